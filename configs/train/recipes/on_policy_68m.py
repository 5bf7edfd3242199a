"""As `logits_68m`, on answers that the draft itself samples, and by reverse KL (DistillSpec)."""

from __future__ import annotations

from dataclasses import replace

from jaxspec.training.objectives import Distillation

from configs.train.recipes.logits_68m import config as logits_68m

config = replace(
    logits_68m,
    stages=tuple(replace(stage, data=(("llava_v1_5_mix665k", 1.0),)) for stage in logits_68m.stages),
    distillation=Distillation("reverse_kl", on_policy=64),
)
