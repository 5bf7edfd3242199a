"""Drafts against LLaVA-1.5-7B's recorded answers to MMSpec, next to the published methods' counts
on the same turns.

`--data mmspec=FOLDER` holds prompts, images and both records; `--tokenizer` is LLaVA's own.
"""

from __future__ import annotations

from eval.lib.questions.sets import MMSPEC
from eval.lib.recorded.config import Method, RecordedConfig

config = RecordedConfig(
    sets=(MMSPEC,),
    data=(f"{MMSPEC}=../shared/data/mmspec",),
    tokenizer="../shared/data/llama_tokenizer",
    limit=600,
    methods=(
        *(
            Method(f"lookup, gamma {gamma}", "lookup", gamma, plotted=gamma == 7)
            for gamma in (3, 5, 7)
        ),
        *(
            Method(
                f"lookup, tree dynamic:{width}:{nodes}",
                "lookup",
                7,
                nodes,
                width,
                plotted=width == 8,
            )
            for width, nodes in ((4, 16), (8, 32), (8, 60))
        ),
        *(
            Method(f"history, gamma {gamma}", "history", gamma, plotted=gamma == 7)
            for gamma in (5, 7)
        ),
        *(Method(f"table, gamma {gamma}", "table", gamma, plotted=gamma == 7) for gamma in (5, 7)),
        *(
            Method(f"history + table, gamma {gamma}", "history+table", gamma)
            for gamma in (3, 5, 7, 10)
        ),
        Method("history + table, learned, gamma 7", "history+table", 7, learned=True),
        *(
            Method(f"history + table, {nodes} nodes", "history+table", 7, nodes)
            for nodes in (24, 60)
        ),
        Method("similar, gamma 7", "similar", 7),
        *(
            Method(f"history + similar, gamma {n}", "history+similar", n, plotted=n == 10)
            for n in (3, 5, 7, 10, 16)
        ),
        Method("history + similar, learned, gamma 7", "history+similar", 7, learned=True),
        *(
            Method(f"history + similar, {n} nodes", "history+similar", 7, n, plotted=n == 60)
            for n in (24, 60)
        ),
    ),
)
