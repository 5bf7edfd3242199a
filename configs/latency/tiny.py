"""A pair of no use, in which a command is tried out on any machine: the part of every other
preset.
"""

from __future__ import annotations

from configs.latency.pair55m import lvlm
from eval.lib.times.random_pair import LatencyConfig

config = LatencyConfig(
    lvlm(32, 64, 1, 2),
    lvlm(32, 64, 1, 2),
    dtype="float32",
    shapes=((1, 15),),
    gammas=(2,),
    views=(1,),
    images=(1,),
    prompt=4,
    gamma=2,
    forced=(2.0,),
    context=8,
    new=8,
    repeats=1,
    probe_megabytes=1,
    probe_side=32,
)
