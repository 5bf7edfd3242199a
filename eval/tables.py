"""Print the tables of a folder of results for a paper, or as CSV.

    python -m eval.tables results/eyes_kv_head
    python -m eval.tables results/eyes_kv_head --format csv

LaTeX's tables need the package booktabs; their captions are the titles, with the notes.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from eval.lib.output.tables import Table, parse_markdown
from jaxspec.cli.options import run_script
from jaxspec.errors import InputError

_SPECIAL = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
}


def main(
    folder: Annotated[Path, tyro.conf.Positional], format: Literal["latex", "csv"] = "latex"
) -> None:
    """Print the tables, CSV with an empty line between two.

    Args:
      folder: Folder of results, with a table.md.
      format: latex or csv.
    """
    file = folder / "table.md"
    if not file.is_file():
        raise InputError(f"{file}: no such file; give a folder of results")
    writer = {"latex": latex, "csv": as_csv}[format]
    print("\n".join(map(writer, parse_markdown(file.read_text(encoding="utf-8")))), end="")


def latex(table: Table) -> str:
    """Return a table of booktabs, with its numbers to the right."""

    def line(cells: Sequence[str]) -> str:
        return " & ".join(map(_escaped, cells)) + r" \\"

    caption = " ".join([f"{table.title}.", *table.notes])
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{_escaped(caption)}}}",
            rf"\begin{{tabular}}{{l{'r' * (len(table.header) - 1)}}}",
            r"\toprule",
            line(table.header),
            r"\midrule",
            *map(line, table.cells),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def as_csv(table: Table) -> str:
    """Return a table's header and cells as lines of CSV."""
    lines = io.StringIO()
    csv.writer(lines, lineterminator="\n").writerows([table.header, *table.cells])
    return lines.getvalue()


def _escaped(text: str) -> str:
    return re.sub(r"[&%$#_{}\\~^]", lambda match: _SPECIAL[match[0]], text)


if __name__ == "__main__":
    run_script(main, __doc__)
