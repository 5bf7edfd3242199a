"""What a weighting loses against the best fixed weights in hindsight, on recorded greedy answers of the target.

The target's and the views' distributions are recorded once, teacher-forced on the target's own answers. At
temperature 0 speculation writes just these answers, so every rule can be replayed on them exactly, block by block:
the same blocks, the same verified places and the same weights as in the decode loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from tqdm import tqdm

from jaxspec.decoding.engine import Engine, LoadedModel, Request
from jaxspec.decoding.mixtures import mixture_costs, simplex_grid
from jaxspec.decoding.replay import RecordedTarget
from jaxspec.decoding.speculative import Speculator
from jaxspec.decoding.state import step_keys
from jaxspec.decoding.views import Captioner
from jaxspec.decoding.weighting import Weighting, parse_weighting
from jaxspec.errors import InputError
from jaxspec.evaluation.block_efficiency import each_turn
from jaxspec.evaluation.config import EvalConfig, Row
from jaxspec.sampling import Sampling, fit_vocabulary, tempered
from jaxspec.typing import Array, Bool, Float, Int, Params

Record = dict[str, Any]

LOSSES = ("kl", "rejections", "misses")
"""Per token: KL(p || q_w) in nats; 1 - sum_v min(p, q_w), the chance that a sampled draft is rejected; and whether
a greedy draft is. The first two at temperature 1."""

HINDSIGHT_STEPS = {2: 50, 3: 20, 4: 10}
"""Grid of the best fixed weights, by the number of views; 10 for more."""


class Recording(struct.PyTreeNode):
    """Answers of B requests, teacher-forced; place t is what followed t new tokens."""

    p: Float[Array, "B T V"]
    view_probs: Float[Array, "R B T V"]
    length: Int[Array, " B"]
    """New tokens of each answer."""


def measure_regret(
    config: EvalConfig,
    target: LoadedModel,
    draft: LoadedModel,
    captioner: Captioner | None,
    views: Sequence[str],
    rules: Sequence[str],
) -> tuple[list[Record], list[Record]]:
    """Losses and regrets a token, and block efficiency at temperature 0: (rows, records).

    A row pools one set, turn and rule; a record is one answer of it.
    """
    if isinstance(target, RecordedTarget):
        raise InputError(f"regret: needs the target's probabilities, and {config.target} has none; give a model")
    if "kv" in views:
        raise InputError("regret: compares views of the prompt, and kv is none; leave it out")
    parsed = {text: parse_weighting(text) for text in rules}
    engine = Engine(target, draft, config.engine(Row("views", tuple(views))), captioner)
    plain = Engine(target, None, engine.config)
    rows: list[Record] = []
    records: list[Record] = []
    bar = tqdm(total=len(config.sets) * len(config.turns), unit="set", desc="regret", delay=1)
    for dataset in config.sets:
        for turn, questions in each_turn(config, plain, dataset):
            requests = [Request(q.prompt, config.max_new_tokens) for q in questions]
            found: dict[str, list[dict[str, np.ndarray]]] = {text: [] for text in rules}
            place = {"dataset": dataset, "turn": turn, "views": list(views), "gamma": config.gamma}
            for start in range(0, len(requests), config.batch_size):
                some = requests[start : start + config.batch_size]
                answers = [result.tokens for result in plain.generate(some)]
                recording = record(engine, some, answers)
                best = {loss: np.asarray(x) for loss, x in best_fixed(recording).items()}
                for text, rule in parsed.items():
                    losses = {k: np.asarray(v) for k, v in replay(rule, config.gamma, recording).items()}
                    found[text].append(
                        {k: v[: len(some)] for k, v in losses.items()}
                        | {f"best_{k}": v[: len(some)] for k, v in best.items()}
                    )
            for text, rule in parsed.items():
                each = {k: np.concatenate([sums[k] for sums in found[text]]) for k in found[text][0]}
                here = place | {"weighting": str(rule)}
                pooled = _per_token({k: float(v.sum()) for k, v in each.items()})
                rows.append(here | {"samples": len(questions)} | pooled)
                records += [
                    here | {"sample": question.sample} | _per_token({k: float(v[i]) for k, v in each.items()})
                    for i, question in enumerate(questions)
                ]
            bar.update()
    bar.close()
    return rows, records


def _per_token(sums: dict[str, float]) -> Record:
    tokens = max(sums["tokens"], 1)
    return (
        {"tokens": int(sums["tokens"]), "num_spec_steps": int(sums["blocks"])}
        | {"block_efficiency": sums["tokens"] / sums["blocks"] if sums["blocks"] else None}
        | {loss: sums[loss] / tokens for loss in LOSSES}
        | {f"regret_{loss}": (sums[loss] - sums[f"best_{loss}"]) / tokens for loss in LOSSES}
    )


def record(engine: Engine, requests: Sequence[Request], answers: Sequence[Sequence[int]]) -> Recording:
    """One pass of target and draft over each answer, on the caches that prefill left."""
    program = engine.program
    assert isinstance(program, Speculator)
    state = engine.prefill(requests)
    new = state.tokens.shape[1]
    tokens = np.zeros((state.count.shape[0], new), np.int32)
    for row, answer in zip(tokens, answers):
        row[: len(answer)] = answer
    length = np.zeros(len(tokens), np.int32)
    length[: len(answers)] = [len(answer) for answer in answers]
    return _record(program, engine.params, state, jnp.asarray(tokens), jnp.asarray(length))


@partial(jax.jit, static_argnums=0)
def _record(program: Speculator, params: Params, state: Any, tokens: Array, length: Array) -> Recording:
    drafter, views = program.drafter, len(program.drafter.views)
    batch, new = tokens.shape
    ones = jnp.ones(batch)
    logits, _ = program.target.extend(params["target"], tokens[:, :-1], state.target)
    fed = jnp.concatenate([state.drafter.last[:, None], jnp.tile(tokens[:, :-1], (views, 1))], axis=1)
    view_logits, _ = drafter.model.extend(params["drafter"], fed, state.drafter.cache)
    view_logits = fit_vocabulary(view_logits, drafter.vocabulary).reshape(views, batch, new, -1)

    def soft(logits: Float[Array, "... B T V"]) -> Float[Array, "... B T V"]:
        return jnp.swapaxes(tempered(jnp.swapaxes(logits, -3, -2), ones), -3, -2)

    # Place 0 is prefill's, and in no block.
    return Recording(soft(jnp.pad(logits, ((0, 0), (1, 0), (0, 0)))), soft(view_logits), length)


@partial(jax.jit, static_argnums=(0, 1))
def replay(rule: Weighting, gamma: int, recording: Recording) -> dict[str, Float[Array, " B"]]:
    """Sums over each answer of the losses, tokens and blocks that decoding at temperature 0 has with this rule."""
    p, q, length = recording.p, recording.view_probs, recording.length
    views, (batch, places, _) = len(q), p.shape
    real = jnp.zeros(batch)
    keys = jax.vmap(partial(jax.random.key, impl="threefry2x32"))(jnp.arange(batch))
    options = Sampling(real, real, real, real, real, jax.random.key_data(keys))  # for `step_keys` alone
    rows = jnp.arange(batch)[:, None]

    def block(carry: tuple[Array, Any, Array, Array]) -> tuple[Array, Any, Array, Array]:
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
        used = used.at[rows, jnp.where(at < end[:, None], at, places)].set(weights[:, None], mode="drop")
        return end, state, used, blocks + live

    start = (
        jnp.minimum(1, length),
        rule.init(jnp.full((batch, views), 1 / views)),
        jnp.full((batch, places, views), 1 / views),
        jnp.zeros(batch),
    )
    _, _, used, blocks = jax.lax.while_loop(lambda carry: jnp.any(carry[0] < length), block, start)
    mixed = jnp.einsum("RBTV,BTR->BTV", q, used, precision="highest")
    return _losses(p, mixed[None], jnp.ones((1, 1)), _counted(recording)) | {
        "tokens": jnp.maximum(length - 1, 0).astype(jnp.float32),
        "blocks": blocks,
    }


@jax.jit
def best_fixed(recording: Recording) -> dict[str, Float[Array, " B"]]:
    """Each answer's least summed loss with one and the same weights for all its tokens, loss by loss."""
    views = len(recording.view_probs)
    grid = jnp.asarray(simplex_grid(views, HINDSIGHT_STEPS.get(views, 10)))
    return _losses(recording.p, recording.view_probs, grid, _counted(recording))


def _counted(recording: Recording) -> Bool[Array, "B T"]:
    place = jnp.arange(recording.p.shape[1])
    return (place > 0) & (place < recording.length[:, None])


def _losses(p: Array, q: Array, candidates: Array, counted: Array) -> dict[str, Array]:
    costs = mixture_costs(("kl", "tvd", "misses"), p, q, candidates)
    sums = jnp.where(counted[..., None, None], costs, 0.0).sum(1).min(-1)
    return {"kl": sums[:, 0], "rejections": sums[:, 1] / 2, "misses": sums[:, 2]}
