"""The Python on exports' model cards runs in transformers and writes what their jaxspec commands
write.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is the oracle of parity: install the `parity` extra")

from jaxspec.cli import main
from jaxspec.data.images import to_rgb
from jaxspec_demo import ASSETS
from picturebook import test_set as samples_of
from tests import tiny
from tests.tiny.families import FAMILIES

pytestmark = pytest.mark.full

INST = (
    "{{ bos_token }}{% for m in messages %}{{ '[INST] ' }}{% for part in m['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{{ ' [/INST]' }}"
    "{% endfor %}"
)


def blocks(path: Path, language: str, places: dict[str, str]) -> str:
    """Return the card's code in one language, with the reader's own paths filled in."""
    code = "".join(
        re.findall(rf"```{language}\n(.*?)```", (path / "README.md").read_text(), re.DOTALL)
    )
    for said, meant in places.items():
        code = code.replace(said, meant)
    return code


def answers(
    path: Path, capsys: pytest.CaptureFixture[str], **places: Path
) -> tuple[str, list[str]]:
    """Return what the card's Python prints, and what each of its commands does."""
    meant = {"path/to/this": str(path)} | {
        f"path/to/{name}": str(place) for name, place in places.items()
    }
    meant["photo.jpg"] = str(path.parent / "photo.png")
    capsys.readouterr()
    exec(blocks(path, "python", meant), {})
    theirs, ours = capsys.readouterr().out.strip(), []
    for line in blocks(path, "sh", meant).strip().splitlines():
        main(shlex.split(line)[1:])
        ours.append(capsys.readouterr().out.strip())
    return theirs, ours


@pytest.fixture
def photo(tmp_path: Path) -> None:
    page = to_rgb(samples_of("describe", 1)[0].images[0])
    page.save(tmp_path / "photo.png")


@pytest.mark.usefixtures("photo")
def test_the_mini_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cards of the mini models, which have no template of their own, write along the template that
    is used here, and BOS.
    """
    target, draft, head = (tmp_path / name for name in ("target", "draft", "head"))
    main(["export", str(ASSETS / "mini" / "target"), str(target)])
    theirs, ours = answers(target, capsys)
    assert len(theirs) > 20
    assert ours == [theirs]
    main(["export", str(ASSETS / "mini" / "draft"), str(draft), "--vocab-of", str(target)])
    alone, spoken = answers(draft, capsys, target=target)[1]
    assert spoken == theirs
    assert alone != theirs
    main(["export", str(ASSETS / "mini" / "kv_head"), str(head)])
    assert answers(head, capsys, target=target) == ("", [theirs])


@pytest.mark.usefixtures("photo")
def test_a_template_that_writes_bos(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny.save(tmp_path / "source", tiny.CONFIG, tiny.random_params(tiny.CONFIG))
    (source / "chat_template.json").write_text(json.dumps({"chat_template": INST}))
    main(["export", str(source), str(tmp_path / "copy")])
    theirs, ours = answers(tmp_path / "copy", capsys)
    assert theirs
    assert ours == [theirs]


def test_a_base_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The card of a base model, without a template and not asked in Vicuna's form, gives it bare
    text.
    """
    config, _ = FAMILIES["opt"]()
    source = tiny.save(tmp_path / "source", config, tiny.random_params(config))
    main(["export", str(source), str(tmp_path / "copy")])
    assert not (tmp_path / "copy" / "chat_template.jinja").exists()
    theirs, ours = answers(tmp_path / "copy", capsys)
    assert theirs
    assert ours == [theirs]
