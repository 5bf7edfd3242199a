"""Checkpoints in every Hugging Face layout are read, one layout is written, and each fault is
named.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError
from safetensors import safe_open
from safetensors.numpy import load_file

from jaxspec.checkpoints.huggingface import SaveOptions, load, save
from jaxspec.checkpoints.locating import locate
from jaxspec.config import LlamaConfig
from jaxspec.errors import InputError
from jaxspec.models.families import abstract_params
from tests import tiny
from tests.tiny import hf
from tests.tiny.disk import full_disk

EMBEDDING = "language_model.model.embed_tokens.weight"
HEAD = "language_model.lm_head.weight"


@pytest.fixture(scope="module")
def llava() -> Any:
    return hf.llava()


@pytest.fixture(scope="module")
def hub(llava, tmp_path_factory) -> Path:
    """Return a LLaVA in the layout of the hub's files."""
    return hf.write(tmp_path_factory.mktemp("hub") / "model", llava, hf.hub_tensors(llava))


def equal(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def renamed(tensors: dict[str, np.ndarray], *rows: tuple[str, str]) -> dict[str, np.ndarray]:
    for pattern, replacement in rows:
        tensors = {re.sub(pattern, replacement, name): tensor for name, tensor in tensors.items()}
    return tensors


def refused(path: Path, *parts: str) -> None:
    """Check that `load` raises an InputError of one line that holds all the parts."""
    message = tiny.one_line(load, path)
    for part in parts:
        assert part in message, message


# --- in ---


MEMORY = (
    (r"^language_model\.lm_head", "lm_head"),
    (r"^language_model\.model\.", "model.language_model."),
    (r"^(vision_tower|multi_modal_projector)\.", r"model.\1."),
)
LAYOUTS = {
    "transformers 4 in memory": MEMORY,
    "transformers 5 in memory": (*MEMORY, (r"vision_tower\.vision_model\.", "vision_tower.")),
    "transformers 5 saved from scratch": ((r"vision_tower\.vision_model\.", "vision_tower."),),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(tmp_path, llava, hub, name):
    path = hf.write(tmp_path / "model", llava, renamed(hf.hub_tensors(llava), *LAYOUTS[name]))
    equal(load(path).params, load(hub).params)


def test_dtypes(tmp_path, llava, hub):
    """bfloat16 files are read as they are, and cast on request."""
    tensors = {name: t.astype(ml_dtypes.bfloat16) for name, t in hf.hub_tensors(llava).items()}
    path = hf.write(tmp_path / "model", llava, tensors)
    stored, cast = load(path).params, load(path, dtype=jnp.float32).params
    assert {leaf.dtype for leaf in jax.tree.leaves(stored)} == {jnp.dtype(jnp.bfloat16)}
    assert {leaf.dtype for leaf in jax.tree.leaves(cast)} == {jnp.dtype(jnp.float32)}
    equal(stored, load(hub, dtype=jnp.bfloat16).params)
    equal(stored, cast)


def test_tied_head(tmp_path):
    model = hf.llava(text={"tie_word_embeddings": True})
    tensors = hf.hub_tensors(model)
    assert HEAD not in tensors
    alone = load(hf.write(tmp_path / "alone", model, tensors))
    assert "lm_head" not in alone.params["language_model"]
    same = hf.write(tmp_path / "same", model, tensors | {HEAD: tensors[EMBEDDING]})
    equal(load(same).params, alone.params)
    other = hf.write(tmp_path / "other", model, tensors | {HEAD: tensors[EMBEDDING] + 1})
    refused(other, f"{HEAD} differs from its tied embedding")


# --- out ---


def test_saved_files(tmp_path, hub):
    checkpoint = load(hub)
    umask = os.umask(0o022)
    try:
        save(
            tmp_path / "a" / "b",
            checkpoint.config,
            checkpoint.params,
            SaveOptions(dtype=jnp.dtype("bfloat16"), generation={"top_k": 5}),
        )
    finally:
        os.umask(umask)
    path = tmp_path / "a" / "b"
    names = {file.name for file in path.iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors"}
    assert [file.name for file in path.parent.iterdir()] == ["b"]
    assert path.stat().st_mode & 0o777 == 0o755
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o644}

    config = json.loads((path / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert (
        config["text_config"]["rope_theta"]
        == config["text_config"]["rope_parameters"]["rope_theta"]
        == 100.0
    )
    generation = json.loads((path / "generation_config.json").read_text())
    assert generation.pop("transformers_version")
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "top_k": 5}

    with safe_open(path / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(load_file(hub / "model.safetensors"))
    equal(load(path).params, load(hub, dtype=jnp.bfloat16).params)


def test_save_replaces_a_checkpoint_when_asked_and_nothing_else(tmp_path):
    config = LlamaConfig(**hf.TEXT)
    params = hf.random_params(abstract_params(config))
    path = tmp_path / "model"
    path.mkdir()
    save(path, config, params, SaveOptions(max_shard_bytes=10_000))
    theirs = "adapter_config.json", "adapter_model.safetensors", "mask_embedding.pt"
    for mine in ("notes.json", ".git/objects/a", "checkpoints/3/state", *theirs):
        (path / mine).parent.mkdir(parents=True, exist_ok=True)
        (path / mine).write_text(mine)
    with pytest.raises(InputError, match="model: holds a checkpoint; give another path, or --over"):
        save(path, config, params)
    assert list(path.glob("*.index.json"))
    save(path, config, params, SaveOptions(overwrite=True))
    assert not list(path.glob("*.index.json"))
    assert sorted(file.name for file in path.glob("*.safetensors")) == ["model.safetensors"]
    assert not [name for name in theirs if (path / name).exists()]  # or transformers would add them
    for mine in ("notes.json", ".git/objects/a", "checkpoints/3/state"):
        assert (path / mine).read_text() == mine
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "keep.txt").write_text("mine")
    with pytest.raises(InputError, match="exists and is no checkpoint"):
        save(tmp_path / "notes", config, params, SaveOptions(overwrite=True))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model", "notes"]
    assert (tmp_path / "notes" / "keep.txt").read_text() == "mine"


def test_a_failed_save_leaves_what_was_there(tmp_path):
    config = LlamaConfig(**hf.TEXT)
    params = hf.random_params(abstract_params(config))
    save(tmp_path / "model", config, params)
    with (
        full_disk(1 << 12),
        pytest.raises(InputError, match="model: cannot be written: File too large"),
    ):
        save(tmp_path / "model", config, params, SaveOptions(overwrite=True))
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
    equal(load(tmp_path / "model").params, params)


# --- wrong ---


def test_no_such_checkpoint(tmp_path):
    (tmp_path / "absent").mkdir()
    (entry,) = os.scandir(tmp_path)  # a path of another type
    (tmp_path / "absent").rmdir()
    (tmp_path / "file").write_text("")
    absent, file = str(tmp_path / "absent"), str(tmp_path / "file")
    for name, said in (
        (absent, "absent': no such directory"),
        (entry, "no such directory"),
        ("three/part/name", "no such directory"),
        (file, "is a file; give the directory"),
        ("a" * 5000, "no such directory"),
        (f"{'a' * 5000}/{'b' * 5000}/c", "no such directory"),
        ("~no such user/model", "no such directory"),
    ):
        with pytest.raises(InputError, match=said):
            locate(name)
    refused(
        tmp_path / "absent",
        "absent/config.json: no such file; give a directory in Hugging Face layout",
    )
    (tmp_path / "config.json").write_text(json.dumps(hf.text_config({}).to_dict()))
    refused(tmp_path, "no model.safetensors and no model.safetensors.index.json")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            LocalEntryNotFoundError("Cannot find\nan appropriate cached snapshot"),
            r".* from the hub \(Cannot find",
        ),
        (
            # type: ignore[arg-type]
            GatedRepoError("403 Client Error", response=SimpleNamespace(headers={}, request=None)),
            "the model is gated; ask for access at https://huggingface.co/some/model, then "
            "run `hf auth login`",
        ),
    ],
)
def test_a_hub_id_that_cannot_be_fetched(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(InputError, match=f"^checkpoint 'some/model': {said}"):
        locate("some/model")


def test_hub_id(monkeypatch, hub):
    """A model named by its id on the hub, with or without a revision, is read after fetching only
    the files it needs.
    """
    from huggingface_hub.utils import filter_repo_objects

    asked = {}

    def download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(hub)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert locate("owner/name", revision="v2") == hub
    assert asked["name"] == "owner/name"
    assert asked["revision"] == "v2"
    locate("owner/name@a272c74")
    with pytest.raises(InputError, match="revision 'v2': 'owner/name@a272c74' names another"):
        locate("owner/name@a272c74", revision="v2")
    with pytest.raises(InputError, match=r"revision 'v2': '/.+' is no hub id; leave it out"):
        locate(str(hub), revision="v2")
    assert (asked["name"], asked["revision"]) == ("owner/name", "a272c74")
    shards = [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    read = [
        *shards,
        "model.safetensors",
        "tokenizer.model",
        "chat_template.jinja",
        "additional_chat_templates/a.jinja",
    ]
    others = [
        "consolidated.safetensors",
        "consolidated-00001-of-00002.safetensors",
        "pytorch_model.bin",
        "a.png",
    ]
    assert (
        list(filter_repo_objects([*read, *others], allow_patterns=asked["allow_patterns"])) == read
    )
