"""A draft of the mini draft's size from the start; on the target's own answers (`--data`) it is AASD's DT-LLaVA."""

from __future__ import annotations

from dataclasses import replace

from configs.models.mini import DRAFT
from configs.train import mini
from configs.train.recipes.mini_large import config as mini_large
from configs.train.recipes.mini_text import PAGES
from jaxspec.training.recipes import Stage

config = replace(mini_large, start=DRAFT.text_config, stages=(Stage("tune", mini.DRAFT, PAGES),))
