"""Read the command line of an evaluation: a preset's name, then options that change it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, make_dataclass
from typing import Any, TypeVar

import tyro

from eval.lib.drafts.config import EvalConfig, Variant, set_places
from eval.lib.drafts.loading import measurable
from eval.lib.output.report import results_folder
from eval.lib.questions.sets import SETS
from jaxspec.cli.options import listing, parse_options
from jaxspec.cluster import join_cluster
from jaxspec.command import load_preset, preset_names, preset_texts, script_name
from jaxspec.decoding.sources.lookup import LOOKUP
from jaxspec.engine.config import capped_gamma
from jaxspec.engine.drafts import HEAD
from jaxspec.errors import InputError, nearest
from jaxspec.prompts.views import is_view

Options = TypeVar("Options", bound=Any)
Config = TypeVar("Config", bound=Any)


def _presets(kind: type[Any] | tuple[type[Any], ...]) -> list[str]:
    """Return the names of the presets of these kinds."""
    names = preset_names("eval")
    return [name for name in names if isinstance(load_preset("eval", name), kind)]


_DEBUG = {
    "limit": 2,
    "held_out": 2,
    "timed": 2,
    "max_new_tokens": 8,
    "repeats": 1,
    "draws": 64,
    "attributes": 2,
}
"""Upper limits of options with --debug."""


@dataclass(frozen=True)
class _Debug:
    debug: bool = False
    """Try the command out: two samples of each set, eight new tokens, one run, written to
    runs/debug."""


@dataclass(frozen=True)
class _Rows(_Debug):
    rows: tuple[str, ...] = ()
    """Names of the preset's rows to measure, or views, such as T-slots or M,P36, with equal
    weights; the default is all rows."""


@dataclass(frozen=True)
class _Pairings(_Debug):
    pairings: tuple[str, ...] = ()
    """Names of the preset's pairings to measure; the default is all."""


_CHOSEN: dict[str, type[_Debug]] = {"rows": _Rows, "pairings": _Pairings}
"""Fields of a preset whose parts can be chosen by name, and the option for each."""


def parse_command(
    options: type[Options],
    description: str | None,
    args: Sequence[str] | None = None,
    kind: type[Config] | tuple[type[Config], ...] = EvalConfig,
    example: str = "mini",
) -> tuple[str, Config, Options]:
    """Return the preset's name, the preset with its overrides, and the script's own options.

    Args:
      options: Dataclass of the script's own options, one of them `out`; every field has a default.
        Its `unread`, if it has one, names the preset's options that the script does not read.
      description: First lines of --help, the script's docstring.
      args: Words of the command line; None takes the process's own.
      kind: Class of the presets that the script takes, or several; the bases of the preset's class
        are the groups of options.
      example: Preset whose defaults --help shows.

    Raises InputError for an unknown preset or option, with the nearest one, and for an option that
    the script does not read. `--help` prints and exits.
    """
    argv = list(sys.argv[1:] if args is None else args)
    if not argv or argv[0].startswith("-"):
        if not {"-h", "--help"} & set(argv):
            names = ", ".join(_presets(kind))
            raise InputError(f"preset: missing; give one of {names} before the options")
        argv = [example, *argv]
    preset, *options_text = argv
    defaults = load_preset("eval", preset)
    if not isinstance(defaults, kind):
        raise InputError(
            f"preset {preset!r}: belongs to another script; use one of {', '.join(_presets(kind))}"
        )
    parts, added = next(((f, a) for f, a in _CHOSEN.items() if hasattr(defaults, f)), ("", _Debug))
    initial = vars(defaults) | vars(options()) | {parts: (), "draft": (), "debug": False}
    # The configuration below checks its fields itself, since tyro would frame the messages.
    unchecked = {
        "__post_init__": lambda self: None,
        "__doc__": "Choose what this script measures, and where its results go.",
    }
    script = make_dataclass("Script", [], bases=(options, added), namespace=unchecked, frozen=True)
    groups = {
        "script": script,
        **{group.__mro__[-2].__name__.lower(): group for group in type(defaults).__bases__},
    }
    command = make_dataclass("Command", groups.items(), frozen=True)
    presets = ""
    if {"-h", "--help"} & set(options_text):
        texts = preset_texts("eval")
        presets = listing({name: texts[name] for name in _presets(kind)})
    names = {word.partition("=")[0].replace("_", "-") for word in options_text}
    unread = getattr(options, "unread", ())
    for name in unread:
        option = name.replace("_", "-")
        if names & {f"--{option}", f"--no-{option}"}:
            raise InputError(f"{name}: {script_name()} does not read it; leave out --{option}")
    filled = parse_options(
        command,
        options_text,
        f"python -m {script_name()} {preset}",
        f"{description}\n\nThe defaults below are those of {preset}. Presets:\n\n{presets}",
        default=command(
            **{name: group(**_fields_of(group, initial)) for name, group in groups.items()}
        ),
        config=(tyro.conf.OmitArgPrefixes,),
        hidden=unread,
    )
    values = {
        name: value for group in groups for name, value in vars(getattr(filled, group)).items()
    }
    for name in _DEBUG.keys() & values if values["debug"] else ():
        values[name] = min(_DEBUG[name], values[name])
    config = _fields_of(type(defaults), initial | values)
    if "draft" in config:
        # A repeated option would add to the preset's drafts; it replaces them.
        config["draft"] = tuple(filter(None, values["draft"] or defaults.draft))
    if parts:
        config[parts] = _chosen(parts, getattr(defaults, parts), values[parts])
    if parts == "rows":
        config["gamma"] = capped_gamma("--gamma", config["gamma"], config["max_new_tokens"])
        if "gammas" in values and "--gamma" in names:
            if "--gammas" in names:
                raise InputError("--gamma: --gammas has the draft lengths; give one of the two")
            values["gammas"] = (config["gamma"],)
        models = [config[name] for name in ("target", "draft", "captioner", "width")]
        config["rows"], config["left_out"] = measurable(config["rows"], *models)
    values["out"] = results_folder(values["out"], preset, values["debug"])
    changed = type(defaults)(**_with_own_sets(config, defaults.data))
    script_options = options(**_fields_of(options, values))
    join_cluster(config.get("cluster", ""))
    return preset, changed, script_options


def _fields_of(part: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: values[field.name] for field in fields(part)}


def _chosen(kind: str, parts: tuple[Any, ...], names: Sequence[str]) -> tuple[Any, ...]:
    """Return the named parts; all of them without names."""
    by_name = {part.name: part for part in parts}
    for name in names:
        views = tuple(name.split(","))
        are_views = all(view in (HEAD, LOOKUP) or is_view(view) for view in views)
        if kind == "rows" and name not in by_name and are_views:
            by_name[name] = Variant(name, views)
        if name not in by_name:
            raise InputError(
                f"{kind}: no {kind[:-1]} {name!r} in the preset; {nearest(name, tuple(by_name))}"
            )
    return tuple(by_name[name] for name in dict.fromkeys(names)) or parts


def _with_own_sets(values: dict[str, Any], preset_data: Sequence[str]) -> dict[str, Any]:
    """Return a preset's fields, with each NAME=PATH of `sets` moved to `data`.

    Paths in the preset for sets that are not asked for are dropped. Raises InputError for dropped
    paths from the command line, and for a folder of images that no set reads.
    """
    names = tuple(set_places(values["sets"]))
    dropped = [entry for entry in preset_data if entry.partition("=")[0] not in names]
    data = [entry for entry in values["data"] if entry not in dropped]
    for name in set_places(data):
        if name not in SETS and name not in names:
            raise InputError(
                f"data: {name!r} is a set that is not asked; add it to --sets, or leave it out"
            )
    if values["images"] is not None and set(names) <= set(SETS):
        raise InputError(
            f"images: {values['images']} is only for sets of your own; give --sets NAME=FILE.jsonl"
        )
    own_sets = [entry for entry in values["sets"] if "=" in entry]
    return values | {"sets": names, "data": (*data, *own_sets)}
