"""A second, larger draft of the mini target: three layers of width 192 for two of 128."""

from __future__ import annotations

from dataclasses import replace

from configs.models.mini import DRAFT
from configs.train import mini
from configs.train.recipes.mini_text import PAGES, TARGET
from jaxspec.training.recipes import Recipe, Stage

config = Recipe(
    target=TARGET,
    start=replace(
        DRAFT.text_config,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=6,
    ),
    stages=(Stage("tune", replace(mini.DRAFT, steps=800, learning_rate=2e-3), PAGES),),
    buckets=mini.DRAFT_PAGES.buckets,
    units=(2,),
)
