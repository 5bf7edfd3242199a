"""Name the image rules of published heads whose config.json does not, by their hub ids."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.checkpoints.locating import model_name
from jaxspec.config import HeadConfig, StateHeadConfig

IMAGE_RULES = {
    r"(?:.*/)?MSD-|LlavaLlamaForCausalLM$": "unfused",
    r"(?:Cloudriver/)?EAGLE2?-": "embedding",
    r"(?:Cloudriver/)?EAGLE3-(?:Qwen2\.5-VL|LLaVA)": "zero",
    r"(?:Rayzl/)?qwen2\.5-vl-7b-eagle3-sgl": "embedding",
    r"Qwen2VLForConditionalGeneration$": "unfused",
}
"""Pattern of a hub id, a folder's name or an architecture -> rule.

They are MSD; MMSpec's EAGLE, which reads what its target shows, and its EAGLE-3, whose code zeroes
the states; SpecForge's head, trained on images; MSD for Qwen2-VL and Qwen2.5-VL.
"""


def with_known_images(path: Path, raw: Mapping[str, Any], config: HeadConfig) -> HeadConfig:
    """Return a head with the image rule of its id or architecture, unless config.json names one.

    raw: config.json.
    """
    extras = raw.get("jaxspec")
    has_rule = isinstance(extras, dict) and "images" in extras
    if has_rule or not isinstance(config, StateHeadConfig):
        return config
    architectures = raw.get("architectures")
    names = [model_name(path), *(architectures if isinstance(architectures, list) else ())]
    rules = (
        rule
        for pattern, rule in IMAGE_RULES.items()
        if rule in config.rules and any(re.match(pattern, str(name)) for name in names)
    )
    rule = next(rules, None)
    return config if rule is None else config.with_images(rule)
