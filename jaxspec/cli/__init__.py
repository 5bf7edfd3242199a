"""The command `jaxspec`: answers go to standard output, progress and errors to standard error."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from jaxspec import __version__
from jaxspec.command import input_errors, parse_subcommand, start


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; bad input ends it with one line on standard error and exit code 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    start("jaxspec")
    if arguments == ["--version"]:
        with input_errors("jaxspec"):
            print(f"jaxspec {__version__}")
        return

    from jaxspec.cli import collaborate, drafts, export, generate, inspect, plan, serve
    from jaxspec.engine.captioners import runs_torch
    from jaxspec.plugins import load_plugin, plugins

    commands: dict[str, tuple[Any, Any]] = {
        "generate": (generate.Generate, generate.run),
        "collaborate": (collaborate.Collaborate, collaborate.run),
        "export": (export.Export, export.run),
        "import": (export.Import, export.run_import),
        "drafts": (drafts.Drafts, drafts.run),
        "inspect": (inspect.Inspect, inspect.run),
        "plan": (plan.Plans, plan.run),
        "serve": (serve.Serve, serve.run),
    }
    with input_errors("jaxspec"):
        added = {name: load_plugin(entry) for name, entry in plugins("commands").items()}
        commands = added | commands
        command = parse_subcommand(
            {name: kind for name, (kind, _) in commands.items()},
            arguments,
            "jaxspec",
            "Lossless speculative decoding of vision-language models. "
            "--version prints the version.",
        )
        if argv is None and not runs_torch(getattr(command, "captioner", None) or ""):
            hide_torch()
        dict(commands.values())[type(command)](command)


def hide_torch() -> None:
    """Keep transformers from importing torch, which tokenisers and image processors do not need.

    The import takes seconds. Call this only in the command's own process: all later code finds
    torch not installed.
    """
    for name in ("torch", "torchvision"):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # None makes imports fail
