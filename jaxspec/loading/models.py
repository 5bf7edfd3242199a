"""Load models, each with its tokeniser and image processor, and draft heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from jaxspec.checkpoints import directories, huggingface
from jaxspec.checkpoints.generation import GenerationSettings, read_generation_settings
from jaxspec.checkpoints.locating import SMALL, locate
from jaxspec.checkpoints.processors import (
    load_image_processor,
    load_tokenizer,
    single_tile_processor,
)
from jaxspec.config import LlavaNextConfig, LvlmConfig, ModelConfig, text_config, with_text
from jaxspec.errors import InputError, check_path
from jaxspec.heads.blocks import borrowed_tokens
from jaxspec.heads.config import HeadConfig
from jaxspec.heads.loading import holds_head, is_head, load_head
from jaxspec.models.families import family_of, split_tower, text_params
from jaxspec.models.inputs import ImageInputs
from jaxspec.models.int8 import Weights, int8_params
from jaxspec.models.language_model import LanguageModel
from jaxspec.models.vocabulary import borrowed_rows
from jaxspec.prompts.encoder import PromptEncoder
from jaxspec.runtime import parse_dtype, setup_runtime
from jaxspec.sharding import mesh_of, put, small_sharding
from jaxspec.typing import Params

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, PreTrainedTokenizerBase


@dataclass(frozen=True)
class LoadedHead:
    """Hold a draft head's configuration and parameters."""

    config: HeadConfig
    params: Params = field(repr=False)
    """The head's own, and the target's output matrix for the tokens of a draft vocabulary."""

    @classmethod
    def load(
        cls,
        path: str | Path,
        target: LoadedModel,
        images: str | None = None,
        weights: Weights | None = None,
    ) -> LoadedHead:
        """Read the head of a directory, in the target's dtype.

        Args:
          images: Rule for images in place of the one that its files or its id tell.
          weights: "int8" holds the matrices of its layers so, see `LoadedModel.load`.

        Raises InputError for a head that was made for another target.
        """
        check_path("draft", path)
        config, params = load_head(path, jax.tree.leaves(target.params)[0].dtype)
        check_weights(weights)
        params = params if weights is None else int8_params(params)
        config = config if images is None else config.with_images(images)
        config = config.for_target(target.config)
        vocabulary = borrowed_tokens(config.text_config, text_config(target.config))
        if "lm_head" not in params and vocabulary:
            rows = borrowed_rows(text_params(target.config, target.params), vocabulary)
            params = {**params, "lm_head": {"weight": rows}}
        return cls(config, put(params, small_sharding(target.params)))


@dataclass(frozen=True)
class LoadedModel:
    """Hold a checkpoint with its tokeniser and image processor."""

    config: ModelConfig
    params: Params = field(repr=False)
    tokenizer: PreTrainedTokenizerBase
    image_processor: BaseImageProcessor | None
    """None for text models."""
    report: huggingface.LoadReport | None = None
    """Report of the reading; None for models that were not read from files."""
    settings: GenerationSettings | None = None
    """generation_config.json's; None without the file."""

    @classmethod
    def load(
        cls,
        path_or_id: str | Path,
        dtype: jnp.dtype | None = None,
        revision: str | None = None,
        tiles: bool = True,
        share_tower_with: LoadedModel | None = None,
        mesh: Mesh | None = None,
        weights: Weights | None = None,
        adapter: str | Path | None = None,
    ) -> LoadedModel:
        """Read a Hugging Face directory or hub id.

        From then on the process keeps its compiled programs on disk, unless JAX is configured to
        keep them elsewhere. Raises InputError where anything is missing or does not fit.

        Args:
          dtype: Dtype of the computation. The default is float32 on CPUs, which are no faster in
            16 bits, and the files' own dtype elsewhere.
          revision: Branch, tag or commit on the hub.
          tiles: False applies `without_tiles`.
          share_tower_with: A loaded model for `sharing_tower`.
          mesh: Mesh of `jaxspec.sharding.make_mesh` to split the parameters over. An `Engine` of
            this target runs on it.
          weights: "int8" holds the matrices of the decoder's layers in half the bytes of 16 bits,
            see `jaxspec.models.int8`. The files' own dtype is the default.
          adapter: Directory of a LoRA adapter in PEFT's format, merged while the tensors are read.
        """
        check_weights(weights)
        if not isinstance(mesh, Mesh | None):
            raise InputError(f"mesh: {mesh!r:.60}; give what jaxspec.sharding.make_mesh returns")
        if mesh is not None and not mesh.local_devices:
            number = f"process {jax.process_index()} of {jax.process_count()}"
            raise InputError(
                f"mesh: none of its {mesh.size} devices belongs to {number}; give a larger one"
            )
        if not isinstance(share_tower_with, LoadedModel | None):
            kind = type(share_tower_with).__name__
            raise InputError(f"share_tower_with: a {kind}; give what LoadedModel.load returns")
        if adapter is not None:
            check_path("adapter", adapter)
        dtype = None if dtype is None else parse_dtype(dtype)
        setup_runtime()
        path = locate(path_or_id, revision)
        if is_head(path):
            raise InputError(f"{path}: a draft head, not a model; give it as a draft")
        (device, *_) = jnp.zeros(()).devices() if mesh is None else mesh.devices.flat
        if dtype is None and device.platform == "cpu":
            dtype = jnp.dtype("float32")
        # Check tokeniser and image processor before gigabytes are read.
        described = cls._described(path, directories.read_config(path))
        if not tiles:
            described.without_tiles()  # raises for a family that always has tiles
        checkpoint = huggingface.load(
            path, dtype=dtype, mesh=mesh, weights=weights, adapter=adapter
        )
        config = with_stop_tokens(checkpoint.config, described.settings)  # an adapter may untie it
        params, report = checkpoint.params, checkpoint.report
        model = replace(described, config=config, params=params, report=report)
        model = model if tiles else model.without_tiles()
        return model if share_tower_with is None else model.sharing_tower(share_tower_with)

    @classmethod
    def without_weights(cls, path_or_id: str | Path) -> LoadedModel:
        """Return a model without weights, which are neither fetched nor read."""
        path = locate(path_or_id, files=SMALL)
        return cls._described(path, directories.read_config(path))

    @classmethod
    def _described(cls, path: Path, config: ModelConfig) -> LoadedModel:
        has_images = isinstance(config, LvlmConfig)
        processor = load_image_processor(path, config) if has_images else None
        settings = read_generation_settings(path)
        config = with_stop_tokens(config, settings)
        return cls(config, {}, load_tokenizer(path), processor, settings=settings)

    def without_tiles(self) -> LoadedModel:
        """Return a LLaVA-NeXT that reads images as LLaVA-1.5 does.

        Each image is one tile, scaled and cropped, without an end-of-line embedding. The released
        TABED code runs its LLaVA-NeXT targets in this way. LLaVA-1.5 and text models stay as they
        are. Raises InputError for families whose images are never one such tile.
        """
        if self.images is None or self.config.model_type == "llava":
            return self
        if type(self.config) is not LlavaNextConfig:
            raise InputError(f"tiles: a {self.config.model_type!r} cannot be read without tiles")
        params = {name: leaf for name, leaf in self.params.items() if name != "image_newline"}
        processor = single_tile_processor(self.image_processor)
        return replace(
            self, config=self.config.without_tiles(), params=params, image_processor=processor
        )

    def sharing_tower(self, other: LoadedModel) -> LoadedModel:
        """Return the model with the other's arrays as its vision tower, if both towers are equal.

        Equal means the same values in the other's dtype, on the same devices. Otherwise return the
        model itself. Sharing frees the second copy of the tower.
        """
        tower, decoder = split_tower(self.params)
        other_tower = split_tower(other.params)[0]
        if not tower or self.mesh != other.mesh or not same_values(tower, other_tower):
            return self
        params = flatten_dict(decoder) | flatten_dict(other_tower)
        return replace(self, params=unflatten_dict(params))

    @cached_property
    def mesh(self) -> Mesh | None:
        """Return the mesh of its parameters; None on a single device."""
        return mesh_of(self.params)

    @property
    def model(self) -> LanguageModel:
        """Return the model as pure functions of its parameters."""
        return LanguageModel(self.config)

    @property
    def images(self) -> ImageInputs | None:
        """Return the reader of images for its tower; None for text models."""
        reader = family_of(self.config.model_type).images
        return reader and reader(self.config, self.image_processor)

    def images_within(self, limits: Mapping[str, int]) -> ImageInputs | None:
        """Return the reader of images that obeys a request's `image_limits`.

        The image processor decides what they do not name. Raises InputError for a family that does
        not size images so.
        """
        reader: Any = self.images
        for name, value in limits.items():
            if not hasattr(reader, name):
                kind = self.config.model_type
                raise InputError(
                    f"{name}: {value}, which {kind!r} does not size images by; leave it out"
                )
        return replace(reader, **limits) if limits else reader


def check_weights(weights: object) -> None:
    """Raise InputError for a format of weights that is unknown."""
    if weights not in (None, *get_args(Weights)):
        raise InputError(f"weights: {weights!r} is unknown; give int8, or leave it out")


LoadedDraft = LoadedModel | LoadedHead


def load_draft(
    path_or_id: str | Path,
    target: LoadedModel,
    dtype: jnp.dtype | None = None,
    revision: str | None = None,
    tiles: bool = True,
    images: str | None = None,
    weights: Weights | None = None,
) -> LoadedDraft:
    """Read a draft model or a head; its files say which it is.

    Args:
      target: Target to draft for. A draft model with an equal tower shares the target's.
      dtype, revision, tiles, weights: See `LoadedModel.load`.
      images: A head's rule for images, see `LoadedHead.load`.
    """
    path = locate(path_or_id, revision)
    if holds_head(path):
        return LoadedHead.load(path, target, images, weights)
    if images is not None:
        raise InputError(f"{path}: a model, which follows no image rule {images!r}; leave that out")
    return LoadedModel.load(path, dtype, tiles=tiles, share_tower_with=target, weights=weights)


def with_stop_tokens(config: ModelConfig, settings: GenerationSettings | None) -> ModelConfig:
    """Return the configuration with generation_config.json's end-of-sequence ids, if it exists.

    As in transformers: chat models name the token that ends a turn there, and often nowhere else.
    Without an id in the file, no token ends an answer.
    """
    if settings is None:
        return config
    return with_text(config, eos_token_id=settings.stop)


def prompt_encoder(model: LoadedModel) -> PromptEncoder:
    """Return the encoder of prompts in this model's tokens."""
    return PromptEncoder.of(model.config, model.tokenizer)


def same_values(first: Params, second: Params) -> bool:
    """Return whether two trees hold the same names, and the same values in the second's dtypes."""
    if jax.tree.structure(first) != jax.tree.structure(second):
        return False
    return all(map(_equal, jax.tree.leaves(first), jax.tree.leaves(second)))


def _equal(x: Any, y: Any) -> bool:
    if x is y:
        return True
    if all(map(_is_here, (x, y))):
        return np.array_equal(np.asarray(x).astype(y.dtype), np.asarray(y))
    return bool(jnp.array_equal(x.astype(y.dtype), y))


def _is_here(leaf: Any) -> bool:
    """Return whether this process holds the whole array."""
    placed = isinstance(leaf, jax.Array)
    return not placed or leaf.is_fully_addressable or leaf.is_fully_replicated
