"""Build a Hugging Face cache of twins: `HF_HOME/hub/models--owner--name/{blobs,refs,snapshots}`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from jaxspec.checkpoints import huggingface
from jaxspec.checkpoints.directories import parse_config, read_config
from jaxspec.checkpoints.fitting import named_tensors
from jaxspec.config import text_config
from jaxspec.heads.kinds import kind_of
from jaxspec.heads.kinds.vispec import VispecConfig
from jaxspec.heads.making import new_head
from tests.hub import block_heads, configs, words
from tests.hub.assistants import ASSISTANTS, write_assistant
from tests.hub.data import DATA
from tests.hub.data import write as write_data
from tests.hub.original import CONVERTED, ORIGINALS
from tests.hub.quantised import quantised
from tests.hub.table import ALIKE, CAPTIONERS, HEADS, TWINS, HeadTwin, Twin
from tests.tiny import captioners
from tests.tiny.disk import save_bin
from tests.tiny.models import eagle_params, gemma_eagle, random_params

TORCH, SENTENCEPIECE = (find_spec(name) is not None for name in ("torch", "sentencepiece"))
"""Where torch is not installed, safetensors stand in the place of .bin files; where sentencepiece
is not, a tokenizer.json is written next to tokenizer.model.
"""


LETTER = 80
"""A token that every tokeniser of the twins reads as a letter."""


def build_hub(folder: Path) -> None:
    """Write all twins into a new cache."""
    folder.mkdir()
    for name, twin in TWINS.items():
        add(folder, name, partial(write_model, twin=twin))
    for name, write in ORIGINALS.items():
        add(folder, name, partial(write, converted=_snapshot(folder, CONVERTED)))
    kinds: tuple[tuple[dict[str, Any], Callable[..., None]], ...] = (
        (HEADS, write_head),
        (block_heads.HEADS, block_heads.write_block_head),
        (ASSISTANTS, write_assistant),
    )
    for twins, write in kinds:
        for name, head in twins.items():
            target = _snapshot(folder, head.target)
            add(folder, name, partial(write, twin=head, target=target))
    for name, like in ALIKE.items():
        _home(folder, name).symlink_to(_home(folder, like).name)
    for name, (kind, _) in CAPTIONERS.items() if TORCH else ():
        add(folder, name, partial(write_captioner, kind=kind))
    for name, twin in DATA.items():
        add(folder, name, partial(write_data, twin=twin), "datasets")


def add(
    cache: Path,
    name: str,
    write: Callable[[Path], None],
    kind: str = "models",
    revision: str = "main",
) -> Path:
    """Write a repository into a hub cache (`HF_HOME/hub`) as huggingface_hub does; return its
    snapshot.

    Args:
      write: lays the repository's files in a folder.
      kind: models or datasets.
    """
    home = _home(cache, name, kind)
    commit = hashlib.sha1(f"{name} {revision}".encode()).hexdigest()
    snapshot = home / "snapshots" / commit
    with TemporaryDirectory(dir=cache) as scratch:
        write(Path(scratch))
        for file in sorted(path for path in Path(scratch).rglob("*") if path.is_file()):
            blob = home / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
            blob.parent.mkdir(parents=True, exist_ok=True)
            file.replace(blob)
            link = snapshot / file.relative_to(scratch)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(blob, link.parent))
    reference = home / "refs" / revision
    reference.parent.mkdir(parents=True, exist_ok=True)
    reference.write_text(commit)
    return snapshot


def _home(cache: Path, name: str, kind: str = "models") -> Path:
    return cache / f"{kind}--{name.replace('/', '--')}"


def _snapshot(cache: Path, name: str) -> Path:
    (snapshot,) = (_home(cache, name) / "snapshots").iterdir()
    return snapshot


LAST = {
    "florence2": (
        "model.language_model.shared.weight",
        "model.language_model.decoder.layers.0.final_layer_norm",
    ),
    "blip": (
        "text_decoder.bert.embeddings.word_embeddings.weight",
        "text_decoder.cls.predictions.transform.LayerNorm",
    ),
    "blip2": (
        "language_model.model.decoder.embed_tokens.weight",
        "language_model.model.decoder.final_layer_norm",
    ),
}
"""Weights of captioners: embeddings, which are the rows of the output's matrix too, and the norm
before it.
"""


def write_captioner(path: Path, kind: str) -> None:
    """Write a captioner of random weights, with its files under the names of its age.

    Captions end at once, and Florence-2's after four words.
    """
    import torch

    getattr(captioners, kind)(path)
    weights = path / "model.safetensors"
    tensors = {name: tensor.copy() for name, tensor in load_file(weights).items()}
    words, norm = LAST[kind]
    tensors[words][:, 0] = tensors[words][2] = 0
    tensors[words][2, 0] = 1
    tensors[f"{norm}.weight"][0], tensors[f"{norm}.bias"][0] = 0, 30
    if kind == "blip":
        weights.unlink()
        save_bin(
            {name: torch.from_numpy(tensor) for name, tensor in tensors.items()},
            path / "pytorch_model.bin",
        )
    else:
        save_file(tensors, weights, metadata={"format": "pt"})
    if kind == "florence2":
        file = path / "generation_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"min_new_tokens": 4}))
        return
    file = path / "processor_config.json"
    processor = json.loads(file.read_text())
    (path / "preprocessor_config.json").write_text(
        json.dumps(processor.pop("image_processor"), indent=2) + "\n"
    )
    if kind == "blip":
        file.unlink()
    else:
        file.write_text(json.dumps(processor, indent=2) + "\n")


def write_head(path: Path, twin: HeadTwin, target: Path) -> None:
    """Write a head of random weights; an EAGLE-3 head reads layers that exist in the target's twin
    of two layers.
    """
    found = read_config(target)
    of_deepseek = twin.layout == "deepseek"
    layers = (0, 1, 1, 2, 2) if of_deepseek else (0, 1, 2)
    read = {"target_layers": layers} if twin.feature == "fused" else {}
    config = new_head(found, feature=twin.feature, **read)
    vocabulary = text_config(found).vocab_size
    own: dict[str, Any] = {
        "fused": {"draft_vocabulary": () if of_deepseek else tuple(range(3, vocabulary, 2))},
        "eagle1": {"own_embedding": True, "fc_bias": True, "rows": vocabulary - twin.padding},
    }[twin.feature]
    text: Any = config.text_config
    if twin.config["architectures"] == ["Gemma4Eagle3Model"]:
        text = gemma_eagle(text_config(found), target_layers=layers)
    config = replace(config, text_config=replace(text, **own | twin.fields))
    if twin.rule == "compressed":
        heads = config.text_config.num_attention_heads
        text = replace(config.text_config, num_key_value_heads=heads)
        config = VispecConfig(text, config.target_hash)
    params = eagle_params(config, random_params(found))
    # DeepSeek's tensors are named as speculators' are, and its config.json as SafeAILab's.
    server = "speculators" if of_deepseek else twin.layout
    made, stored = kind_of(config).written(config, named_tensors(params), server, ())
    if of_deepseek:
        made = config.to_dict() | {"target_layer_ids": [layer - 1 for layer in layers]}
        made.pop("eagle_aux_hidden_state_layer_ids", None)
        del made["draft_vocab_size"], stored["d2t"], stored["t2d"]
    dtype = np.dtype(_numpy(twin.dtype))
    tensors = {
        name: leaf.astype(dtype) if leaf.dtype.kind == "f" else leaf
        for name, leaf in stored.items()
    }
    sizes = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
    )
    sizes += ("head_dim", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
    sizes += ("target_layer_ids", "global_head_dim", "num_global_key_value_heads")
    raw = twin.config | {name: made[name] for name in sizes if name in made}
    if inner := made.get("transformer_layer_config"):
        layer = {name: inner[name] for name in sizes if name in inner}
        raw["transformer_layer_config"] = twin.config["transformer_layer_config"] | layer
    raw |= {"torch_dtype": twin.dtype}
    (path / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    if twin.bin and TORCH:
        import torch

        save_bin(
            {name: torch.from_numpy(leaf) for name, leaf in tensors.items()},
            path / "pytorch_model.bin",
        )
    else:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def write_model(path: Path, twin: Twin) -> None:
    """Write a model's files."""
    raw = write_texts(path, twin)
    _write_weights(path, raw, twin)
    if twin.quantisation:
        whole = raw | {"quantization_config": twin.quantisation}
        (path / "config.json").write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


def write_texts(path: Path, twin: Twin) -> dict[str, Any]:
    """Write a model's files without its weights; return its config.json."""
    chat = configs.CHATS.get(twin.words, "") if twin.chat else ""
    whole = not twin.bin or (twin.words == "llama2" and not SENTENCEPIECE)
    ids = words.files(twin.words, path, whole=whole, chat=chat)
    files = configs.files_of(twin.family, ids, _in_ids(twin.config, ids))
    raw = files["config.json"] | {"torch_dtype": twin.dtype, "transformers_version": "4.36.0.dev0"}
    generation = _in_ids(twin.generation, ids) | {"transformers_version": "4.36.0.dev0"}
    for name, content in {
        **files,
        "config.json": raw,
        "generation_config.json": generation,
    }.items():
        (path / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return raw


def _in_ids(entries: dict[str, Any], ids: dict[str, int]) -> dict[str, Any]:
    """Return configuration entries with the ids of the tokens that the table names."""
    out = dict(entries)
    for key in ("bos_token_id", "eos_token_id"):
        value = entries.get(key)
        if isinstance(value, list):
            out[key] = [ids[word] for word in value]
        elif isinstance(value, str):
            out[key] = ids[value]
    if entries.get("pad_token_id", -1) >= len(ids):
        out["pad_token_id"] = ids["<pad>"]
    return out


def _write_weights(path: Path, raw: dict[str, Any], twin: Twin) -> None:
    """Write random weights under the names of the hub's files, in as many shards as the original
    has.
    """
    config = parse_config(path, raw)
    with TemporaryDirectory(dir=path) as scratch:
        whole = Path(scratch) / "whole"
        options = huggingface.SaveOptions(dtype=np.dtype(_numpy(twin.dtype)))
        huggingface.save(whole, config, random_params(config, twin.seed), options)
        tensors = load_file(whole / "model.safetensors")
    _end_soon(tensors, text_config(config).eos_token_id)
    if twin.family == "opt":  # saved from the model without its head
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    if twin.quantisation:
        tensors, _ = quantised(tensors, twin.quantisation, twin.seed)
    unread = _unread(raw, {name: tensor.shape for name, tensor in tensors.items()})
    tensors |= {name: np.zeros(x, np.dtype(_numpy(twin.dtype))) for name, x in unread.items()}
    names = sorted(tensors)
    bin = twin.bin and TORCH
    stem, ending = ("pytorch_model", "bin") if bin else ("model", "safetensors")
    shards = [
        f"{stem}-{number:05d}-of-{twin.shards:05d}.{ending}" for number in range(1, twin.shards + 1)
    ]
    if twin.shards == 1:
        shards = [f"{stem}.{ending}"]
    where = {name: shards[place * twin.shards // len(names)] for place, name in enumerate(names)}
    for file in shards:
        part = {name: tensors[name] for name in names if where[name] == file}
        if bin:
            import torch

            whole = {key: torch.from_numpy(value.astype(np.float32)) for key, value in part.items()}
            save_bin(
                {key: value.to(getattr(torch, twin.dtype)) for key, value in whole.items()},
                path / file,
            )
        else:
            save_file(part, path / file, metadata={"format": "pt"})
    if twin.shards > 1:
        index = {
            "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
            "weight_map": where,
        }
        (path / f"{stem}.{ending}.index.json").write_text(json.dumps(index, indent=2) + "\n")
    # Mistral's own library reads this one: all weights again, by other names
    if twin.family == "mistral":
        save_file(
            {f"layers.{name}": value for name, value in tensors.items()},
            path / "consolidated.safetensors",
        )


def _unread(raw: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a Gemma 4's tensors that this library does not read.

    They are audio, and keys and values of layers that read those of others.
    """
    text, audio, out = raw.get("text_config") or {}, raw.get("audio_config"), {}
    if audio:
        out["model.embed_audio.embedding_projection.weight"] = (16, 640)
    if audio and "output_proj_dims" in audio:
        out["model.audio_tower.output_proj.bias"] = (640,)
    shared = text.get("num_kv_shared_layers", 0)
    for i in range(shared):
        layers = i, text["num_hidden_layers"] - shared + i
        like, own = (f"model.language_model.layers.{n}.self_attn." for n in layers)
        parts = ("k_proj.weight", "v_proj.weight", "k_norm.weight")
        out |= {own + part: shapes[like + part] for part in parts}
    return out


def _end_soon(tensors: dict[str, np.ndarray], stop: Any) -> None:
    """Make answers short: what follows a token is the one of half its number, counted from the
    end-of-sequence token.

    Left random, a greedy answer is a loop. A token's embedding holds its number in binary, as -10
    and 10, which the layers hardly change; the head looks for the number whose bits are these, one
    place lower. A tied head scores by likeness, so that every token is followed by a letter, whose
    embedding is longer, and the letter by the end-of-sequence token, whose embedding is longest.
    """
    (embed,) = (tensors[name] for name in tensors if name.endswith("embed_tokens.weight"))
    stop = stop if isinstance(stop, int) else stop[0]
    heads = [name for name in tensors if name.endswith("lm_head.weight")]
    if not heads:
        embed[:, :2] = 10, 0
        embed[LETTER, :2] = 50, 50
        embed[stop, :2] = 0, 200
        return
    head = tensors[heads[0]]
    numbers = (np.arange(len(embed)) - stop) % len(embed)
    bits = 2.0 * (numbers[:, None] >> np.arange(9) & 1) - 1
    embed[:, :9], embed[:, 9] = 10 * bits, 10
    head[:] = 0
    head[:, 1:9], head[:, 9] = bits[:, :8], -bits[:, 8]


def _numpy(dtype: str) -> Any:
    import ml_dtypes

    return ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
