"""Shapes of the shipped mini pair, float32."""

from __future__ import annotations

from configs.models.mini import DRAFT, TARGET
from eval.lib.times.random_pair import LatencyConfig

config = LatencyConfig(
    TARGET,
    DRAFT,
    dtype="float32",
    shapes=((1, 128), (8, 128)),
    prompt=24,
    context=64,
    new=96,
    repeats=60,
    probe_megabytes=128,
    probe_side=1024,
)
