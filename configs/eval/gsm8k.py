"""Small text models of GSM8K that write together; `python -m train.text NAME --data ...` makes each
of them.
"""

from __future__ import annotations

from pathlib import Path

from eval.lib.collaborative.config import CollaborativeEvalConfig, Pairing

MODELS = Path(__file__).resolve().parents[2] / "runs" / "train" / "gsm8k"
LEFT, RIGHT, WHOLE, AMATEUR = (
    str(MODELS / name / "hf") for name in ("left", "right", "whole", "amateur")
)

config = CollaborativeEvalConfig(
    pairings=(
        Pairing(
            "left + right",
            (LEFT, RIGHT),
            "weighted:0.5,0.5",
            gammas=(3, 1),
            sweep="lambda:0.1,0.3,0.5,0.7,0.9",
        ),
        Pairing(
            "left + right + whole",
            (LEFT, RIGHT, WHOLE),
            "weighted",
            gammas=(1, 1, 3),
            default_proposer=2,
        ),
        *(
            Pairing(
                name,
                (WHOLE, AMATEUR),
                "contrastive:mu=0.1",
                temperature,
                (1, 5),
                1,
                sweep="mu:0,0.1,0.3,0.5",
            )
            for name, temperature in (("whole - amateur", 1.0), ("whole - amateur, greedy", 0.0))
        ),
    ),
    sets=("gsm8k",),
    prompt_buckets=(384,),
    image_buckets=(0,),
)
