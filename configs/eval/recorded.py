"""Drafts against LLaVA-1.5-7B's recorded answers to MMSpec, next to the published methods' counts on the same turns.

`--data mmspec=FOLDER` holds prompts, images and both records; `--tokenizer` is LLaVA's own.
"""

from __future__ import annotations

from eval.lib.recorded_config import Method, RecordedConfig
from eval.lib.sets import MMSPEC

config = RecordedConfig(
    sets=(MMSPEC,),
    data=(f"{MMSPEC}=../shared/data/mmspec",),
    tokenizer="../shared/data/llama_tokenizer",
    limit=600,
    methods=(
        *(Method(f"lookup, J = {gamma}", "lookup", gamma) for gamma in (3, 5, 7)),
        *(Method(f"history, J = {gamma}", "history", gamma) for gamma in (5, 7)),
        *(Method(f"table, J = {gamma}", "table", gamma) for gamma in (5, 7)),
        *(Method(f"history + table, J = {gamma}", "history+table", gamma) for gamma in (3, 5, 7, 10)),
        Method("history + table, learned, J = 7", "history+table", 7, learned=True),
        *(Method(f"history + table, {nodes} nodes", "history+table", 7, nodes) for nodes in (24, 60)),
    ),
)
