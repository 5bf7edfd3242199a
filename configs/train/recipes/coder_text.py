"""A text draft of Qwen2.5-Coder of four layers and 56M parameters, 49M of them its embedding,
trained as `coder_kv`.

    python -m train.recipe coder_text --target Qwen/Qwen2.5-Coder-1.5B-Instruct
"""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.coder_kv import TRAIN
from configs.train.recipes.coder_kv import config as coder_kv
from jaxspec.config import LlamaConfig
from jaxspec.training.draft_recipe import Recipe
from jaxspec.training.recipes import Stage

DRAFT = LlamaConfig(
    vocab_size=151936,
    hidden_size=320,
    intermediate_size=896,
    num_hidden_layers=4,
    num_attention_heads=5,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    bos_token_id=151643,
    eos_token_id=151645,
    pad_token_id=151643,
)

config = Recipe(
    target=coder_kv.target,
    start=DRAFT,
    stages=(Stage("tune", replace(TRAIN, learning_rate=3e-3), (("coder_t0", 1.0),)),),
    buckets=coder_kv.buckets,
    view="T",
    draft_vocabulary=coder_kv.draft_vocabulary,
)
