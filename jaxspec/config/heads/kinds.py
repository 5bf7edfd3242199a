"""New heads of any kind for a target, by the options of a recipe."""

from __future__ import annotations

from typing import Any, Literal

from jaxspec.config.heads.eagle3 import Eagle3Config
from jaxspec.config.heads.head import HeadConfig
from jaxspec.config.heads.kv_head import KVHeadConfig
from jaxspec.config.heads.one_pass import OnePassConfig
from jaxspec.errors import InputError

_EAGLE3 = ("layers", "target_layers", "target_name", "gamma")
"""Words that an EAGLE-3 head reads."""


def new_head(
    target: Any,
    *,
    feature: Literal["none", "last_hidden", "fused"] = "none",
    parallel: bool = False,
    markov: int = 0,
    target_layers: tuple[int, ...] = (),
    **options: Any,
) -> HeadConfig:
    """Return the configuration of a new head for a target.

    Args:
      target: A `ModelConfig`.
      feature: `fused` makes an EAGLE-3 head, which ignores options about images.
      parallel: Whether the head drafts a block in one pass.
      markov: See `OnePassConfig`.
      target_layers: See `Eagle3Config.of_target`.
      options: See `KVHeadConfig.of_target`.

    Raises InputError for options that exclude each other, and what `of_target` raises.
    """
    fused, layers = feature == "fused", list(options.get("key_layers", ()))
    refused = {
        f"key_layers {layers} with feature 'fused', which has keys of its own; drop them": (
            fused and layers
        ),
        "parallel with feature 'fused'; give feature none or last_hidden": fused and parallel,
        f"markov {markov} without parallel; give 0, or parallel": markov and not parallel,
    }
    for reason, holds in refused.items():
        if holds:
            raise InputError(f"KV head: {reason}")
    if fused:
        eagle3_options = {name: value for name, value in options.items() if name in _EAGLE3}
        return Eagle3Config.of_target(target, target_layers=target_layers, **eagle3_options)
    if parallel:
        return OnePassConfig.of_target(target, feature=feature, markov=markov, **options)
    return KVHeadConfig.of_target(target, feature=feature, **options)
