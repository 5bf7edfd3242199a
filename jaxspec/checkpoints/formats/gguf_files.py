"""Write a Llama, Qwen2 or Gemma 3 of llama.cpp's GGUF files once in Hugging Face layout.

The `gguf` package reads the file and dequantises its tensors; transformers makes the tokeniser.
This file translates the configuration and the names, and puts llama.cpp's rows of q and k, which
interleave the two halves that rotate together, back in order. Gemma's norms are stored plus 1.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.checkpoints.directories import written_once
from jaxspec.checkpoints.fitting import contradictions, in_hub_layout, layouts_of, refuse
from jaxspec.checkpoints.formats.gguf_tokenizer import gguf_tokenizer, special_ids
from jaxspec.checkpoints.formats.tensor_files import StoredTensor
from jaxspec.checkpoints.huggingface import SaveOptions, UnreadParameter, save
from jaxspec.config import Gemma3TextConfig, LlamaConfig, Qwen2Config, RotaryConfig
from jaxspec.errors import InputError, located, needing, reading
from jaxspec.models.layers import rotary_frequencies

_FAMILIES: dict[Any, type[RotaryConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "gemma3": Gemma3TextConfig,
}
_ENTRIES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
"""config.json's name -> the entry that every file has; all others have defaults."""
_SANDWICH_LAYOUT = (
    (r"\.ffn_norm\.", ".pre_feedforward_layernorm."),
    (r"\.post_attention_norm\.", ".post_attention_layernorm."),
    (r"\.post_ffw_norm\.", ".post_feedforward_layernorm."),
    (r"\.attn_([qk])_norm\.", r".self_attn.\1_norm."),
)
"""Gemma 3's names that are not Llama's."""
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
CONVERSION = 3
"""Version of the conversion: another one is written anew."""
_LLAMA3 = {"rope_type": "llama3", "original_max_position_embeddings": 8192}


def converted(file: Path, name: str = "") -> Path:
    """Return the directory in jaxspec's cache that holds a file's model; the first call writes it.

    Args:
      name: Name of the model; by default the file's name.
    """
    status = file.resolve().stat()
    made_of = f"{file.resolve()} {status.st_size} {status.st_mtime_ns} {CONVERSION}"
    write = partial(convert, file)
    return written_once(made_of.encode(), "gguf", name or file.stem, write, file)


def stored_kinds(file: Path) -> dict[str, str]:
    """Return for people how a file holds its numbers, and a second matrix of a tied model."""
    kinds = {tensor.name: tensor.tensor_type.name for tensor in _reader(file).tensors}
    counts = Counter(kinds.values()).most_common()
    facts = {"tensors": ", ".join(f"{count} of {kind}" for kind, count in counts)}
    if "output.weight" in kinds:
        facts["output matrix"] = (
            f"apart ({kinds['output.weight']}) from the embedding ({kinds['token_embd.weight']}); "
            "of a tied model, files may hold the one matrix twice"
        )
    return facts


def _reader(file: Path) -> Any:
    with needing(str(file), "gguf"):
        gguf = import_module("gguf")
    with reading(f"{file}: not readable as GGUF", "fetch it again"):
        return gguf.GGUFReader(file)


def convert(file: Path, path: Path, dtype: Any = None, overwrite: bool = False) -> RotaryConfig:
    """Write a file's model, tokeniser and chat template as a directory; return its configuration.

    Args:
      dtype: Dtype of the stored tensors; None is float32, which holds every number of the file.

    Raises:
      InputError: as `save`; or the file is unreadable, of another architecture, or contradicts
        itself.
    """
    reader = _reader(file)
    with located(file), reading(f"{file}: not readable as GGUF", "fetch it again"):
        entries = {name: field.contents() for name, field in reader.fields.items()}
        if (parts := entries.get("split.count") or 1) > 1:
            join = "llama-gguf-split --merge FIRST_PART JOINED.gguf"
            raise InputError(f"one of {parts} parts of a model; join them by {join}")
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        factors = tensors.pop("rope_freqs.weight", None)
        # The checks see float32, which is what will be written, and rows first.
        listed = [
            StoredTensor(name, file, "F32", tuple(tensor.shape.tolist()[::-1]), 0, 0)
            for name, tensor in tensors.items()
        ]
        problems: list[str] = []
        gemma = entries.get("general.architecture") == "gemma3"
        layout = (*_SANDWICH_LAYOUT, *_LAYOUT) if gemma else _LAYOUT
        stored = in_hub_layout(listed, layout, problems)
        config = _config(entries, stored, factors and factors.data)
        if problems := problems or contradictions(config, lambda: layouts_of(config)[0], stored):
            refuse(file, problems)
        ids, tokenizer = special_ids(entries), gguf_tokenizer(entries)
    layouts, tree = layouts_of(config)
    reordered = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}

    def leaf(name: str) -> UnreadParameter:
        heads = reordered.get(name.split(".")[-2], 0) if isinstance(config, LlamaConfig) else 0
        title = stored[name].name
        added = (config.norm_offset or 0) * name.endswith("norm.weight")
        read = partial(_dequantised, f"{file}: {title}", tensors[title], heads, float(added))
        return UnreadParameter(layouts[name], np.dtype(np.float32), read)

    ends = list(dict.fromkeys(ids[role] for role in ("eos", "eot") if role in ids))
    options = SaveOptions(
        dtype=dtype or np.dtype(np.float32),
        generation={"eos_token_id": ends} if len(ends) > 1 else {},
        overwrite=overwrite,
    )
    params = jax.tree.unflatten(tree, [leaf(name) for name in layouts])
    save(path, config, params, options, tokenizer=tokenizer)
    return config


def _dequantised(origin: str, tensor: Any, heads: int, added: float) -> np.ndarray:
    """Return a tensor's numbers in float32.

    Args:
      origin: The file and the tensor, for errors.
      tensor: The `gguf` package's ReaderTensor.
      heads: Number of heads of q or k, whose rows are in llama.cpp's order; else 0.
      added: What llama.cpp added to the numbers.
    """
    kind = tensor.tensor_type
    with reading(f"{origin}: {kind.name} cannot be dequantised", "take another file"):
        numbers = import_module("gguf").dequantize(tensor.data, kind)
    if heads:
        pairs = numbers.reshape(heads, -1, 2, *numbers.shape[1:])
        numbers = pairs.swapaxes(1, 2).reshape(numbers.shape)
    return numbers - np.float32(added) if added else numbers


def _config(
    entries: dict[str, Any], stored: dict[str, StoredTensor], factors: np.ndarray | None
) -> RotaryConfig:
    """Return the configuration that a file's entries describe.

    factors: Divisors of the rotary frequencies, which Llama 3.1's files have.

    Raises InputError for entries that this library lacks.
    """
    kind = entries.get("general.architecture")
    if kind not in _FAMILIES:
        raise InputError(f"architecture {kind!r} is not one of {', '.join(_FAMILIES)}")
    # A float32 as config.json writes it (9.999999747378752e-06 is 1e-05), so that a head's
    # `target_hash` holds for the same model in Hugging Face's files too.
    settings: dict[str, Any] = {
        name.removeprefix(f"{kind}."): float(str(np.float32(x))) if isinstance(x, float) else x
        for name, x in entries.items()
    }
    # As llama.cpp reads files, of which old ones have only the factor, under another name.
    factor = settings.get("rope.scaling.factor", settings.get("rope.scale_linear")) or None
    stretch = settings.get("rope.scaling.type", "linear" if factor else "none")
    scaling = {
        "rope_type": stretch.replace("none", "default"),
        "factor": factor,
        "original_max_position_embeddings": settings.get("rope.scaling.original_context_length"),
        "beta_fast": settings.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": settings.get("rope.scaling.yarn_beta_slow"),
    }
    raw = {name: settings[entry] for name, entry in _ENTRIES.items()} | {
        "vocab_size": stored["model.embed_tokens.weight"].shape[0],
        "num_key_value_heads": settings.get("attention.head_count_kv"),
        "head_dim": settings.get("attention.key_length"),
        "rope_theta": settings.get("rope.freq_base"),
        "rope_scaling": scaling,
        "tie_word_embeddings": "lm_head.weight" not in stored,
        "attention_bias": "model.layers.0.self_attn.o_proj.bias" in stored,
        "bos_token_id": entries.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": entries.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": entries.get("tokenizer.ggml.padding_token_id"),
    }
    if kind == "gemma3":
        raw |= _of_gemma(settings)
    config = plain = _FAMILIES[kind].from_hf(raw)
    if factors is not None:  # divisors of the frequencies: Llama 3.1's files have no other entry
        config = _FAMILIES[kind].from_hf(
            raw | {"rope_scaling": _LLAMA3 | {"factor": float(factors.max())}}
        )
        if not np.allclose(
            rotary_frequencies(config) * factors, rotary_frequencies(plain), rtol=1e-4, atol=0
        ):
            raise InputError("rope_freqs.weight is not Llama 3's; take another file")
    window = config.sliding_window or max(
        settings.get("attention.sliding_window", 0), config.context
    )
    whole = {"rope.dimension_count": config.head_dim, "attention.value_length": config.head_dim}
    whole |= dict.fromkeys(("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"), 1)
    for name, value in (whole | {"attention.sliding_window": window}).items():
        if settings.get(name, value) not in (value, 0):
            raise InputError(f"{kind}.{name} is {settings[name]}, supported: {value}")
    return config


def _of_gemma(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of config.json that only Gemma has, as far as a file has them."""
    names = {
        "sliding_window": "attention.sliding_window",
        "rope_local_base_freq": "rope.freq_base_swa",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    }
    raw = {name: settings[entry] for name, entry in names.items() if entry in settings}
    heads, width = settings["attention.head_count"], settings["attention.key_length"]
    # No entry has the factor of the scores: llama.cpp knows the 27B by its 62 layers.
    if settings["block_count"] == 62:
        width = settings["embedding_length"] / heads
    return raw | {"query_pre_attn_scalar": width}
