"""SmolLM2-135M and a text draft of its own write together, on questions that the draft was not
trained on.

    python -m train.prompts --data path/to/data
    python -m train.recipe smollm2_text
    jaxspec export runs/train/smollm2_text/hf runs/train/smollm2_text/whole
    python -m eval.collaborative smollm2_together

The export scores all words again, as models that write together must.
"""

from __future__ import annotations

from eval.lib.collaborative.config import CollaborativeEvalConfig, Pairing

TARGET, DRAFT = "smollm2-135m", "runs/train/smollm2_text/whole"

config = CollaborativeEvalConfig(
    pairings=(
        Pairing("draft + SmolLM2", (DRAFT, TARGET), "weighted:0.3,0.7", 1.0, (3, 1)),
        *(
            Pairing(
                f"SmolLM2 - draft, T={heat:g}",
                (TARGET, DRAFT),
                "contrastive:mu=0.1",
                heat,
                (1, 3),
                1,
            )
            for heat in (1.0, 0.0)
        ),
    ),
    sets=("gsm8k_test",),
    data=("gsm8k_test=runs/data/prompts/test/gsm8k.jsonl",),
    limit=8,
    held_out=8,
    repeats=3,
    prompt_buckets=(256,),
    image_buckets=(0,),
)
