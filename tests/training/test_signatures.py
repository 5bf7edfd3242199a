"""Equal data have equal signatures, and data made anew under the same name and in the same size
have another.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.data.prepared import Prepared, prepare
from jaxspec.errors import InputError
from jaxspec.training.config import TrainConfig
from jaxspec.training.loop import signatures
from jaxspec.training.loop.signatures import claim, data_signature, model_signature, run_signature
from picturebook.training import Picturebook
from tests.tiny import Talk


def test_data(tmp_path: Path) -> None:
    rows = [Talk()[i] for i in range(29)]
    known = data_signature(rows)
    assert data_signature([Talk()[i] for i in range(29)]) == known
    for place in (0, 28, 4):  # the first, the last, and one of those between
        said = replace(rows[place], turns=(("What?", "Another."),))
        shown = replace(rows[place], images=(np.zeros((20, 30, 3), np.uint8) + 99,))
        assert data_signature([*rows[:place], said, *rows[place + 1 :]]) != known
        assert data_signature([*rows[:place], shown, *rows[place + 1 :]]) != known
    assert data_signature(rows[:28]) != known
    assert data_signature(rows[::-1]) != known
    folder = prepare("talk", tmp_path, rows)
    assert data_signature(Prepared(folder)) == data_signature(Prepared(folder))
    assert data_signature(Picturebook()) != data_signature(Picturebook(1))


def test_models(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).bytes(1 << 20)
    files = {"model.safetensors": weights, "config.json": b"{}", "tokenizer.json": b"{}"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    known = model_signature(tmp_path)
    (tmp_path / "README.md").write_text("What it is.")
    (tmp_path / "generation_config.json").write_text("{}")
    # Mistral's second copy, which is never read
    (tmp_path / "consolidated.safetensors").write_bytes(weights)
    assert model_signature(tmp_path) == known
    trained = np.frombuffer(weights, np.uint8).copy()
    trained[1 << 19 :: 2] += 1  # half of it was frozen
    for name, other in (
        ("model.safetensors", trained.tobytes()),
        ("config.json", b"[]"),
        ("tokenizer.json", b"[]"),
    ):
        (tmp_path / name).write_bytes(other)
        assert model_signature(tmp_path) != known
        (tmp_path / name).write_bytes(files[name])
    assert model_signature(tmp_path) == known


def test_a_run_goes_on_with_a_model_and_data_that_were_moved(tmp_path: Path) -> None:
    config, here, there = TrainConfig(steps=4, batch=2), tmp_path / "here", tmp_path / "there"
    here.mkdir()
    (here / "model.safetensors").write_bytes(b"weights")
    run = run_signature(config, {"target": model_signature(here)})
    here.rename(there)
    claim(tmp_path, config, run_signature(config, {"target": model_signature(there)}), (2, run))
    data = [[["here/talk", 0.5, 7, "fingerprint 1"]], [["there/talk", 0.5, 7, "fingerprint 1"]]]
    old, new = (run_signature(config, {"data": sets}) for sets in data)
    claim(tmp_path, config, new, (2, old))
    (there / "model.safetensors").write_bytes(b"trained")
    trained = run_signature(config, {"target": model_signature(there)})
    with pytest.raises(InputError, match=r"target '.*/here, fing.*, but now it is '.*/there, fing"):
        claim(tmp_path, config, trained, (2, run))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": 0.1}, r"process 1: learning_rate 0.1, but process 0 has 0.001; give"),
        ({"mesh": {"fsdp": 2}}, r"process 1: mesh.fsdp 2, but process 0 has None"),
        ({"data": [["b", 1.0, 7, "fingerprint 2"]]}, r"process 1: data \[\['b', .* process 0 has"),
        ({"data": [["b", 1.0, 7, "fingerprint 1"]], "target": "b, fingerprint 2", "keep": 9}, ""),
    ],
)
def test_processes_of_a_run_have_the_same_options_and_data(
    change: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes of a run have the same options and data; places and models of the cache differ."""
    config = TrainConfig(steps=4, batch=2)
    inputs = {"data": [["a", 1.0, 7, "fingerprint 1"]], "target": "a, fingerprint 1"}
    run = run_signature(config, inputs) | {"mesh": {}}
    monkeypatch.setattr(signatures, "in_all", lambda work: [work(), work() | change])
    if not message:
        return claim(tmp_path, config, run, None)
    with pytest.raises(InputError, match=message):
        claim(tmp_path, config, run, None)


def test_a_run_of_an_older_release_had_the_defaults(tmp_path: Path) -> None:
    config = TrainConfig(steps=4, batch=2)
    run = run_signature(config, {"plain": False})
    old = {name: value for name, value in run.items() if name not in ("plain", "ema")}
    claim(tmp_path, config, run, (2, old))
    with pytest.raises(InputError, match="holds a run with plain False, but now it is True; go on"):
        claim(tmp_path, config, run | {"plain": True}, (2, old))
