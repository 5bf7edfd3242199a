"""The command `jaxspec`: answers go to standard output, progress and errors to standard error."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from jaxspec import __version__
from jaxspec.command import input_errors, parse_subcommand, start


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; bad input ends it with one line on standard error and exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    start("jaxspec")
    if words == ["--version"]:
        with input_errors("jaxspec"):
            print(f"jaxspec {__version__}")
        return

    from jaxspec.cli import collaborate, demo, export, generate, inspect, plan
    from jaxspec.decoding.captioners import runs_torch

    commands: dict[str, tuple[Any, Any]] = {
        "demo": (demo.Demo, demo.run),
        "generate": (generate.Generate, generate.run),
        "collaborate": (collaborate.Collaborate, collaborate.run),
        "export": (export.Export, export.run),
        "import": (export.Import, export.run_import),
        "inspect": (inspect.Inspect, inspect.run),
        "plan": (plan.Plans, plan.run),
    }
    with input_errors("jaxspec"):
        command = parse_subcommand(
            {name: kind for name, (kind, _) in commands.items()},
            words,
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
