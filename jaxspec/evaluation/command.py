"""The command line of the scripts under `eval/`: a preset's name, then any field as an override."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import tyro

from jaxspec.errors import InputError
from jaxspec.evaluation.config import EvalConfig
from jaxspec.presets import load_preset, preset_names

Options = TypeVar("Options", bound=Any)


def parse_command(
    options: type[Options], description: str | None, args: Sequence[str] | None = None
) -> tuple[str, EvalConfig, Options]:
    """(name of the preset, the preset with its overrides, the script's own options).

    Args:
      options: dataclass of what the script takes besides `EvalConfig`'s fields; every field has a default.
      args: the words of the command line; None: the process's own.

    Raises InputError for an unknown preset or option, with the nearest one. `--help` prints and exits.
    """
    words = list(sys.argv[1:] if args is None else args)
    if not words or words[0].startswith("-"):
        known = preset_names("eval")
        if not {"-h", "--help"} & set(words):
            raise InputError(f"preset: none is named; give one of {', '.join(known)} before the options")
        words = ["mini", *words]
    preset, *rest = words
    given = vars(load_preset("eval", preset)) | vars(options())
    # Checked when the parts are built, below: tyro would frame the message and lose its line.
    unchecked = {"__post_init__": lambda self: None, "__doc__": description}
    whole = dataclass(frozen=True)(type("Command", (options, EvalConfig), unchecked))
    found, unknown = tyro.cli(
        whole, prog=f"{Path(sys.argv[0]).name} PRESET", args=rest, default=whole(**given), return_unknown_args=True
    )
    if unknown:
        word = unknown[0].partition("=")[0]
        near = difflib.get_close_matches(word, ["--" + name.replace("_", "-") for name in given], 1)
        raise InputError(f"{word}: no such option; " + (f"did you mean {near[0]}?" if near else "see --help"))
    config, own = ({f.name: getattr(found, f.name) for f in fields(part)} for part in (EvalConfig, options))
    return preset, EvalConfig(**config), options(**own)
