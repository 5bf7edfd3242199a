"""How likely an answer is to the models that an engine runs, in one pass over the prompt and the answer."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jaxspec.decoding.collaborative import Member, Program
from jaxspec.decoding.speculative import Autoregressive, Speculator
from jaxspec.decoding.state import PromptBatch, Prompts
from jaxspec.typing import Array, Float, Int, Params


@partial(jax.jit, static_argnames=("program",))
def run_logprobs(
    program: Program, params: Params, batch: PromptBatch, answer: Int[Array, "1 T"], starts: Int[Array, " forms"]
) -> Float[Array, " T"]:
    """Return the log-probabilities of one row's answer, which each form's prompt ends with.

    Args:
      starts: the place in each form of the token before the answer.
    """
    combination = params.get("combination")
    if isinstance(program, Autoregressive | Speculator):
        members, weights = (Member(program.target),), (params["target"],)
    else:
        members, weights = program.members, params["models"]
    prompts = (Prompts(batch.target, batch.images), *batch.others)
    logits = jnp.stack([
        _logits(member, own, prompt, start, answer.shape[1])
        for member, own, prompt, start in zip(members, weights, prompts, starts[: len(members)], strict=True)
    ])  # fmt: skip
    if combination is None:
        logs = jax.nn.log_softmax(logits[0])
    else:
        logs = jnp.log(combination.soft(logits, jnp.ones(answer.shape[1])))
    return jnp.take_along_axis(logs, answer[0][:, None], axis=1)[:, 0]


def _logits(
    member: Member, params: Params, prompt: Prompts, start: Int[Array, ""], count: int
) -> Float[Array, "T V"]:
    """Return what one model says at `start` and the places behind it."""
    model, rows = member.model, prompt.rows
    features = None if prompt.images is None else model.encode(params, prompt.images)
    embeds = model.embed(params, rows, features, member.pool)
    hidden, _ = model.read(params, embeds, rows, rows.tokens.shape[1])
    return model.logits(params, jax.lax.dynamic_slice_in_dim(hidden[0], start, count))
