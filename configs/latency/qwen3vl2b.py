"""Qwen3-VL-2B with a draft as wide and deep as IbED's 68M, bfloat16."""

from __future__ import annotations

from dataclasses import replace

from jaxspec.config import Qwen3VisionConfig

from configs.latency.qwen3vl8b import config as base
from configs.latency.qwen3vl8b import model

TOWER = Qwen3VisionConfig(24, 1024, 4096, out_hidden_size=2048, deepstack_visual_indexes=(5, 11, 17))

config = replace(
    base,
    target=model(2048, 6144, 28, 16, True, TOWER),
    draft=model(768, 3072, 2, 8, True, replace(TOWER, out_hidden_size=768)),
)
