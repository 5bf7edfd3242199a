"""IbED's mixtures with a weight of 1 to 4 on view M (its Tables 8 and 9); `--captioner` for those
of Table 8.
"""

from __future__ import annotations

from dataclasses import replace

from configs.eval import ibed
from configs.published.ibed import WEIGHT_ROWS

config = replace(ibed.config, rows=WEIGHT_ROWS)
