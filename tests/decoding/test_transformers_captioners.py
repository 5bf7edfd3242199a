"""BLIP, BLIP-2 and Florence-2, from tiny random checkpoints in the real layout, write the captions
of transformers called by hand.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxspec.engine.captioners import TransformersCaptioner, check_captioner
from jaxspec.errors import InputError
from tests.tiny.captioners import blip, blip2, florence2

pytestmark = pytest.mark.full

torch = pytest.importorskip("torch", reason="these captioners run in torch")


def pages() -> list[Image.Image]:
    rng = np.random.default_rng(0)
    return [
        Image.fromarray(rng.integers(0, 256, size, np.uint8))
        for size in ((40, 50, 3), (32, 32, 3), (64, 20, 3))
    ]


KINDS = {
    "blip": (blip, "blip", None),
    "blip-2": (blip2, "blip", None),
    "florence2": (florence2, "florence2", "<DETAILED_CAPTION>"),
}
NEW = 8


@pytest.mark.parametrize("name", KINDS)
def test_captions_are_those_of_transformers_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    make, kind, task = KINDS[name]
    path = make(tmp_path / name)
    monkeypatch.setenv("HOME", str(tmp_path))  # shells leave a ~ behind `blip:` as it is
    captioner = TransformersCaptioner(kind, f"~/{name}", task, NEW)
    captions = captioner.caption(pages())
    assert (captioner.identity != TransformersCaptioner(kind, str(path), task).identity) == (
        kind == "florence2"
    )
    assert len({caption.text for caption in captions}) > 1

    processor = transformers.AutoProcessor.from_pretrained(path, backend="pil")
    model = transformers.AutoModelForImageTextToText.from_pretrained(path)
    for image, caption in zip(pages(), captions, strict=True):
        asked = {"text": task} if task else {}
        inputs = processor(images=image, **asked, return_tensors="pt")
        beams = (
            {"num_beams": 3, "do_sample": False, "max_new_tokens": NEW}
            if kind == "florence2"
            else {}
        )
        ids = model.generate(**inputs, **beams)
        assert caption.text == processor.decode(ids[0], skip_special_tokens=True).strip()


def test_florence2_in_its_legacy_form_is_refused(tmp_path: Path) -> None:
    path = florence2(tmp_path / "Florence-2-base")
    check_captioner(f"florence2:{path}")
    told = json.loads((path / "config.json").read_text())
    told["auto_map"] = {"AutoConfig": "configuration_florence2.Florence2Config"}
    (path / "config.json").write_text(json.dumps(told))
    mend = "runs code of its own; use florence2:florence-community/Florence-2-base$"
    with pytest.raises(InputError, match=mend):
        check_captioner(f"florence2:{path}")
