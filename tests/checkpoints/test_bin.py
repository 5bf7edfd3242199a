"""PyTorch's .bin weights: the very parameters of the safetensors, and every way in which a pickle may be wrong."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxspec.checkpoints import directories
from jaxspec.checkpoints.directories import weight_files
from jaxspec.checkpoints.export import export
from jaxspec.checkpoints.fitting import survey
from jaxspec.checkpoints.huggingface import load
from jaxspec.checkpoints.locating import locate
from jaxspec.checkpoints.processors import load_tokenizer
from jaxspec.cli.inspect import inspect
from jaxspec.config import ModelConfig
from jaxspec.errors import InputError
from jaxspec.models import LanguageModel
from jaxspec.models.inputs import PromptRows

torch = pytest.importorskip("torch", reason="torch reads .bin: install the `parity` extra")

from safetensors.torch import save_file  # noqa: E402

from tests.hub import words  # noqa: E402
from tests.tiny import hf  # noqa: E402
from tests.tiny.disk import save_bin  # noqa: E402

VICUNA = {
    "_name_or_path": "vicuna-7b-v1.5", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 44,
    "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 4, "num_hidden_layers": 2,
    "num_key_value_heads": 4, "pad_token_id": 0, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.31.0", "use_cache": True,
    "vocab_size": 368,
}  # fmt: skip
"""config.json of lmsys/vicuna-7b-v1.5 in its entries, with small sizes."""
OPT = {
    "_name_or_path": "opt-13b", "_remove_final_layer_norm": False, "activation_dropout": 0.0,
    "activation_function": "relu", "architectures": ["OPTForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 2,
    "do_layer_norm_before": True, "dropout": 0.1, "eos_token_id": 2, "ffn_dim": 44, "hidden_size": 32,
    "init_std": 0.02, "layerdrop": 0.0, "max_position_embeddings": 2048, "model_type": "opt",
    "num_attention_heads": 4, "num_hidden_layers": 2, "output_projection": True, "pad_token_id": 1, "prefix": "</s>",
    "torch_dtype": "float16", "transformers_version": "4.21.0.dev0", "use_cache": True, "vocab_size": 272,
    "word_embed_proj_dim": 32,
}  # fmt: skip
"""The same of facebook/opt-13b."""
MODELS = {"lmsys/vicuna-7b-v1.5": (VICUNA, 2), "facebook/opt-13b": (OPT, 3)}
INDEX, FIRST = "pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin"


def tensors_of(raw: dict[str, Any], dtype: Any = None) -> dict[str, Any]:
    """A random model's tensors under the names of the hub's file."""
    sizes = {key: value for key, value in raw.items() if key not in ("torch_dtype", "transformers_version")}
    if raw["model_type"] == "opt":
        model = hf.random_model(hf.OPTForCausalLM, hf.OPTConfig(**sizes))
        state = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
        assert state["lm_head.weight"].data_ptr() == state["decoder.embed_tokens.weight"].data_ptr()
    else:
        state = dict(hf.random_model(hf.LlamaForCausalLM, hf.LlamaConfig(**sizes)).state_dict())
    state = {name: tensor.detach().to(dtype or torch.float16) for name, tensor in state.items()}
    if raw["model_type"] == "opt":
        state["lm_head.weight"] = state["decoder.embed_tokens.weight"]
    else:  # which transformers stored up to 4.31
        state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    return state


def write_bin(path: Path, tensors: Mapping[str, Any], shards: int = 1) -> None:
    """Write torch's tensors as pytorch_model.bin, or as shards with an index."""
    path.mkdir(exist_ok=True)
    if shards == 1:
        save_bin(dict(tensors), path / "pytorch_model.bin")
        return
    where = {name: f"pytorch_model-{i * shards // len(tensors) + 1:05d}-of-{shards:05d}.bin" for i, name in
             enumerate(tensors)}  # fmt: skip
    for file in set(where.values()):
        save_bin({name: tensor for name, tensor in tensors.items() if where[name] == file}, path / file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (path / INDEX).write_text(json.dumps(index, indent=2))


def write(path: Path, raw: dict[str, Any], shards: int = 1, dtype: Any = None) -> Path:
    write_bin(path, tensors_of(raw, dtype), shards)
    (path / "config.json").write_text(json.dumps(raw))
    return path


@pytest.fixture
def vicuna(tmp_path: Path) -> Path:
    return write(tmp_path / "model", VICUNA, 2)


def as_safetensors(source: Path, path: Path, raw: dict[str, Any], dtype: Any = None) -> Path:
    path.mkdir()
    save_file({name: tensor.clone() for name, tensor in tensors_of(raw, dtype).items()}, path / "model.safetensors")
    shutil.copy(source / "config.json", path)
    return path


def logits(config: ModelConfig, params: Any) -> np.ndarray:
    lm = LanguageModel(config)
    prompt = PromptRows(jnp.asarray([[2, 7, 31, 8]]), jnp.asarray([4]))
    return np.asarray(lm.prefill(params, lm.embed(params, prompt, None), prompt, 8)[0])


def refused(path: Path, *parts: str) -> None:
    with pytest.raises(InputError) as caught:
        load(path)
    said = str(caught.value)
    assert said.isprintable(), said
    assert str(path) in said
    for part in parts:
        assert part in said, said
    assert any(parts[0] in problem for problem in inspect(path).problems)


@pytest.mark.parametrize(("name", "dtype"), zip(MODELS, (torch.float16, torch.bfloat16)))
def test_the_same_parameters_as_in_safetensors(name, dtype, tmp_path):
    raw, shards = MODELS[name]
    path = write(tmp_path / "bin", raw, shards, dtype)
    assert len(list(path.glob("pytorch_model-*.bin"))) == shards
    found = load(path)
    twin = load(as_safetensors(path, tmp_path / "twin", raw, dtype))
    assert found.config == twin.config
    jax.tree.map(np.testing.assert_array_equal, found.params, twin.params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(found.params)} == {str(dtype).removeprefix("torch.")}
    np.testing.assert_array_equal(logits(found.config, found.params), logits(twin.config, twin.params))
    assert survey(path).problems == []


def test_one_file_and_views_of_one_storage(tmp_path):
    """As OPT's converter left them: q, k and v are parts of one tensor, of which the file holds one copy."""
    tensors = tensors_of(OPT)
    for layer in range(2):
        names = [f"decoder.layers.{layer}.self_attn.{part}_proj.weight" for part in "qkv"]
        parts = torch.cat([tensors[name] for name in names]).split(32)
        tensors |= dict(zip(names, parts))
    (tmp_path / "model").mkdir()
    torch.save(tensors, tmp_path / "model" / "pytorch_model.bin")  # as today's torch does
    (tmp_path / "model" / "config.json").write_text(json.dumps(OPT))
    jax.tree.map(
        np.testing.assert_array_equal,
        load(tmp_path / "model").params,
        load(write(tmp_path / "plain", OPT)).params,
    )


@pytest.mark.parametrize("name", MODELS)
def test_exported_as_safetensors(name, tmp_path):
    """The whole model as it is distributed, tokeniser and all; transformers reads what is written."""
    raw, shards = MODELS[name]
    path = write(tmp_path / "model", raw, shards)
    if raw is OPT:
        words.files("opt", path, whole=False)
    else:
        pytest.importorskip("sentencepiece", reason="install the `sentencepiece` extra")
        words.files("llama2", path, whole=False)
    export(path, tmp_path / "out")
    assert weight_files(tmp_path / "out") == [tmp_path / "out" / "model.safetensors"]
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path / "out").params, load(path).params)
    hf.reload(tmp_path / "out", hf.OPTForCausalLM if raw is OPT else hf.LlamaForCausalLM)
    before, after = load_tokenizer(path), load_tokenizer(tmp_path / "out")
    for text in ("the thing in \u00fc w?", ""):
        assert after.encode(text) == before.encode(text)


class Evil:
    """Runs a command where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


def test_code_in_a_pickle_does_not_run(vicuna):
    ran = vicuna / "ran"
    torch.save({"model.norm.weight": torch.ones(32), "evil": Evil(ran)}, vicuna / FIRST)
    refused(vicuna, f"{FIRST}: holds code ({os.system.__module__}.system), and none of it was run; take the model's")
    (vicuna / FIRST).write_bytes(pickle.dumps(Evil(ran)))
    refused(vicuna, f"{FIRST}: not as torch writes files since 1.6; load it")
    torch.save({"evil": Evil(ran)}, vicuna / FIRST, _use_new_zipfile_serialization=False)
    refused(vicuna, f"{FIRST}: not as torch writes files since 1.6")
    assert not ran.exists()


def damaged(vicuna: Path, case: str) -> str:
    """Damage a file; what is said of it."""
    file = vicuna / FIRST
    tensors = torch.load(file, weights_only=True)
    if case == "lost shard":
        file.unlink()
        return f"{FIRST}: named by the index and not there; fetch it"
    if case == "page of errors":
        file.write_text("<!DOCTYPE html><html>404</html>")
        return f"{FIRST}: not as torch writes files since 1.6"
    if case == "lost tensor":
        name = min(tensors)
        torch.save({key: tensor for key, tensor in tensors.items() if key != name}, file)
        return f"{name} is missing"
    if case == "transposed":
        torch.save({name: tensor.t() if tensor.ndim == 2 else tensor for name, tensor in tensors.items()}, file)
        return "is not in row-major order; load it with weights_only=True, and torch.save"
    assert case == "nested"
    torch.save({"state_dict": tensors}, file)
    return f"{FIRST}: holds no dictionary of tensors alone; load it with weights_only=True"


CASES = (*("lost shard", "page of errors", "lost tensor", "transposed", "nested"),)


@pytest.mark.parametrize("case", CASES)
def test_damage(case, vicuna):
    refused(vicuna, damaged(vicuna, case))


def test_without_torch(vicuna, monkeypatch):
    """One line with the mend, and nothing is fetched that cannot be read."""
    asked: list[list[str]] = []

    def download(_: str, allow_patterns: list[str], **options: Any) -> str:
        asked.append(allow_patterns)
        return str(vicuna)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    locate("owner/name")
    assert asked[1:] == [["pytorch_model*.bin"]]
    asked.clear()
    for have in ("", "2.9.1+cpu"):
        monkeypatch.setattr(directories, "version", lambda package, have=have: have)
        refused(vicuna, f"{INDEX}: PyTorch's .bin is read with torch 2.11 or later, and here is {have or 'none'}; pip")
        refused(vicuna, "pip install -e '.[torch]', or save the model as safetensors")
    locate("owner/name")
    assert len(asked) == 1
    for file in vicuna.glob("pytorch_model*"):
        file.unlink()
    refused(vicuna, "no model.safetensors and no model.safetensors.index.json; PyTorch's .bin is read with torch")
