"""A LLaVA draft of `smollm2-eyes`, of which 4.7M parameters embed the target's vocabulary.

It learns only single pages, and its positions hold one image and a text, as published drafts' do.
"""

from __future__ import annotations

from configs.models.eyes import TOWER
from configs.train.recipes.smollm2_eyes_kv import config as smollm2_eyes_kv
from jaxspec.config import LlamaConfig, LlavaConfig
from jaxspec.training.config import TrainConfig
from jaxspec.training.draft_recipe import Recipe
from jaxspec.training.recipes import Stage

POSITIONS = 256
DRAFT = LlavaConfig(
    LlamaConfig(
        vocab_size=49152,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=3,
        max_position_embeddings=POSITIONS,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    ),
    TOWER,
    image_token_index=16,
    vision_feature_layer=-1,
)
PAGES = (("picturebook:attributes,describe,read,exist,reason,chart,facts,sums", 1.0),)
TUNE = TrainConfig(
    steps=1500,
    batch=32,
    learning_rate=3e-3,
    warmup=100,
    weight_decay=0.02,
    frozen=("vision_tower",),
    save_every=50,
)

config = Recipe(
    target=smollm2_eyes_kv.target,
    start=DRAFT,
    stages=(Stage("tune", TUNE, PAGES),),
    buckets=(POSITIONS,),
    tile_buckets=(1,),
    draft_vocabulary=smollm2_eyes_kv.draft_vocabulary,
)
