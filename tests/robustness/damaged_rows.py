"""Damage rows of data by the seed: JSONL, JSON lists and parquet, before every reader of strangers'
files.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from eval.lib.questions.sets import read_prompts
from eval.lib.standins.replay import RecordedTarget
from jaxspec.data.benchmarks import BENCHMARKS, benchmark_samples, few_shot_samples
from jaxspec.data.conversations import Skipped, own_samples, readable
from jaxspec.engine.captioners import CaptionFile
from jaxspec.loading.models import LoadedModel
from tests.robustness.damage import Outcome, judge, spoil

SAID = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "A page."}]
ROWS: dict[str, tuple[dict[str, Any], ...]] = {
    "training rows": (
        {"id": 1, "image": "page.png", "conversations": SAID},
        {"id": "a", "video": "clip", "conversations": SAID},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]},
        {"instruction": "Add.", "output": "Done."},
        {"text": "Once."},
    ),
    "evaluation rows": (
        {
            "question": "What?",
            "answer": "1",
            "image": "page.png",
            "subject": "law",
            "choices": ["no", "yes"],
        },
        {
            "image_1": "page.png",
            "image_2": "page.png",
            "question": "<image><image>?",
            "answer": ["a", "b"],
        },
        {"question": "1+1?", "answer": "#### 2"},
    ),
    "MMSpec prompts": (
        {"id": "m", "image": "page.png", "turns": ["What?", "Why?"], "topic": "a", "category": "b"},
    ),
    "own rows": (
        {"id": "a", "images": ["page.png"], "turns": ["What?", "Why?"], "reference": ["So.", ""]},
    ),
    "captions": (
        {"image": "page.png", "caption": "A page."},
        {"sha256": "0", "caption": "Another."},
    ),
    "recorded answers": (
        {
            "question_id": "m",
            "choices": [{"turns": ["So."], "new_tokens": [4], "token_ids": [[5, 6]]}],
        },
        {"sample": "a", "turn": 2, "text": "So.", "temperature": 0.0},
        {"sample": "a", "token_ids": [5, 6]},
    ),
}
"""What files of each kind hold before they are damaged."""


def row_outcome(scratch: Path, seed: int, draft: LoadedModel) -> Outcome:
    """Damage a file of two rows by the seed, and read it.

    Args:
      draft: an LVLM, by whose tokeniser recorded answers are read.
    """
    draw = random.Random(seed)
    folder = scratch / "rows"
    if not folder.exists():
        (folder / "clip").mkdir(parents=True)
        for name in ("page.png", "clip/1.png"):
            Image.new("RGB", (6, 4), "red").save(folder / name)
    kind = draw.choice(list(ROWS))
    rows = [copy.deepcopy(draw.choice(ROWS[kind])) for _ in range(2)]
    told = [spoil(rows[-1], draw) for _ in range(draw.choice((1, 1, 2, 3)))]
    file = _write(folder, rows, draw, lists=kind == "training rows")
    if draw.random() < 0.4:
        raw = bytearray(file.read_bytes())
        for _ in range(draw.choice((1, 1, 4))):
            raw[draw.randrange(len(raw))] = draw.randrange(256)
        told.append("other bytes")
        file.write_bytes(raw if draw.random() < 0.7 else raw[: draw.randrange(len(raw))])
    return judge(
        seed,
        kind,
        f"{file.suffix}: {', '.join(told)}",
        lambda: list(_reader(kind, file, draft, draw)()),
    )


def _write(folder: Path, rows: list[dict[str, Any]], draw: random.Random, lists: bool) -> Path:
    """Write the rows in one of the forms; parquet where it can hold them."""
    form = draw.choice(("jsonl", "parquet", "json") if lists else ("jsonl", "jsonl", "parquet"))
    if form == "parquet":
        try:
            import pyarrow
            from pyarrow.parquet import write_table

            write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
            return folder / "rows.parquet"
        except Exception:  # not installed, or columns of more than one kind
            form = "jsonl"
    lines = [json.dumps(row) for row in rows]
    file = folder / f"rows.{form}"
    file.write_text(
        "[" + ",\n".join(lines) + "]" if form == "json" else "\n".join(lines), encoding="utf-8"
    )
    return file


def _reader(kind: str, file: Path, draft: LoadedModel, draw: random.Random) -> Callable[[], Any]:
    name = draw.choice(sorted(BENCHMARKS))
    shots = draw.random() < 0.2
    readers: dict[str, Callable[[], Any]] = {
        "training rows": lambda: readable(file, Skipped(2, file.with_name("skipped.log"))),
        "evaluation rows": lambda: (
            few_shot_samples("mmlu", file, file) if shots else benchmark_samples(name, file)
        ),
        "MMSpec prompts": lambda: read_prompts(file),
        "own rows": lambda: own_samples("mine", file),
        "captions": lambda: CaptionFile(file).captions,
        "recorded answers": lambda: RecordedTarget.read(file, draft).answers,
    }
    return readers[kind]
