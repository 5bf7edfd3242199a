"""Small text models of GSM8K: two that have each seen another half of it, one of the whole, and an
amateur for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxspec.config import LlamaConfig
from jaxspec.training.config import TrainConfig

VOCABULARY = 2048
BUCKETS = (128, 192, 256, 384)
"""Tokens of a training row; longer ones are cut."""


@dataclass(frozen=True)
class TextStage:
    """Describe one model and how it is trained."""

    model: LlamaConfig
    train: TrainConfig
    part: tuple[int, int] = (0, 1)
    """(i, n): of the data, every n-th sample from the i-th on."""


def _llama(width: int, layers: int, heads: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=-(-8 * width // 3 // 32) * 32,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=768,
        rms_norm_eps=1e-5,
        pad_token_id=3,
        tie_word_embeddings=True,
    )


_TRAIN = TrainConfig(
    steps=400, batch=16, learning_rate=5e-3, warmup=40, weight_decay=0.05, save_every=50
)

STAGES = {
    "left": TextStage(_llama(96, 2, 3), _TRAIN, (0, 2)),
    "right": TextStage(_llama(128, 1, 4), replace(_TRAIN, seed=1), (1, 2)),
    "whole": TextStage(_llama(64, 1, 2), replace(_TRAIN, steps=900, warmup=60, learning_rate=8e-3)),
    "amateur": TextStage(
        _llama(32, 1, 1), replace(_TRAIN, steps=60, batch=8, warmup=10, learning_rate=1e-2)
    ),
}

DEBUG = TextStage(_llama(64, 1, 2), replace(_TRAIN, steps=2, batch=2, save_every=1, log_every=1))
