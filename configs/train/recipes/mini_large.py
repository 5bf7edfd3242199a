"""A second, larger draft of the mini target: three layers of width 192 for two of 128."""

from __future__ import annotations

from dataclasses import replace

from configs.models.mini import DRAFT
from configs.train.recipes.mini_draft import PAGES, TUNE
from configs.train.recipes.mini_llava import config as mini_llava
from jaxspec.training.recipes import Stage

config = replace(
    mini_llava,
    start=replace(
        DRAFT.text_config,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=6,
    ),
    stages=(Stage("tune", replace(TUNE, steps=800, learning_rate=2e-3), PAGES),),
)
