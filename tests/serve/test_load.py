"""`python -m eval.serving` asks a server that runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval import serving
from eval.lib.times.load import ask
from jaxspec.errors import InputError
from tests.serve.conftest import Served

pytestmark = pytest.mark.full


def test_what_is_no_server_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"url nowhere: lists no model .*; start the server"):
        serving.main(tmp_path / "out", "nowhere")


def test_load_is_measured(served: Served, tmp_path: Path) -> None:
    serving.main(tmp_path / "out", served.url, clients=(1, 2), requests=4, new=8, images=False)
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert [row["clients"] for row in rows] == [1, 2]
    for row in rows:
        assert 4 <= row["tokens"] <= 4 * 8
        assert 0 < row["first_ms_p50"] <= row["first_ms_p95"]
        assert row["tokens_per_second"] > row["requests_per_second"] > 0


def test_a_refusal_is_one_line(served: Served) -> None:
    with pytest.raises(InputError, match=r"url .*: gives no answer \(status 4\d\d: .*\); start"):
        ask(served.url, {"messages": []})
    with pytest.raises(InputError, match=r"url http://127\.0\.0\.1:9: gives no answer .*refused"):
        ask("http://127.0.0.1:9", {})
