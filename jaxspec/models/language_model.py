"""Call a text model or an LVLM as one `LanguageModel`, as all code does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxspec.cache import KVCache, TreeMask, init_cache, whole_slots
from jaxspec.config import ModelConfig, TextConfig, text_config
from jaxspec.models.decoder import Places
from jaxspec.models.families import build, family_of, text_params
from jaxspec.models.inputs import ImageInputs, Pool, PromptRows, show_images
from jaxspec.models.layers import apply
from jaxspec.sharding import gather
from jaxspec.typing import Array, Features, Float, Int, Params, Tokens


@dataclass(frozen=True)
class LanguageModel:
    """Run a text model or an LVLM as pure functions of (parameters, inputs).

    It is hashable, so it can be a static argument.
    """

    config: ModelConfig

    @property
    def text(self) -> TextConfig:
        return text_config(self.config)

    @property
    def has_vision(self) -> bool:
        """Return whether the model has a vision tower."""
        return self._image_inputs is not None

    def blended(self, pool: Pool | None) -> int:
        """Return the number of feature rows that an image slot blends; 0 without images."""
        return self._image_inputs.blended(pool) if self._image_inputs else 0

    @property
    def mrope(self) -> bool:
        """Return whether images take other rotary positions than slots (M-RoPE)."""
        return self._image_inputs is not None and self._image_inputs.mrope

    @property
    def _image_inputs(self) -> type[ImageInputs] | None:
        return family_of(self.config.model_type).images

    def reach(self, rows: PromptRows) -> Int[Array, "B L"] | None:
        """Return `rows.reach` if tokens of an image read one another; None if they do not."""
        return rows.reach if self.text.joint_images else None

    def encode(self, params: Params, images: Mapping[str, Array]) -> Features:
        """Return tower features of every tile of every row's images."""
        return self._apply_model(params, "encode", **images)

    def embed(
        self, params: Params, rows: PromptRows, features: Features | None, pool: Pool | None = None
    ) -> Float[Array, "B L D"]:
        """Return prompt embeddings. Image slots show projected features, pooled for view P."""
        embeds = self._apply_decoder(params, "embed", rows.tokens)
        if stacked := getattr(self.config, "stacked", 0):  # room for what later layers add
            embeds = jnp.pad(embeds, ((0, 0), (0, 0), (0, stacked * embeds.shape[-1])))
        if features is None or rows.sources is None:
            return embeds
        table = self._apply_model(params, "project", features, pool)
        return show_images(embeds, table, rows.sources, rows.blend)

    def prefill(
        self,
        params: Params,
        embeds: Float[Array, "B L wide"],
        rows: PromptRows,
        slots: int,
        layers: tuple[int, ...] | None = None,
    ) -> tuple[Float[Array, "B V"], KVCache]:
        """Run right-padded prompts; return each one's next-token logits, and their cache.

        Args:
          slots: Minimum slots of the cache, see `whole_slots`.
          layers: Hidden states that the cache keeps, as `KVCache.kept`; None keeps none.
        """
        hidden, cache = self.read(params, embeds, rows, whole_slots(slots), layers)
        return self._last_logits(params, hidden, rows), cache

    def resume(
        self, params: Params, embeds: Float[Array, "B L wide"], rows: PromptRows, cache: KVCache
    ) -> tuple[Float[Array, "B V"], KVCache]:
        """Run right-padded rows behind what a cache holds; return what `prefill` does."""
        first = cache.length[:, None]
        slots = first + jnp.arange(embeds.shape[1])
        rotary = slots + cache.shift[:, None] if rows.rotary is None else rows.rotary
        reach = self.reach(rows)
        at = Places(slots, rotary, reach=None if reach is None else first + reach)
        hidden, longer = self._apply_decoder(params, "hidden", embeds, at, cache)
        shift = cache.shift if rows.shift is None else rows.shift
        longer = longer.replace(length=cache.length + rows.length, shift=shift)
        return self._last_logits(params, hidden, rows), longer

    def _last_logits(
        self, params: Params, hidden: Float[Array, "B L D"], rows: PromptRows
    ) -> Float[Array, "B V"]:
        """Return the logits after each row's last token."""
        last = jnp.take_along_axis(hidden, rows.length[:, None, None] - 1, axis=1)[:, 0]
        return gather(self.logits(params, last), "batch")

    def read(
        self,
        params: Params,
        embeds: Float[Array, "B L wide"],
        rows: PromptRows,
        slots: int,
        layers: tuple[int, ...] | None = None,
    ) -> tuple[Float[Array, "B L D"], KVCache]:
        """Run right-padded prompts; return final-normed hidden states and the cache."""
        cache = init_cache(self.text, len(embeds), slots, embeds.dtype, layers)
        hidden, cache = self._hidden(params, embeds, rows, cache)
        shift = cache.shift if rows.shift is None else rows.shift
        return hidden, cache.replace(length=rows.length, shift=shift)

    def _hidden(
        self, params: Params, embeds: Array, rows: PromptRows, cache: KVCache | None
    ) -> tuple[Float[Array, "B L D"], Any]:
        """Run whole right-padded rows, whose tokens fill the cache's slots from 0 on."""
        batch, width, _ = embeds.shape
        positions = jnp.broadcast_to(jnp.arange(width), (batch, width))
        rotary = positions if rows.angles is None else rows.angles
        live = None if cache is None else width
        at = Places(positions, rotary, None, live, self.reach(rows), rows.first)
        return self._apply_decoder(params, "hidden", embeds, at, cache)

    def logits(self, params: Params, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Return the scores of the next token, float32."""
        return self._apply_decoder(params, "logits", hidden)

    def scores(self, params: Params, hidden: Float[Array, "... D"]) -> Float[Array, "... words"]:
        """Return the scores of the draft vocabulary, or of all tokens without one."""
        return self._apply_decoder(
            params, "scores" if self.text.draft_vocabulary else "logits", hidden
        )

    def score(
        self,
        params: Params,
        rows: PromptRows,
        features: Features | None,
        pool: Pool | None = None,
        slots: Int[Array, "B K"] | None = None,
    ) -> Float[Array, "B K words"]:
        """Return the next-token `scores` of tokens of right-padded rows, without a cache.

        Training reads these.

        Args:
          slots: Slots of the tokens to score; None scores every token.
        """
        embeds = self.embed(params, rows, features, pool)
        hidden, _ = self._hidden(params, embeds, rows, None)
        if slots is not None:
            hidden = jnp.take_along_axis(hidden, slots[..., None], axis=1)
        return self.scores(params, hidden)

    def extend(
        self, params: Params, tokens: Tokens, cache: KVCache, tree: TreeMask | None = None
    ) -> tuple[Float[Array, "B T V"], KVCache]:
        """Append T tokens, or nodes of a tree, to each row; return next-token logits and the cache.

        On a mesh each device gets whole rows of logits. If the head's columns split them, drafts
        would be split too, and each sum over the vocabulary would be a message.
        """
        logits, cache = self._apply_decoder(params, "extend", tokens, cache, tree)
        return gather(logits, "batch"), cache

    def _apply_model(self, params: Params, method: str, *args: Any, **images: Any) -> Any:
        return apply(build(self.config), params, *args, method=method, **images)

    def _apply_decoder(self, params: Params, method: str, *args: Any) -> Any:
        return apply(build(self.text), text_params(self.config, params), *args, method=method)
