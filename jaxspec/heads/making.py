"""Make heads of any kind: their configuration by a recipe's options, module and parameters."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxspec.errors import InputError, check_counts, check_numbers, nearest
from jaxspec.heads.config import HeadConfig
from jaxspec.heads.kinds import KINDS, kind_of, kv_head, one_pass
from jaxspec.sharding import shardings
from jaxspec.typing import Params

Feature = Literal["none", "last_hidden", "eagle1", "fused", "block", "assistant", "mtp"]
"""What a new head reads, which makes its kind; see `Kind.features`."""
_DEFAULTS: dict[str, Any] = {
    **{"layers": 1, "key_layers": (), "reads_text": True, "own_keys": True, "markov": 0},
    **{"images": "placeholder", "target_layers": (), "width": 1024},
    **{"mask_token": None, "anchored": False, "window": 0},
}
"""Values that say nothing, so that every kind takes them."""


def new_head(
    target: Any, *, feature: Feature = "none", parallel: bool = False, **options: Any
) -> HeadConfig:
    """Return the configuration of a new head for a target.

    Args:
      target: A `ModelConfig`.
      feature: `eagle1` makes an EAGLE-1 head, `fused` an EAGLE-3 head, `block` a DFlash head,
        `assistant` an assistant of a Gemma 4 and `mtp` an MTP head. These ignore options about
        pooled images.
      parallel: Whether a KV head drafts a block in one pass.
      options: See `of_target` of the kind's configuration, and its fields.

    Raises InputError for options that the kind lacks, and what `of_target` raises.
    """
    if feature not in (features := get_args(Feature)):
        raise InputError(f"feature: {feature!r} is unknown; {nearest(str(feature), features)}")
    kind = next(kind for kind in KINDS if feature in kind.features)
    if kind is kv_head.KIND:
        options["feature"] = feature
        kind = one_pass.KIND if parallel else kind
    elif parallel:
        raise InputError(f"{kind.config.title}: parallel is an option of KV heads; leave it out")
    check_counts(layers=options.get("layers", 1), width=options.get("width", 1))
    check_numbers(markov=options.get("markov", 0), window=options.get("window", 0))
    every = (*kv_head.POOLED, *_DEFAULTS)
    for name in [name for name in every if name in options and name not in kind.options]:
        value = options.pop(name)
        if value != _DEFAULTS.get(name, value):
            kinds = ", ".join(other.config.title for other in KINDS if name in other.options)
            raise InputError(
                f"{kind.config.title}: {name} {value!r} is not an option of this kind; leave it "
                f"out, or make one of {kinds}"
            )
    return kind.config.of_target(target, **options)


def module_of(config: HeadConfig) -> Any:
    """Return the (stateless, hashable) module of a head."""
    return kind_of(config).module(config)


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


def head_shardings(config: HeadConfig, params: Params, mesh: Mesh | AbstractMesh) -> Any:
    """Return the sharding of every parameter of a head: split as a decoder's."""
    return shardings(config.text_config, params, mesh, kind_of(config).axes)
