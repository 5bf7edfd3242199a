"""Compare a target with a draft: token ids, images, towers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxspec.checkpoints.locating import locate
from jaxspec.config import LvlmConfig, ModelConfig, text_config
from jaxspec.config.schema import WHOLE
from jaxspec.errors import InputError
from jaxspec.heads.loading import holds_head
from jaxspec.loading.models import LoadedModel, same_values
from jaxspec.models.families import split_tower
from jaxspec.prompts.views import View

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPARE_TOKENS = 64
"""Number of added and padding tokens that only one of target and draft may have."""


def same_images(target: LoadedModel, draft: LoadedModel) -> bool:
    """Return whether images become the same inputs to both towers."""
    a, b = target.config, draft.config
    if not isinstance(a, LvlmConfig) or not isinstance(b, LvlmConfig) or a.tower != b.tower:
        return False
    if type(target.images) is not type(draft.images):
        return False
    first, second = target.image_processor, draft.image_processor
    return first is not None and second is not None and first.to_dict() == second.to_dict()


def same_tower(target: LoadedModel, draft: LoadedModel) -> bool:
    """Return whether both see the same features, so that images are encoded once."""
    if not same_images(target, draft):
        return False
    return same_values(*(split_tower(model.params)[0] for model in (draft, target)))


def check_vocabulary(name: str, model: LoadedModel) -> None:
    """Refuse a tokeniser with more than `SPARE_TOKENS` ids that the model has no embeddings for.

    Gemma 3's text models lack the image token of their family's tokeniser.
    """
    size = text_config(model.config).vocab_size
    ids = model.tokenizer.get_vocab().values()
    beyond = sum(i >= size for i in ids)
    if beyond > SPARE_TOKENS or max(ids, default=0) > WHOLE:
        raise InputError(f"{name} tokeniser: {beyond} ids are over vocab_size {size}; use its own")


def check_tokens(
    tokenizer: PreTrainedTokenizerBase,
    other: PreTrainedTokenizerBase,
    name: str = "draft",
    whose: str = "the target",
    grows: bool = False,
) -> None:
    """Refuse another tokeniser whose ids mean other words than the first one's.

    One id may mean different added tokens, such as padding, which no model writes.

    Args:
      name: The other model in errors.
      whose: The first tokeniser's model in errors.
      grows: Whether the first one may have any number of tokens that the other one lacks.
    """
    ids, other_ids = tokenizer.get_vocab(), other.get_vocab()
    added = {*tokenizer.get_added_vocab(), *other.get_added_vocab()}
    word_of = {i: word for word, i in ids.items()}
    different = sorted(
        (i, word)
        for word, i in other_ids.items()
        if ids.get(word, i) != i
        or (word_of.get(i, word) != word and not (word in added and word_of[i] in added))
    )
    missing = len(other_ids.keys() - ids.keys() if grows else ids.keys() ^ other_ids.keys())
    if different or missing > SPARE_TOKENS:
        first = f"{missing} tokens are in one only"
        if different:
            i, word = different[0]
            first = f"{i} is {word!r} against {word_of.get(i)!r}"
        raise InputError(f"{name} tokeniser: differs from {whose}'s: {first}; use one made for it")


def known_tokens(
    tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase
) -> tuple[int | None, int]:
    """Return the first id behind another tokeniser's last, if any, and the number of words that it
    lacks.

    It may lack a word and have another one at its id, such as a reserved token: that id is known.
    """
    ids, other_ids = tokenizer.get_vocab(), other.get_vocab()
    end = 1 + max(other_ids.values(), default=-1)
    return end if max(ids.values(), default=-1) >= end else None, len(ids.keys() - other_ids.keys())


def check_pair(target: LoadedModel, draft: LoadedModel, views: tuple[View, ...]) -> None:
    """Refuse a draft with other token ids than the target's, and views that it cannot read."""
    check_tokens(target.tokenizer, draft.tokenizer)
    check_vocabulary("draft", draft)
    check_views(target.config, draft.config, views)


def check_drafts(target: str | Path, drafts: Sequence[str | Path]) -> None:
    """Refuse draft models in files with other token ids than the target's, and read no weights."""
    models = [path for path in map(locate, drafts) if not holds_head(path)]
    if not models:
        return
    described = LoadedModel.without_weights(target)
    check_vocabulary("target", described)
    for path in models:
        check_pair(described, LoadedModel.without_weights(path), ())


def check_group(models: Sequence[LoadedModel]) -> None:
    """Refuse models that write together without one vocabulary; their weights are not read."""
    first, size = models[0], text_config(models[0].config).vocab_size
    check_vocabulary("model 1", first)
    for number, other in enumerate(models[1:], start=2):
        other_size = text_config(other.config).vocab_size
        if other_size != size:
            raise InputError(
                f"model {number} vocabulary: {other_size} tokens and model 1's {size}; "
                "models that write together need one vocabulary"
            )
        if other is not first:
            check_tokens(first.tokenizer, other.tokenizer, f"model {number}", "model 1")
    marks = {
        model.config.image_token_index for model in models if isinstance(model.config, LvlmConfig)
    }
    if len(marks) > 1:
        raise InputError(f"models: image_token_index {sorted(marks)} differ")


def check_views(target: ModelConfig, draft: ModelConfig, views: tuple[View, ...]) -> None:
    """Refuse views that a draft cannot read."""
    counting = [view.name for view in views if view.counts_slots]
    token = getattr(target, "image_token_index", 0)
    size = text_config(draft).vocab_size
    if counting and token >= size:
        raise InputError(
            f"views: {','.join(counting)} shows token {token}, but the draft has {size} tokens; "
            "export it with --vocab-of the target"
        )
    if isinstance(draft, LvlmConfig) and isinstance(target, LvlmConfig):
        here, there = draft.image_token_index, target.image_token_index
        if here != there:
            raise InputError(f"draft: image_token_index {here}, but the target's is {there}")
        return
    blind = [view.name for view in views if view.reads_images]
    if blind:
        which = "draft" if isinstance(target, LvlmConfig) else "target"
        raise InputError(
            f"views: {','.join(blind)} shows images and the {which} is a text model; use view T"
        )
