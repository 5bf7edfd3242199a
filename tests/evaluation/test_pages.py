"""Figures and the HTML page, drawn from made-up records."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eval.lib import figures
from eval.lib.config import EvalConfig, Variant
from eval.lib.figures import draw_all
from eval.lib.page import ASKED, SHOWN, token_class, write_html
from eval.lib.tables import Table

ROWS = (Variant("M", ("M",)), Variant("MT*", ("M", "T")))
CONFIG = EvalConfig(target="t", draft="d", rows=ROWS, sets=("describe", "saga"))
PIECES = ["A", " <b>", " red", " &", " cat"]


def made_up(trace: bool = True) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    rows, records = [], []
    for dataset in CONFIG.sets:
        for turn in CONFIG.turns:
            for row in CONFIG.rows:
                views = len(row.views)
                place = {"dataset": dataset, "turn": turn, "row": row.name, "views": list(row.views)}
                times = {"gamma": 2, "draft_ms": 1.0, "verify_ms": 3.0, "target_ms": 2.0}
                rates = {"tokens_per_pass": 2.0, "conditional_acceptance_rate_per_position": [0.5, None]}
                rows.append(place | times | rates)
                weights = np.linspace(0, 1, 5 * views).reshape(5, views).tolist()
                agree = [None, [True] * views, [False] * views, [True] + [False] * (views - 1), None]
                told = {"pieces": PIECES, "place": [-1, 0, 1, 0, -1], "agree": agree, "weights": weights}
                for sample in range(SHOWN + 1):
                    record = place | rates | {"sample": f"{dataset}-{sample}"}
                    records.append(record | ({"trace": told} if trace else {}))
    return rows, records


@pytest.mark.parametrize("trace", [True, False])
def test_every_figure_that_can_be_drawn_is(tmp_path: Path, trace: bool) -> None:
    pytest.importorskip("matplotlib")
    drawn = draw_all(CONFIG, *made_up(trace), tmp_path)
    untraced = ["block_efficiency", "acceptance_by_position", "stage_times"]
    assert [f.stem for f in drawn] == untraced + ["weight_trajectory", "overlap", "accepted_over_time"] * trace
    assert sorted(tmp_path.iterdir()) == sorted(drawn)


def test_each_figure_names_the_models_and_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.update({path.stem: figure}))
    draw_all(replace(CONFIG, target=str(tmp_path / "me" / "big"), draft="org/small"), *made_up(), tmp_path)
    assert list(drawn) == list(figures.TITLES)
    for name, figure in drawn.items():
        assert figure.get_suptitle() == f"{figures.TITLES[name]}\ntarget me/big, draft org/small"
        assert all(axis.get_legend() is None for axis in figure.axes)  # but below them all
        for axis in figure.axes:
            styles = [(line.get_linewidth(), *line.get_xdata()) for line in axis.get_lines() if len(line.get_xdata())]
            assert len(set(styles)) == len(styles), "lines of equal values lie on each other"
    (legend,) = drawn["weight_trajectory"].legends
    assert [text.get_text() for text in legend.get_texts()] == ["M", "T", "accepted draft", "the target's own token"]


def test_where_every_row_failed_nothing_is_drawn(tmp_path: Path) -> None:
    assert draw_all(CONFIG, [], [], tmp_path) == []


def test_the_page_holds_all_and_escapes_it(tmp_path: Path) -> None:
    _, records = made_up()
    image = np.zeros((4, 4, 3), np.uint8)
    asked = {tuple(map(r.get, ASKED)): ("<image>\nWhat?", [image]) for r in records}
    path = tmp_path / "report.html"
    write_html(path, {"device": "cpu"}, Table("A < B", ["views", "x"], [["M", "2.0"]], ["a note"]), [], records, asked)
    page = path.read_text()
    assert "A &lt; B" in page
    assert "<b>" not in re.sub(r"<br>", "", page)
    assert "&lt;image&gt;" in page
    assert all(word in page for word in ("block efficiency", "gamma", "C puts captions in their place", "Eq. (1)"))
    assert page.count('class="sample"') == len(CONFIG.sets) * len(CONFIG.turns) * SHOWN
    assert not re.search(r'(src|href)="(?!data:)', page), "one file, nothing fetched"


@pytest.mark.parametrize(
    ("place", "agree", "kind"),
    [
        (-1, None, "target"),
        (-1, [True, True], "target"),
        (0, [False, True], "view1"),
        (2, [True, True], "several"),
        (2, [False, False], "mixture"),
    ],
)
def test_token_class(place: int, agree: list[bool] | None, kind: str) -> None:
    assert token_class(place, agree) == kind
