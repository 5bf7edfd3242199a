"""Look up the module of a head's configuration."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.config import (
    AssistantConfig,
    DFlashConfig,
    Eagle1Config,
    Eagle1Text,
    Eagle3Config,
    EagleConfig,
    HeadConfig,
    KVHeadConfig,
    OnePassConfig,
    VispecConfig,
)
from jaxspec.models.heads.assistant import AssistantHead
from jaxspec.models.heads.dflash import DFlashHead
from jaxspec.models.heads.eagle1 import BareLM, Eagle1Head
from jaxspec.models.heads.eagle3 import Eagle3Head, FusedLM
from jaxspec.models.heads.kv_head import KVHead
from jaxspec.models.heads.one_pass import OnePassHead
from jaxspec.models.heads.vispec import VispecHead
from jaxspec.typing import Params

MODULES: dict[type[HeadConfig], Any] = {
    KVHeadConfig: KVHead,
    OnePassConfig: OnePassHead,
    Eagle1Config: Eagle1Head,
    VispecConfig: VispecHead,
    Eagle3Config: Eagle3Head,
    DFlashConfig: DFlashHead,
    AssistantConfig: AssistantHead,
}
DECODERS: dict[type[Any], Any] = {Eagle1Text: BareLM, EagleConfig: FusedLM}
"""Modules of heads as language models, by their decoders' configurations; other heads are those of
their model type."""


def module_of(config: HeadConfig) -> Any:
    """Return the (stateless, hashable) module of a head."""
    return MODULES[type(config)](config)


def init_head(
    config: HeadConfig, target: Params | None, key: jax.Array, offset: int | None = None
) -> Params:
    """Return initial parameters, float32: random, or copied from the target as far as they fit.

    offset: `norm_offset` of the target's decoder; a head with another one gets the same factors.
    """
    added = (offset or 0) - (config.text_config.norm_offset or 0)
    if target is not None and added:
        norm = jax.tree.map(lambda weight: added + jnp.float32(weight), target["model"]["norm"])
        target = {**target, "model": {**target["model"], "norm": norm}}
    return module_of(config).initial(target, key)


@cache
def abstract_head(config: HeadConfig) -> Params:
    """Return the shapes of the parameters; nothing is allocated."""
    return jax.eval_shape(lambda: init_head(config, None, jax.random.key(0)))
