"""Compute the regret of weightings: their losses, less those of the best fixed weights in
hindsight.

Target and views read the target's own answers once, and each weighting is replayed on the recorded
distributions. At temperature 0 speculation writes exactly these answers, so the blocks of a replay
equal those of the decode loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from eval.lib.drafts.comparison import prompts_of
from eval.lib.drafts.config import EvalConfig, Variant
from eval.lib.drafts.loading import Loaded
from eval.lib.output.report import progress
from eval.lib.output.tables import Record
from eval.lib.standins.replay import RecordedTarget
from jaxspec.cluster import map_over_processes
from jaxspec.decoding.drafting.mixtures import costs, mixture_costs, simplex_grid
from jaxspec.decoding.drafting.rules import parse_weighting
from jaxspec.decoding.drafting.weighting import Weighting
from jaxspec.decoding.sources.draft_model import DraftModel
from jaxspec.decoding.speculative import Speculator
from jaxspec.decoding.state import step_keys
from jaxspec.engine.engine import Engine, Request
from jaxspec.errors import InputError
from jaxspec.prompts.views import parse_weights
from jaxspec.sampling import Sampling, fit_vocabulary, tempered
from jaxspec.typing import Array, Bool, Float, Int, Params

LOSSES = ("kl", "rejections", "misses")
"""Losses a token: KL(p || q_w) in nats; 1 - sum_v min(p, q_w), the chance that a sampled draft is
rejected; and 1 if a greedy draft is rejected. The first two are at temperature 1."""

HINDSIGHT_STEPS = {2: 50, 3: 20, 4: 10}
"""Steps of the grid of fixed weights, by the number of views; 10 for more views."""


class Recording(struct.PyTreeNode):
    """Record answers of B requests, teacher-forced; place t is the prediction after t new
    tokens.
    """

    p: Float[Array, "B T V"]
    view_probs: Float[Array, "R B T V"]
    length: Int[Array, " B"]
    """New tokens of each answer."""

    @property
    def counted(self) -> Bool[Array, "B T"]:
        """Return which places belong to blocks; place 0 is prefill's."""
        places = jnp.arange(self.p.shape[1])
        return (places > 0) & (places < self.length[:, None])


def measure_regret(config: EvalConfig, models: Loaded) -> tuple[list[Record], list[Record]]:
    """Measure losses, regrets and tokens per pass of the rows that mix views, at temperature 0.

    Returns (rows, records): a row pools one set, turn and row of the table; a record is one answer.
    """
    if isinstance(models.target, RecordedTarget):
        raise InputError(f"regret: {config.target} has no probabilities; give a model as --target")
    mixing = [
        row
        for row in config.rows
        if row.draft_views == row.views and len(row.views) > 1 and row.tree is None
    ]
    if not mixing:
        raise InputError("regret: no row mixes views in a chain; choose another preset or --rows")
    plain = Engine(models.target, None, config.plain())
    rows: list[Record] = []
    records: list[Record] = []
    parts = list(config.parts())
    with progress(len(parts), "regret", "set") as bar:
        for where in parts:
            with config.named(where["dataset"]):
                prompts = prompts_of(config, plain, where)
                requests = [Request(prompt, config.max_new_tokens) for prompt in prompts]
                answers = [result.tokens for result in plain.generate(requests)]
            answered = list(zip(requests, answers, strict=True))
            for views in dict.fromkeys(row.views for row in mixing):
                same_views = [row for row in mixing if row.views == views]
                variant = Variant("views", views)
                engine = models.engine(variant, config.engine(variant))
                replays = map_over_processes(
                    partial(_replayed, config, engine, same_views), answered
                )
                for row, sums in zip(same_views, zip(*replays, strict=True), strict=True):
                    rule = str(parse_weighting(row.weighting))
                    fields = where | {"row": row.name, "views": list(views)}
                    fields |= {"weighting": rule, "gamma": config.gamma}
                    pooled = {name: sum((each[name] for each in sums), 0.0) for name in sums[0]}
                    rows.append(fields | {"samples": len(prompts)} | _per_token(pooled))
                    records += [
                        fields | {"sample": prompt.sample} | _per_token(sample_sums)
                        for prompt, sample_sums in zip(prompts, sums, strict=True)
                    ]
            bar.update()
    return rows, records


def _replayed(
    config: EvalConfig,
    engine: Engine,
    rows: Sequence[Variant],
    answered: Sequence[tuple[Request, Sequence[int]]],
) -> list[list[dict[str, float]]]:
    """Return sums for each answer and row, of its weighting and the best fixed weights."""
    sums_of = []
    for start in range(0, len(answered), config.batch_size):
        requests, answers = zip(*answered[start : start + config.batch_size])
        recording = record(engine, requests, answers)
        best = {f"best_{name}": values for name, values in best_fixed(recording).items()}
        sums = [best | replay_row(row, config.gamma, recording) for row in rows]
        sums = jax.device_get(sums)
        sums_of += [
            [{k: float(v[i]) for k, v in part.items()} for part in sums]
            for i in range(len(answers))
        ]
    return sums_of


def replay_row(row: Variant, gamma: int, recording: Recording) -> dict[str, Float[Array, " B"]]:
    """Return what `replay` does of a row's rule, from the row's weights on."""
    rule, shares = parse_weighting(row.weighting), parse_weights(row.weights, len(row.views))
    first = rule.first(shares, recording.p.shape[-1])
    return replay(rule, gamma, recording, jnp.asarray(first))


def _per_token(sums: dict[str, float]) -> Record:
    tokens = max(sums["tokens"], 1)
    return (
        {"tokens": int(sums["tokens"]), "num_spec_steps": int(sums["blocks"])}
        | {"tokens_per_pass": sums["tokens"] / sums["blocks"] if sums["blocks"] else None}
        | {loss: sums[loss] / tokens for loss in LOSSES}
        | {f"regret_{loss}": (sums[loss] - sums[f"best_{loss}"]) / tokens for loss in LOSSES}
    )


def record(
    engine: Engine, requests: Sequence[Request], answers: Sequence[Sequence[int]]
) -> Recording:
    """Run one pass of target and draft over each answer, on the caches after prefill."""
    program = engine.assembly.program
    assert isinstance(program, Speculator)
    state = engine.prefill(requests)
    tokens = np.zeros(state.tokens.shape, np.int32)
    length = np.zeros(len(tokens), np.int32)
    for row, answer in enumerate(answers):
        tokens[row, : len(answer)] = answer
        length[row] = len(answer)
    return _record(program, engine.assembly.params, state, jnp.asarray(tokens), jnp.asarray(length))


@partial(jax.jit, static_argnums=0)
def _record(
    program: Speculator, params: Params, state: Any, tokens: Array, length: Array
) -> Recording:
    """Read recorded answers by the target and all views, in one pass each."""
    (draft,), (cache,) = program.sources, state.drafter
    assert isinstance(draft, DraftModel)
    batch, new = tokens.shape
    ones = jnp.ones(batch)
    logits, _ = program.target.extend(params["target"], tokens[:, :-1], state.target)
    inputs = jnp.tile(tokens[:, :-1], (draft.width, 1))
    inputs = jnp.concatenate([cache.last[:, None], inputs], axis=1)
    view_logits, _ = draft.model.extend(params[draft.name], inputs, cache.cache)
    view_logits = fit_vocabulary(view_logits, program.drafter.vocabulary)
    view_logits = view_logits.reshape(draft.width, batch, new, -1)

    def soft(logits: Float[Array, "... B T V"]) -> Float[Array, "... B T V"]:
        return jnp.swapaxes(tempered(jnp.swapaxes(logits, -3, -2), ones), -3, -2)

    return Recording(soft(jnp.pad(logits, ((0, 0), (1, 0), (0, 0)))), soft(view_logits), length)


@partial(jax.jit, static_argnums=(0, 1))
def replay(
    rule: Weighting, gamma: int, recording: Recording, first: Float[Array, " R"]
) -> dict[str, Float[Array, " B"]]:
    """Return each answer's losses, tokens and blocks at temperature 0 with this rule.

    first: Weights of the first block.
    """
    p, q, length = recording.p, recording.view_probs, recording.length
    batch, places, _ = p.shape
    keys = jax.vmap(partial(jax.random.key, impl="threefry2x32"))(jnp.arange(batch))
    # `step_keys` reads only the keys.
    unread = jnp.zeros(batch)
    options = Sampling(unread, unread, unread, unread, unread, jax.random.key_data(keys))
    rows = jnp.arange(batch)[:, None]

    def block(carry: tuple[Array, Any, Array, Array]) -> tuple[Array, Any, Array, Array]:
        """Draft the next block of each row by the rule's weights, and show it what was verified."""
        count, state, used, blocks = carry
        weights = rule.weights(state, step_keys(options, count, 0))
        at = count[:, None] + jnp.arange(gamma + 1)
        here = jnp.minimum(at, places - 1)
        p_here, q_here = p[rows, here], q[:, rows, here]
        mixed = jnp.einsum("RBJV,BR->BJV", q_here, weights)
        hit = jnp.argmax(mixed, -1) == jnp.argmax(p_here, -1)
        accepted = jnp.cumprod(hit[:, :gamma], axis=1).sum(1)
        live = count < length
        valid = (jnp.arange(gamma) <= accepted[:, None]) & live[:, None]
        state = rule.observe(state, weights, p_here[:, :gamma], q_here[:, :, :gamma], valid)
        end = jnp.where(live, jnp.minimum(count + accepted + 1, length), count)
        used = used.at[rows, jnp.where(at < end[:, None], at, places)].set(
            weights[:, None], mode="drop"
        )
        return end, state, used, blocks + live

    start = (
        jnp.minimum(1, length),
        rule.init(jnp.tile(first, (batch, 1))),
        jnp.tile(first, (batch, places, 1)),
        jnp.zeros(batch),
    )
    _, _, used, blocks = jax.lax.while_loop(lambda carry: jnp.any(carry[0] < length), block, start)
    mixed = jnp.einsum("RBTV,BTR->BTV", q, used, precision="highest")
    losses = costs(("kl", "tvd", "misses"), p, mixed)[..., None]
    return _sums(losses, recording) | {
        "tokens": jnp.maximum(length - 1, 0).astype(jnp.float32),
        "blocks": blocks,
    }


@jax.jit
def best_fixed(recording: Recording) -> dict[str, Float[Array, " B"]]:
    """Return each answer's least loss with fixed weights, for each kind of loss."""
    views = len(recording.view_probs)
    grid = jnp.asarray(simplex_grid(views, HINDSIGHT_STEPS.get(views, 10)))
    losses = mixture_costs(("kl", "tvd", "misses"), recording.p, recording.view_probs, grid)
    return _sums(losses, recording)


def _sums(
    losses: Float[Array, "B T measures points"], recording: Recording
) -> dict[str, Float[Array, " B"]]:
    sums = jnp.where(recording.counted[..., None, None], losses, 0.0).sum(1).min(-1)
    return {"kl": sums[:, 0], "rejections": sums[:, 1] / 2, "misses": sums[:, 2]}
