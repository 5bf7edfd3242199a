"""Every id that presets, README or docs name has a twin."""

from __future__ import annotations

from jaxspec.data.benchmarks import BENCHMARKS
from tests.hub.data import DATA
from tests.hub.heads import HEADS
from tests.hub.named import data_ids, page_ids, preset_ids
from tests.hub.original import ORIGINALS
from tests.hub.table import CAPTIONERS, TWINS


def test_every_model_that_a_preset_or_a_page_names_has_a_twin() -> None:
    named = preset_ids() | page_ids()
    assert named - data_ids() - {*HEADS} == {*TWINS, *CAPTIONERS, *ORIGINALS}
    assert {
        "llava-hf/llava-1.5-7b-hf",
        "mjbooo/lvlm68m",
        "Qwen/Qwen2.5-Math-1.5B-Instruct",
    } <= named


def test_every_data_set_that_is_read_has_a_twin() -> None:
    assert data_ids() == set(DATA)
    parts = {(name, *part) for name, twin in DATA.items() for part in twin.parts}
    for known in BENCHMARKS.values():
        splits = [known.split, *([known.shots.split] if known.shots else [])]
        assert {(known.hub, known.config, split) for split in splits} <= parts
