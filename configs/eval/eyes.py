"""`smollm2-eyes` on picturebook's synthetic sets: its shipped KV head, lookup, and the views of a
draft.

    python -m eval.block_efficiency eyes
    python -m eval.block_efficiency eyes --draft runs/train/smollm2_eyes_draft/hf \\
        --draft jaxspec_demo/smollm2_eyes/kv_head
"""

from __future__ import annotations

from dataclasses import replace

from configs.eval.mini import config as mini
from eval.lib.drafts.config import Variant
from jaxspec.engine.config import PROMPT_BUCKETS
from jaxspec_demo import ASSETS

config = replace(
    mini,
    target="smollm2-eyes",
    draft=(str(ASSETS / "smollm2_eyes" / "kv_head"),),
    rows=(
        *(row for row in mini.rows if row.name != "P"),
        Variant("P36", ("P36",)),
        Variant("lookup", ("lookup",)),
        Variant("KV head, tree 2:7", ("head",), tree="2:7"),
    ),
    gamma=7,
    batch_size=1,
    prompt_buckets=PROMPT_BUCKETS,
    image_buckets=(0, 1, 2, 5),
)
