"""The mini draft, trained on towards the mini target's distributions, over picturebook's own
answers.

For sequence-level distillation make answers with `python -m train.distill_data` and name them with
`--data`.
"""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.mini_pooled import config as mini_pooled
from jaxspec.training.objectives import Distillation

config = replace(mini_pooled, view="M", distillation=Distillation("forward_kl"))
