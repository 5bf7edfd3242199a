"""Make a new head of any kind for a target, by the options of a recipe."""

from __future__ import annotations

from typing import Any, Literal

from jaxspec.config.heads.assistant import AssistantConfig
from jaxspec.config.heads.dflash import DFlashConfig
from jaxspec.config.heads.eagle1 import Eagle1Config
from jaxspec.config.heads.eagle3 import Eagle3Config
from jaxspec.config.heads.head import HeadConfig
from jaxspec.config.heads.kv_head import KVHeadConfig
from jaxspec.config.heads.one_pass import OnePassConfig
from jaxspec.config.heads.states import ImageRule, StateHeadConfig
from jaxspec.errors import InputError

Feature = Literal["none", "last_hidden", "eagle1", "fused", "block", "assistant"]
_EAGLE3 = ("layers", "target_layers", "target_name", "gamma")
_Kind = type[StateHeadConfig | DFlashConfig | AssistantConfig]
_KINDS: dict[str, tuple[_Kind, tuple[str, ...]]] = {
    "eagle1": (Eagle1Config, ("images", "target_name", "gamma")),
    "fused": (Eagle3Config, ("images", *_EAGLE3)),
    "block": (DFlashConfig, (*_EAGLE3, "markov", "mask_token", "anchored")),
    "assistant": (AssistantConfig, ("layers", "width", "target_name", "gamma")),
}
"""Features that make other heads than KV heads, and the options that these read."""


def new_head(
    target: Any,
    *,
    feature: Feature = "none",
    images: ImageRule = "placeholder",
    parallel: bool = False,
    markov: int = 0,
    target_layers: tuple[int, ...] = (),
    width: int = 1024,
    **options: Any,
) -> HeadConfig:
    """Return the configuration of a new head for a target.

    Args:
      target: A `ModelConfig`.
      feature: `eagle1` makes an EAGLE-1 head, `fused` an EAGLE-3 head, `block` a DFlash head and
        `assistant` an assistant of a Gemma 4. These ignore options about pooled images.
      images: Rule of EAGLE heads for images.
      parallel: Whether a KV head drafts a block in one pass.
      markov: See `OnePassConfig`, `DFlashConfig`.
      target_layers: See `Eagle3Config.of_target`, `DFlashConfig.of_target`.
      width: See `AssistantConfig.of_target`; other heads have their target's.
      options: See `KVHeadConfig.of_target`.

    Raises InputError for options that exclude each other, and what `of_target` raises.
    """
    kind, fields = _KINDS.get(feature, (None, ()))
    layers = list(options.get("key_layers", ()))
    refused = {
        f"key_layers {layers} with feature {feature!r}, which chooses its keys; drop them": (
            kind and layers
        ),
        f"parallel with feature {feature!r}; give feature none or last_hidden": kind and parallel,
        f"own_keys False with {'parallel' if parallel else f'feature {feature!r}'}; leave it out": (
            (kind or parallel) and not options.get("own_keys", True)
        ),
        f"markov {markov} without parallel; give 0, or parallel": (
            markov and not parallel and "markov" not in fields
        ),
        f"images {images!r} with feature {feature!r}; give feature eagle1 or fused": (
            images != "placeholder" and "images" not in fields
        ),
    }
    for reason, holds in refused.items():
        if holds:
            raise InputError(f"KV head: {reason}")
    if kind:
        entries = {**options, "target_layers": target_layers, "markov": markov, "width": width}
        entries["images"] = images
        return kind.of_target(target, **{name: entries[name] for name in fields if name in entries})
    if parallel:
        return OnePassConfig.of_target(target, feature=feature, markov=markov, **options)
    return KVHeadConfig.of_target(target, feature=feature, **options)
