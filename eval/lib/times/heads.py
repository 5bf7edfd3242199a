"""Heads of absent targets, in the sizes that recipes train and publishers offer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from eval.lib.times.random_pair import LatencyConfig
from jaxspec.config import Eagle1Config, Eagle3Config, HeadConfig, text_config
from jaxspec.config.heads.kinds import new_head
from jaxspec.engine.plan import usual_head


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


HEADS: dict[str, Callable[[LatencyConfig], HeadConfig]] = {
    "kv": lambda config: usual_head(config.target, gamma=config.gamma),
    "onepass": lambda config: usual_head(
        config.target, gamma=config.gamma, parallel=True, markov=64
    ),
    "msd": msd_head,
    "eagle3": eagle3_head,
    "dflash": lambda config: new_head(config.target, feature="block", gamma=15),
}
"""Heads by their names in `eval.compiled`. DFlash heads draft 15 tokens, all others the preset's
gamma."""
