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
from jaxspec.errors import InputError, check_counts, check_numbers

Feature = Literal["none", "last_hidden", "eagle1", "fused", "block", "assistant"]
_POOLED = ("pooling", "image_slots", "slot_bias", "image_tokens")
_KV = (*_POOLED, "layers", "key_layers", "reads_text")
_KV_HEAD = KVHeadConfig, (*_KV, "own_keys")
_ONE_PASS = OnePassConfig, (*_KV, "markov")
_KINDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "eagle1": (Eagle1Config, ("images",)),
    "fused": (Eagle3Config, ("images", "layers", "target_layers")),
    "block": (DFlashConfig, ("layers", "target_layers", "markov", "mask_token", "anchored")),
    "assistant": (AssistantConfig, ("layers", "width")),
}
"""Features that make other heads than KV heads, and the options that only some kinds have."""
_DEFAULTS: dict[str, Any] = {
    **{"layers": 1, "key_layers": (), "reads_text": True, "own_keys": True, "markov": 0},
    **{"images": "placeholder", "target_layers": (), "width": 1024},
    **{"mask_token": None, "anchored": False},
}
"""Values that say nothing, so that every kind takes them."""


def new_head(
    target: Any, *, feature: Feature = "none", parallel: bool = False, **options: Any
) -> HeadConfig:
    """Return the configuration of a new head for a target.

    Args:
      target: A `ModelConfig`.
      feature: `eagle1` makes an EAGLE-1 head, `fused` an EAGLE-3 head, `block` a DFlash head and
        `assistant` an assistant of a Gemma 4. These ignore options about pooled images.
      parallel: Whether a KV head drafts a block in one pass.
      options: See `of_target` of the kind's configuration, and its fields.

    Raises InputError for options that the kind lacks, and what `of_target` raises.
    """
    kind, names = _KINDS.get(feature, _ONE_PASS if parallel else _KV_HEAD)
    if feature not in _KINDS:
        options["feature"] = feature
    elif parallel:
        raise InputError(f"{kind.title}: parallel is an option of KV heads; leave it out")
    check_counts(layers=options.get("layers", 1), width=options.get("width", 1))
    check_numbers(markov=options.get("markov", 0))
    ignored = [name for name in (*_POOLED, *_DEFAULTS) if name in options and name not in names]
    for name in ignored:
        value = options.pop(name)
        if value != _DEFAULTS.get(name, value):
            kinds = [
                other.title
                for other, theirs in (_KV_HEAD, _ONE_PASS, *_KINDS.values())
                if name in theirs
            ]
            raise InputError(
                f"{kind.title}: {name} {value!r} is not an option of this kind; leave it out, or "
                f"make one of {', '.join(kinds)}"
            )
    return kind.of_target(target, **options)
