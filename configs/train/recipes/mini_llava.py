"""A draft of the mini draft's size from the start; on the target's own answers (`--data`) it is
AASD's DT-LLaVA.
"""

from __future__ import annotations

from dataclasses import replace

from configs.models.mini import DRAFT
from configs.train.recipes.mini_draft import TARGET
from configs.train.recipes.mini_draft import config as mini_draft

config = replace(mini_draft, target=TARGET, start=DRAFT.text_config)
