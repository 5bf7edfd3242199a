"""Each pass of the shipped target yields the recorded number of tokens, by views, trees, rules and
lookup.

Exactness cannot see a draft that is worse than it was: it only costs passes. The yields of
`yields.json` are of fixed prompts. `python -m tests.decoding.test_yields` writes them again, after
a change that means to move them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from PIL.Image import Image

from eval.lib.drafts.comparison import first_prompt
from jaxspec.data.images import to_rgb
from jaxspec.engine.engine import Engine, EngineConfig, LoadedModel, Request
from jaxspec.loading.models import LoadedDraft, load_draft
from jaxspec.prompts.captions import Caption
from jaxspec_demo import ASSETS
from picturebook import caption, test_set

RECORD = Path(__file__).with_name("yields.json")
SETS, SAMPLES, NEW = ("describe", "read", "edit", "saga"), 2, 48
CASES: dict[str, dict[str, Any]] = {
    "P,C": {"views": ("P", "C")},
    "M,T in a tree": {"views": ("M", "T"), "tree": "2:8"},
    "KV head": {},
    "KV head in a tree": {"tree": "dynamic:3:9"},
    "lookup": {"views": ("lookup",)},
    "lookup in a tree": {"views": ("lookup",), "tree": "2:8"},
    "KV head, T and lookup by the grid": {"views": ("T", "lookup"), "weighting": "grid:window=16"},
    "KV head and T by their errors": {"views": ("T",), "weighting": "inverse_error_power"},
    "KV head and T by their matches": {"views": ("T",), "weighting": "hard_match"},
}


class Pages:
    """Return captions that say what was drawn, by the pixels of a page."""

    def __init__(self) -> None:
        self.texts = {
            to_rgb(image).tobytes(): caption(scene)
            for sample in samples()
            for image, scene in zip(sample.images, sample.scenes, strict=True)
        }

    def caption(self, images: Sequence[Image]) -> list[Caption]:
        return [Caption(self.texts[image.tobytes()]) for image in images]


def samples() -> list[Any]:
    return [sample for name in SETS for sample in test_set(name, SAMPLES)]


@cache
def target() -> LoadedModel:
    return LoadedModel.load(ASSETS / "mini" / "target", "float32")


def drafts(name: str, views: Sequence[str]) -> Iterator[LoadedDraft]:
    if {*views} - {"lookup"}:
        yield load_draft(ASSETS / "mini" / "draft", target(), "float32")
    if "KV head" in name:
        yield load_draft(ASSETS / "mini" / "kv_head", target(), "float32")


def tokens_a_pass(name: str) -> float:
    fields = CASES[name]
    config = EngineConfig(
        gamma=3,
        batch_size=SAMPLES * len(SETS),
        prompt_buckets=(384,),
        image_buckets=(6,),
        new_buckets=(NEW,),
        **fields,
    )
    engine = Engine(target(), [*drafts(name, fields.get("views", ()))], config, Pages())
    prompts = [first_prompt(engine.encoder, sample) for sample in samples()]
    stats = [result.stats for result in engine.generate([Request(p, NEW) for p in prompts])]
    return sum(one.emitted for one in stats) / sum(one.steps for one in stats)


@pytest.mark.parametrize("name", CASES)
def test_a_pass_yields_what_it_did(name: str) -> None:
    assert tokens_a_pass(name) > 0.95 * json.loads(RECORD.read_text())[name]


if __name__ == "__main__":
    yields = {name: round(tokens_a_pass(name), 3) for name in CASES}
    RECORD.write_text(json.dumps(yields, indent=1) + "\n")
