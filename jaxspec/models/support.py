"""The tables of supported families in the documentation, made from `FAMILIES`.

    python -m jaxspec.models.support README.md docs/families.md

A table stands between two markers, `<!-- families: ... -->` or, with all columns, `<!-- families in full: ... -->`, and
`<!-- /families -->`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from jaxspec.errors import InputError
from jaxspec.models import FAMILIES

BETWEEN = re.compile(r"(<!-- families( in full)?: [^\n]*-->\n).*?(<!-- /families -->)", re.DOTALL)


def support_table(full: bool = True) -> str:
    """One row a family, in Markdown; without `full` its name and one example alone."""
    titles = ("`model_type`", "family", "image input", "for example", "notes") if full else ("family", "for example")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for model_type, family in FAMILIES.items():
        examples = [f"`{name}`" for name in family.examples]
        cells = (f"`{model_type}`", family.title, family.image_input, ", ".join(examples), family.notes)
        lines.append(f"| {' | '.join(cells if full else (family.title, examples[0]))} |")
    return "\n".join(lines)


def with_table(text: str) -> str:
    """The text with the table between its markers. Raises InputError where it has none."""
    made, count = BETWEEN.subn(lambda found: f"{found[1]}{support_table(bool(found[2]))}\n{found[3]}", text)
    if count != 1:
        raise InputError(
            f"page: holds {count} pairs of markers <!-- families: --> ... <!-- /families -->; "
            "put one where the table shall stand"
        )
    return made


if __name__ == "__main__":
    for page in map(Path, sys.argv[1:]):
        page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")
