"""Every id that presets, README or docs name has a twin."""

from __future__ import annotations

from pathlib import Path

import pytest
from jaxspec.data.benchmarks import BENCHMARKS

from tests.hub import build
from tests.hub.data import DATA
from tests.hub.named import data_ids, page_ids, preset_ids
from tests.hub.table import CAPTIONERS, HEADS, TWINS


def test_every_model_that_a_preset_or_a_page_names_has_a_twin() -> None:
    named = preset_ids() | page_ids()
    assert named - data_ids() - set(HEADS) == set(TWINS) | set(CAPTIONERS)
    assert {"llava-hf/llava-1.5-7b-hf", "mjbooo/lvlm68m", "Qwen/Qwen2.5-Math-1.5B-Instruct"} <= named


def test_every_data_set_that_is_read_has_a_twin() -> None:
    assert data_ids() == set(DATA)
    parts = {(name, *part) for name, twin in DATA.items() for part in twin.parts}
    for known in BENCHMARKS.values():
        splits = [known.split, *([known.shots.split] if known.shots else [])]
        assert {(known.hub, known.config, split) for split in splits} <= parts


def test_a_twin_lies_as_huggingface_hub_lays_it(offline_hub: Path) -> None:
    folder = offline_hub / "models--llava-hf--llava-1.5-7b-hf"
    snapshot = folder / "snapshots" / (folder / "refs" / "main").read_text()
    assert {file.name for file in snapshot.iterdir()} == {
        *("added_tokens.json", "chat_template.json", "config.json", "generation_config.json"),
        *(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)),
        *("model.safetensors.index.json", "preprocessor_config.json", "processor_config.json"),
        *("special_tokens_map.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
    }
    assert all(file.resolve().parent == (folder / "blobs").resolve() for file in snapshot.iterdir())


@pytest.mark.skipif(not build.TORCH, reason="torch writes .bin files")
def test_weights_lie_as_they_are_distributed(offline_hub: Path) -> None:
    for name, twin in TWINS.items():
        files = {file.name for file in offline_hub.glob(f"models--{name.replace('/', '--')}/snapshots/*/*")}
        weights = {file for file in files if file.endswith((".bin", ".safetensors")) and "consolidated" not in file}
        assert len(weights) == twin.shards
        assert all(file.startswith("pytorch_model") == twin.bin for file in weights)
        assert any(file.endswith("index.json") for file in files) == (twin.shards > 1)
