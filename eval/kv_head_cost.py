"""What Target-Draft attention costs, as ratios of one run: in training, and a drafted token.

    python -m eval.kv_head_cost --lengths 256 512 1024

Training: one step (loss and gradient) of a head with the mini target's widths over one row of S text tokens, a block
at every token. Against it the naive way, in which every block has a copy of the keys and values that it reads, and
plain causal training of the same head, one token a place. Decoding: the shipped head's drafted token, and its
projector and packing at prefill, against passes of its target.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from configs.eval.kv_head import config as preset
from configs.models.mini import TARGET
from jaxspec.command import run_script
from jaxspec.config import KVHeadConfig
from jaxspec.data.picturebook import test_set
from jaxspec.decoding.engine import Engine, Request
from jaxspec.decoding.speculative import Speculator
from jaxspec.errors import InputError, check_counts
from jaxspec.evaluation.command import load_models
from jaxspec.evaluation.exactness import whole_row
from jaxspec.evaluation.report import begin, describe_run, finish, markdown, show, write_results
from jaxspec.evaluation.timing import time_passes
from jaxspec.models.kv_head import HeadRows, KVHead, head_rows, init_head, pack
from jaxspec.models.layers import apply
from jaxspec.runtime import setup_runtime
from jaxspec.training.losses import draft_loss
from jaxspec.typing import Array, Params


class Case(NamedTuple):
    """A way to lay out one training step: inputs of `KVHead`."""

    embeds: Array
    anchors: Array
    k: Array
    v: Array
    text: Array


LAYOUTS = ("anchored blocks", "naive", "causal")
MOST_BYTES = 2 << 30
"""Steps that take more are not run."""


def layouts(length: int, gamma: int, config: KVHeadConfig) -> dict[str, Case]:
    """The same row of `length` tokens, laid out each way."""
    text, rng = config.text_config, np.random.default_rng(0)

    def draw(*shape: int) -> Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    k, v = (draw(1, text.num_key_value_heads, length, text.head_dim) for _ in range(2))
    anchors = jnp.arange(1, length - gamma)[None]
    embeds = draw(1, anchors.shape[1], gamma, text.hidden_size)
    order = jnp.arange(length)[None]
    copies = anchors.shape[1]
    k_copies, v_copies = (jnp.tile(leaf, (copies, 1, 1, 1)) for leaf in (k, v))
    cases = (
        Case(embeds, anchors, k, v, order),
        # A copy of keys and values for each block, as if it were a row of its own.
        Case(embeds[0][:, None], anchors[0][:, None], k_copies, v_copies, jnp.tile(order, (copies, 1))),
        # One block that is the whole row and reads nothing of the target.
        Case(draw(1, 1, length, text.hidden_size), jnp.zeros((1, 1), jnp.int32), k, v, order),
    )
    return dict(zip(LAYOUTS, cases, strict=True))


def training_step(config: KVHeadConfig) -> Callable[..., Any]:
    """Loss and gradient, jitted; the output head and its loss are those of training."""

    def loss(params: Params, output: Array, case: Case) -> Array:
        embeds, anchors, k, v, text = case
        places = anchors[..., None] + jnp.arange(embeds.shape[2])
        rows = HeadRows(text, jnp.zeros((len(text), 0, config.image_tokens), jnp.int32))
        out: Any = jax.checkpoint(
            lambda own: apply(KVHead(config), own, embeds, anchors, places, k, v, rows)
        )(params)
        ones = jnp.ones(places.shape, jnp.int32)
        if embeds.shape[2] > config.gamma:  # causal: the output head runs over J-th parts too
            cut = embeds.shape[2] // config.gamma * config.gamma
            out, ones = (x[:, 0, :cut].reshape(1, -1, config.gamma, *x.shape[3:]) for x in (out, ones))
        return draft_loss(lambda x: x @ output, out, jnp.zeros_like(out), ones, ones, True, 0.8)[0]

    return jax.jit(jax.grad(loss))


def measure(call: Callable[[], Any], repeats: int) -> float:
    """Least milliseconds of a few calls."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)


def main(
    lengths: tuple[int, ...] = (256, 512, 1024),
    gamma: int = 5,
    repeats: int = 5,
    out: Path = Path("runs/kv_head_cost"),
) -> None:
    """Prints ratios, and writes results.json and table.md.

    Args:
      lengths: tokens of a training row.
      gamma: tokens of a block.
      repeats: calls, of which the fastest counts.
      out: directory for the results.
    """
    given = dict(locals())
    check_counts(repeats=repeats)
    for length in lengths:
        if length < gamma + 2:
            raise InputError(f"lengths: {length} tokens have no whole block of {gamma}; give {gamma + 2} or more")
    fresh = begin(out, given)
    setup_runtime()
    config = KVHeadConfig.of_target(TARGET, pooling="drop", gamma=gamma)
    head = init_head(config, None, jax.random.key(0))
    output = jnp.asarray(np.random.default_rng(1).normal(size=(TARGET.text_config.hidden_size, 1024)), jnp.float32)
    rows = []
    with tqdm(total=len(lengths) * len(LAYOUTS), desc="costs", unit="layout") as bar:
        for length in lengths:
            for name, case in layouts(length, gamma, config).items():
                step = training_step(config).lower(head, output, case).compile()
                memory = step.memory_analysis()
                peak = memory.temp_size_in_bytes + memory.argument_size_in_bytes
                took = measure(partial(step, head, output, case), repeats) if peak < MOST_BYTES else None
                rows.append({"layout": name, "length": length, "ms": took, "bytes": peak})
                bar.update()
    rows += decoding(repeats)
    header = ["", *(f"S = {length}" for length in lengths)]
    cells = []
    for name in LAYOUTS:
        for field, unit in (("ms", "time"), ("bytes", "memory")):
            line = [r[field] for r in rows if r["layout"] == name]
            base = [r[field] for r in rows if r["layout"] == "anchored blocks"]
            shown = [
                "not run" if b is None else f"{b:.0f} ms ({b / a:.2f}x)" if field == "ms"
                else f"{b / 2**20:.0f} MiB ({b / a:.2f}x)"
                for a, b in zip(base, line)
            ]
            cells.append([f"{name}, {unit}", *shown])
    passes = rows[-1]
    notes = [
        f"One row, a block of {gamma} tokens at every token; memory: arguments and temporaries of the compiled step. "
        f"Steps over {MOST_BYTES >> 30} GiB are not run.",
        f"Decoding, batch 1: a drafted token takes {passes['draft_ms']:.2f} ms, a target pass "
        f"{passes['target_ms']:.2f} ms ({passes['draft_ms'] / passes['target_ms']:.2f}); projecting and packing at "
        f"prefill takes {passes['pack_ms']:.2f} ms of its {passes['prefill_ms']:.1f}.",
    ]
    title = "Cost of Target-Draft attention"
    write_results(fresh, describe_run("kv_head", given), rows, [], markdown(title, header, cells, notes))
    finish(fresh, out)
    show(title, header, cells, notes)


def decoding(repeats: int) -> list[dict[str, Any]]:
    """Times of the shipped head's passes, on one prompt with an image."""
    target, _, _ = load_models(preset, views=("kv",))
    head = target.head
    assert head is not None
    buckets = replace(preset, image_buckets=(1,)).engine(preset.rows[0])
    engine = Engine(target, None, replace(buckets, views=("kv",)))
    sample = test_set("describe", 1)[0]
    prompt = engine.encoder.prompt(sample.turns[0][0], sample.images)
    requests = [Request(prompt, 96)]
    times = time_passes(engine, requests)
    assert isinstance(engine.program, Speculator)
    state = engine.prefill(requests)
    _, _, shown = whole_row(target, prompt, [])
    rows = head_rows(head.config, [shown], 128, 1)
    packing = jax.jit(lambda own, cache: pack(head.config, own, cache, rows, state.drafter.head.slots))
    return [
        {
            "layout": "decoding",
            **vars(times),
            "pack_ms": measure(lambda: packing(head.params, state.target), repeats),
            "prefill_ms": measure(lambda: engine.prefill(requests), repeats),
        }
    ]


if __name__ == "__main__":
    run_script(main, __doc__)
