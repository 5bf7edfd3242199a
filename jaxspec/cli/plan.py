"""`jaxspec plan`: what decoding, or training, would take of devices, from configurations alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from jaxspec.checkpoints.directories import read_config, read_raw_config
from jaxspec.checkpoints.kv_head import is_kv_head
from jaxspec.checkpoints.locating import locate
from jaxspec.config import KVHeadConfig, ModelConfig
from jaxspec.decoding.plan import CHIPS, Chip, Plan, abstract_program, plan, sizes_of, usual_head
from jaxspec.errors import InputError, check_counts, nearest
from jaxspec.runtime import human_bytes, parse_dtype

COUNTS = (1, 2, 4, 8, 16)
"""Devices that a target is split over in decoding; training's are up to four times as many."""
ROOM, TRAINING_ROOM = 0.93, 0.5
"""Share of a device's memory that programs may take, and that parameters and batches may where activations come on top.
"""
TOKENS = (2, 3, 4)
"""Tokens a pass whose speed-up is told."""


@dataclass(frozen=True)
class Plans:
    """Tells which devices hold a target with its draft, to decode or to train it, and how fast they can be; no weights
    are read, and no device is needed.
    """

    target: Annotated[str, tyro.conf.Positional]
    """Directory in Hugging Face layout, or hub id; only its config.json is read."""
    draft: str | None = None
    """The draft's, likewise."""
    kv_head: str | None = None
    """Directory of a KV head, or `new` for one as `train.recipe kv_llava15_7b` makes it."""
    views: str = "M"
    """How the draft is shown prompts, comma-separated."""
    gamma: int = 5
    """Drafted tokens a block."""
    batch_size: int = 1
    prompt: int = 1024
    """Prompt tokens, those of images included."""
    images: int = 1
    """Image tiles."""
    new: int = 256
    """New tokens."""
    train: int | None = None
    """Plan a training step of so many samples instead, in which the target teaches the draft (logit distillation): of
    `prompt` tokens each."""
    dtype: str = "bfloat16"
    chips: tuple[str, ...] = ("v5e", "v6e", "v5p", "h100")
    """Kinds of devices; of each, the fewest that hold it all, and those that do not."""


def run(args: Plans) -> None:
    """Print a line per number of devices."""
    check_counts(gamma=args.gamma, batch_size=args.batch_size, prompt=args.prompt, new=args.new)
    for kind in args.chips:
        if kind not in CHIPS:
            raise InputError(f"chips: {kind!r} is none that is known; {nearest(kind, list(CHIPS))}")
    target = _config(args.target)
    draft = None if args.draft is None else _config(args.draft)
    if args.train is not None:
        _print(*_training(args, target, draft))
        return
    head = None if args.kv_head is None else _head(args.kv_head, target)
    views = (*(args.views.split(",") if args.draft else ()), *(("kv",) if head else ()))
    program, params = abstract_program(
        target, draft, views, args.gamma, parse_dtype(args.dtype), head=head
    )
    sizes = sizes_of(program, args.prompt, args.images, args.new)
    drafted = bool(views)
    columns = ["weights", "caches", "working", "together", "of", "fits", "ms a token"]
    columns += ["ms a block", *(f"x at {n}" for n in TOKENS)] if drafted else []
    table = _table(
        f"{args.target}, batch {args.batch_size}, {args.prompt} + {args.new} tokens, {args.dtype}",
        columns,
    )
    planned = cache(lambda count: plan(program, params, count, args.batch_size, sizes))
    for kind in args.chips:
        for count in COUNTS:
            found = planned(count)
            fits = found.memory.total <= ROOM * CHIPS[kind].gib * 2**30
            table.add_row(f"{count} {kind}", *_cells(found, CHIPS[kind], fits, drafted))
            if fits:
                break
    notes = (
        "Each device's. Weights and caches are exact, working memory is what one device would need alone. Times are "
        "the least: those of reading weights and caches at the device's full bandwidth."
    )
    _print(
        table,
        notes
        + f" x at {TOKENS[0]}: speed-up over plain decoding at {TOKENS[0]} tokens a pass."
        * drafted,
    )


def _training(args: Plans, target: ModelConfig, draft: ModelConfig | None) -> tuple[Table, str]:
    """Return a line per number of devices of a training step, and what is to be known of it."""
    check_counts(train=args.train)
    if draft is None or args.kv_head is not None:
        raise InputError(
            f"train: {args.train} samples; give --draft, and no --kv-head: it is a draft that is taught"
        )
    try:
        from jaxspec.training.plan import abstract_step, mesh_for
    except ImportError as error:
        raise InputError(
            f"train: {error.name} is not installed; pip install -e '.[train]'"
        ) from error

    batch = int(args.train or 0)

    @cache
    def planned(count: int) -> Any:
        mesh = mesh_for(count, batch)
        return mesh, abstract_step(target, draft, mesh, batch, args.prompt, args.dtype)

    first = planned(1)[1]
    title = (
        f"{args.target} teaches {args.draft}: {batch} samples of {args.prompt} tokens, {args.dtype}"
    )
    table, flops = (
        _table(title, [*first.held, "together", "of", "fits", "s a step", "mesh"]),
        first.flops,
    )
    for kind in args.chips:
        for count in (*COUNTS, 32, 64):
            mesh, step = planned(count)
            held, chip = step.held, CHIPS[kind]
            total = sum(held.values())
            fits = total <= TRAINING_ROOM * chip.gib * 2**30
            axes = " ".join(
                f"--tune.mesh.{axis} {size}" for axis, size in mesh.shape.items() if size > 1
            )
            told = [
                *map(human_bytes, (*held.values(), total)),
                f"{chip.gib:g} GiB",
                "yes" if fits else "no",
            ]
            table.add_row(
                f"{count} {kind}", *told, f"{flops / count / chip.tflops / 1e12:.3g}", axes or "-"
            )
            if fits:
                break
    return table, (
        f"Each device's. Activations come on top, so what fits leaves {1 - TRAINING_ROOM:.0%} free for them; "
        "--tune.accumulate and --tune.remat make them fewer. Times are the least, at all operations that a device can "
        "do. mesh: options of train.recipe."
    )


def _table(title: str, columns: list[str]) -> Table:
    table = Table("devices", title=title)
    for name in columns:
        table.add_column(name, justify="right", overflow="fold")
    return table


def _print(table: Table, notes: str) -> None:
    console = Console()
    console.print(table)
    console.print(notes)


def _cells(found: Plan, chip: Chip, fits: bool, drafted: bool) -> list[str]:
    report = found.memory
    caches = report.target_cache + report.draft_cache
    weights = report.target_weights + report.draft_weights
    held = map(human_bytes, (weights, caches, report.total - weights - caches, report.total))
    plain, block = (f"{read / chip.gbps / 1e6:.2f}" for read in (found.plain, found.block))
    cells = [*held, f"{chip.gib:g} GiB", "yes" if fits else "no", plain]
    return [*cells, block, *(f"{found.speedup(n):.2f}" for n in TOKENS)] if drafted else cells


def _config(name: str) -> ModelConfig:
    return read_config(locate(name, wanted=("config.json",)))


def _head(name: str, target: ModelConfig) -> KVHeadConfig:
    if name == "new":
        return usual_head(target)
    if not is_kv_head(name):
        raise InputError(
            f"kv_head {name}: no KV head lies there; give the directory of one, or new"
        )
    return KVHeadConfig.from_dict(read_raw_config(locate(name)))
