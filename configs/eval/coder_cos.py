"""Qwen2.5-Coder's 1.5B and 0.5B write together: as an ensemble, and the larger in contrast to the
smaller.

    python -m eval.collaborative coder_cos
    python -m eval.collaborative coder_cos --limit 100 --max-new-tokens 512 --run-code

The larger has three times the parameters of the smaller.
"""

from __future__ import annotations

from eval.lib.collaborative.config import CollaborativeEvalConfig, Pairing

LARGE, SMALL = (f"Qwen/Qwen2.5-Coder-{size}-Instruct" for size in ("1.5B", "0.5B"))

config = CollaborativeEvalConfig(
    pairings=tuple(
        pairing
        for heat in (1.0, 0.0)
        for pairing in (
            Pairing(f"0.5B + 1.5B, T={heat:g}", (SMALL, LARGE), "weighted:0.5,0.5", heat),
            Pairing(
                f"1.5B - 0.5B, T={heat:g}", (LARGE, SMALL), "contrastive:mu=0.1", heat, (1, 5), 1
            ),
        )
    ),
    sets=("humaneval-chat", "gsm8k"),
    limit=4,
    held_out=8,
    timed=4,
    repeats=1,
    max_new_tokens=64,
    prompt_buckets=(256,),
    image_buckets=(0,),
)
