"""A block that compilers for TPUs and GPUs make fits, keeps its caches in place, and moves no
weight.

Nothing is run. `make compiled` brings libtpu and the plugin for GPUs, which the other tests do
without.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from jaxspec.config import text_config
from jaxspec.engine.plan import CHIPS
from tests.conftest import ROOT

if find_spec("libtpu") is None:
    pytest.skip("libtpu is not installed (214 MB): run make compiled", allow_module_level=True)

from eval.compiled import with_layers
from jaxspec.command import load_preset

TPUS = ("v5e:1x1", "v5e:2x2")
LAYERS = 4
"""Decoder layers of either target: the mini pair has so many, and of the 7B they are a slice."""


@pytest.fixture(scope="module", params=["mini", "llava7b_68m"])
def preset(request: pytest.FixtureRequest) -> str:
    return request.param


def compiled(preset: str, out: Path, *options: str) -> list[dict[str, Any]]:
    """Return what the compilers say of programs on chips."""
    # Without what the suite sets to compile for CPUs in less time.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-m", "eval.compiled", preset,
         "--layers", str(LAYERS), *options, "--out", str(out)],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((out / "results.json").read_text())["rows"]


@pytest.fixture(scope="module")
def rows(preset: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Compile a block of views M and T, and return its rows by the number of chips."""
    found = compiled(
        preset, tmp_path_factory.mktemp(preset), "--chips", *TPUS, "--programs", "chain"
    )
    return {row["devices"]: row for row in found}


@pytest.mark.parametrize("chips", [1, 4])
def test_a_block_fits_in_place(preset: str, rows: dict[int, dict[str, Any]], chips: int) -> None:
    row = rows[chips]
    assert row["fits"]
    assert row["peak_gib"] < CHIPS["v5e"].gib
    assert row["aliased_gib"] >= row["caches_gib"] > 0
    # The draft's caches of 14 MiB are copied before the loop or behind it, the target's are not.
    assert row["copied_around_mib"] < 16
    # The smallest matrix of a layer of the target, as far as one chip holds it.
    text = text_config(with_layers(load_preset("latency", preset), LAYERS).target)
    matrix = 2 * text.hidden_size * text.num_key_value_heads * text.head_dim / chips
    assert row["copied_in_mib"] * 2**20 < matrix
    # Two of each layer, and what makes embeddings and logits whole.
    assert row["collectives"] <= (2 * LAYERS + 2 if chips > 1 else 0)


def test_a_tree_of_a_head_copies_no_weight(tmp_path: Path) -> None:
    """A tree of a head copies no weight, and no scores of its nodes, of which a level has ten."""
    options = ("--chips", TPUS[0], "--programs", "msd", "--tree", "dynamic:10:30")
    (row,) = compiled("llava7b_68m", tmp_path, *options)
    assert row["width"] == 31
    assert row["aliased_gib"] >= row["caches_gib"] > 0
    scores = 4 * 10 * text_config(load_preset("latency", "llava7b_68m").target).vocab_size
    assert row["copied_in_mib"] * 2**20 < scores


@pytest.mark.skipif(find_spec("jax_plugins") is None, reason="jax-cuda12-plugin is not installed")
def test_gpus_gather_no_embeddings_and_no_head(tmp_path: Path) -> None:
    text = text_config(load_preset("latency", "llava7b_68m").target)
    table = 2 * text.vocab_size * text.hidden_size
    programs = ("--programs", "chain", "kv", "eagle3")
    for row in compiled(
        "llava7b_68m", tmp_path, "--chips", "h100:1", "h100:4", *programs, "--batches", "1", "8"
    ):
        assert row["fits"]
        assert (row["collectives"] > 0) == (row["devices"] > 1)
        assert row["collected_mib"] * 2**20 < table / 10, row


@pytest.mark.parametrize("chip", ["v5e:1x1", "h100:1"])
def test_int8_weights_are_cast_in_the_product(tmp_path: Path, chip: str) -> None:
    """int8 weights are cast in the product: the loop holds no matrix in 16 bits, not even of one
    layer.
    """
    if chip.startswith("h100") and find_spec("jax_plugins") is None:
        pytest.skip("jax-cuda12-plugin is not installed")
    text = text_config(load_preset("latency", "llava7b_68m").target)
    options = ("--chips", chip, "--programs", "chain")
    (whole,) = compiled("llava7b_68m", tmp_path / "16", *options)
    (half,) = compiled("llava7b_68m", tmp_path / "8", *options, "--target-weights", "int8")
    layer = text.hidden_size * (4 * text.hidden_size + 3 * text.intermediate_size)
    assert (whole["arguments_gib"] - half["arguments_gib"]) * 2**30 > 0.99 * LAYERS * layer
    matrix = 2 * text.hidden_size * text.intermediate_size
    assert (half["temporaries_gib"] - whole["temporaries_gib"]) * 2**30 < matrix / 10
    assert half["copied_in_mib"] * 2**20 < matrix


def test_a_long_prompt_lays_no_scores_in_memory(tmp_path: Path) -> None:
    length = 4096
    heads = text_config(load_preset("latency", "llava7b_68m").target).num_attention_heads
    for row in compiled(
        "llava7b_68m", tmp_path, "--chips", *TPUS, "--programs", "prompt", "--prompt", str(length)
    ):
        scores = heads * length**2 * 4 / row["devices"]  # of one layer, 2 GiB on one chip
        assert row["fits"]
        assert row["temporaries_gib"] * 2**30 < scores / 2


def test_an_option_of_the_compiler_keeps_caches_in_place(tmp_path: Path) -> None:
    """An option of the compiler keeps caches in place, which XLA otherwise copies into fast memory
    and writes back whole.
    """
    options = ("--chips", "v5e:1x1", "--programs", "plain")
    (usual,) = compiled("llava7b_68m", tmp_path / "usual", *options)
    option = "xla_vf_vmem_max_outstanding_evictions=0"
    (in_place,) = compiled("llava7b_68m", tmp_path / "in_place", *options, "--xla", option)
    assert usual["moved_gib"] - in_place["moved_gib"] > usual["caches_gib"] / 2
