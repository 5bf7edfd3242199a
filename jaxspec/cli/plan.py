"""`jaxspec plan`: what decoding would take of devices, from configurations alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from jaxspec.checkpoints.directories import locate, read_config, read_raw_config
from jaxspec.checkpoints.kv_head import is_kv_head
from jaxspec.config import KVHeadConfig, ModelConfig
from jaxspec.decoding.plan import CHIPS, Chip, Plan, abstract_program, plan, sizes_of, usual_head
from jaxspec.errors import InputError, check_counts, nearest
from jaxspec.runtime import human_bytes, parse_dtype

COUNTS = (1, 2, 4, 8, 16)
"""Devices that a target is split over."""
ROOM = 0.93
"""Share of a device's memory that programs may take."""
TOKENS = (2, 3, 4)
"""Tokens a pass whose speed-up is told."""


@dataclass(frozen=True)
class Plans:
    """Tells which devices hold a target with its draft, and how fast they can be; no weights are read, and no device is
    needed.
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
    head = None if args.kv_head is None else _head(args.kv_head, target)
    views = (*(args.views.split(",") if args.draft else ()), *(("kv",) if head else ()))
    draft = None if args.draft is None else _config(args.draft)
    program, params = abstract_program(target, draft, views, args.gamma, parse_dtype(args.dtype), head=head)
    sizes = sizes_of(program, args.prompt, args.images, args.new)
    drafted = bool(views)
    table = Table(title=f"{args.target}, batch {args.batch_size}, {args.prompt} + {args.new} tokens, {args.dtype}")
    names = ("devices", "weights", "caches", "working", "together", "of", "fits", "ms a token")
    for name in (*names, *(("ms a block", *(f"x at {n}" for n in TOKENS)) if drafted else ())):
        table.add_column(name, justify="left" if name == "devices" else "right")
    planned = cache(lambda count: plan(program, params, count, args.batch_size, sizes))
    for kind in args.chips:
        for count in COUNTS:
            found = planned(count)
            fits = found.memory.total <= ROOM * CHIPS[kind].gib * 2**30
            table.add_row(f"{count} {kind}", *_cells(found, CHIPS[kind], fits, drafted))
            if fits:
                break
    console = Console()
    console.print(table)
    console.print(
        "Each device's. Weights and caches are exact, working memory is what one device would need alone. Times are "
        "the least: those of reading weights and caches at the device's full bandwidth."
        + (f" x at {TOKENS[0]}: speed-up over plain decoding at {TOKENS[0]} tokens a pass." if drafted else "")
    )


def _cells(found: Plan, chip: Chip, fits: bool, drafted: bool) -> list[str]:
    report = found.memory
    caches = report.target_cache + report.draft_cache
    weights = report.target_weights + report.draft_weights
    held = map(human_bytes, (weights, caches, report.total - weights - caches, report.total))
    plain, block = (f"{read / chip.gbps / 1e6:.2f}" for read in (found.plain, found.block))
    cells = [*held, f"{chip.gib:g} GiB", "yes" if fits else "no", plain]
    return [*cells, block, *(f"{found.speedup(n):.2f}" for n in TOKENS)] if drafted else cells


def _config(name: str) -> ModelConfig:
    return read_config(locate(name, weights=False))


def _head(name: str, target: ModelConfig) -> KVHeadConfig:
    if name == "new":
        return usual_head(target)
    if not is_kv_head(name):
        raise InputError(f"kv_head {name}: no KV head lies there; give the directory of one, or new")
    return KVHeadConfig.from_dict(read_raw_config(locate(name)))
