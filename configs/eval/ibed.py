"""LLaVA-1.5-7B with IbED's 68M draft on IbED's eight sets: its single views (Tables 1, 2) and
mixtures (Table 3).

In `pool (n)` an image is n tokens. Other captioners (Tables 6 and 7) are `--captioner`, other
drafts (Tables 5 and 13) `--draft`.
"""

from __future__ import annotations

from dataclasses import replace

from configs.eval import llava15
from configs.published import ibed

config = replace(
    llava15.config,
    rows=ibed.ROWS,
    sets=(*ibed.ONE, *ibed.TWO, *ibed.FIVE),
    turns=(1,),
    averages=ibed.AVERAGES,
    published=ibed.MIXTURES,
)
