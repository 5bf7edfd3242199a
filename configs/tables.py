"""Every table and figure of the four papers, and the commands that measure it.

    python -m configs.tables docs/tables.md

They are written between the page's two markers, `<!-- tables: ... -->` and `<!-- /tables -->`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from configs.commands.aasd import AASD
from configs.commands.cos import COS
from configs.commands.ibed import IBED
from configs.commands.tabed import TABED
from eval.lib.output.tables import put_between

PAPERS = {"TABED": TABED, "IbED": IBED, "AASD": AASD, "CoS": COS}


def commands() -> Iterator[str]:
    """Yield each command of every line, once."""
    texts = (
        text for lines in PAPERS.values() for line in lines for text in (line.command, line.mini)
    )
    yield from dict.fromkeys(command for text in texts for command in text.splitlines())


def list_of_tables() -> str:
    """Return the lines of each paper as a table in Markdown."""
    parts = []
    for paper, lines in PAPERS.items():
        rows = [f"| {paper} | comparison | needs | commands |", "|---|---|---|---|"]
        for line in lines:
            cells = [f"`{command}`" for command in line.command.splitlines()] or [line.why]
            cells += [f"mini: `{command}`" for command in line.mini.splitlines()]
            rows.append(f"| {line.where} | {line.what} | {line.needs} | {'<br>'.join(cells)} |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


if __name__ == "__main__":
    for page in map(Path, sys.argv[1:]):
        put_between(page, "tables", list_of_tables())
