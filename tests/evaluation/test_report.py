"""Tables in the terminal: all of them, however narrow it is."""

from __future__ import annotations

import pytest

from jaxspec.evaluation.report import show

HEADER = ["view", "turn", *(f"set {i}" for i in range(9))]
ROWS = [[view, turn, *(f"{view}{turn}.{i}0" for i in range(9))] for turn in "12" for view in "MTCP"]


@pytest.mark.parametrize("columns", [24, 40, 200])
def test_every_cell_is_there_beside_what_names_its_row(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    show("A title", HEADER, ROWS, ["a note"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    for row in ROWS:
        of_row = [line for line in lines if row[:2] == [cell.strip() for cell in line.split("│")[1:3]]]
        assert all(any(cell in line for line in of_row) for cell in row)
    assert all(any(name in line for line in lines) for name in HEADER)


def test_a_table_that_fits_on_its_side_is_turned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    show("A title", HEADER, ROWS[:2])
    assert "│ set 8 │ M1.80 │ T1.80 │" in capsys.readouterr().out
