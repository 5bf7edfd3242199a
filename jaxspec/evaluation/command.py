"""What the scripts under `eval/` share: a command line of a preset's name and overrides, and loading the models."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp
import tyro

from jaxspec.checkpoints.directories import locate, read_config
from jaxspec.checkpoints.kv_head import is_kv_head
from jaxspec.command import script_name
from jaxspec.data.rows import local_rows
from jaxspec.data.sets import MMSPEC
from jaxspec.decoding.captioners import check_captioner, load_captioner
from jaxspec.decoding.engine_config import capped_gamma
from jaxspec.decoding.loading import LoadedModel
from jaxspec.decoding.replay import PREFIX, RecordedTarget
from jaxspec.decoding.views import Captioner
from jaxspec.decoding.weighting import parse_weighting
from jaxspec.errors import InputError, nearest
from jaxspec.evaluation.config import EvalConfig, Row, data_places, with_own_sets
from jaxspec.presets import load_preset, preset_names

Options = TypeVar("Options", bound=Any)
Config = TypeVar("Config", bound=Any)


def eval_presets(kind: type[Any] = EvalConfig) -> list[str]:
    """Names of the presets under `configs/eval` that are of this kind."""
    return [name for name in preset_names("eval") if isinstance(load_preset("eval", name), kind)]


def eval_preset(name: str, kind: type[Config] = EvalConfig) -> Config:
    """The preset `configs/eval/NAME.py`.

    Raises InputError for an unknown name, with the nearest one, and for a preset of another kind.
    """
    found = load_preset("eval", name)
    if not isinstance(found, kind):
        known = ", ".join(eval_presets(kind))
        raise InputError(f"preset {name!r}: is for another script under eval/; use one of {known}")
    return found


def parse_command(
    options: type[Options],
    description: str | None,
    args: Sequence[str] | None = None,
    kind: type[Config] = EvalConfig,
    example: str = "mini",
) -> tuple[str, Config, Options]:
    """(name of the preset, the preset with its overrides, the script's own options).

    Args:
      options: dataclass of what the script takes besides the preset's fields; every field has a default.
      description: what --help begins with, the script's docstring.
      args: the words of the command line; None: the process's own.
      kind: of presets that the script takes.
      example: the preset whose defaults --help shows.

    Raises InputError for an unknown preset or option, with the nearest one. `--help` prints and exits.
    """
    words = list(sys.argv[1:] if args is None else args)
    if not words or words[0].startswith("-"):
        if not {"-h", "--help"} & set(words):
            raise InputError(f"preset: none is named; give one of {', '.join(eval_presets(kind))} before the options")
        words = [example, *words]
    preset, *rest = words
    defaults = eval_preset(preset, kind)
    given = vars(defaults) | vars(options())
    # Checked when the parts are built, below: tyro would frame the message and lose its line.
    bases = (options, *[Chosen] * ("rows" in given), kind)
    whole = dataclass(frozen=True)(type("Command", bases, {"__post_init__": lambda self: None}))
    found, unknown = tyro.cli(
        whole,
        prog=f"python -m {script_name()} PRESET",
        description=f"{description}\nPresets: {', '.join(eval_presets(kind))}; defaults below are those of {preset}.",
        args=rest,
        default=whole(**given | {"rows": ()} if "rows" in given else given),
        return_unknown_args=True,
    )
    if unknown:
        word = unknown[0].partition("=")[0]
        known = ["--" + name.replace("_", "-") for name in given if name != "pairings"]
        raise InputError(f"{word}: no such option; {nearest(word, known)}")
    config, own = ({f.name: getattr(found, f.name) for f in fields(part)} for part in (kind, options))
    if "rows" in config:
        config["gamma"] = capped_gamma("--gamma", config["gamma"], config["max_new_tokens"])
        config["rows"] = served(chosen(defaults.rows, config["rows"]), config["target"])
    return preset, kind(**with_own_sets(config)), options(**own)


@dataclass(frozen=True)
class Chosen:
    """The rows of a preset that the command line names."""

    rows: tuple[str, ...]
    """Names of the preset's rows to measure; by default all."""


def chosen(rows: tuple[Row, ...], names: Sequence[str]) -> tuple[Row, ...]:
    """The rows of these names, or all where none is named. Raises InputError for an unknown name, with the nearest."""
    known = {row.name: row for row in rows}
    for name in names:
        if name not in known:
            raise InputError(f"rows: no row {name!r} in the preset; {nearest(name, tuple(known))}")
    return tuple(known[name] for name in dict.fromkeys(names)) or rows


def served(rows: tuple[Row, ...], target: str) -> tuple[Row, ...]:
    """The rows without those that the target, if it is recorded answers, cannot serve; one line names them.

    Raises InputError where no row is left.
    """
    lacks = {row.name: why for row in rows if target.startswith(PREFIX) and (why := _asks_for(row))}
    if not lacks:
        return rows
    named = ", ".join(f"{name} ({why})" for name, why in lacks.items())
    if len(lacks) == len(rows):
        raise InputError(f"rows: recorded answers cannot serve {named}; give another target")
    print(f"replay: recorded answers cannot serve {named}; left out", file=sys.stderr)
    return tuple(row for row in rows if row.name not in lacks)


def _asks_for(row: Row) -> str | None:
    """What a row asks of its target that recorded answers lack."""
    if "kv" in row.views:
        return "reads keys and values"
    if not parse_weighting(row.weighting).hard_labels:
        return "learns from probabilities"
    return "times passes" if row.adaptive_gamma else None


def load_models(
    config: EvalConfig, views: Sequence[str] | None = None
) -> tuple[LoadedModel, LoadedModel, Captioner | None]:
    """Target, draft and, for views that show captions, captioner, in the preset's dtype; towers alike are held once.

    A target `replay:FILE` is a file of recorded answers. The views are those of the preset's rows, or as given.
    """
    shown = [name for row in config.rows for name in row.views] if views is None else views
    head = config.kv_head if "kv" in shown else None
    captioner = config.captioner if "C" in shown else None
    check_files(config, head, captioner)
    dtype = jnp.dtype(config.dtype)
    if config.target.startswith(PREFIX):
        draft = LoadedModel.load(config.draft, dtype, tiles=config.tiles)
        target: LoadedModel = RecordedTarget.read(Path(config.target.removeprefix(PREFIX)), draft)
    else:
        target = LoadedModel.load(config.target, dtype, tiles=config.tiles)
        draft = LoadedModel.load(config.draft, dtype, tiles=config.tiles, beside=target)
    if head is not None:
        target = target.with_head(head)
    print(f"target {config.target}\ndraft  {config.draft}", file=sys.stderr)
    return target, draft, None if captioner is None else load_captioner(captioner, dtype, beside=target)


def check_files(config: EvalConfig, head: str | None = None, captioner: str | None = None) -> None:
    """Raises InputError for what is not there, models, KV head, captions and the user's data, before any is loaded."""
    for place in (config.target, config.draft):
        if place.startswith(PREFIX):
            next(local_rows(Path(place.removeprefix(PREFIX))), None)
        else:
            read_config(locate(place))
    if head is not None and not is_kv_head(head):
        raise InputError(f"kv_head {head}: no KV head lies there; give the directory of one")
    if captioner is not None:
        kind, where, _ = check_captioner(captioner)
        if kind == "jax":
            read_config(locate(where))
        elif kind == "file" and not Path(captioner.removeprefix("file:")).is_file():
            raise InputError(f"captioner {captioner}: no such file; check the path")
    for name in config.sets:
        if name in data_places(config.data) or name == MMSPEC:
            for turn in config.turns:
                config.samples(name, turn)
