"""Loaded models: a checkpoint with its tokeniser and image processor, and which two of them make a pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh
from PIL.Image import Image

from jaxspec.checkpoints import directories, huggingface
from jaxspec.checkpoints.kv_head import is_kv_head, load_kv_head
from jaxspec.checkpoints.locating import SMALL, locate
from jaxspec.checkpoints.processors import (
    load_image_processor,
    load_tokenizer,
    single_tile_processor,
)
from jaxspec.config import KVHeadConfig, LlavaNextConfig, LvlmConfig, ModelConfig, text_config
from jaxspec.config.schema import WHOLE, check_fields
from jaxspec.errors import InputError
from jaxspec.models import LanguageModel, abstract_params, family_of, split_tower, text_params
from jaxspec.models.inputs import ImageInputs
from jaxspec.models.kv_head import check_target
from jaxspec.models.vocabulary import head_kernel
from jaxspec.prompts.encoder import Prompt, PromptEncoder
from jaxspec.prompts.rows import bucket
from jaxspec.prompts.views import View
from jaxspec.runtime import setup_runtime
from jaxspec.sharding import mesh_of, put, shardings, small_sharding
from jaxspec.typing import Params

SPARE_TOKENS = 64
"""Added and padding tokens that only one of target and draft may have."""


@dataclass(frozen=True)
class LoadedHead:
    """A KV head: what it computes, and its own parameters."""

    config: KVHeadConfig
    params: Params
    """With the target's output head for the words of a draft vocabulary, where it has one."""


@dataclass(frozen=True)
class LoadedModel:
    """A checkpoint with what turns text and images into its inputs."""

    config: ModelConfig
    params: Params
    tokenizer: Any
    image_processor: Any
    """None for text models."""
    report: huggingface.LoadReport | None = None
    """What reading it took; None for models that were not read."""
    head: LoadedHead | None = None
    """A KV head made for it, as a target; it drafts in the view kv."""

    @classmethod
    def load(
        cls,
        path_or_id: str | Path,
        dtype: jnp.dtype | None = None,
        revision: str | None = None,
        tiles: bool = True,
        share_tower_with: LoadedModel | None = None,
        mesh: Mesh | None = None,
    ) -> LoadedModel:
        """Read a Hugging Face directory or hub id; InputError where anything is missing or does not fit.

        It computes in `dtype`: by default in float32 on CPUs, which are no faster in 16 bits, else in what its files
        hold. The process's compiled programs are kept on disk from then on, unless it keeps them elsewhere.

        Without `tiles`, `without_tiles` of it. With `share_tower_with`, `sharing_tower` with that model, loaded before.
        With a mesh (`jaxspec.sharding.make_mesh`) the parameters are split over it, and an `Engine` of this target
        runs on it.
        """
        setup_runtime()
        path = locate(path_or_id, revision)
        if is_kv_head(path):
            raise InputError(
                f"{path}: a KV head, not a model; load its target and call with_head({str(path)!r})"
            )
        (device, *_) = jnp.zeros(()).devices() if mesh is None else mesh.devices.flat
        if dtype is None and device.platform == "cpu":
            dtype = jnp.dtype("float32")
        places = None
        if mesh is not None:
            config = directories.read_config(path)
            places = shardings(config, abstract_params(config), mesh)
        found = huggingface.load(path, dtype=dtype, shardings=places)
        model = replace(
            cls._described(path, found.config), params=found.params, report=found.report
        )
        model = model if tiles else model.without_tiles()
        return model if share_tower_with is None else model.sharing_tower(share_tower_with)

    @classmethod
    def without_weights(cls, path_or_id: str | Path) -> LoadedModel:
        """Return a checkpoint's configuration, tokeniser and image processor; no weights are fetched or read."""
        path = locate(path_or_id, wanted=SMALL)
        return cls._described(path, directories.read_config(path))

    @classmethod
    def _described(cls, path: Path, config: ModelConfig) -> LoadedModel:
        has_vision = LanguageModel(config).has_vision
        processor = load_image_processor(path, config) if has_vision else None
        return cls(with_stop_tokens(config, path), {}, load_tokenizer(path), processor)

    def with_head(self, path: str | Path) -> LoadedModel:
        """Return the model with the KV head of a directory, in its own dtype. InputError if that was made for another."""
        config, params = load_kv_head(path, jax.tree.leaves(self.params)[0].dtype)
        check_target(config, self.config)
        if words := config.text_config.draft_vocabulary:
            params = {
                **params,
                "lm_head": {"kernel": head_kernel(text_params(self.config, self.params), words)},
            }
        return replace(self, head=LoadedHead(config, put(params, small_sharding(self.params))))

    def without_tiles(self) -> LoadedModel:
        """Return a LLaVA-NeXT read as LLaVA-1.5: of each image one tile, scaled and cropped, and no end-of-line
        embedding.

        The released TABED code runs its LLaVA-NeXT targets so. LLaVA-1.5 and text models are what they were.
        InputError for families whose images are never one such tile.
        """
        if self.images is None or self.config.model_type == "llava":
            return self
        if self.config.model_type != "llava_next" or not isinstance(self.config, LlavaNextConfig):
            raise InputError(
                f"tiles: only a llava_next model can be read without, and this is {self.config.model_type!r}; "
                "leave the option out"
            )
        params = {name: leaf for name, leaf in self.params.items() if name != "image_newline"}
        processor = single_tile_processor(self.image_processor)
        return replace(
            self, config=self.config.without_tiles(), params=params, image_processor=processor
        )

    def sharing_tower(self, other: LoadedModel) -> LoadedModel:
        """Return the model with the other's arrays as its vision tower, where they are its own in the other's dtype,
        and on the same devices.

        Else the model itself. The second copy of the tower is free then.
        """
        if not isinstance(self.config, LvlmConfig) or not isinstance(other.config, LvlmConfig):
            return self
        if self.mesh != other.mesh:
            return self
        own, rest = split_tower(self.config, self.params)
        theirs = split_tower(other.config, other.params)[0]
        if not _equal(own, theirs):
            return self
        return replace(self, params=unflatten_dict(flatten_dict(rest) | flatten_dict(theirs)))

    @cached_property
    def mesh(self) -> Mesh | None:
        """The mesh that its parameters lie on; None for those of a single device."""
        return mesh_of(self.params)

    @property
    def model(self) -> LanguageModel:
        """The functions that its parameters go into."""
        return LanguageModel(self.config)

    @property
    def images(self) -> ImageInputs | None:
        """How its tower reads images; None for text models."""
        reader = family_of(self.config.model_type).images
        return reader and reader(self.config, self.image_processor)


def with_stop_tokens(config: ModelConfig, path: Path) -> ModelConfig:
    """Return the configuration with generation_config.json's end-of-sequence ids, where there is such a file.

    As in transformers: chat models name the token that ends a turn there, and often nowhere else; and where the file
    names none, no token ends an answer.
    """
    file = path / "generation_config.json"
    if not file.is_file():
        return config
    stop = directories.read_json(file).get("eos_token_id")
    check_fields(str(file), {"eos_token_id": stop})
    text = replace(
        text_config(config), eos_token_id=tuple(stop) if isinstance(stop, list) else stop
    )
    return replace(config, text_config=text) if isinstance(config, LvlmConfig) else text


def image_inputs(
    model: LoadedModel, pictures: Sequence[Sequence[Image]], tiles: int
) -> dict[str, Any] | None:
    """Return the tiles [B, U, ...] of each row's images, padded with zeros; None if there are to be none."""
    if tiles == 0 or model.images is None:
        return None
    shapes = model.images.shapes(model.config)
    out = {
        name: np.zeros((len(pictures), tiles, *shape), dtype)
        for name, (shape, dtype) in shapes.items()
    }
    for row, images in enumerate(pictures):
        start = 0
        for arrays in model.images.read(images) if images else ():
            for name, values in arrays.items():
                out[name][row, start : start + len(values)] = values
            start += len(next(iter(arrays.values())))
    return out


def image_tiles(model: LoadedModel | None, prompt: Prompt, buckets: Sequence[int]) -> int:
    """Return the bucket of the tiles that the prompt's images are to the model; of no model 0, of a text model that of
    0."""
    if model is None:
        return 0
    reader = model.images
    count = (
        sum(reader.tiles((x.height, x.width), len(prompt.images)) for x in prompt.images)
        if reader
        else 0
    )
    return bucket(count, buckets, "image tiles of one prompt")


def prompt_encoder(model: LoadedModel) -> PromptEncoder:
    """Return what makes the prompts of requests that are written with this model's tokens."""
    return PromptEncoder.of(model.config, model.tokenizer)


def same_images(target: LoadedModel, draft: LoadedModel) -> bool:
    """Return whether images become the same inputs to both towers."""
    a, b = target.config, draft.config
    if not isinstance(a, LvlmConfig) or not isinstance(b, LvlmConfig) or a.tower != b.tower:
        return False
    if type(target.images) is not type(draft.images):
        return False
    return target.image_processor.to_dict() == draft.image_processor.to_dict()


def same_tower(target: LoadedModel, draft: LoadedModel) -> bool:
    """Return whether both see the same features, so that images are encoded once."""
    if not same_images(target, draft):
        return False
    return _equal(*(split_tower(model.config, model.params)[0] for model in (draft, target)))


def _equal(ours: Params, theirs: Params) -> bool:
    """Return whether two trees hold the same arrays: same names, and same values in their dtypes."""
    if jax.tree.structure(ours) != jax.tree.structure(theirs):
        return False
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return all(
        x is y or np.array_equal(np.asarray(x).astype(y.dtype), np.asarray(y)) for x, y in pairs
    )


def check_vocabulary(name: str, model: LoadedModel, spare: int) -> None:
    """Refuses a tokeniser whose ids the model has no embeddings for, but for `spare` of them."""
    size = text_config(model.config).vocab_size
    ids = model.tokenizer.get_vocab().values()
    beyond = sum(i >= size for i in ids)
    if beyond > spare or max(ids, default=0) > WHOLE:
        raise InputError(
            f"{name} vocabulary: {beyond} tokens of the tokeniser have ids over config.json's vocab_size "
            f"{size}; use the tokeniser that belongs to the model"
        )


def check_words(tokenizer: Any, other: Any, name: str = "draft", whose: str = "the target") -> None:
    """Refuses another tokeniser whose ids mean other words than the first one's; the errors call them so.

    An id may stand for one added token here and for another there: padding, say, which no model writes.
    """
    ours, theirs = tokenizer.get_vocab(), other.get_vocab()
    added = {*tokenizer.get_added_vocab(), *other.get_added_vocab()}
    words = {i: word for word, i in ours.items()}
    different = sorted(
        (i, word)
        for word, i in theirs.items()
        if ours.get(word, i) != i
        or (words.get(i, word) != word and not (word in added and words[i] in added))
    )
    missing = len(ours.keys() ^ theirs.keys())
    if different or missing > SPARE_TOKENS:
        first = f"{missing} tokens are in one only"
        if different:
            i, word = different[0]
            moved = ours.get(word, i) != i
            first = (
                f"{word!r} is {i} against {ours[word]}"
                if moved
                else f"{i} is {word!r} against {words[i]!r}"
            )
        raise InputError(f"{name} tokeniser: differs from {whose}'s: {first}; use one made for it")


def check_pair(target: LoadedModel, draft: LoadedModel, views: tuple[View, ...]) -> None:
    """Refuses a draft whose token ids mean other words than the target's, and views that it cannot read."""
    check_words(target.tokenizer, draft.tokenizer)
    check_vocabulary("draft", draft, SPARE_TOKENS)
    if isinstance(draft.config, LvlmConfig) and isinstance(target.config, LvlmConfig):
        here, there = draft.config.image_token_index, target.config.image_token_index
        if here != there:
            raise InputError(
                f"draft: image_token_index {here} and the target's is {there}; use a draft made for this target"
            )
        return
    blind = [view.name for view in views if view.reads_images]
    if blind:
        which = "draft" if isinstance(target.config, LvlmConfig) else "target"
        raise InputError(
            f"views: {','.join(blind)} shows images and the {which} is a text model; use view T"
        )
