"""Quantised files are read as the numbers that their formats define."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.checkpoints.fitting import survey
from jaxspec.checkpoints.huggingface import SaveOptions, load, save
from jaxspec.checkpoints.tower import read_tower
from jaxspec.cli.inspect import inspect
from jaxspec.config import Qwen2Config
from jaxspec.publishing.export import export
from jaxspec.sharding import make_mesh
from tests import tiny
from tests.hub.quantised import AWQ, FP8, GPTQ, NF4, quantised
from tests.tiny.models import random_params

CONFIG = Qwen2Config(
    vocab_size=24,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
)
FORMS: dict[str, dict[str, Any]] = {
    "awq": AWQ,
    "awq, one group": AWQ | {"group_size": -1},
    "gptq": GPTQ,
    "gptq, desc_act": GPTQ | {"desc_act": True, "sym": False, "checkpoint_format": "gptq"},
    "gptq_v2": GPTQ | {"checkpoint_format": "gptq_v2", "pack_dtype": "int32"},
    "gptq, 8 bits": GPTQ | {"bits": 8},
    "fp8": FP8,
    "nf4": NF4,
    "nf4, not nested": NF4 | {"bnb_4bit_use_double_quant": False},
}
MATRIX = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module", params=FORMS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a quantised model, and the same one in 16 bits."""
    entry, folder = FORMS[request.param], tmp_path_factory.mktemp("pair")
    plain, packed = folder / "plain", folder / "packed"
    dtype = jnp.float16 if entry["quant_method"] in ("awq", "gptq") else jnp.bfloat16
    save(plain, CONFIG, random_params(CONFIG), SaveOptions(dtype=jnp.dtype(dtype)))
    stored, exact = quantised(load_file(plain / "model.safetensors"), entry)
    save_file(exact, plain / "model.safetensors", metadata={"format": "pt"})
    write(packed, stored, entry)
    return packed, plain


def write(path: Path, tensors: dict[str, np.ndarray], entry: dict[str, Any]) -> Path:
    path.mkdir()
    raw = CONFIG.to_hf() | {"quantization_config": entry}
    (path / "config.json").write_text(json.dumps(raw))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize(
    "options", [{}, {"dtype": jnp.dtype("float32")}, {"weights": "int8"}], ids=str
)
def test_the_parameters_are_the_16_bit_models(pair: Any, options: dict[str, Any]) -> None:
    packed, plain = (load(path, **options).params for path in pair)
    jax.tree.map(np.testing.assert_array_equal, packed, plain)
    assert jax.tree.map(lambda x: x.dtype, packed) == jax.tree.map(lambda x: x.dtype, plain)


def test_each_device_reads_its_part(pair: Any) -> None:
    packed, plain = (load(path, mesh=make_mesh(1)).params for path in pair)
    jax.tree.map(np.testing.assert_array_equal, packed, plain)


def test_any_box_is_that_part_of_the_matrix(pair: Any) -> None:
    packed, plain = (survey(path).tensors[MATRIX] for path in pair)
    assert (packed.shape, packed.dtype) == (plain.shape, plain.dtype)
    draw, numbers = np.random.default_rng(0), plain.read()
    for _ in range(40):
        ends = [sorted(draw.integers(0, size + 1, 2).tolist()) for size in packed.shape]
        box = tuple(slice(*end) for end in ends)
        np.testing.assert_array_equal(packed.read(box), numbers[box])


def test_it_is_inspected_and_written_in_16_bits(pair: Any, tmp_path: Path) -> None:
    packed, plain = pair
    assert survey(packed).problems == []
    assert inspect(packed).parameters == inspect(plain).parameters
    export(packed, tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path / "out").params, load(plain).params)


def test_a_quantised_tower_is_read_alone_as_with_its_model(tmp_path: Path) -> None:
    """A tower in 4 bits, whose matrices and scales are in two shards, is read from these alone."""
    save(tmp_path, tiny.CONFIG, random_params(tiny.CONFIG), SaveOptions(dtype=jnp.dtype("float16")))
    stored, _ = quantised(load_file(tmp_path / "model.safetensors"), NF4)
    (tmp_path / "model.safetensors").unlink()
    names = {name: f"model-{1 + ('absmax' in name)}-of-3.safetensors" for name in stored}
    names |= {name: "model-3-of-3.safetensors" for name in names if "language_model" in name}
    for file in {*names.values()}:
        save_file({name: stored[name] for name in names if names[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    raw = tiny.CONFIG.to_hf() | {"quantization_config": NF4}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    whole = load(tmp_path, dtype=jnp.dtype("float32")).params["vision_tower"]
    (tmp_path / "model-3-of-3.safetensors").unlink()
    tower = read_tower(tmp_path, jnp.dtype("float32"))
    jax.tree.map(np.testing.assert_array_equal, tower, {"vision_tower": whole})


def test_fp8_as_transformers_dequantises_it() -> None:
    torch = pytest.importorskip("torch")
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    stored, exact = quantised({MATRIX: np.zeros((32, 24))}, FP8)
    numbers = torch.from_numpy(stored[MATRIX].view(np.uint8)).view(torch.float8_e4m3fn)
    scales = torch.from_numpy(stored[f"{MATRIX}_scale_inv"])
    values = fp8.Fp8Dequantize(None).convert({"weight": numbers, "weight_scale_inv": scales})
    (values,) = values.values()
    np.testing.assert_array_equal(values.to(torch.bfloat16).float().numpy(), exact[MATRIX])


def test_a_matrix_is_read_with_little_more_memory_than_it_takes(tmp_path: Path) -> None:
    """Reading a quantised matrix never holds a second copy of the whole, in whatever dtype."""
    rows, columns = 1024, 4096
    draw = np.random.default_rng(0).integers
    parts = {
        "qweight": draw(0, 1 << 31, (rows, columns // 8), np.int32),
        "qzeros": draw(0, 1 << 31, (rows // 128, columns // 8), np.int32),
        "scales": np.ones((rows // 128, columns), np.float16),
    }
    path = write(tmp_path / "x", {f"lm_head.{k}": v for k, v in parts.items()}, AWQ)
    (path / "config.json").write_text(
        json.dumps(CONFIG.to_hf() | {"quantization_config": AWQ | {"group_size": 128}})
    )
    matrix = survey(path).tensors["lm_head.weight"]
    tracemalloc.start()
    numbers = matrix.read()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert numbers.dtype == np.float16
    assert peak < 1.6 * numbers.nbytes


Change = Callable[[dict[str, np.ndarray], dict[str, Any]], object]
WRONG: dict[str, tuple[dict[str, Any], Change, str]] = {
    "marlin": (GPTQ, lambda t, e: e.update(is_marlin_format=True), "(gptq, checkpoint_format marl"),
    "gemv": (AWQ, lambda t, e: e.update(version="gemv"), "(awq, version gemv, bits 4, group_size"),
    "3 bits": (GPTQ, lambda t, e: e.update(bits=3), "bits 3, group_size 8), and AWQ, GPTQ, fp8 in"),
    "8 bits": (NF4, lambda t, e: e.update(load_in_4bit=False), "is quantised (bitsandbytes)"),
    "per tensor": (FP8, lambda t, e: e.pop("weight_block_size"), "(fp8, fmt e4m3, weight_block_si"),
    "no scales": (
        AWQ,
        lambda t, e: t.pop(MATRIX.replace("weight", "scales")),
        f"{MATRIX} is quantised, but its scales is missing",
    ),
    "another group size": (
        AWQ,
        lambda t, e: e.update(group_size=4),
        "proj.qzeros is I32 [3, 2], and config.json and the matrix ask for I32 [6, 2]",
    ),
    "a bias": (
        GPTQ,
        lambda t, e: t[MATRIX.replace("weight", "bias")].fill(1),
        "down_proj.bias is unexpected",
    ),
    "no such group": (
        GPTQ,
        lambda t, e: t[MATRIX.replace("weight", "g_idx")].fill(3),
        "down_proj.g_idx names no group of 3",
    ),
    "not finite": (
        AWQ,
        lambda t, e: t[MATRIX.replace("weight", "scales")].fill(np.inf),
        "down_proj.scales holds NaN or infinity",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_others_are_one_line(name: str, tmp_path: Path) -> None:
    entry, change, line = WRONG[name]
    save(tmp_path / "plain", CONFIG, random_params(CONFIG), SaveOptions(dtype=jnp.dtype("float16")))
    tensors, _ = quantised(load_file(tmp_path / "plain/model.safetensors"), entry)
    change(tensors, entry := dict(entry))
    path = write(tmp_path / "packed", tensors, entry)
    said = tiny.one_line(load, path)
    assert line in said
    assert str(path) in said
