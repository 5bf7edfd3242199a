"""PyTorch's .bin weights give the same parameters as safetensors, and a pickle that is wrong in any
way is refused.
"""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.checkpoints import directories
from jaxspec.checkpoints.directories import weight_files
from jaxspec.checkpoints.fitting import survey
from jaxspec.checkpoints.huggingface import load
from jaxspec.checkpoints.locating import locate
from jaxspec.checkpoints.processors import load_tokenizer
from jaxspec.cli.inspect import inspect
from jaxspec.publishing.export import export

torch = pytest.importorskip("torch", reason="torch reads .bin: install the `parity` extra")

from tests import tiny  # noqa: E402
from tests.hub import build  # noqa: E402
from tests.hub.table import TWINS  # noqa: E402
from tests.tiny import hf  # noqa: E402
from tests.tiny.disk import save_bin  # noqa: E402

MODELS = ("lmsys/vicuna-7b-v1.5", "facebook/opt-13b")
INDEX, FIRST = "pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin"


def write(path: Path, name: str, **changes: Any) -> Path:
    """Write the twin of a model that is distributed as .bin, in shards."""
    path.mkdir()
    build.write_model(path, replace(TWINS[name], **changes))
    return path


@pytest.fixture
def vicuna(tmp_path: Path) -> Path:
    return write(tmp_path / "model", MODELS[0])


def refused(path: Path, *parts: str) -> None:
    said = tiny.one_line(load, path)
    assert said.isprintable(), said
    assert str(path) in said
    for part in parts:
        assert part in said, said
    assert any(parts[0] in problem for problem in inspect(path).problems)


@pytest.mark.parametrize(("name", "dtype"), zip(MODELS, ("float16", "bfloat16")))
def test_the_same_parameters_as_in_safetensors(name, dtype, tmp_path):
    """PyTorch's shards give the parameters of safetensors; buffers that transformers stored up to
    4.31, and a tied head's copy, are passed over.
    """
    path = write(tmp_path / "bin", name, dtype=dtype)
    shards = sorted(path.glob("pytorch_model-*.bin"))
    assert len(shards) == TWINS[name].shards
    tensors = torch.load(shards[0], weights_only=True)
    if name == MODELS[0]:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    else:
        tensors["lm_head.weight"] = tensors["decoder.embed_tokens.weight"]
    index = json.loads((path / INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(tensors, shards[0].name)
    (path / INDEX).write_text(json.dumps(index))
    save_bin(tensors, shards[0])
    found = load(path)
    twin = load(write(tmp_path / "twin", name, dtype=dtype, bin=False))
    assert found.config == twin.config
    jax.tree.map(np.testing.assert_array_equal, found.params, twin.params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(found.params)} == {dtype}
    assert survey(path).problems == []


def test_one_file_and_views_of_one_storage(tmp_path):
    """A file whose q, k and v are views of one tensor, as OPT's converter left them, gives the
    parameters of separate tensors.
    """
    path = write(tmp_path / "model", MODELS[1], shards=1)
    before, file = load(path).params, path / "pytorch_model.bin"
    tensors = torch.load(file, weights_only=True)
    for layer in range(2):
        names = [f"decoder.layers.{layer}.self_attn.{part}_proj.weight" for part in "qkv"]
        tensors |= dict(zip(names, torch.cat([tensors[name] for name in names]).split(32)))
    torch.save(tensors, file)  # as today's torch does
    jax.tree.map(np.testing.assert_array_equal, load(path).params, before)


@pytest.mark.parametrize("name", MODELS)
def test_exported_as_safetensors(name, tmp_path):
    """A model that is distributed as .bin is exported whole, with its tokeniser, and transformers
    reads it.
    """
    if name == MODELS[0]:
        pytest.importorskip("sentencepiece", reason="install the `sentencepiece` extra")
    path = write(tmp_path / "model", name)
    export(path, tmp_path / "out")
    assert weight_files(tmp_path / "out") == [tmp_path / "out" / "model.safetensors"]
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path / "out").params, load(path).params)
    hf.reload(tmp_path / "out", hf.LlamaForCausalLM if name == MODELS[0] else hf.OPTForCausalLM)
    before, after = load_tokenizer(path), load_tokenizer(tmp_path / "out")
    for text in ("the thing in \u00fc w?", ""):
        assert after.encode(text) == before.encode(text)


class Evil:
    """Run a command where this object is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


def test_code_in_a_pickle_does_not_run(vicuna):
    ran = vicuna / "ran"
    torch.save({"model.norm.weight": torch.ones(32), "evil": Evil(ran)}, vicuna / FIRST)
    refused(
        vicuna,
        f"{FIRST}: holds code ({os.system.__module__}.system), and none of it was run; take "
        "the model's",
    )
    (vicuna / FIRST).write_bytes(pickle.dumps(Evil(ran)))
    refused(vicuna, f"{FIRST}: not as torch writes files since 1.6; load it")
    torch.save({"evil": Evil(ran)}, vicuna / FIRST, _use_new_zipfile_serialization=False)
    refused(vicuna, f"{FIRST}: not as torch writes files since 1.6")
    assert not ran.exists()


def damaged(vicuna: Path, case: str) -> str:
    """Damage a file, and return what its refusal says."""
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
        torch.save(
            {name: tensor.t() if tensor.ndim == 2 else tensor for name, tensor in tensors.items()},
            file,
        )
        return "is not in row-major order; load it with weights_only=True, and torch.save"
    assert case == "nested"
    torch.save({"state_dict": tensors}, file)
    return f"{FIRST}: holds more than a dictionary of tensors; load it with weights_only=True"


CASES = (*("lost shard", "page of errors", "lost tensor", "transposed", "nested"),)


@pytest.mark.parametrize("case", CASES)
def test_damage(case, vicuna):
    refused(vicuna, damaged(vicuna, case))


def test_without_torch(vicuna, monkeypatch):
    """Without torch, .bin files are refused in one line with the mend, and are not fetched."""
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
        refused(
            vicuna,
            f"{INDEX}: PyTorch's .bin is read with torch 2.11 or later, and here is "
            f"{have or 'none'}; pip",
        )
        refused(vicuna, "pip install -e '.[torch]', or save the model as safetensors")
    locate("owner/name")
    assert len(asked) == 1
    for file in vicuna.glob("pytorch_model*"):
        file.unlink()
    refused(
        vicuna,
        "no model.safetensors and no model.safetensors.index.json; PyTorch's .bin is read "
        "with torch",
    )
