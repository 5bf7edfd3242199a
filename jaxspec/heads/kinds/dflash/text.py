"""Describe the layers of a DFlash head, and read them from config.json in any layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxspec.config.text import FULL, Qwen3Config, RotaryConfig
from jaxspec.errors import InputError
from jaxspec.heads.config import windows_of

_SLIDING = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
"""Entries that say which layers slide, at the top level or within."""


@dataclass(frozen=True)
class DFlashText(Qwen3Config):
    """Describe layers of Qwen3, which may read and score as a target of another family does."""

    embed_scale: float = 1.0  # pyright: ignore
    final_logit_softcapping: float | None = None  # pyright: ignore

    def to_hf(self) -> dict[str, Any]:
        out = super().to_hf()
        del out["embed_scale"]
        if self.final_logit_softcapping is None:
            del out["final_logit_softcapping"]
        return out


def qwen3_layers(
    layers: Mapping[str, Any], entries: Mapping[str, Any], speculators: bool
) -> DFlashText:
    """Return the configuration of a Qwen3's layers.

    speculators: Whether its window is the number of slots before the block, as in speculators'
      files. Elsewhere the window counts the newest token too, as here.
    """
    heads = {"head_dim": layers["hidden_size"] // layers["num_attention_heads"]}
    fixed = {"model_type": Qwen3Config.model_type, "draft_vocabulary": None}
    usual = {} if layers.get("model_type") == Qwen3Config.model_type else heads
    sliding = {name: entries[name] for name in _SLIDING if name in entries}
    raw = {**usual, **layers, **fixed, **sliding}
    window, kinds = windows_of(raw)
    text = DFlashText.from_hf(raw | {"use_sliding_window": window is not None})
    return replace(
        text,
        rope_scaling=text.rope_scaling.one_axis,
        tie_word_embeddings=False,
        # one as long as the context is kept, since its layers may be causal in a block
        sliding_window=None if window is None else window + speculators,
        layer_types=kinds,
    )


def is_causal(text: RotaryConfig, entries: Mapping[str, Any]) -> bool:
    """Return whether sliding layers are causal in a block, as they are unless the file says
    otherwise; InputError for full layers that would be."""
    stated = [entries.get(name) for name in ("is_causal", "causal")]
    full = text.sliding_window is None or FULL in text.layer_types
    if True in stated and full:
        raise InputError("DFlash head: is_causal true in full layers is not supported")
    if text.sliding_window is None:
        return True
    return not (False in stated or entries.get("sliding_window_non_causal"))
