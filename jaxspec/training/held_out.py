"""A half-trained draft in the real engine, on prompts that it does not train on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from jaxspec.decoding.engine import Engine, EngineConfig, LoadedModel, Request
from jaxspec.evaluation.metrics import acceptance_metrics
from jaxspec.typing import Params


@dataclass(frozen=True)
class HeldOut:
    """An evaluation for `fit`: the draft's acceptance, with a target. Its programs are compiled once."""

    target: LoadedModel
    draft: LoadedModel
    """What does not train of it; its parameters are not read."""
    requests: tuple[Request, ...]
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __call__(self, params: Params) -> dict[str, float]:
        """`mean_acceptance_length` and `draft_acceptance_rate` over all requests, in the target's dtype.

        On several hosts each decodes on a device of its own.
        """
        dtype = jax.tree.leaves(self.target.params)[0].dtype
        draft = replace(self.draft, params=jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), params))
        results = Engine(self.target, draft, self.engine).generate(self.requests)
        found = acceptance_metrics([result.stats for result in results])
        wanted = ("mean_acceptance_length", "draft_acceptance_rate")
        return {name: float(found[name]) for name in wanted if found[name] is not None}
