"""Time single passes inside compiled loops, for predictions, and the device's roofline.

A pass that the host calls by itself also pays for its dispatch and, since its inputs must survive,
for a copy of the cache. A decode loop pays neither, so each pass is timed in a loop of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from eval.lib.output.intervals import interval
from jaxspec.cache import KVCache
from jaxspec.config import TextConfig
from jaxspec.decoding.drafting.drafter import Drafter
from jaxspec.decoding.sources.source import Committed, Verified
from jaxspec.decoding.speculative import Speculator
from jaxspec.decoding.state import DecodeState, place
from jaxspec.engine.compile_cache import Held, executable
from jaxspec.engine.engine import Engine, Request, Result
from jaxspec.models.families import abstract_params
from jaxspec.sampling import Sampling, argmax
from jaxspec.sharding import mesh_of
from jaxspec.typing import Array, Int, Params

Item = TypeVar("Item")

CALL_MS = 40.0
"""Milliseconds of one timed call: long compared with its dispatch, which takes up to 1 ms."""


def time_loops(
    calls: Mapping[str, Callable[[int], Any]], repeats: int, name: str | None = None
) -> dict[str, float]:
    """Return the least milliseconds of each call; calls are interleaved, to share the machine.

    Other processes can only add time, so the least is the best estimate; on an idle machine it is
    close to the median.

    Args:
      name: Name of the progress bar, whose first round compiles; None shows no bar.
    """
    counts = {}
    times: dict[str, list[float]] = {key: [] for key in calls}
    with tqdm(
        total=(1 + repeats) * len(calls), desc=name, unit="call", leave=False, disable=name is None
    ) as bar:
        for key, call in calls.items():
            # Compile. A call may return another kind of state than it took, so call twice.
            for _ in range(2):
                jax.block_until_ready(call(1))
            counts[key] = int(np.clip(CALL_MS / _milliseconds(call, 2), 1, 1000))
            bar.update()
        for turn in range(repeats):
            for key in there_and_back(calls, turn):
                times[key].append(_milliseconds(calls[key], counts[key]))
                bar.update()
    return {key: min(values) for key, values in times.items()}


def _milliseconds(call: Callable[[int], Any], count: int) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call(count))
    return 1e3 * (time.perf_counter() - start) / count


class Passes:
    """Run passes over one cache, which each call hands to the next.

    Args:
      extend: (params, tokens [B, T], cache) -> logits [B, T, V], cache.
    """

    def __init__(
        self,
        extend: Callable[..., tuple[Array, KVCache]],
        params: Params,
        cache: KVCache,
        batch: int,
    ) -> None:
        self.extend, self.params, self.state, self.batch = extend, params, cache, batch

    def over(self, tokens: int) -> Callable[[int], Any]:
        """Return `call(n)`, which runs n passes over `tokens` tokens, each from the same length."""
        tokens_in = jnp.ones((self.batch, tokens), jnp.int32)
        program = Held(self.extend, mesh_of(self.params), self.params)

        def call(times: int) -> Array:
            args = tokens_in, self.state, jnp.int32(times)
            out, self.state = executable(_run_passes, program, *args)(self.params, *args)
            return out

        return call


@partial(jax.jit, static_argnames=("extend",), donate_argnames=("cache",))
def _run_passes(
    extend: Callable[..., Any],
    params: Params,
    tokens: Int[Array, "B T"],
    cache: KVCache,
    times: Array,
) -> tuple[Int[Array, "B T"], KVCache]:
    """Run `times` passes, each over the tokens that the one before it scored likeliest."""

    def step(_: int, carry: tuple[Array, KVCache]) -> tuple[Array, KVCache]:
        logits, after = extend(params, *carry)
        return argmax(logits), rewound(after, cache)

    tokens, cache = jax.lax.fori_loop(0, times, step, (tokens, cache))
    return tokens, place(cache)


def drafting(
    drafter: Drafter, params: Params, state: DecodeState, weights: Array, target: Passes
) -> Callable[[int], Any]:
    """Return `call(n)`, which drafts n blocks from one state, greedily: what a block does.

    target: Passes of the target, which hold its cache.
    """
    program, states = Held(drafter, mesh_of(params["target"]), params), [state.drafter]
    options = greedy_options(len(state.count), state.tokens.shape[1])

    def call(times: int) -> Array:
        cache = target.state
        args = state.tokens, states[0], state.count, cache, weights, options, jnp.int32(times)
        out, states[0] = executable(_run_drafts, program, *args)(params, *args)
        return out

    return call


@partial(jax.jit, static_argnames=("drafter",), donate_argnames=("states",))
def _run_drafts(
    drafter: Drafter,
    params: Params,
    tokens: Int[Array, "B C"],
    states: Any,
    count: Int[Array, " B"],
    target: KVCache,
    weights: Array,
    options: Sampling,
    times: Array,
) -> tuple[Int[Array, "B C"], Any]:
    """Draft `times` blocks, each behind the first token of the one before it."""

    def step(_: int, carry: tuple[Array, Any]) -> tuple[Array, Any]:
        tokens, before = carry
        committed = Committed(params, tokens, count, target, drafter.reads)
        draft, scratch = drafter.draft(committed, before, weights, options)
        after = drafter.commit(before, scratch, Verified(jnp.zeros_like(count)))
        return tokens.at[:, 0].set(draft.tokens[:, 0]), rewound(after, states)

    tokens, states = jax.lax.fori_loop(0, times, step, (tokens, states))
    return tokens, place(states)


def rewound(after: Any, before: Any) -> Any:
    """Return `after` with the lengths and other integers of `before`.

    The floats stay: entries written past a row's length are never read.
    """
    return jax.tree.map(
        lambda new, old: new if jnp.issubdtype(old.dtype, jnp.floating) else old, after, before
    )


def greedy_options(batch: int, new: int) -> Sampling:
    """Return the options of greedy rows that write exactly `new` tokens."""
    whole, real = jnp.zeros(batch, jnp.int32), jnp.zeros(batch)
    keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), batch)
    data = jax.random.key_data(keys)
    return Sampling(
        real, whole, real + 1, whole + new, jnp.full(1, -1, jnp.int32), data, greedy=True
    )


class Rates(NamedTuple):
    """Hold tokens a second, [program, run]."""

    loop: np.ndarray
    """Rates of the decode loop; the prefill token is not counted."""
    call: np.ndarray
    """Rates of whole calls: prefill of target and draft, and the loop."""


def interleaved(
    programs: Sequence[Any], requests: Sequence[Request], repeats: int, bar: tqdm
) -> tuple[list[list[Result]], Rates]:
    """Run engines on the same requests by turns, so that other load slows all of them equally.

    Each round goes the other way than the one before, see `there_and_back`.

    Args:
      bar: Progress bar, which counts runs.

    Returns the answers of each engine in the last run, and its rates in every run.
    """
    answers, rates = [], Rates(*np.zeros((2, len(programs), repeats)))
    for run in range(repeats):
        answers = [list[Result]()] * len(programs)
        for i in there_and_back(range(len(programs)), run):
            answers[i] = done = programs[i].generate(requests)
            decode, prefill = (
                sum(getattr(r, field) / r.batch for r in done) / 1e3
                for field in ("decode_ms", "prefill_ms")
            )
            rates.loop[i, run] = sum(r.stats.emitted for r in done) / max(decode, 1e-12)
            rates.call[i, run] = sum(len(r.tokens) for r in done) / max(prefill + decode, 1e-12)
            bar.update()
    return answers, rates


def there_and_back(items: Iterable[Item], turn: int) -> list[Item]:
    """Return the items, and in every second round backwards.

    If the machine becomes slower while A, B, B, A run, then both are slowed alike.
    """
    return list(items)[:: -1 if turn % 2 else 1]


def speed_up(rates: np.ndarray, base: np.ndarray) -> float | None:
    """Return the median speed-up over `base`, run by run.

    It is None where every answer of `base` ends at its first token, which prefill writes.
    """
    return float(np.median(rates / base)) if base.all() else None


def call_interval(base: Sequence[Result], answers: Sequence[Result]) -> tuple[float, float]:
    """Return the 95 % interval, over samples, of the speed-up of whole calls in one run.

    base: Standard decoding's answers; its time is counted for as many tokens as the other wrote.
    """
    pairs = list(zip(base, answers, strict=True))
    tokens = np.array([[len(answer.tokens) for answer in pair] for pair in pairs])
    ms = np.array([[answer.prefill_ms + answer.decode_ms for answer in pair] for pair in pairs])
    return interval(ms * tokens[:, 1:] / tokens)


@dataclass(frozen=True)
class PassTimes:
    """Hold milliseconds at the batch and cache size of the given requests."""

    draft_ms: float
    """T_q: drafting a block, mixing and drawing included, over gamma. A one-pass head drafts its
    gamma tokens in one pass, and an EAGLE-3 head first reads the last block again."""
    target_ms: float
    """T_p: one target pass over one token."""
    verify_ms: float
    """T_p(gamma+1): one target pass over a block."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> PassTimes | None:
        """Return the times that a row of results holds."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: row[name] for name in names}) if row.keys() >= set(names) else None


def time_passes(engine: Engine, requests: list[Request], repeats: int = 20) -> PassTimes:
    """Time draft and target passes on the state after the requests' prefill, in turns."""
    program = engine.assembly.program
    assert isinstance(program, Speculator)
    state = engine.prefill(requests)
    params, rows = engine.assembly.params, len(state.count)
    cache = jax.tree.map(jnp.copy, state.target)  # passes donate theirs, and heads read the state's
    target = Passes(program.target.extend, params["target"], cache, rows)
    drafter = program.drafter
    weights = jnp.full((rows, drafter.width), 1 / drafter.width)
    calls = {
        "draft_ms": drafting(drafter, params, state, weights, target),
        "target_ms": target.over(1),
        "verify_ms": target.over(drafter.nodes + 1),
    }
    times = time_loops(calls, repeats)
    return PassTimes(**times | {"draft_ms": times["draft_ms"] / drafter.gamma})


def predicted_speedup(
    tokens_per_pass: float,
    gamma: int,
    draft_ms: float,
    target_ms: float,
    verify_ms: float | None = None,
) -> float:
    """Return Eq. (1) of TABED, (2) of IbED: tokens per pass over its cost in target passes.

    Args:
      draft_ms: T_q, one draft pass.
      target_ms: T_p, one target pass over one token.
      verify_ms: T_p(gamma+1), the pass over a block; None takes T_p, as the papers do.
    """
    verify_ms = target_ms if verify_ms is None else verify_ms
    return tokens_per_pass / (gamma * draft_ms / target_ms + verify_ms / target_ms)


def time_members(
    engine: Engine, request: Request, widths: Collection[int]
) -> dict[int, list[float]]:
    """Time each model's passes over these numbers of tokens after the prompt, in milliseconds."""
    state = engine.prefill([request])
    members = [
        Passes(form.model.model.extend, form.model.params, cache, len(cache.length))
        for form, cache in zip(engine.assembly.forms, state.target, strict=True)
    ]
    calls = {
        f"{width} {m}": member.over(width) for width in widths for m, member in enumerate(members)
    }
    ms = time_loops(calls, repeats=10)
    return {width: [ms[f"{width} {m}"] for m in range(len(members))] for width in widths}


@dataclass(frozen=True)
class Roofline:
    """Hold the rates of three probes: the most that programs reach on this device at this hour."""

    copy_gbps: float
    """Bytes read and written a second by x + 1 over an array too large for caches, in 1e9."""
    read_gbps: float
    """Bytes read a second by a vector times a matrix."""
    matmul_tflops: float
    """Floating-point operations a second by a product of square matrices, in 1e12."""


def measure_roofline(dtype: jnp.dtype, megabytes: int, side: int) -> Roofline:
    """Run the probes, in turns.

    Args:
      megabytes: Size of the copied array and of the matrix that is read.
      side: Side of the square matrices that are multiplied.
    """
    width = 1024
    depth = megabytes * 2**20 // (width * dtype.itemsize)
    matrix, square = jnp.ones((depth, width), dtype) / depth, jnp.ones((side, side), dtype) / side
    # What each probe does again and again, to which array, and with which other one.
    probes = {
        "copy": (lambda x, _: x + 1, jnp.ones((depth, width), dtype), square[0]),
        "read": (lambda x, y: x + (x @ y).max(), jnp.ones((1, depth), dtype), matrix),
        "matmul": (lambda x, y: x @ y, square + 0, square),
    }
    state = {name: begin for name, (_, begin, _) in probes.items()}

    def call(name: str, times: int) -> Array:
        step, _, other = probes[name]
        state[name] = _run_probe(step, state[name], other, times)
        return state[name]

    ms = time_loops({name: partial(call, name) for name in probes}, 20, "roofline")
    size = depth * width * dtype.itemsize
    return Roofline(
        2 * size / ms["copy"] / 1e6, size / ms["read"] / 1e6, 2 * side**3 / ms["matmul"] / 1e9
    )


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _run_probe(step: Callable[[Array, Array], Array], x: Array, other: Array, times: int) -> Array:
    return jax.lax.fori_loop(0, times, lambda _, x: step(x, other), x)


@dataclass(frozen=True)
class Work:
    """Count the work of one pass over T new tokens a row."""

    bytes: float
    """Bytes of the weights and of all cache slots, each read once."""
    flops: float


def pass_work(config: TextConfig, itemsize: int, batch: int, tokens: int, slots: int) -> Work:
    """Return the work of a decoder's pass: B rows, T tokens each, over S slots.

    Embeddings that are only looked up count nothing.
    """
    leaves = jax.tree_util.tree_leaves_with_path(abstract_params(config))
    weights = sum(
        leaf.size
        for path, leaf in leaves
        if config.tie_word_embeddings or path[-1].key != "embedding"
    )
    layers, width = config.num_hidden_layers, config.head_dim
    cache = 2 * layers * batch * slots * config.num_key_value_heads * width
    attention = 4 * layers * batch * tokens * slots * config.num_attention_heads * width
    return Work(itemsize * (weights + cache), 2 * weights * batch * tokens + attention)
