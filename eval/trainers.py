"""Training steps of an EAGLE-3 head next to SpecJAX's, or of several heads together and alone.

    python -m eval.trainers small --clone SpecJAX
    python -m eval.trainers llama1b --clone SpecJAX --chip v5e:1x1
    python -m eval.trainers smollm2 --anchors 32

Heads that learn together share the target's pass. SpecJAX (github.com/tails-mpt/SpecJAX) trains
EAGLE-3 heads of text targets on TPUs in JAX; give the folder of a clone. A step is compiled and run
on this machine, in turns: other programs slow both alike. With --chip the steps are compiled for an
absent TPU and not run (`make compiled` installs what that needs). Weights are random. Writes
results.json and table.md into --out.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import SingleDeviceSharding

from eval.compiled import GIB, described, moving_ms
from eval.lib.output.report import Run
from eval.lib.output.tables import Record, Table, cell, number, pivot
from eval.lib.times.hlo import ProgramText
from eval.lib.times.trainers import HEADS, Shapes, Step, our_step, specjax_step
from jaxspec.cli.options import run_script
from jaxspec.config import LlamaConfig
from jaxspec.engine.memory import at_place

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


def main(
    shapes: Annotated[Literal["small", "llama1b", "smollm2"], tyro.conf.Positional],
    clone: Path | None = None,
    out: Path = Path("runs/trainers"),
    anchors: tuple[int, ...] = (),
    chip: str | None = None,
    repeats: int = 20,
) -> None:
    """Compiles the steps, and times them by turns unless a chip is named.

    Args:
      shapes: Sizes of target, head and batch.
      clone: Folder of a clone of SpecJAX; without one, three heads learn alone and together.
      out: Directory for results.json and table.md.
      anchors: Blocks of a row in jaxspec's steps; by default an eighth of the tokens, and all.
      chip: An absent TPU, such as v5e:1x1.
      repeats: Timed turns.
    """
    arguments, sizes = dict(locals()), SHAPES[shapes]
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
    columns = {
        "places": cell("places"),
        "state": cell("state_gib", number),
        "temporaries": cell("temporaries_gib", number),
    }
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


if __name__ == "__main__":
    run_script(main, __doc__)
