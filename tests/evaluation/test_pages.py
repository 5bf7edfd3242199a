"""Figures and the HTML page are drawn from made-up records."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from eval.lib.drafts.config import EvalConfig, Variant
from eval.lib.drafts.figures import block_efficiency, draw_all
from eval.lib.drafts.page import ASKED, SHOWN, write_html
from eval.lib.output.tables import Table

ROWS = (Variant("M", ("M",)), Variant("MT*", ("M", "T")))
CONFIG = EvalConfig(target="t", draft=("d",), rows=ROWS, sets=("describe", "saga"))
PIECES = ["A", " <b>", " red", " &", " cat"]


def made_up(trace: bool = True) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    rows, records = [], []
    for dataset in CONFIG.sets:
        for turn in CONFIG.turns:
            for row in CONFIG.rows:
                views = len(row.views)
                place = {
                    "dataset": dataset,
                    "turn": turn,
                    "row": row.name,
                    "views": list(row.views),
                }
                times = {"gamma": 2, "draft_ms": 1.0, "verify_ms": 3.0, "target_ms": 2.0}
                rates = {
                    "tokens_per_pass": 2.0,
                    "conditional_acceptance_rate_per_position": [0.5, None],
                }
                rows.append(place | times | rates)
                weights = np.linspace(0, 1, 5 * views).reshape(5, views).tolist()
                agree = [
                    None,
                    [True] * views,
                    [False] * views,
                    [True] + [False] * (views - 1),
                    None,
                ]
                told = {
                    "pieces": PIECES,
                    "place": [-1, 0, 1, 0, -1],
                    "agree": agree,
                    "weights": weights,
                    "shares": [None, [0.0, 0.4], None, [0.2, 1.0], None],
                }
                for sample in range(SHOWN + 1):
                    counts = {"tokens_per_pass": 1.0 + sample % 3, "num_spec_steps": 4}
                    record = place | rates | counts | {"sample": f"{dataset}-{sample}"}
                    records.append(record | ({"trace": told} if trace else {}))
    return rows, records


@pytest.mark.parametrize("trace", [True, False])
def test_every_figure_that_can_be_drawn_is(tmp_path: Path, trace: bool) -> None:
    pytest.importorskip("matplotlib")
    drawn = draw_all(CONFIG, *made_up(trace), tmp_path)
    untraced = ["block_efficiency", "acceptance_by_position", "block_times"]
    assert [f.stem for f in drawn] == untraced + [
        "weight_trajectory",
        "overlap",
        "accepted_over_time",
    ] * trace
    vectors = [figure.with_suffix(".svg") for figure in drawn]
    assert sorted(tmp_path.iterdir()) == sorted([*drawn, *vectors])


def test_bars_have_intervals() -> None:
    pytest.importorskip("matplotlib")
    figure = block_efficiency(CONFIG, *made_up())
    bars = [bar for axis in figure.axes for bar in axis.containers if hasattr(bar, "patches")]
    assert len(bars) == len(CONFIG.turns) * len(ROWS)
    for bar in bars:
        (lines,) = bar.errorbar.lines[2]
        for (_, low), (_, high) in lines.get_segments():
            assert 1 <= low < 2 < high <= 3


def test_the_page_holds_all_and_escapes_it(tmp_path: Path) -> None:
    _, records = made_up()
    image = np.zeros((4, 4, 3), np.uint8)
    photo = np.zeros((600, 900, 3), np.uint8)
    asked = {
        tuple(map(r.get, ASKED)): ("<image>\nWhat?", [image])
        if r["turn"] == 1
        else ("<image> or <image>?", [image, photo, photo])
        for r in records
    }
    run = {
        "device": "cpu",
        "options": {
            "gamma": 5,
            "mesh": None,
            "rows": [{"name": "MT", "views": ["M", "T"], "tree": None}],
        },
        "load": 5.11474609375,
    }
    path = tmp_path / "report.html"
    write_html(
        path, run, Table("A < B", ["views", "x"], [["M", "2.0"]], ["a note"]), [], records, asked
    )
    page = path.read_text()
    assert "A &lt; B" in page
    assert "<b>" not in re.sub(r"<br>", "", page)
    assert page.count('class="sample"') == len(CONFIG.sets) * len(CONFIG.turns) * SHOWN
    assert '<div class="question">What?</div>' in page
    assert '<div class="question">[image 2] or [image 3]?</div>' in page
    assert "&lt;image&gt;" not in page
    sizes = {
        kind: Image.open(io.BytesIO(base64.b64decode(data))).size
        for kind, data in re.findall(
            r'<img class="(\w*)" [^>]*src="data:image/\w+;base64,([^"]+)"', page
        )
    }
    assert sizes == {"drawn": (4, 4), "": (640, 427)}
    for text in (
        "<dt>options</dt><dd>gamma 5; rows (name MT; views M, T)</dd>",
        "<dt>load</dt><dd>5.11</dd>",
    ):
        assert text in page
    assert re.findall(r'class="name">(.+?)<br>', page)[:2] == ["M", "MT* (M, T)"]
    legend = re.search(r'<p class="legend">.*?</p>', page, re.DOTALL)
    assert legend
    assert re.findall(r'class="(\w+)">', legend[0])[1:] == ["target", "several", "mixture", "view0"]
    assert not re.search(r'(src|href)="(?!data:)', page), "one file, nothing fetched"
