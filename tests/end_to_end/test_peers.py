"""eval/peers.py runs on tiny checkpoints, and its table keeps the methods that fail."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eval import peers
from eval.lib.times.peer_methods import Timed
from jaxspec.prompts.encoder import Prompt
from tests import tiny

pytestmark = pytest.mark.full


def test_both_libraries_on_one_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="peers needs the `parity` extra")
    config = replace(tiny.CONFIG, text_config=replace(tiny.CONFIG.text_config, num_hidden_layers=1))
    params = tiny.random_params(config)
    # transformers refuses it in answers
    params["language_model"]["lm_head"]["weight"][config.image_token_index] = 0
    tiny.save(tmp_path / "mini" / "target", config, params)
    tiny.save(tmp_path / "mini" / "draft", config, tiny.noisy(params, 0.1))
    monkeypatch.setattr(peers, "ASSETS", tmp_path)
    peers.main("mini", tmp_path / "out", new=6, prompts=1, repeats=1)
    rows = peers.summaries(json.loads((tmp_path / "out/results.json").read_text())["rows"])
    # Prompt lookup may propose the prompt's own image tokens, and is then left out.
    methods = {
        peers.PLAIN,
        "jaxspec speculative, view M, gamma = 5",
        "jaxspec speculative, lookup, gamma = 5",
        peers.EAGER,
        f"{peers.ASSISTED}, LLaVA draft, constant",
    }
    assert methods <= {row["method"] for row in rows}
    assert all(row["token_identity_rate"] == 1 and row["tokens_per_second"] > 0 for row in rows)
    assert f"| {peers.EAGER} |" in (tmp_path / "out/table.md").read_text()


def test_a_method_that_fails_leaves_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    def works(prompt: Prompt, new: int) -> Timed:
        return Timed((1, 2, 3), 2.0, 1.0, 4.0, 3)

    def fails(prompt: Prompt, new: int) -> Timed:
        raise RuntimeError

    methods = {peers.PLAIN: fails, peers.EAGER: works, peers.ASSISTED: fails}
    runs = peers.measure(methods, Prompt(np.zeros(1, np.int32)), 3, repeats=1, warm=3)
    assert f"{peers.ASSISTED}: RuntimeError" in capsys.readouterr().err
    rows = [{"prompt": 0, "method": name} | vars(timed) for name, timed in runs.items()]
    (line,) = peers.peers_table("mini", rows).cells
    assert line == [peers.EAGER, "1.5", "1.00", "-", "2.0", "1.00", "-", "1333.33", "1.00", "-"]
