"""The shipped mini models: mixtures with a weight of 1 to 4 on view M, as in IbED's Tables 8 and
9.
"""

from __future__ import annotations

from dataclasses import replace

from configs.eval import mini
from configs.published.ibed import WEIGHT_ROWS

config = replace(mini.config, rows=WEIGHT_ROWS)
