"""Time training steps of an EAGLE-3 head next to SpecJAX's, or of several heads together and apart.

    python -m train.steps small --clone SpecJAX
    python -m train.steps llama1b --clone SpecJAX --chip v5e:1x1
    python -m train.steps smollm2 --anchors 32

Heads that learn together share the target's pass. SpecJAX (github.com/tails-mpt/SpecJAX) trains
EAGLE-3 heads of text targets on TPUs in JAX; give the folder of a clone. A step is compiled and run
on this machine, in turns: other programs slow both alike. With --chip the steps are compiled for an
absent TPU and not run (`make compiled` installs what that needs). Weights are random. Writes
results.json and table.md into --out.

Heads learn from one frozen Llama, on rows of equal length, with gamma steps of their own output.
SpecJAX begins a block at every token of a row, and jaxspec at sampled anchors, of which --anchors
may be all tokens too. SpecJAX's own loop updates the parameters outside of the compiled step; here
both are one program. Its code is read from the clone: nothing of it is copied here.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.sharding import SingleDeviceSharding

from eval.lib.output.report import Run
from eval.lib.output.tables import Record, Table, cell, number, pivot
from eval.lib.times.chips import GIB, described, moving_ms
from eval.lib.times.hlo import ProgramText
from jaxspec.checkpoints.fitting import layouts_of
from jaxspec.cli.options import run_script
from jaxspec.config import LlamaConfig
from jaxspec.engine.memory import at_place
from jaxspec.errors import InputError, check_all_counts, check_counts
from jaxspec.heads.config import HeadConfig
from jaxspec.heads.making import abstract_head, new_head
from jaxspec.models.families import abstract_params
from jaxspec.models.inputs import PromptRows
from jaxspec.models.language_model import LanguageModel
from jaxspec.training.config import TrainConfig
from jaxspec.training.conversations import ConversationBatch
from jaxspec.training.head_batches import Anchoring, Blocks, HeadBatch
from jaxspec.training.head_loss import make_loss
from jaxspec.training.loop.step import init_state, make_optimizer, make_step, partition


@dataclass(frozen=True)
class Shapes:
    """Hold the sizes of a step."""

    target: LlamaConfig
    vocabulary: int
    """Tokens that the head scores."""
    batch: int
    length: int
    gamma: int
    dtype: Literal["float32", "bfloat16"]


class Step(NamedTuple):
    """Hold a step to compile, with its first argument donated."""

    run: Callable[..., Any]
    arguments: tuple[Any, ...]
    """Shapes of the state and of what is frozen, then arrays of the batch."""
    places: int
    """Drafted tokens that the loss counts."""


SHAPES = {
    "small": Shapes(
        LlamaConfig(
            vocab_size=8192,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
        ),
        vocabulary=2048,
        batch=4,
        length=256,
        gamma=7,
        dtype="float32",
    ),
    "llama1b": Shapes(
        LlamaConfig(
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            rope_theta=5e5,
        ),
        vocabulary=32000,
        batch=1,
        length=1024,
        gamma=7,
        dtype="bfloat16",
    ),
    "smollm2": Shapes(
        LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
        ),
        vocabulary=8192,
        batch=4,
        length=256,
        gamma=3,
        dtype="float32",
    ),
}
"""SpecJAX's gamma, and for Llama-3.2-1B its row length and its draft vocabulary; SmolLM2-135M with
those of `smollm2_kv`."""
BASELINE = "SpecJAX"
HEADS: dict[str, dict[str, Any]] = {
    "KV": {"feature": "last_hidden"},
    "EAGLE-3": {"feature": "fused"},
    "DFlash": {"feature": "block", "layers": 1, "target_layers": (2,)},
}
"""Options of `new_head` by the kind's name."""


def main(
    shapes: Annotated[Literal["small", "llama1b", "smollm2"], tyro.conf.Positional],
    clone: Path | None = None,
    out: Path = Path("runs/trainers"),
    anchors: tuple[int, ...] = (),
    chip: str | None = None,
    repeats: int = 20,
) -> None:
    """Compile the steps, and time them by turns unless a chip is named.

    Args:
      shapes: Sizes of target, head and batch.
      clone: Folder of a clone of SpecJAX; without one, three heads learn apart and together.
      out: Directory for results.json and table.md.
      anchors: Blocks of a row in jaxspec's steps; by default an eighth of the tokens, and all.
      chip: An absent TPU, such as v5e:1x1.
      repeats: Timed turns.
    """
    arguments, sizes = dict(locals()), SHAPES[shapes]
    check_all_counts(anchors=anchors)
    check_counts(repeats=repeats)
    if clone is None and len(anchors) > 1:
        raise InputError(f"anchors: {anchors}; give one number, or also --clone")
    anchors = anchors or (sizes.length // 8, sizes.length - 1)
    if clone is None:
        count = anchors[0]
        steps = {f"{kind}, alone": our_step(sizes, count, (kind,)) for kind in HEADS}
        steps["all together"] = our_step(sizes, count, tuple(HEADS))
    else:
        steps = {BASELINE: specjax_step(sizes, clone)}
        steps |= {f"jaxspec, {count} blocks a row": our_step(sizes, count) for count in anchors}
    with Run(shapes, arguments, out) as run:
        programs = {}
        for name, step in steps.items():
            programs[name], row = compiled(step, chip)
            run.rows.append({"trainer": name, "places": step.places, "chip": chip} | row)
            run.write(trainers_table(shapes, sizes, run.rows))
        if chip is None:
            seconds = timed(steps, programs, repeats)
            for row, turns in zip(run.rows, seconds, strict=True):
                row["cpu_seconds"] = float(np.median(turns))
                row["of_baseline"] = float(np.median(turns / seconds[0]))
            run.write(trainers_table(shapes, sizes, run.rows))


def compiled(step: Step, chip: str | None) -> tuple[Any, Record]:
    """Return the program, and the compiler's figures."""
    sharding = SingleDeviceSharding(jax.devices()[0] if chip is None else described(chip)[0])
    arguments = at_place(jax.eval_shape(lambda *tree: tree, *step.arguments), sharding)
    program = jax.jit(step.run, donate_argnums=0).lower(*arguments).compile()
    memory: Any = program.memory_analysis()
    row: Record = {
        "state_gib": memory.alias_size_in_bytes / GIB,
        "temporaries_gib": memory.temp_size_in_bytes / GIB,
    }
    if chip is not None:
        moved = ProgramText(str(program.as_text())).whole().moved.total()
        row["peak_gib"] = memory.peak_memory_in_bytes / GIB
        row["moved_gib"] = moved / GIB
        row["least_ms"] = moving_ms(chip.partition(":")[0], moved)
    return program, row


def timed(steps: dict[str, Step], programs: dict[str, Any], repeats: int) -> np.ndarray:
    """Return the CPU seconds of each program in each turn; the first turn is not counted."""
    key = jax.random.key(0)

    def filled(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return jnp.asarray(leaf)
        moment = any(getattr(part, "name", "") in ("mu", "nu") for part in path)
        if moment or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.zeros(leaf.shape, leaf.dtype)
        return 0.02 * jax.random.normal(key, leaf.shape, leaf.dtype)

    arguments = {
        name: jax.tree_util.tree_map_with_path(filled, step.arguments)
        for name, step in steps.items()
    }
    seconds = np.zeros((len(steps), repeats + 1))
    for turn in range(repeats + 1):
        for i, (name, program) in enumerate(programs.items()):
            start = time.process_time()
            state, _ = jax.block_until_ready(program(*arguments[name]))
            seconds[i, turn] = time.process_time() - start
            arguments[name] = state, *arguments[name][1:]
    if not all(
        np.isfinite(leaf).all() for tree in arguments.values() for leaf in jax.tree.leaves(tree)
    ):
        raise RuntimeError("a step gave numbers that are not finite, whose time says nothing")
    return seconds[:, 1:]


def trainers_table(name: str, sizes: Shapes, rows: list[Record]) -> Table:
    """Return a line per trainer."""
    columns = {"places": cell("places"), "state": cell("state_gib", number)}
    columns["temporaries"] = cell("temporaries_gib", number)
    if rows[0]["chip"] is not None:
        columns["peak GiB"] = cell("peak_gib", number)
        columns["moved GiB"] = cell("moved_gib", number)
        columns["least ms"] = cell("least_ms", number)
    elif all("cpu_seconds" in row for row in rows):
        columns["CPU s"] = cell("cpu_seconds", number)
        columns[f"of {rows[0]['trainer']}"] = cell("of_baseline", number)
    notes = [
        f"{sizes.batch} rows of {sizes.length} tokens, gamma {sizes.gamma}, {sizes.vocabulary} of "
        f"{sizes.target.vocab_size} tokens scored, {sizes.dtype}. places: drafted tokens that a "
        "step's loss counts. GiB of the head's parameters and moments (state), which jaxspec keeps "
        "in float32, and of temporaries, by the compiler."
    ]
    if rows[0]["chip"] is not None:
        notes[0] += (
            " Not run: peak, and the bytes that a step moves from and to the chip's memory, with "
            "the time that they take at least."
        )
    else:
        notes[0] += (
            " CPU s: median of the turns, on all threads; its ratio to the first trainer's: median "
            "of those within a turn."
        )
    lines = [((row["trainer"],), row) for row in rows]
    title = f"Training steps of heads, {name}"
    return pivot(title, ("trainer",), lines, columns, notes=notes)


def our_step(shapes: Shapes, anchors: int, kinds: Sequence[str] = ("EAGLE-3",)) -> Step:
    """Return jaxspec's step with this many blocks a row, of one head or of several together."""
    configs: dict[str, HeadConfig] = {}
    for kind in kinds:
        config = new_head(shapes.target, gamma=shapes.gamma, **HEADS[kind])
        text = replace(config.text_config, draft_vocabulary=tuple(range(shapes.vocabulary)))
        configs[kind] = replace(config, text_config=text)
    anchored = {kind: (config, Anchoring(anchors)) for kind, config in configs.items()}
    parts = (f"{kind}/{part}" for kind, config in configs.items() for part in config.fixed)
    fixed = ("target", *parts)
    train = TrainConfig(steps=100, batch=shapes.batch, frozen=fixed, dtype=shapes.dtype, warmup=1)
    params = {kind: abstract_head(config) for kind, config in configs.items()}
    params["target"] = abstract_params(shapes.target, jnp.dtype(shapes.dtype))
    trainable, frozen = partition(params, train.frozen)
    optimizer = make_optimizer(train, trainable, kinds)
    state = jax.eval_shape(lambda params: init_state(params, optimizer), trainable)
    loss = make_loss(LanguageModel(shapes.target), anchored)
    tokens = _tokens(shapes)
    rows = PromptRows(jnp.asarray(tokens), jnp.full(shapes.batch, shapes.length))
    numbers = np.arange(shapes.batch, dtype=np.uint32)
    starts = np.linspace(0, shapes.length - 1 - shapes.gamma, anchors).astype(np.int32)
    batch = HeadBatch(
        ConversationBatch(rows, np.ones(tokens.shape, bool), {}, numbers),
        {
            kind: Blocks(
                np.tile(starts, (shapes.batch, 1)),
                np.zeros((shapes.batch, 0, 2), np.int32) if config.reads_spans else None,
            )
            for kind, config in configs.items()
        },
    )
    return Step(
        make_step(loss, optimizer, train),
        (state, frozen, batch),
        shapes.batch * anchors * shapes.gamma * len(kinds),
    )


def specjax_step(shapes: Shapes, clone: Path) -> Step:
    """Return SpecJAX's step.

    Raises InputError for a folder that is not a clone.
    """
    if not (clone / "specjax" / "train.py").is_file():
        raise InputError(f"clone {clone}: has no specjax/train.py; give a clone of SpecJAX")
    sys.path.insert(0, str(clone))
    llama, heads, train, optimizers = (
        import_module(f"specjax.{name}")
        for name in ("models.target.llama", "models.draft.eagle3", "train", "training.optimizer")
    )
    sizes, dtype = shapes.target, jnp.dtype(shapes.dtype)
    names = "vocab_size", "hidden_size", "intermediate_size", "head_dim"
    shared = {name: getattr(sizes, name) for name in (*names, "rope_theta", "rms_norm_eps")}
    target = llama.LlamaConfig(
        **shared,
        num_hidden_layers=sizes.num_hidden_layers,
        num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_key_value_heads,
    )
    head = heads.Eagle3Config(
        **shared,
        num_heads=sizes.num_attention_heads,
        num_kv_heads=sizes.num_key_value_heads,
        draft_vocab_size=shapes.vocabulary,
    )
    initial = jax.eval_shape(lambda: heads.init_eagle3_params(head, jax.random.key(0)))
    params = {  # its trainer keeps norms in float32
        name: jax.ShapeDtypeStruct(leaf.shape, jnp.float32 if leaf.ndim == 1 else dtype)
        for name, leaf in initial.items()
    }
    gradient = train.make_train_step_ttt(llama.llama_forward, target, head, shapes.gamma)
    optimizer, _ = optimizers.build_optimizer(1e-3, 1, 100)

    def step(state: Any, frozen: Any, maps: Any, batch: Any) -> Any:
        params, moments = state
        loss, *_, grads = gradient(params, frozen, *maps, batch)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    scored = np.arange(shapes.vocabulary, dtype=np.int32)
    indices = np.full(sizes.vocab_size, -1, np.int32)
    indices[scored] = scored
    tokens = _tokens(shapes)
    batch = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
    state = params, jax.eval_shape(optimizer.init, params)
    frozen = {
        name: jax.ShapeDtypeStruct(layout.file_shape, dtype)
        for name, layout in layouts_of(sizes)[0].items()
    }
    return Step(
        step,
        (state, frozen, (scored, indices), batch),
        shapes.batch * (shapes.length - 1) * shapes.gamma,
    )


def _tokens(shapes: Shapes) -> np.ndarray:
    tokens = np.random.default_rng(0).integers(0, shapes.vocabulary, (shapes.batch, shapes.length))
    return tokens.astype(np.int32)


if __name__ == "__main__":
    run_script(main, __doc__)
