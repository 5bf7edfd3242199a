"""Recognise the kind of a draft head by its files, also kinds that this library lacks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jaxspec.config import AssistantConfig, KVHeadConfig
from jaxspec.config.heads.assistant import ASSISTANTS

_KINDS_BY_NAME = {
    "dflash2": "DFlash2",
    "dflash": "DFlash",
    "dspark": "DSpark",
    "p-?eagle": "P-EAGLE",
    "medusa": "Medusa",
    r"^mtp$": "MTP",
    "vispec": "ViSpec",
    "eagle(?!-?3)": "EAGLE-1",
}
"""Patterns of lower-case names of architectures and speculators' types -> kind of the head."""
_KINDS_BY_TENSOR = {
    r"img_fc\.|imadpt\.": "ViSpec",
    r"(medusa_head\.)?\d+\.\d+\.linear\.weight": "Medusa",
}
"""Patterns of tensors that only one kind of head has."""

_OF_IMAGES = re.compile("forconditionalgeneration|llavallama")
"""Lower-case names of targets that read images, which config.json of EAGLE-1 heads copies."""


def kind_of_head(
    raw: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]] | None = None
) -> str:
    """Return the kind of draft head that files describe, such as "EAGLE-3"; "" for no known one.

    The kinds that can be read are the names in `HEADS`.

    EAGLE-3 heads are known by their names, by `draft_vocab_size` or by their tensors: some trainers
    write their target's architecture and depth.

    Args:
      raw: config.json.
      tensors: Shapes of the tensors, if they were listed.
    """
    if raw.get("model_type") == KVHeadConfig.model_type:
        return "one-pass" if raw.get("parallel") is True else "KV"
    if str(raw.get("model_type")) in ASSISTANTS:
        return AssistantConfig.title
    stored = {name.removeprefix("model."): shape for name, shape in (tensors or {}).items()}
    architectures = raw.get("architectures")
    names = [*(architectures if isinstance(architectures, list) else ())]
    names = [str(name).lower() for name in (*names, raw.get("speculators_model_type") or "")]
    for pattern, kind in _KINDS_BY_NAME.items():
        if any(re.search(pattern, name) for name in names):
            return kind
    for pattern, kind in _KINDS_BY_TENSOR.items():
        if any(re.match(pattern, name) for name in stored):
            return kind
    if "hidden_norm.weight" in stored or "dflash_config" in raw:
        return "DFlash"
    layers = any(name.startswith("layers.0.") for name in stored)
    if "fc.weight" in stored and layers and not any("hidden_norm" in name for name in stored):
        return "EAGLE-1"
    if any("eagle3" in name for name in names) or raw.get("draft_vocab_size") is not None:
        return "EAGLE-3"
    if "fc.weight" in stored and any(name.endswith("hidden_norm.weight") for name in stored):
        return "EAGLE-3"
    return "EAGLE-1" if any(map(_OF_IMAGES.search, names)) and _has_one_layer(raw) else ""


def _has_one_layer(raw: Mapping[str, Any]) -> bool:
    """Return whether config.json describes one layer at the top level, where MSD for Qwen has a
    `vision_config` too."""
    return raw.get("num_hidden_layers") == 1 and "text_config" not in raw
