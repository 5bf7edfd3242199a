"""Make heads of absent targets, in the sizes that recipes train and publishers offer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from eval.lib.times.random_pair import LatencyConfig
from jaxspec.config import Gemma4TextConfig, text_config
from jaxspec.config.text import FULL, SLIDING
from jaxspec.engine.plan import usual_head
from jaxspec.errors import InputError
from jaxspec.heads.config import HeadConfig
from jaxspec.heads.kinds.assistant import AssistantConfig
from jaxspec.heads.kinds.eagle1 import Eagle1Config
from jaxspec.heads.kinds.eagle3.config import Eagle3Config
from jaxspec.heads.making import new_head

ASSISTANTS = {3840: (1024, 8192, 16, 0), 2560: (256, 2048, 4, 2048)}
"""Width of a target -> width, MLP, attention heads and groups of tokens of its assistant."""


def msd_head(config: LatencyConfig) -> HeadConfig:
    """Return MSD's EAGLE-1 head of LLaVA-1.5, which has an embedding of its own."""
    head = Eagle1Config.of_target(config.target, images="unfused", gamma=config.gamma)
    return replace(head, text_config=replace(head.text_config, fc_bias=True, own_embedding=True))


def eagle3_head(config: LatencyConfig) -> HeadConfig:
    """Return an EAGLE-3 head that scores `head_vocabulary` tokens, also for only a few layers."""
    depth = text_config(config.target).num_hidden_layers
    few = (0, depth // 2, depth) if depth < 7 else ()
    head = Eagle3Config.of_target(config.target, target_layers=few, gamma=config.gamma)
    ids = tuple(range(config.head_vocabulary))
    return replace(head, text_config=replace(head.text_config, draft_vocabulary=ids))


def assistant_head(config: LatencyConfig) -> HeadConfig:
    """Return the assistant of Gemma 4 12B or E4B: three sliding layers and a full one."""
    text = text_config(config.target)
    if not isinstance(text, Gemma4TextConfig) or text.hidden_size not in ASSISTANTS:
        raise InputError("programs: assistant drafts for gemma4_12b and gemma4_e4b; take one")
    width, mlp, heads, groups = ASSISTANTS[text.hidden_size]
    layers = replace(
        text,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=4,
        num_attention_heads=heads,
        layer_types=(SLIDING, SLIDING, SLIDING, FULL),
    )
    return AssistantConfig(
        layers, backbone_hidden_size=text.hidden_size, num_centroids=groups, gamma=config.gamma
    )


def dspark_head(config: LatencyConfig) -> HeadConfig:
    """Return a DSpark head in the sizes of DeepSeek's for Qwen3 and Gemma 4.

    It has five layers like the target's full ones, an embedding and an output matrix of its own,
    and a Markov head, and drafts seven tokens.
    """
    options = {
        "own_embedding": True,
        "own_output": True,
        "markov": 256,
        "anchored": True,
        "gamma": 7,
    }
    head = new_head(config.target, feature="block", layers=5, **options)
    if isinstance(text := text_config(config.target), Gemma4TextConfig):
        layers = replace(text, num_hidden_layers=5, layer_types=(FULL,) * 5)
        return replace(head, text_config=layers)
    return head


HEADS: dict[str, Callable[[LatencyConfig], HeadConfig]] = {
    "kv": lambda config: usual_head(config.target, gamma=config.gamma),
    "onepass": lambda config: usual_head(
        config.target, gamma=config.gamma, parallel=True, markov=64
    ),
    "msd": msd_head,
    "assistant": assistant_head,
    "eagle3": eagle3_head,
    "dflash": lambda config: new_head(config.target, feature="block", gamma=15),
    "dspark": dspark_head,
}
"""Heads by their names in `eval.compiled`. DFlash heads draft 15 tokens, DSpark heads 7, all others
the preset's gamma."""
