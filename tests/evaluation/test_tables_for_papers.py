"""Tables of results for papers are read back as they were written, and LaTeX's characters are
escaped.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from eval.lib.output.tables import Table, markdown, parse_markdown
from eval.tables import latex, main
from jaxspec.errors import InputError
from tests.conftest import ROOT

TABLES = [
    Table("Tokens per pass", ["row", "95 %"], [["a|b_c", "2.4 to 2.6"], ["", "-"]], ["A note."]),
    Table("Intervals", ["over"], [["avg"]]),
]


def test_what_is_written_is_read_back() -> None:
    text = "\n".join(map(markdown, TABLES))
    assert parse_markdown(text) == [table._replace(notes=[*table.notes]) for table in TABLES]
    for file in sorted((ROOT / "results").glob("*/table.md")):
        for table in parse_markdown(file.read_text(encoding="utf-8")):
            assert {len(cells) for cells in table.cells} <= {len(table.header)}, file


def test_latex_escapes_its_characters() -> None:
    lines = latex(TABLES[0]).splitlines()
    assert lines[1:3] == [r"\caption{Tokens per pass. A note.}", r"\begin{tabular}{lr}"]
    assert lines[4] == r"row & 95 \% \\"
    assert lines[6] == r"a|b\_c & 2.4 to 2.6 \\"


def test_csv_has_the_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "table.md").write_text("\n".join(map(markdown, TABLES)))
    main(tmp_path, "csv")
    assert [*csv.reader(capsys.readouterr().out.splitlines())] == [
        ["row", "95 %"],
        ["a|b_c", "2.4 to 2.6"],
        ["", "-"],
        [],
        ["over"],
        ["avg"],
    ]
    with pytest.raises(InputError, match="no such file; give a folder of results"):
        main(tmp_path / "none")
