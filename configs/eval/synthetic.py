"""Synthetic models of 54M and 3M that write together. Times are real, words not."""

from __future__ import annotations

from eval.lib.collaborative.config import CollaborativeEvalConfig, Pairing

TARGET, PARTNER, DRAFT = "synthetic:target", "synthetic:partner:0.8", "synthetic:draft:0.7"

config = CollaborativeEvalConfig(
    pairings=(
        Pairing(
            "54M + 54M",
            (TARGET, PARTNER),
            "weighted:0.5,0.5",
            gammas=(3, 1),
            sweep="lambda:0.1,0.5,0.9",
        ),
        Pairing(
            "54M - 3M, greedy",
            (TARGET, DRAFT),
            "contrastive:mu=0.1",
            0.0,
            (1, 5),
            1,
            sweep="mu:0,0.1,0.5",
        ),
    ),
    sets=("describe",),
    limit=2,
    held_out=4,
    repeats=3,
    max_new_tokens=48,
    prompt_buckets=(640,),
    image_buckets=(1,),
)
