"""Draw a head's parameters, copy them from its target, or borrow them while it drafts."""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.config import TextConfig
from jaxspec.models.vocabulary import output_rows
from jaxspec.typing import Params


def borrowed_tokens(head: TextConfig, target: TextConfig) -> tuple[int, ...]:
    """Return the tokens whose columns a head takes of its target's output matrix.

    () takes the matrix as it is. A tied target has none: its embedding becomes one, unless the head
    is tied too.
    """
    if head.draft_vocabulary or head.tie_word_embeddings or not target.tie_word_embeddings:
        return head.draft_vocabulary
    return tuple(range(head.vocab_size))


def joined(head: Params, target: Params, vocabulary: tuple[int, ...] = ()) -> Params:
    """Return the head's parameters as a `CausalLM`, which borrows missing parts from the target.

    Embedding and output matrix may be missing. With a draft vocabulary the output matrix has the
    rows of its tokens, which `head` may hold.
    """
    target = target.get("language_model", target)
    parts = {
        name: leaf
        for name, leaf in head.items()
        if name in ("norm", "embed_tokens") or name.startswith("layers_")
    }
    model = {"embed_tokens": target["model"]["embed_tokens"]} | parts
    if vocabulary or "lm_head" in head:
        return {
            "model": model,
            "lm_head": head.get("lm_head") or {"weight": output_rows(target, vocabulary)},
        }
    return {"model": model} | ({"lm_head": target["lm_head"]} if "lm_head" in target else {})


@partial(jax.jit, static_argnums=0, static_argnames="method")
def drawn(head: nn.Module, key: jax.Array, *inputs: Any, method: str = "__call__") -> Params:
    """Return random parameters of a head's module, for the inputs of a method.

    method: By default the training pass.
    """
    return dict(head.init(key, *inputs, method=method)["params"])


def in_float32(params: Params) -> Params:
    """Return a copy of parameters in float32."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), params)
