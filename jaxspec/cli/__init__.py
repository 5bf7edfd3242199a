"""Run the command `jaxspec`: answers go to standard output, progress and errors to stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from jaxspec import __version__
from jaxspec.cli.mistyped import mistake
from jaxspec.command import input_errors, start
from jaxspec.errors import InputError


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; bad input ends it with one line on standard error and exit code 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    start("jaxspec")
    if arguments == ["--version"]:
        with input_errors("jaxspec"):
            print(f"jaxspec {__version__}")
        return

    if error := mistake(arguments):
        with input_errors("jaxspec"):
            raise InputError(error)

    from jaxspec.cli.options import parse_subcommand
    from jaxspec.engine.captioners import runs_torch

    with input_errors("jaxspec"):
        subcommands = commands()
        command = parse_subcommand(
            {name: kind for name, (kind, _) in subcommands.items()},
            arguments,
            "jaxspec",
            "Lossless speculative decoding of vision-language models. `jaxspec demo` shows it on "
            "models that are shipped; --version prints the version.",
        )
        drafting = getattr(command, "drafting", None)
        if argv is None and not runs_torch(getattr(drafting, "captioner", None) or ""):
            hide_torch()
        dict(subcommands.values())[type(command)](command)


def commands() -> dict[str, tuple[Any, Callable[[Any], None]]]:
    """Return the subcommands by name: a dataclass of options, and the function that runs it."""
    from jaxspec.cli import collaborate, drafts, export, generate, inspect, plan, serve
    from jaxspec.plugins import load_plugin, plugins

    return {name: load_plugin(entry) for name, entry in plugins("commands").items()} | {
        "generate": (generate.Generate, generate.run),
        "collaborate": (collaborate.Collaborate, collaborate.run),
        "export": (export.Export, export.run),
        "import": (export.Import, export.run_import),
        "drafts": (drafts.Drafts, drafts.run),
        "inspect": (inspect.Inspect, inspect.run),
        "plan": (plan.Plans, plan.run),
        "serve": (serve.Serve, serve.run),
    }


def hide_torch() -> None:
    """Keep transformers from importing torch, which tokenisers and image processors do not need.

    The import takes seconds. Call this only in the command's own process: all later code finds
    torch not installed.
    """
    for name in ("torch", "torchvision"):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # None makes imports fail
