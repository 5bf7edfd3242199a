"""Small text models of GSM8K that write together; `python -m train.text NAME --data ...` makes each of them."""

from __future__ import annotations

from pathlib import Path

from jaxspec.evaluation.config import CollaborativeEvalConfig, Pairing

MODELS = Path(__file__).resolve().parents[2] / "runs" / "train" / "gsm8k"
LEFT, RIGHT, WHOLE, AMATEUR = (str(MODELS / name / "hf") for name in ("left", "right", "whole", "amateur"))

_WEIGHTS = tuple((share, f"weighted:{share},{1 - share:g}") for share in (0.1, 0.3, 0.5, 0.7, 0.9))
_CONTRASTS = tuple((mu, f"contrastive:mu={mu}") for mu in (0.0, 0.1, 0.3, 0.5))

config = CollaborativeEvalConfig(
    pairings=(
        Pairing("left + right", (LEFT, RIGHT), "weighted:0.5,0.5", gammas=(3, 1), sweep=_WEIGHTS),
        Pairing("left + right + whole", (LEFT, RIGHT, WHOLE), "weighted", gammas=(1, 1, 3), proposer=2),
        Pairing("whole - amateur", (WHOLE, AMATEUR), "contrastive:mu=0.1", gammas=(1, 5), proposer=1, sweep=_CONTRASTS),
        Pairing("whole - amateur, greedy", (WHOLE, AMATEUR), "contrastive:mu=0.1", 0.0, (1, 5), 1, sweep=_CONTRASTS),
    ),
    sets=("gsm8k",),
    prompt_buckets=(384,),
    image_buckets=(0,),
)
