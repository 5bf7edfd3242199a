"""LLaVA-1.5-7B with IbED's 68M draft, bfloat16; `--dtype float16` is TABED's."""

from __future__ import annotations

from eval.lib.times.random_pair import LatencyConfig
from jaxspec.config import LlamaConfig, LlavaConfig

TARGET = LlavaConfig(LlamaConfig(vocab_size=32064, max_position_embeddings=4096))


def draft(width: int, mlp: int, layers: int) -> LlavaConfig:
    """Return a LLaVA-1.5 around a small Llama with the target's tower and vocabulary."""
    text = LlamaConfig(
        vocab_size=32064,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=12,
        max_position_embeddings=4096,
    )
    return LlavaConfig(text)


config = LatencyConfig(
    TARGET,
    draft(768, 3072, 2),
    dtype="bfloat16",
    shapes=(
        *((batch, 1024) for batch in (1, 4, 16, 2, 3, 8, 32)),
        (1, 512),
        (1, 2048),
        (1, 3072),
    ),
    views=(1, 2, 3, 4),
    answers={1: 92, 2: 117, 5: 88},  # IbED, 4.2: means of TextVQA, Spot, PororoSV
    papers={
        "passes": "TABED, Table 13: T_q/T_p 0.063; it has an A100 and float16 in Figures 5, 6.",
        "images": "IbED, Tables 10 and 11: the draft's prefill 35.6, 35.7 and 35.7 ms over 200, "
        "1200 and 2200 tokens, its decoding 27.1 ms; on an A100. An image is 576 tokens. IbED, "
        "Figure 3: prefill lengths of 600, 1200 and 3000 tokens, answers of 92, 117 and 88.",
        "captions": "TABED, Table 11, in seconds by 1, 2 and 5 images: BLIP 0.054, 0.055 and "
        "0.074, Florence-2 0.105, 0.149 and 0.292, the target's prefill 0.112, 0.207 and 0.540; on "
        "a device that it does not name.",
        "flops": "TABED, Table 14: 66.08 of the target, 0.09 of the draft, 0.17 of two views: what "
        "weights take for a block of five tokens, and for one.",
    },
)
