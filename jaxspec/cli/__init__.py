"""The command `jaxspec`: answers go to standard output, progress and complaints to standard error."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import tyro

from jaxspec.cli import collaborate, export, generate, inspect
from jaxspec.runtime import input_errors


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; bad input ends it with one line on standard error and exit code 2."""
    command = tyro.extras.subcommand_cli_from_dict(
        {"generate": generate.Generate, "export": export.Export, "inspect": inspect.Inspect},
        prog="jaxspec",
        description="Lossless speculative decoding of vision-language models.",
        args=argv,
    )
    with input_errors("jaxspec"):
        if isinstance(command, generate.Generate):
            print((collaborate if command.collaborate is not None else generate).run(command))
        elif isinstance(command, export.Export):
            print(export.run(command))
        elif not inspect.run(command):
            sys.exit(2)
