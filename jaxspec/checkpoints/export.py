"""From any checkpoint that this library loads to a Hugging Face directory: other dtypes, vocabularies, parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.checkpoints.directories import check_destination, read_json, read_raw_config
from jaxspec.checkpoints.huggingface import load, save
from jaxspec.checkpoints.kv_head import is_kv_head, load_kv_head, save_kv_head
from jaxspec.checkpoints.locating import locate
from jaxspec.checkpoints.model_card import model_name, write_head_card, write_model_card
from jaxspec.checkpoints.processors import copy_processors, has_tokenizer, load_tokenizer
from jaxspec.config import KVHeadConfig, ModelConfig, text_config
from jaxspec.errors import InputError
from jaxspec.models import LanguageModel, text_params
from jaxspec.models.vocabulary import narrowed, widened
from jaxspec.prompts.encoder import PromptEncoder
from jaxspec.typing import Array, Params

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Target:
    """The model that an exported draft is made for."""

    name: str
    vocab_size: int


def export(
    source: str | Path,
    destination: str | Path,
    *,
    dtype: jnp.dtype | None = None,
    max_shard_bytes: int = 5 << 30,
    target: Target | None = None,
    text_only: bool = False,
    draft_vocabulary: int | None = None,
    overwrite: bool = False,
) -> ModelConfig | KVHeadConfig:
    """Write a checkpoint anew, with what lies beside it, for transformers 4.57 and 5; return its configuration.

    Tokeniser, processor, chat template and generation settings are written along, and so is a model card. Entries of
    config.json that this library does not read are kept. A KV head becomes one file, for this library alone.

    Args:
      target: pad the vocabulary to this model's size, see `pad_vocabulary`; the card names it.
      text_only: of an LVLM, the decoder alone, as a language model of its own.
      draft_vocabulary: keep so many tokens of a draft's vocabulary, its first, for this library alone; by default a
        KV head keeps all, and any other draft is `widened`, as transformers reads nothing else.
      overwrite: replace a checkpoint that is there, as `save` does.

    Raises:
      InputError: as `load` and `save`; the destination holds the source; the vocabulary is larger than the target's; or
        the text of a text model.
    """
    path = locate(source)
    check_destination(destination, overwrite, path)
    if is_kv_head(path):
        if target is not None or text_only:
            raise InputError(
                f"{path}: a KV head, which has neither words nor towers; leave vocab-of and text-only out"
            )
        return _export_head(path, destination, dtype, draft_vocabulary, overwrite)
    found = load(path)
    config, params, raw = found.config, found.params, read_raw_config(found.path)
    if text_only:
        if not LanguageModel(config).has_vision:
            raise InputError(
                f"{found.path}: {config.model_type!r} is a text model already; leave text-only out"
            )
        config, params, raw = text_config(config), text_params(config, params), _text_entries(raw)
        config = replace(
            config,
            **{key: raw[key] for key in _TOKEN_IDS if getattr(config, key) is None and key in raw},
        )
    words = text_config(config).draft_vocabulary
    kept = _first_words(path, words, draft_vocabulary) if draft_vocabulary is not None else ()
    config, params = widened(config, params)
    if target is not None:
        config, params = pad_vocabulary(config, params, target.vocab_size)
    if kept:
        config, params = narrowed(config, params, kept)
    settings = found.path / "generation_config.json"
    # Without EOS there no token ends an answer, whatever config.json says.
    generation = {"eos_token_id": None} | read_json(settings) if settings.is_file() else {}

    encoder, add_bos = None, False
    if has_tokenizer(found.path):
        encoder = PromptEncoder.of(config, load_tokenizer(found.path))
        add_bos = not encoder.tokenizer.chat_template and encoder.tokenizer.bos_token is not None
        encoder.tokenizer.chat_template = encoder.chat_templates()

    def write_more(path: Path) -> None:
        copy_processors(found.path, path, config, encoder and encoder.tokenizer, add_bos)
        write_model_card(
            path,
            config,
            params,
            name=model_name(destination),
            source=found.path,
            target=target and target.name,
            added=text_config(config).vocab_size - text_config(found.config).vocab_size,
            scored=len(kept or words),
            encoder=encoder,
            generation=generation,
        )

    save(
        destination,
        config,
        params,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        generation={
            key: value for key, value in generation.items() if key != "transformers_version"
        },
        extra=raw,
        write_more=write_more,
        overwrite=overwrite,
    )
    return config


def _export_head(
    source: Path,
    destination: str | Path,
    dtype: jnp.dtype | None,
    draft_vocabulary: int | None,
    overwrite: bool,
) -> KVHeadConfig:
    config, params = load_kv_head(source)
    if draft_vocabulary is not None:
        text = config.text_config
        words = _first_words(source, text.draft_vocabulary, draft_vocabulary)
        config = replace(config, text_config=replace(text, draft_vocabulary=words))
    name = model_name(destination)

    def write_more(path: Path) -> None:
        write_head_card(path, config, params, name, source)

    save_kv_head(destination, config, params, dtype, write_more=write_more, overwrite=overwrite)
    return config


def _first_words(path: Path, words: tuple[int, ...], count: int) -> tuple[int, ...]:
    if not 0 < count <= len(words):
        raise InputError(
            f"{path}: a draft vocabulary of {len(words)} tokens, and {count} are asked for; give fewer"
        )
    return words[:count]


def pad_vocabulary(config: ModelConfig, params: Params, size: int) -> tuple[ModelConfig, Params]:
    """Add rows to the embedding, and columns to the head, that are the means of those there.

    The logit of an added token is then the mean of the model's logits. It never exceeds their maximum, so that, but
    for rounding, no added token is ever the argmax; and a prompt that holds one reads an embedding of usual size.
    Zeros would make it the argmax wherever all logits are negative, and no finite bias-free column makes it -inf.
    """
    text = text_config(config)
    if size < text.vocab_size:
        raise InputError(
            f"vocabulary: {text.vocab_size} tokens and the target's {size}; rows cannot be taken away, "
            "export for a target with the same tokeniser"
        )

    text = replace(text, vocab_size=size)
    padded = text if text_config(config) is config else replace(config, text_config=text)
    return padded, with_words(params, size)


def with_words(params: Params, words: int) -> Params:
    """Return parameters with so many embeddings and output columns: the first ones, then the mean of all there were."""

    def resized(path: Any, leaf: Array) -> Array:
        keys = tuple(key.key for key in path[-2:])
        axis = {("embed_tokens", "embedding"): 0, ("lm_head", "kernel"): 1}.get(keys)
        if axis is None or leaf.shape[axis] == words:
            return leaf
        mean = jnp.mean(leaf, axis, keepdims=True, dtype=jnp.float32).astype(leaf.dtype)
        kept = jax.lax.slice_in_dim(leaf, 0, min(words, leaf.shape[axis]), axis=axis)
        return jnp.concatenate([kept, jnp.repeat(mean, words - kept.shape[axis], axis)], axis)

    return jax.tree_util.tree_map_with_path(resized, params)


def _text_entries(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an LVLM's config.json says of its decoder; token ids may stand outside."""
    outer = {key: raw[key] for key in _TOKEN_IDS if raw.get(key) is not None}
    return outer | {
        key: value for key, value in (raw.get("text_config") or {}).items() if value is not None
    }
