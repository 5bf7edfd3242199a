"""The README says what the code does."""

from __future__ import annotations

import pytest

from jaxspec.errors import InputError
from jaxspec.models import FAMILIES
from jaxspec.models.support import support_table, with_table
from tests.conftest import ROOT


def test_the_table_of_families_is_up_to_date():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert with_table(text) == text, "run: python -m jaxspec.models.support README.md"


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_is_described(model_type):
    family = FAMILIES[model_type]
    assert family.title
    assert family.examples
    assert (family.image_input == "none") == (family.images is None)
    assert f"| `{model_type}` | {family.title} |" in support_table()


def test_a_readme_without_markers_is_refused():
    with pytest.raises(InputError, match="holds no markers"):
        with_table("# a readme\n")
