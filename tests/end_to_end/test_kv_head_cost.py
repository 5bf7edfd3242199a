"""The costs of Target-Draft attention are measured of the shipped head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.kv_head_cost import main
from jaxspec.errors import InputError


def test_the_script_writes_costs(tmp_path: Path) -> None:
    main(lengths=(32,), gamma=2, repeats=1, out=tmp_path)
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    sizes = {row["layout"]: row["bytes"] for row in rows[:-1]}
    assert sizes["naive"] > sizes["anchored blocks"] > sizes["causal"]
    assert rows[-1]["layout"] == "decoding"
    assert all(rows[-1][name] > 0 for name in ("draft_ms", "target_ms", "pack_ms", "prefill_ms"))
    assert "a drafted token takes" in (tmp_path / "table.md").read_text()


def test_rows_without_a_block_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="lengths: 0 tokens have no whole block of 5; give 7 or more"):
        main(lengths=(0,), out=tmp_path)
