"""Qwen2.5-Coder-1.5B with its 0.5B sibling as draft, and with lookup, on code, sums, chat and
summaries.

    python -m train.prompts --data path/to/data
    python -m eval.block_efficiency coder --no-times
    python -m eval.block_efficiency coder --draft runs/train/coder_eagle3/hf
    python -m eval.draft_quality coder --sets humaneval-chat gsm8k --limit 164 \\
        --max-new-tokens 512 --batch-size 16 --run-code

Qwen's report says 70.7 (1.5B) and 61.6 (0.5B) for HumanEval's pass@1, in bfloat16 and by EvalPlus.
"""

from __future__ import annotations

from eval.lib.drafts.config import EvalConfig, Variant

OWN = ("chat_test", "summary_test")

config = EvalConfig(
    target="Qwen/Qwen2.5-Coder-1.5B-Instruct",
    draft=("Qwen/Qwen2.5-Coder-0.5B-Instruct",),
    rows=(
        Variant("0.5B", ("T",)),
        Variant("0.5B, tree 2:16", ("T",), tree="2:16"),
        Variant("0.5B, dynamic:4:24", ("T",), tree="dynamic:4:24"),
        Variant("lookup", ("lookup",)),
        Variant("0.5B + lookup", ("T", "lookup")),
        Variant("MT* of 0.5B, lookup", ("T", "lookup"), weighting="mt-paper"),
        Variant("head", ("head",)),
        Variant("head + lookup", ("head", "lookup")),
        Variant("MT* of head, lookup", ("head", "lookup"), weighting="mt-paper"),
    ),
    sets=("humaneval-chat", "gsm8k", *OWN),
    data=tuple(f"{name}=runs/data/prompts/test/{name.removesuffix('_test')}.jsonl" for name in OWN),
    limit=40,
    turns=(1,),
    max_new_tokens=128,
    batch_size=1,
    prompt_buckets=(128, 256, 512),
    image_buckets=(0,),
)
