"""`jaxspec plan`: estimate the memory and time of decoding or training, only from configs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from textwrap import fill
from types import SimpleNamespace
from typing import Annotated, Any

import tyro

from jaxspec.checkpoints.directories import read_config, read_raw_config
from jaxspec.checkpoints.locating import locate
from jaxspec.checkpoints.processors import QWEN_PIXELS
from jaxspec.cli.shared import refuse_set, view_names
from jaxspec.config import ModelConfig, QwenVLConfig
from jaxspec.engine import plan
from jaxspec.engine.config import EngineConfig
from jaxspec.engine.drafts import DraftConfig, mixture
from jaxspec.errors import InputError, check_counts, nearest, needing, printable
from jaxspec.heads.loading import read_draft_config, recognised
from jaxspec.models.int8 import Weights
from jaxspec.models.lvlms.qwen_vl import QwenImages
from jaxspec.runtime import parse_dtype

COUNTS = (1, 2, 4, 8, 16)
"""Devices that a target is split over when it decodes; training also tries 32 and 64."""
ROOM, TRAINING_ROOM = 0.93, 0.5
"""Share of a device's memory for decoding, and for training without activations."""
MOST = 1 << 20
"""Maximum tokens, images or requests that an option takes."""
KINDS = "{" + ",".join(plan.CHIPS) + "} ..."
DEFAULT_CHIPS = ("v5e", "v6e", "v5p", "h100")
OF_DECODING = (
    *("views", "gamma", "batch_size", "images", "max_pixels", "new"),
    *("target_weights", "draft_weights"),
)
"""Options that the plan of a training step does not read."""
TOKENS = (2, 3, 4)
"""Tokens per pass for which speed-ups are printed."""


@dataclass(frozen=True)
class Plans:
    """Print which devices hold a target with its draft, to decode or to train it, and the minimum
    times. Only config.json is read, of a head also the tensors' names, and no device is needed.

    $ jaxspec plan llava-hf/llava-1.5-7b-hf --draft mjbooo/lvlm68m --chips h100
    $ jaxspec plan llava-hf/llava-1.5-7b-hf --draft mjbooo/lvlm68m --train 128
    """

    target: Annotated[str, tyro.conf.Positional]
    """Directory in Hugging Face layout, or hub id, of the target."""
    draft: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Directory or hub id of a draft model or a head, or `new` for the head that
    `train.recipe kv_llava15_7b` makes. Repeat the option for a model and a head."""
    views: str | None = None
    """Views that a draft model sees, then lookup, comma-separated; by default M."""
    gamma: int = 5
    """Draft length: drafted tokens in each block."""
    batch_size: Annotated[int, tyro.conf.arg(metavar="REQUESTS")] = 1
    """Requests that decode together."""
    prompt: Annotated[int, tyro.conf.arg(metavar="TOKENS")] = 1024
    """Tokens of a prompt, with those of its images."""
    images: Annotated[int, tyro.conf.arg(metavar="TILES")] = 1
    """Image tiles of a prompt; LLaVA-1.5 has one per image."""
    max_pixels: Annotated[int | None, tyro.conf.arg(metavar="PIXELS")] = None
    """Pixels of a square image after resizing, for Qwen2.5-VL and Qwen3-VL; then --images counts
    images of that size, whose tiles are counted here."""
    new: Annotated[int, tyro.conf.arg(metavar="TOKENS")] = 256
    """Maximum tokens of an answer."""
    train: Annotated[int | None, tyro.conf.arg(metavar="SAMPLES")] = None
    """Plan a training step of this many samples instead, each of `prompt` tokens, in which the
    target teaches the draft model (logit distillation), or the head by 128 blocks a sample."""
    dtype: str = "bfloat16"
    """Data type of weights and caches."""
    target_weights: Weights | None = None
    """int8 for a target whose layers are quantised, see `jaxspec generate`."""
    draft_weights: Weights | None = None
    """int8 for drafts whose layers are quantised."""
    chips: Annotated[tuple[str, ...], tyro.conf.arg(metavar=KINDS)] = DEFAULT_CHIPS
    """Kinds of devices. For each, 1, 2, 4, ... devices are tried until one number holds it all."""


def run(args: Plans) -> None:
    """Print a table for each kind of device: a column for each number of devices."""
    _check(args)
    views = None if args.views is None else view_names(args.views)
    target = read_config(locate(args.target, files=("config.json",)))
    drafts = [_draft(name, target) for name in args.draft]
    parts = mixture(views, drafts)
    if args.train is not None:
        if len(drafts) != 1:
            raise InputError(f"--train: {args.train} samples teach one draft; give it by --draft")
        _plan_training(args, target, *drafts)
        return
    if not parts.names:
        refuse_set(args, ["gamma"], "needs a draft; give --draft, or leave it out")
    config, dtype = EngineConfig(views=views, gamma=args.gamma), parse_dtype(args.dtype)
    weights = args.target_weights, args.draft_weights
    program, params = plan.abstract_program(target, drafts, config, dtype, *weights)
    sizes = plan.sizes_of(program, args.prompt, _tiles(args, target), args.new)
    estimates = cache(
        lambda count: plan.estimate_decoding(program, params, count, args.batch_size, sizes)
    )

    def column(chip: plan.Chip, count: int) -> tuple[dict[str, int], dict[str, str]]:
        """Return the bytes and the times of `count` chips, by the names of the table's rows."""
        estimate = estimates(count)
        report = estimate.memory
        caches = report.target_cache + report.draft_cache
        weights = report.target_weights + report.draft_weights
        sizes = {
            "weights": weights,
            "caches": caches,
            "working": report.total - weights - caches,
            "together": report.total,
        }
        cells = {"ms a token": _ms(estimate.plain, chip)}
        if parts.names:
            cells["ms a block"] = _ms(estimate.block, chip)
            cells |= {f"speed-up at {n}": f"{estimate.speedup(n):.2f}" for n in TOKENS}
        return sizes, cells

    size = f"batch {args.batch_size}, {args.prompt} + {args.new} tokens, {args.dtype}"
    size += "" if args.target_weights is None else f", {args.target_weights} target"
    size += "" if args.draft_weights is None else f", {args.draft_weights} draft"
    _print(f"{args.target}: {size}", args.chips, COUNTS, ROOM, column)
    notes = (
        "Memory is that of each device. Weights and caches are exact; working memory is that "
        "of one device alone. Times are lower bounds: to read weights and caches at full "
        "bandwidth."
    )
    drafted = f" speed-up at {TOKENS[0]}: over plain decoding, at {TOKENS[0]} tokens a target pass."
    print(fill(notes + drafted * bool(parts.names), 80))


def _check(args: Plans) -> None:
    """Raise InputError for options out of range, or that nothing reads."""
    if args.target in plan.CHIPS:
        raise InputError(f"TARGET: missing; {args.target!r} is a chip; give a model before --chips")
    if not args.chips:
        raise InputError(f"--chips: give one or more of {', '.join(plan.CHIPS)}")
    for kind in args.chips:
        if kind not in plan.CHIPS:
            raise InputError(f"--chips: unknown chip {kind!r}; {nearest(kind, list(plan.CHIPS))}")
    counts = {"gamma": args.gamma, "batch-size": args.batch_size, "new": args.new}
    check_counts(**counts, prompt=args.prompt, train=1 if args.train is None else args.train)
    counts |= {"prompt": args.prompt, "images": args.images, "train": args.train or 0}
    for name, count in counts.items():
        if not 0 <= count <= MOST:
            raise InputError(f"--{name}: {count}; give 0 to {MOST}")
    if args.train is not None:
        refuse_set(args, OF_DECODING, "a training step does not depend on it; leave it out")
    if not args.draft:
        refuse_set(args, ["draft_weights"], "needs --draft; give one, or leave it out")
    if args.max_pixels is not None and not 1 <= args.max_pixels <= QWEN_PIXELS:
        raise InputError(f"--max-pixels: {args.max_pixels}; give 1 to {QWEN_PIXELS}")


def _tiles(args: Plans, target: ModelConfig) -> int:
    """Return the image tiles of a prompt."""
    if args.max_pixels is None:
        return args.images
    if not isinstance(target, QwenVLConfig):
        kind = target.model_type
        raise InputError(f"--max-pixels: {kind!r} does not size images by it; leave it out")
    limits = {"shortest_edge": 1, "longest_edge": args.max_pixels}
    side = math.isqrt(args.max_pixels)
    return args.images * QwenImages(target, SimpleNamespace(size=limits)).tiles((side, side))


def _plan_training(args: Plans, target: ModelConfig, draft: DraftConfig) -> None:
    """Print the memory, least time and mesh of a training step by number of devices."""
    with needing("--train", "train"):
        from jaxspec.training.plan import abstract_step, mesh_for
    batch = int(args.train or 0)

    @cache
    def planned(count: int) -> Any:
        mesh = mesh_for(count, batch)
        return mesh, abstract_step(target, draft, mesh, batch, args.prompt, args.dtype)

    def column(chip: plan.Chip, count: int) -> tuple[dict[str, int], dict[str, str]]:
        mesh, step = planned(count)
        cells = {"s a step": f"{step.flops / count / chip.tflops / 1e12:.3g}"}
        cells |= {f"mesh.{axis}": f"{size}" for axis, size in mesh.shape.items()}
        return step.held | {"together": sum(step.held.values())}, cells

    title = f"{args.target} teaches {args.draft[0]}: {batch} samples of {args.prompt} tokens"
    counts = (*COUNTS, 32, 64)
    _print(f"{title}, {args.dtype}", args.chips, counts, TRAINING_ROOM, column)
    notes = (
        f"Memory is that of each device, without activations: what fits leaves "
        f"{1 - TRAINING_ROOM:.0%} free for them, and --tune.accumulate and --tune.remat make them "
        "fewer. Times are lower bounds, at the device's peak. mesh.NAME: train.recipe's option "
        "--tune.mesh.NAME."
    )
    print(fill(notes, 80))


def _print(
    title: str,
    kinds: tuple[str, ...],
    counts: tuple[int, ...],
    room: float,
    column: Callable[[plan.Chip, int], tuple[dict[str, int], dict[str, str]]],
) -> None:
    """Print a table for each kind of device, a line per quantity, at most 80 columns wide.

    Args:
      room: Share of a device's memory that may be filled.
      column: Returns the bytes on each of a number of devices, `together` last, and more cells.
    """
    print(printable(title))
    for kind in kinds:
        chip, columns = plan.CHIPS[kind], dict[int, dict[str, str]]()
        for count in counts:
            sizes, cells = column(chip, count)
            fits = sizes["together"] <= room * chip.gib * 2**30
            gib = {f"{name}, GiB": f"{size / 2**30:.2f}" for name, size in sizes.items()}
            columns[count] = gib | {"fits": "yes" if fits else "no"} | cells
            if fits:
                break
        print(f"\n{f'{kind}, {chip.gib:g} GiB':<17}" + "".join(f"{n:>9}" for n in columns))
        for name in next(iter(columns.values())):
            print(f"{name:<17}" + "".join(f" {cells[name]:>8}" for cells in columns.values()))
    print()


def _ms(read: float, chip: plan.Chip) -> str:
    """Return the milliseconds to read bytes at a chip's bandwidth."""
    return f"{read / chip.gbps / 1e6:.2f}"


def _draft(name: str, target: ModelConfig) -> DraftConfig:
    """Return the configuration of a draft; `new` is the head that the recipe makes."""
    if name == "new":
        return plan.usual_head(target)
    path = locate(name, files=("config.json",))
    raw = read_raw_config(path)
    if recognised(raw) or raw.get("num_hidden_layers") == 1:
        path = locate(name)  # a head's sizes, and often its kind, are known by its tensors
    return read_draft_config(path)
