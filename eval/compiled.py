"""Print compilers' estimates for absent TPUs and GPUs: memory, bytes moved, messages, cycles.

    python -m eval.compiled llava7b_68m --chips v5e:1x1 v5e:2x2 --batches 1 8
    python -m eval.compiled llava7b_68m --chips v5e:1x1 --programs plain chain --widths 1 8 16
    python -m eval.compiled llava7b_68m --chips h100:1 h100:4 --programs plain chain kv eagle3
    python -m eval.compiled llava7b_68m --chips v5e:1x1 --programs plain msd --tree dynamic:10:30
    python -m eval.compiled llava7b_68m --chips v5e:4x4 --programs train --batches 256
    python -m eval.compiled llava13b_68m --chips v5e:1x1 --target-weights int8
    python -m eval.compiled llava7b_68m --chips v5e:2x2 --programs prompt --prompt 3072 --tiles 5

Programs are compiled and not run: the script needs libtpu or jax-cuda12-plugin (`make compiled`
puts them into .venv-tpu), and no TPU or GPU. Every figure is the compiler's estimate. A block is
one turn of the decode loop: a token of plain decoding, or draft, target pass, verification and
commit. Writes results.json and table.md into --out.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import SingleDeviceSharding
from tqdm import tqdm

from eval.lib.output.report import Run
from eval.lib.output.tables import Record, Table, cell, number, pivot
from eval.lib.times.chips import GIB, computing_ms, described, moving_ms
from eval.lib.times.heads import HEADS
from eval.lib.times.hlo import COLLECTIVES, STAGES, ProgramText
from eval.lib.times.random_pair import LatencyConfig
from jaxspec.cli.options import run_script
from jaxspec.command import load_preset, preset_names
from jaxspec.config import RotaryConfig, text_config, with_text
from jaxspec.decoding.steps import run_decode, run_prefill
from jaxspec.engine.config import EngineConfig
from jaxspec.engine.drafts import DraftConfig
from jaxspec.engine.memory import abstract_inputs, abstract_prefill, at_place, bytes_held
from jaxspec.engine.plan import CHIPS, abstract_program, chip_of, sizes_of, split_over
from jaxspec.errors import InputError, check_all_counts, check_counts, first_line, needing
from jaxspec.models.int8 import Weights
from jaxspec.sharding import make_mesh, on_mesh, replicated
from jaxspec.typing import Params

Drafting = Literal[
    "chain", "kv", "onepass", "msd", "eagle3", "dflash", "dspark", "assistant", "lookup"
]
Name = Literal["plain", Drafting, "prefill", "prompt", "train"]
WHOLE = ("prefill", "prompt", "train")
"""Programs without a loop of blocks."""


def main(
    preset: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PRESET")],
    out: Path = Path("runs/compiled"),
    chips: tuple[str, ...] = ("v5e:1x1", "v5e:2x2"),
    programs: tuple[Name, ...] = ("plain", "chain", "kv"),
    batches: tuple[int, ...] = (1,),
    prompt: int = 1024,
    new: int = 128,
    tiles: int = 1,
    layers: int | None = None,
    target_weights: Weights | None = None,
    widths: tuple[int, ...] = (1,),
    tree: str | None = None,
    xla: tuple[str, ...] = (),
) -> None:
    """Compile programs for the shapes of a preset in configs/latency.

    Args:
      preset: A preset of configs/latency, listed above.
      out: Directory for results.json and table.md.
      chips: Kind and topology in libtpu's notation, such as v5e:2x2, or a kind of GPU and their
        number, such as h100:4; the target is split over all chips.
      programs: Plain decoding; a chain drafted from views M and T; a KV head (kv), one that drafts
        a block in one pass (onepass), MSD's head (msd), an EAGLE-3 head of as many draft tokens as
        the preset says (eagle3), a DFlash head of 15 drafted tokens (dflash), a DSpark head of
        seven (dspark), or Gemma 4's assistant (assistant); lookup, without a draft; prefill of the
        chain or of plain decoding (prompt); a training step of logit distillation (train).
      batches: Batch sizes.
      prompt: Slots for prompt tokens; in training, tokens of a row.
      new: Slots for new tokens.
      tiles: Image tiles of a row: LLaVA-NeXT has five an image, Qwen2.5-VL counts windows.
      layers: Number of the target's layers; fewer than its own compile faster.
      target_weights: int8 compiles a target with int8 layers.
      widths: Tokens that a target pass reads, padding included. Longer blocks and trees are left
        as they are. Each program is compiled once, and its row has the width of its pass.
      tree: A tree instead of all chains, such as 2 or dynamic:10:30.
      xla: NAME=VALUE of options of XLA's compiler, such as xla_vf_vmem_max_outstanding_evictions=0.
    """
    arguments = dict(locals())
    jax.config.update("jax_platforms", "cpu")  # GPUs' plugin asks for CUDA's libraries otherwise
    check_all_counts(batches=batches, widths=widths)
    check_counts(prompt=prompt, new=new, layers=1 if layers is None else layers)
    if wrong := [option for option in xla if not all(option.partition("="))]:
        raise InputError(f"xla: {wrong[0]!r} is not NAME=VALUE")
    options = {name: value for name, _, value in (option.partition("=") for option in xla)}
    config: LatencyConfig = load_preset("latency", preset)
    config = replace(config, target_weights=target_weights, tree=tree)
    if layers is not None:
        config = with_layers(config, layers)
    if target_weights is not None and "train" in programs:
        raise InputError("target_weights: training reads no int8 weights; leave `train` out")
    changes = {f"{target_weights} target": target_weights, f"tree {tree}": tree}
    title = ", ".join([preset, *(text for text, value in changes.items() if value), *xla])
    # Longer blocks and trees have one width, and prefill and training have none.
    variants: dict[tuple[Name, int | None], None] = dict.fromkeys(
        (name, None if name in WHOLE else assembled(config, name, width)[0].width)
        for name, width in product(programs, widths)
    )
    topologies = {chip: described(chip) for chip in chips}
    with Run(preset, arguments, out) as run:
        for chip, devices in topologies.items():
            for batch in batches:
                for name, width in tqdm(variants, f"{chip}, batch {batch}", unit="program"):
                    row = {"chips": chip, "devices": len(devices), "batch": batch}
                    row |= {"program": name, "width": width}
                    shape = Shape(batch, prompt, new, tiles)
                    run.rows.append(row | compiled(config, name, devices, shape, width, options))
                    run.write(compiled_table(title, shape, run.rows))


class Shape(NamedTuple):
    """Hold the sizes of a program, with names as in `main`."""

    batch: int
    prompt: int
    new: int
    tiles: int


def with_layers(config: LatencyConfig, layers: int) -> LatencyConfig:
    """Return the preset with another number of layers of its target."""
    text = text_config(config.target)
    assert isinstance(text, RotaryConfig)
    kinds = text.layer_types[:layers]
    target = with_text(config.target, num_hidden_layers=layers, layer_types=kinds)
    return replace(config, target=target)


def assembled(config: LatencyConfig, name: Name, width: int | None) -> tuple[Any, Params]:
    """Return the named program, and its parameters as shapes.

    width: Tokens of a target pass with padding; trees and longer blocks are left as they are.
    """
    views: tuple[str, ...] = ("lookup",) if name == "lookup" else ()
    drafts: list[DraftConfig] = []
    gamma, tree = config.gamma, None if name in ("plain", "prompt") else config.tree
    if name in HEADS:
        head = HEADS[name](config)
        drafts.append(head)
        gamma = head.gamma
    elif name not in ("plain", "prompt", "lookup"):
        views, drafts = ("M", "T"), [config.draft]
    padded = width and tree is None and (name == "plain" or width > gamma)
    options = EngineConfig(views=views, gamma=gamma, tree=tree, width=width if padded else None)
    dtype, weights = jnp.dtype(config.dtype), config.target_weights
    return abstract_program(config.target, drafts, options, dtype, weights)


def compiled(
    config: LatencyConfig,
    name: Name,
    devices: list[Any],
    shape: Shape,
    width: int | None,
    options: dict[str, str],
) -> Record:
    """Return the compiler's figures for one program; only `peak` if it does not fit."""
    kind = next(name for name, chip in CHIPS.items() if chip is chip_of(devices[0]))
    if name == "train":
        lowered, flops = training_step(config, devices, shape)
        caches, least, flags = 0, flops / (CHIPS[kind].tflops * 1e9), {}
    else:
        with jax.default_device(devices[0]):
            lowered, caches, flags = decoding(config, name, devices, shape, width)
        least = 0.0
    start = time.process_time()
    try:
        done = lowered.compile(compiler_options=flags | options)
    except jax.errors.JaxRuntimeError as error:
        needs = re.search(r"\(([\d.]+)G\) exceeds", str(error))
        if needs is None and options and "No such compile option" in str(error):
            raise InputError(f"xla: {first_line(error)}; check the option's name") from error
        if needs is None:
            raise
        return {"fits": False, "peak_gib": float(needs[1])}
    spent = time.process_time() - start
    memory, text = done.memory_analysis(), ProgramText(done.as_text())
    cost = text.whole() if name in WHOLE else text.block()
    before, behind = (0, 0) if name in WHOLE else text.around()
    peak = memory.peak_memory_in_bytes / GIB
    return {
        # A TPU's compiler refuses a program that does not fit; a GPU's does not know.
        "fits": peak < CHIPS[kind].gib,
        "peak_gib": peak,
        "arguments_gib": memory.argument_size_in_bytes / GIB,
        "temporaries_gib": memory.temp_size_in_bytes / GIB,
        "caches_gib": caches / GIB,
        "aliased_gib": memory.alias_size_in_bytes / GIB,
        "program_mib": memory.generated_code_size_in_bytes / 2**20,
        "copied_around_mib": (before + behind) / 2**20,
        "copied_in_mib": cost.copied.total() / 2**20,
        "collectives": cost.collectives.total(),
        "collected_mib": cost.sent.total() / 2**20,
        "kernels": cost.kernels.total(),
        "cycles": cost.cycles.total(),
        "cycles_by_stage": dict(cost.cycles),
        "moved_gib": cost.moved.total() / GIB,
        "compile_cpu_seconds": spent,
        "least_ms": max(moving_ms(kind, cost.moved.total()), least),
    }


def decoding(
    config: LatencyConfig, name: Name, devices: list[Any], shape: Shape, width: int | None
) -> tuple[Any, int, dict[str, bool]]:
    """Return a lowered decoding program, the bytes of its caches, and its options of XLA."""
    mesh = make_mesh(model=len(devices), devices=devices) if len(devices) > 1 else None
    program, params = assembled(config, name, width)
    whole = replicated(mesh) if mesh else SingleDeviceSharding(devices[0])
    params = split_over(program, params, mesh) if mesh else at_place(params, whole)
    sizes = sizes_of(program, shape.prompt, shape.tiles, shape.new)
    inputs, options = at_place(abstract_inputs(program, shape.batch, sizes), whole)
    options = options.replace(greedy=True)
    with on_mesh(mesh):
        if name in WHOLE:
            lowered = run_prefill.lower(program, params, inputs, options, shape.new)
            return lowered, 0, program.compiler_options
        state, _ = abstract_prefill(program, params, inputs, options, shape.new)
        placed = state if mesh else at_place(state, whole)
        lowered = run_decode.lower(program, params, placed, options)
        caches = bytes_held((state.target, state.drafter))
        return lowered, caches, program.compiler_options


def training_step(config: LatencyConfig, devices: list[Any], shape: Shape) -> tuple[Any, float]:
    """Return the lowered step of logit distillation, and its FLOPs on a device."""
    with needing("programs: train", "train"):
        from jaxspec.training.plan import abstract_step, mesh_for
    batch = shape.batch
    mesh = make_mesh(**mesh_for(len(devices), batch).shape, devices=devices)
    step = abstract_step(config.target, config.draft, mesh, batch, shape.prompt, config.dtype)
    with on_mesh(mesh):
        lowered = step.step.lower(step.state, step.frozen, step.batch)
    return lowered, step.flops / len(devices)


def compiled_table(title: str, shape: Shape, rows: list[Record]) -> Table:
    """Return a line per program."""

    def time_of(row: Record, cycles: float) -> str:
        return number(computing_ms(row["chips"].partition(":")[0], cycles))

    def label(row: Record) -> tuple[str, ...]:
        peak = number(row["peak_gib"]) + ("" if row["fits"] else ": does not fit")
        return row["program"], row["chips"], str(row["batch"]), number(row["width"], 0), peak

    columns: Mapping[str, Callable[[Record], str]] = {
        "arguments": cell("arguments_gib", number),
        "temporaries": cell("temporaries_gib", number),
        "copied MiB": lambda row: f"{row['copied_around_mib']:.0f} + {row['copied_in_mib']:.0f}",
        "messages": lambda row: (
            f"{row['collectives']}, {row['collected_mib']:.1f} MiB" if row["collectives"] else "-"
        ),
        "kernels": cell("kernels"),
        "moved GiB": cell("moved_gib", number),
        "least ms": cell("least_ms", number),
        "cycles ms": lambda row: time_of(row, row["cycles"]),
        **{
            stage: lambda row, stage=stage: time_of(row, row["cycles_by_stage"].get(stage, 0))
            for stage in STAGES
        },
        "program MiB": cell("program_mib", number, 0),
        "compile s": cell("compile_cpu_seconds", number, 0),
    }
    columns = {
        name: lambda row, column=column: column(row) if row["fits"] else "-"
        for name, column in columns.items()
    }
    notes = [
        f"Estimated by the compiler: nothing was run. {shape.prompt} + {shape.new} "
        f"slots, {shape.tiles} image tiles. "
        "Memory is one chip's. copied: arrays written again around the loop, and in one block. "
        f"messages: {', '.join(COLLECTIVES)} of one block, and at most so many MiB that they make. "
        "kernels: what a block gives the device one by one.",
        "moved: bytes of one block (of prefill and training, all) from and to the chip's memory; "
        "least ms: what they take at its bandwidth, in training at least what the operations take. "
        "Compare programs by these. cycles ms, draft to commit: the compiler's cycles, without the "
        "kernels that attend to long prompts. They count the wait for some operands and not for "
        "others, by what the compiler fetches in advance, so equal products differ up to tenfold. "
        "For GPUs it gives none.",
    ]
    labels = "program", "chips", "B", "width", "peak GiB"
    lines = [(label(row), row) for row in rows]
    return pivot(f"Compiled, not run: {title}", labels, lines, columns, notes=notes)


if __name__ == "__main__":
    presets = ", ".join(preset_names("latency"))
    run_script(main, f"{__doc__}\nPresets: {presets}.")
