"""Rewrite checkpoints with another dtype, vocabulary or part of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.checkpoints.directories import check_destination, read_json, read_raw_config
from jaxspec.checkpoints.huggingface import SaveOptions, load, save
from jaxspec.checkpoints.locating import locate, model_name
from jaxspec.checkpoints.processors import copy_processors, has_tokenizer, load_tokenizer
from jaxspec.config import ModelConfig, RotaryConfig, TextConfig, text_config, with_text
from jaxspec.errors import InputError, located, reading
from jaxspec.files import local_path
from jaxspec.heads.config import HeadConfig
from jaxspec.heads.files import ExportOptions, Server
from jaxspec.heads.kinds import kind_of
from jaxspec.heads.loading import is_head, load_head, save_head
from jaxspec.heads.states import ImageRule
from jaxspec.models.families import text_params
from jaxspec.models.vocabulary import first_tokens, narrowed, widened
from jaxspec.prompts.chat_templates import chat_templates
from jaxspec.prompts.encoder import PromptEncoder
from jaxspec.publishing import model_card
from jaxspec.publishing.served_draft import check_served, draft_command
from jaxspec.typing import Array, Params

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Target:
    """Describe the model that an exported draft is made for.

    Fields:
      known: The first of its tokens behind the last of the draft's tokeniser; None without one.
      tokenizer: Directory of the tokeniser for the draft, if the draft's own lacks too many.
      place: Hub id or directory by which an engine finds it; by default its name.
    """

    name: str
    config: ModelConfig
    known: int | None = None
    tokenizer: Path | None = None
    place: str = ""


def export(
    source: str | Path,
    destination: str | Path,
    *,
    target: Target | None = None,
    text_only: bool = False,
    draft_vocabulary: int | None = None,
    engine: Server | None = None,
    images: ImageRule | None = None,
    options: SaveOptions | None = None,
    adapter: str | Path | None = None,
    terms: model_card.Terms | None = None,
) -> ModelConfig | HeadConfig:
    """Rewrite a checkpoint for transformers 4.57 and 5 and return its configuration.

    Tokeniser, processor, chat template, generation settings and a model card are written too.
    Entries of config.json that this library does not read are kept. A KV head is written only for
    this library, and an EAGLE-3 head for engines that serve models. A text draft is checked for
    vLLM, which reads transformers' layout.

    Args:
      target: Pad the vocabulary to this model's size, see `pad_vocabulary`; the card names it.
        Tokens that the source cannot know get no probability: from this library, which reads
        `known_tokens` of config.json, and from transformers' `generate`, by `suppress_tokens` of
        generation_config.json. In other programs they are never likeliest.
      text_only: Write only the decoder of an LVLM, as a language model of its own.
      draft_vocabulary: Keep this many tokens of a draft's vocabulary, the first ones, only for
        this library; by default a KV head keeps all, and any other draft is `widened`, the only
        form that transformers reads.
      engine: Program that will serve the EAGLE-3 head or text draft; `target` is then the model
        that it drafts for.
      images: Rule for images to write into a head's config.json; None writes its own.
      options: Dtype, shard size and overwriting, as in `save`; other entries come from the source.
      adapter: Directory of a LoRA adapter in PEFT's format, to merge into the model.
      terms: Licence and base model for the card; by default what the source says.

    Raises:
      InputError: as `load` and `save`; the destination holds the source; the vocabulary is larger
        than the target's; the target is not the head's; or `text_only` for a text model.
    """
    path, options = locate(source), options or SaveOptions()
    terms = terms or model_card.Terms.of(path)
    sources = [path, *([] if adapter is None else [local_path(adapter)])]
    check_destination(destination, options.overwrite, *sources)
    if is_head(path):
        if adapter is not None:
            raise InputError(f"{path}: a draft head, which takes no adapter; leave it out")
        config, params = load_head(path)
        config = config if images is None else config.with_images(images)
        head = path, config, params
        return _export_head(
            head, destination, target, text_only, draft_vocabulary, engine, options, terms
        )
    if images is not None:
        raise InputError(f"{path}: a model, which follows no image rule {images!r}; leave that out")
    checkpoint = load(path, adapter=adapter)
    config, params, raw = checkpoint.config, checkpoint.params, read_raw_config(path)
    if text_only:
        config, params, raw = _text_model(path, config, params, raw)
    if engine is not None:
        check_served(path, config, engine, target is not None and draft_vocabulary is None)
    scored = vocabulary = text_config(config).draft_vocabulary
    if draft_vocabulary is not None:
        scored = first_tokens(path, vocabulary, draft_vocabulary)
    size = text_config(config).vocab_size
    config, params = widened(config, params)
    if target is not None:
        config, params = pad_vocabulary(config, params, text_config(target.config).vocab_size)
        config = _with_known_tokens(
            config, size if target.known is None else min(size, target.known)
        )
    if draft_vocabulary is not None:
        config, params = narrowed(config, params, scored)
    command = ""
    if target is not None and engine is not None:
        command = draft_command(
            model_card.HERE, model_card.path_or_id(target.name), config, target.config
        )
    model = model_card.Exported(
        path,
        config,
        params,
        target=target.name if target else "",
        added=text_config(config).vocab_size - size,
        scored=len(scored),
        command=command,
    )
    tokenizer = target and target.tokenizer
    _write_model(model, destination, replace(options, extra=raw), terms, tokenizer or path)
    return config


def _export_head(
    head: tuple[Path, HeadConfig, Params],
    destination: str | Path,
    target: Target | None,
    text_only: bool,
    draft_vocabulary: int | None,
    engine: Server | None,
    options: SaveOptions,
    terms: model_card.Terms,
) -> HeadConfig:
    """Write a head as its server reads it; return the configuration."""
    source, config, params = head
    if text_only:
        raise InputError(f"{source}: {config.title}s take no text-only; leave it out")
    if target is not None:
        with located(f"vocab-of {target.name}"):
            config.for_target(target.config)
    name = None
    if target is not None:
        name = (target.place or target.name) if engine else target.name
    head_options = ExportOptions(source, name, draft_vocabulary, engine)
    config, params = kind_of(config).exported(config, params, head_options)
    exported = config
    if target is not None and engine != "speculators":  # others need not know a directory's path
        exported = replace(config, target_name=target.name)

    def write_more(path: Path) -> None:
        name, served = model_name(destination), target and target.config
        model_card.write_head_card(path, exported, params, name, source, terms, served, engine)

    save_head(
        destination,
        exported,
        params,
        options.dtype,
        write_more=write_more,
        overwrite=options.overwrite,
        server=engine or "vllm",
        architectures=[target.config.architecture] if target else (),
    )
    return config


def _text_model(
    source: Path, whole: ModelConfig, params: Params, raw: Mapping[str, Any]
) -> tuple[TextConfig, Params, dict[str, Any]]:
    """Return an LVLM's decoder as a model of its own, and its part of config.json."""
    if isinstance(whole, TextConfig):
        kind = whole.model_type
        raise InputError(f"{source}: {kind!r} is a text model already; leave text-only out")
    config, inner = whole.text_config, raw.get("text_config") or {}
    # Token ids may be at the top level.
    raw = {key: raw[key] for key in _TOKEN_IDS if raw.get(key) is not None} | {
        key: value for key, value in inner.items() if value is not None
    }
    missing = [key for key in _TOKEN_IDS if getattr(config, key) is None and key in raw]
    # Text has one position a token, not M-RoPE's three, which are then equal.
    config = replace(
        config, rope_scaling=config.rope_scaling.one_axis, **{key: raw[key] for key in missing}
    )
    return config, text_params(whole, params), raw


def _with_known_tokens(config: ModelConfig, count: int) -> ModelConfig:
    """Return the configuration of a model that knows no more than the first tokens."""
    text = text_config(config)
    count = min(count, text.known_tokens or count)
    if count == text.vocab_size or not isinstance(text, RotaryConfig):
        return config
    return with_text(config, known_tokens=count)


def _write_model(
    model: model_card.Exported,
    destination: str | Path,
    options: SaveOptions,
    terms: model_card.Terms,
    tokenizer_source: Path,
) -> None:
    """Write the model with its tokeniser, processors, generation settings and card.

    tokenizer_source: Directory of the tokeniser.
    """
    source, encoder, add_bos = model.source, None, False
    settings = source / "generation_config.json"
    # A generation_config.json without EOS means that no token ends an answer.
    generation = {"eos_token_id": None} | read_json(settings) if settings.is_file() else {}
    text = text_config(model.config)
    if text.known_tokens:
        listed = generation.get("suppress_tokens") or ()
        with reading(f"{settings}: suppress_tokens {listed!r:.40}", "give a list of token ids"):
            unknown = range(text.known_tokens, text.vocab_size)
            generation["suppress_tokens"] = sorted({*listed, *unknown})
    if has_tokenizer(tokenizer_source):
        encoder = PromptEncoder.of(model.config, load_tokenizer(tokenizer_source))
        add_bos = not encoder.tokenizer.chat_template and encoder.tokenizer.bos_token is not None
        encoder.tokenizer.chat_template = chat_templates(encoder)
        model = replace(model, has_template=bool(encoder.tokenizer.chat_template))

    def write_more(path: Path) -> None:
        tokenizer = encoder and encoder.tokenizer
        copy_processors(source, path, model.config, tokenizer, add_bos, tokenizer_source)
        model_card.write_model_card(path, model_name(destination), model, terms)

    options = replace(options, generation=generation)
    save(destination, model.config, model.params, options, write_more=write_more)


def pad_vocabulary(config: ModelConfig, params: Params, size: int) -> tuple[ModelConfig, Params]:
    """Add rows to the embedding and the head that are the mean of the existing ones.

    The logit of an added token is then the mean of the model's logits. It never exceeds their
    maximum, so, but for rounding, no added token is ever the argmax; and a prompt that holds one
    reads an embedding of usual size. Zeros would be the argmax wherever all logits are negative,
    and no finite bias-free row gives -inf.
    """
    text = text_config(config)
    if size < text.vocab_size:
        raise InputError(f"vocabulary: {text.vocab_size} tokens, more than the target's {size}")
    return with_text(config, vocab_size=size), with_vocabulary(params, size)


_BY_TOKEN = {
    *{("embed_tokens", "embedding"), ("embed_tokens_per_layer", "embedding")},
    ("lm_head", "weight"),
}
"""Names of the arrays that have a row for each token."""


def with_vocabulary(params: Params, count: int) -> Params:
    """Return parameters with this many tokens: the first ones, then copies of the mean."""

    def resized(path: Any, leaf: Array) -> Array:
        keys = tuple(key.key for key in path[-2:])
        if keys not in _BY_TOKEN or len(leaf) == count:
            return leaf
        mean = jnp.mean(leaf, 0, keepdims=True, dtype=jnp.float32).astype(leaf.dtype)
        first = leaf[: min(count, len(leaf))]
        return jnp.concatenate([first, jnp.repeat(mean, count - len(first), 0)])

    return jax.tree_util.tree_map_with_path(resized, params)
