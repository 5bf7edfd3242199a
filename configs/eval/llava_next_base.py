"""LLaVA-NeXT-7B as the released TABED code runs it: read as LLaVA-1.5, one 576-token page an image,
no tiles.

With `--tiles` it is LLaVA-NeXT itself, whose numbers are not the paper's.
"""

from __future__ import annotations

from dataclasses import replace

from configs.eval import llava15
from configs.published import tabed_next

config = replace(llava15.config, target=tabed_next.TARGET, tiles=False, published=tabed_next.NEXT)
