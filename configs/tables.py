"""List every table and figure of the four papers, and the commands that measure it.

    python -m configs.tables docs

Each paper's are written between the two markers of its page, `docs/tables-NAME.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from configs.commands.aasd import AASD
from configs.commands.cos import COS
from configs.commands.ibed import IBED
from configs.commands.line import Line
from configs.commands.tabed import TABED
from eval.lib.output.tables import put_between

PAPERS = {"TABED": TABED, "IbED": IBED, "AASD": AASD, "CoS": COS}


def commands() -> Iterator[str]:
    """Yield each command of every line, once."""
    texts = (
        text for lines in PAPERS.values() for line in lines for text in (line.command, line.mini)
    )
    yield from dict.fromkeys(command for text in texts for command in text.splitlines())


def list_of_tables(paper: str) -> str:
    """Return a section in Markdown for each line of a paper."""
    return "\n\n".join(map(_section, PAPERS[paper]))


def _section(line: Line) -> str:
    """Return a line's comparison, its commands, and under a fold how it differs from the paper."""
    parts = [f"## {line.where}", line.what]
    if line.command:
        extras, disk = line.needs.replace(", ", ",").split("; ")
        parts += [
            f"The commands need `pip install -e '.[{extras}]'`, and {disk} of disk for weights.",
            f"```sh\n{line.command}\n```",
        ]
    if line.mini:
        parts += ["To do the same with the shipped models:", f"```sh\n{line.mini}\n```"]
    if line.details:
        fold = "<details><summary>How does this differ from the paper?</summary>"
        parts += [fold, "\n".join(f"- {point}" for point in line.details), "</details>"]
    return "\n\n".join(parts)


if __name__ == "__main__":
    for folder in map(Path, sys.argv[1:]):
        for paper in PAPERS:
            put_between(folder / f"tables-{paper.lower()}.md", "tables", list_of_tables(paper))
