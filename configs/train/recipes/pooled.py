"""IbED's pooled drafts: LLaVA-68M trained on with its 576 image tokens pooled to 144, or with
`--view` P36, P9 or P1.

IbED pools "during the instruction fine-tuning stage", the second of two, which begins with the
first stage's projector. This recipe begins with the finished draft, mjbooo/lvlm68m, and runs the
second stage once more, because the first stage's result is not published.

The paper does not print this training's hyperparameters: they are those of LLaVA-1.5's second
stage.
"""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.llava15_68m import config as llava15_68m

config = replace(llava15_68m, start="mjbooo/lvlm68m", view="P144", stages=llava15_68m.stages[1:])
