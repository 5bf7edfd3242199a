"""For directories that are no checkpoint, or a broken one, `load` says what is wrong and the mend,
and `inspect` says all of it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.checkpoints.directories import read_config
from jaxspec.checkpoints.huggingface import SaveOptions, load, save
from jaxspec.checkpoints.tower import read_tower
from jaxspec.cli import main
from jaxspec.cli.inspect import inspect
from jaxspec.errors import InputError
from jaxspec.loading.models import LoadedModel
from tests import tiny
from tests.tiny import families

ORIGINAL = {
    "architectures": ["LlavaLlamaForCausalLM"],
    "hidden_size": 4096,
    "image_aspect_ratio": "pad",
    "mm_projector_type": "mlp2x_gelu",
    "mm_vision_tower": "openai/clip-vit-large-patch14-336",
    "model_type": "llava",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
}
"""From the config.json of LLaVA-1.5-7B in its own repository."""
HEAD = "language_model.lm_head.weight"


def edit(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    raw = json.loads(file.read_text())
    change(raw)
    file.write_text(json.dumps(raw))


def config(*keys: str, **changes: Any) -> Callable[[Path], None]:
    """Change entries of config.json, or of the part that `keys` name."""

    def change(raw: dict[str, Any]) -> None:
        for key in keys:
            raw = raw[key]
        raw.update(changes)

    return lambda path: edit(path / "config.json", change)


def first_shard(path: Path) -> Path:
    return min(path.glob("*.safetensors"))


def lose_shard(path: Path) -> None:
    first_shard(path).unlink()


def wrong_length(path: Path) -> None:
    """Write a header whose shape is not what its bytes hold."""
    shard = first_shard(path)
    raw = shard.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    entry = header[sorted(header)[-1]]
    entry["shape"] = [*entry["shape"][:-1], entry["shape"][-1] - 1]
    text = json.dumps(header).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + raw[end:])


def lose_tensor(path: Path) -> None:
    shard = first_shard(path)
    tensors = load_file(shard)
    del tensors[min(tensors)]
    save_file(tensors, shard)


def float8(path: Path) -> None:
    for shard in path.glob("*.safetensors"):
        tensors = load_file(shard)
        tensors = {
            name: t.astype(ml_dtypes.float8_e4m3fn) if name == HEAD else t
            for name, t in tensors.items()
        }
        save_file(tensors, shard)


def without_weights(*others: str, keep_config: bool = True) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        for file in [*path.glob("*.safetensors"), path / "model.safetensors.index.json"]:
            file.unlink()
        if not keep_config:
            (path / "config.json").unlink()
        for name in others:
            (path / name).write_text("{}")

    return change


def lose_index(path: Path, shards: bool = False) -> None:
    (path / "model.safetensors.index.json").unlink()
    if shards:
        lose_shard(path)


def rename(change: Callable[[str], str]) -> Callable[[Path], None]:
    """Change the names of the tensors, and write them to one file."""

    def write(path: Path) -> None:
        tensors: dict[str, np.ndarray] = {}
        for shard in sorted(path.glob("*.safetensors")):
            tensors |= load_file(shard)
            shard.unlink()
        lose_index(path)
        save_file(
            {change(name): tensor for name, tensor in tensors.items()}, path / "model.safetensors"
        )

    return write


def stray(path: Path) -> None:
    save_file({"other.weight": np.zeros(3, np.float32)}, path / "model.safetensors")


def without_head(path: Path) -> None:
    rename(lambda name: name)(path)
    tensors = load_file(path / "model.safetensors")
    save_file({name: tensors[name] for name in tensors if name != HEAD}, path / "model.safetensors")


def pointer(name: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        (path / name).write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"
        )

    return write


def original(path: Path) -> None:
    (path / "config.json").write_text(json.dumps(ORIGINAL))


WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "rope_theta of zero": (
        config("text_config", rope_parameters={"rope_theta": 0}),
        "rope_theta 0 is not supported",
    ),
    "a negative placeholder": (config(image_token_index=-1), "image_token_index -1 is not support"),
    "another family": (config(model_type="gpt9"), "model_type 'gpt9' is not supported; supported:"),
    "quantised": (
        config(quantization_config={"quant_method": "hqq"}),
        "the model is quantised (hqq), and AWQ, GPTQ",
    ),
    "float8": (float8, f"{HEAD} is F8_E4M3, supported: F32, F16, BF16"),
    "bin": (without_weights("optimizer.bin"), "it holds only optimizer.bin; give the whole model"),
    "gguf": (without_weights("llava-q4.gguf", keep_config=False), "it holds only llava-q4.gguf"),
    "adapter": (
        without_weights("adapter_config.json", keep_config=False),
        "it holds only adapter_config.json",
    ),
    "no weights": (without_weights(), "no model.safetensors and no model.safetensors.index.json"),
    "lost shard": (
        lose_shard,
        "model-00001-of-00005.safetensors: named by the index and not there; fetch it",
    ),
    "header against bytes": (wrong_length, "unreadable ("),
    "lost tensor": (lose_tensor, " is missing"),
    "vocabulary": (config("text_config", vocab_size=99), "config.json asks for [99, 32]"),
    "depth": (
        config("text_config", num_hidden_layers=3),
        "model.layers.2.input_layernorm.weight is missing",
    ),
    "width": (config("text_config", hidden_size=64), "config.json asks for [64"),
    "number as text": (
        config("text_config", hidden_size="32"),
        "hidden_size '32' is not supported; give int",
    ),
    "deep": (
        lambda path: (path / "config.json").write_text("[" * 100_000),
        "not readable as JSON (maximum recursion",
    ),
    "shards lack": (
        partial(lose_index, shards=True),
        "4 of the 5 files model-*-of-00005.safetensors, and there is no model.saf",
    ),
    "stray file": (
        stray,
        "model.safetensors is read, and shards are there too; remove those, or the file if it is",
    ),
    "other names": (rename(lambda name: f"net.{name}"), "net.language_model.lm_head.weight is une"),
    "no output matrix": (without_head, f"tie_word_embeddings is false, and {HEAD} is missing"),
    "pointer": (
        pointer("model-00002-of-00005.safetensors"),
        "a pointer of git-lfs, not the file; run `git lfs pull`",
    ),
    "pointer of words": (pointer("tokenizer.json"), "tokenizer.json: a pointer of git-lfs, not th"),
    "original format": (
        original,
        "config.json: in the original LLaVA format; write it with `jaxspec import`",
    ),
    "no sizes": (config(text_config=None), "config.json: no text_config; fetch the model's own co"),
    "no tower": (config(vision_config={}), "config.json: no vision_config; fetch the model's own"),
    "a bare text model": (
        config(model_type="llama"),
        "no hidden_size, num_hidden_layers, num_attention_heads; fetch",
    ),
    "many layers": (
        config("text_config", num_hidden_layers=1000),
        "num_hidden_layers 1000, and the files hold 64",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_checkpoint(case, model):
    damage, words = WRONG[case]
    damage(model)
    said = tiny.one_line(load, model)
    assert words in said
    assert str(model) in said
    assert any(words in problem for problem in inspect(model).problems)


TOOLS: dict[str, Callable[[Path], None]] = {
    "no index": lose_index,
    "DDP": rename(lambda name: f"module.{name}"),
    "torch.compile": rename(
        lambda name: f"_orig_mod.{name}".replace("layers.0.", "layers.0._orig_mod.")
    ),
    "PEFT": rename(lambda name: f"base_model.model.{name}"),
    "both": rename(lambda name: f"module._orig_mod.{name}"),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_what_tools_leave(tool, good, model):
    TOOLS[tool](model)
    jax.tree.map(np.testing.assert_array_equal, load(model).params, load(good).params)


def test_a_wrapped_text_model(tmp_path):
    """A file of a module that holds the text model as its `model` gives the same parameters."""
    text, params = tiny.CONFIG.text_config, tiny.random_params(tiny.CONFIG.text_config)
    path = tiny.save(tmp_path / "model", text, params)
    tensors = load_file(path / "model.safetensors")
    save_file(
        {f"model.{name}": tensor for name, tensor in tensors.items()}, path / "model.safetensors"
    )
    jax.tree.map(np.testing.assert_array_equal, load(path).params, params)


@pytest.mark.parametrize("case", ["rope_theta of zero", "another family", "number as text"])
def test_a_configuration_alone_is_refused_by_its_file(case, model):
    damage, words = WRONG[case]
    damage(model)
    said = tiny.one_line(read_config, model)
    assert said.startswith(f"{model}/config.json: ")
    assert said.count("config.json") == 1
    assert words in said


def test_few_of_many_problems_are_shown(model, capsys):
    rename(lambda name: f"net.{name}")(model)
    with pytest.raises(SystemExit):
        main(["inspect", str(model)])
    assert "more; --json has all" in capsys.readouterr().out


def test_good_checkpoint(good):
    found = inspect(good)
    assert found.problems == []
    assert (found.family, found.model_type, found.image_tokens) == ("LLaVA-1.5", "llava", 4)
    numbers = sum(leaf.size for leaf in jax.tree.leaves(tiny.random_params(tiny.CONFIG)))
    assert sum(found.parameters.values()) == numbers
    assert found.dtypes == {"F32": 4 * numbers}


def test_inspection_tells_every_problem(model):
    lose_shard(model)
    config("text_config", intermediate_size=50)(model)
    (model / "tokenizer.json").unlink()
    problems = inspect(model).problems
    for words in (
        "named by the index and not there",
        "config.json asks for [50, 32]",
        "no tokenizer",
    ):
        assert any(words in problem for problem in problems), problems
    assert sum("asks for" in problem for problem in problems) == 4
    assert not any(problem.endswith("is missing") for problem in problems)


@pytest.mark.parametrize(
    ("dtype", "number"), [(np.float32, np.nan), (np.float16, -np.inf), (ml_dtypes.bfloat16, np.inf)]
)
def test_weights_are_numbers(dtype, number, model):
    """Weights that hold NaN or infinity are refused, but not the largest finite ones."""
    shard = first_shard(model)
    tensors = {name: tensor.astype(dtype) for name, tensor in load_file(shard).items()}
    name = max(tensors)
    tensors[name].flat[-1] = -np.finfo(np.float16).max if dtype == np.float16 else -3e38
    save_file(tensors, shard)
    load(model)
    tensors[name].flat[-1] = number
    save_file(tensors, shard)
    with pytest.raises(InputError, match=f"{shard.name}: {name} holds NaN or infinity"):
        load(model)


@pytest.mark.parametrize(
    ("number", "dtype"), [(np.nan, None), (np.inf, jnp.bfloat16), (1e5, jnp.float16)]
)
def test_weights_that_are_no_numbers_are_not_written(number, dtype, good, tmp_path):
    """Weights that are NaN or infinite in the dtype of the file, as 100,000 is in float16, are not
    written.
    """
    model = load(good)
    params = jax.tree.map(lambda leaf: leaf.at[(0,) * leaf.ndim].set(number), model.params)
    with pytest.raises(InputError, match=r"^weights \S+: not finite in \w+, and are not written"):
        save(tmp_path / "out", model.config, params, SaveOptions(dtype=dtype))
    assert not list(tmp_path.iterdir())


def test_a_tower_is_read_from_the_files_that_the_model_is(good, tmp_path):
    """The tower is read from the model's own files, not from a copy in another dtype, as the hub's
    repositories may have.
    """
    model = load(good)
    save(tmp_path / "model", model.config, model.params)
    shutil.copy(tmp_path / "model/model.safetensors", tmp_path / "model/model.fp16.safetensors")
    equal = np.testing.assert_array_equal
    tower = read_tower(tmp_path / "model", jnp.dtype("float32"))
    jax.tree.map(equal, tower["vision_tower"], model.params["vision_tower"])


def test_a_tower_is_not_read_from_a_directory_without_weights(model):
    without_weights()(model)
    line = r"model: no model.safetensors and no model.safetensors.index.json; fetch the model's"
    with pytest.raises(InputError, match=line):
        read_tower(model, jnp.dtype("float32"))


def test_a_tower_that_the_index_does_not_name_is_one_line(model):
    index = model / "model.safetensors.index.json"
    weights = json.loads(index.read_text())["weight_map"]
    kept = {name: file for name, file in weights.items() if "vision_tower" not in name}
    towers = {file for name, file in weights.items() if name not in kept}
    edit(index, lambda raw: raw.update(weight_map=kept))
    for file in towers - {*kept.values()}:
        (model / file).unlink()
    with pytest.raises(InputError, match=r"model: vision_tower\.\S+ is missing; "):
        read_tower(model, jnp.dtype("float32"))


def test_a_model_that_always_has_tiles_is_refused_without_before_its_weights_are_read(
    tmp_path, monkeypatch
):
    path = families.write(tmp_path, "qwen2_5_vl") / "target"
    monkeypatch.setattr("jaxspec.checkpoints.huggingface.load", None)
    with pytest.raises(InputError, match="tiles: a 'qwen2_5_vl' cannot be read without tiles"):
        LoadedModel.load(path, tiles=False)
