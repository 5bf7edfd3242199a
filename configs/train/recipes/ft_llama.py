"""AASD's FT-LLaMA (Table 1): a text draft of 112M, fine-tuned on the corpus's own answers.

The paper prints neither the draft's shape nor its training: these are Llama-160M, the published model next to it in
size, and the hyperparameters of LLaVA-1.5's second stage.
"""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.text_68m import config as text_68m

config = replace(text_68m, start="JackFram/llama-160m")
