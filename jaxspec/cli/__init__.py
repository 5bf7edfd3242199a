"""The command `jaxspec`: answers go to standard output, progress and complaints to standard error."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jaxspec import __version__
from jaxspec.command import expect_interrupt, input_errors


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; bad input ends it with one line on standard error and exit code 2."""
    if list(sys.argv[1:] if argv is None else argv) == ["--version"]:
        print(f"jaxspec {__version__}")
        return
    expect_interrupt("jaxspec")

    import tyro

    from jaxspec.cli import collaborate, demo, export, generate, inspect
    from jaxspec.errors import printable

    with input_errors("jaxspec"):
        command = tyro.extras.subcommand_cli_from_dict(
            {
                "demo": demo.Demo,
                "generate": generate.Generate,
                "export": export.Export,
                "inspect": inspect.Inspect,
            },
            prog="jaxspec",
            description="Lossless speculative decoding of vision-language models. --version prints the version.",
            args=argv,
        )
        if isinstance(command, generate.Generate):
            (collaborate if command.collaborate is not None else generate).run(command)
        elif isinstance(command, demo.Demo):
            demo.run(command)
        elif isinstance(command, export.Export):
            print(printable(export.run(command)))
        elif not inspect.run(command):
            sys.exit(2)
