"""The vocabulary of the pair of 54M and 3M, and next to no model in front of it: what rules cost
shows in its blocks, in milliseconds, where in those of a real pair it is less than they vary.
"""

from __future__ import annotations

from configs.latency.pair55m import lvlm
from eval.lib.times.random_pair import LatencyConfig

config = LatencyConfig(
    lvlm(64, 128, 1, 2),
    lvlm(32, 64, 1, 2),
    dtype="float32",
    shapes=((1, 128),),
    gammas=(1, 5),
    views=(1, 2, 4),
    context=64,
    new=64,
    repeats=60,
    probe_megabytes=128,
    probe_side=1024,
)
