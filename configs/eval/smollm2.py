"""SmolLM2-135M with the KV head of this repository, on questions that the head was not trained on.

    python -m train.prompts --data path/to/data
    python -m eval.block_efficiency smollm2
    python -m eval.block_efficiency smollm2 --draft runs/train/smollm2_text/hf \\
        --draft jaxspec_demo/smollm2/kv_head
"""

from __future__ import annotations

from eval.lib.drafts.config import EvalConfig, Variant
from jaxspec_demo import ASSETS

KINDS = ("gsm8k", "humaneval", "chat", "summary")

config = EvalConfig(
    target="smollm2-135m",
    draft=(str(ASSETS / "smollm2" / "kv_head"),),
    rows=(
        Variant("KV head", ("head",)),
        Variant("KV head, tree 2:7", ("head",), tree="2:7"),
        Variant("KV head, dynamic:4:7", ("head",), tree="dynamic:4:7"),
        Variant("KV head, dynamic:8:60", ("head",), tree="dynamic:8:60"),
        Variant("text draft", ("T",)),
        Variant("text draft + KV head", ("T", "head")),
        Variant("MT* of both", ("T", "head"), weighting="mt-paper"),
        Variant("lookup", ("lookup",)),
        Variant("KV head + lookup", ("head", "lookup")),
        Variant("MT* of KV head, lookup", ("head", "lookup"), weighting="mt-paper"),
        Variant("text draft + lookup", ("T", "lookup")),
    ),
    sets=tuple(f"{kind}_test" for kind in KINDS),
    data=tuple(f"{kind}_test=runs/data/prompts/test/{kind}.jsonl" for kind in KINDS),
    limit=50,
    turns=(1,),
    max_new_tokens=128,
    batch_size=1,
    prompt_buckets=(128, 256, 512),
)
