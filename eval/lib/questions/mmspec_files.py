"""Read and write MMSpec's own files: a line per conversation, and the summary of methods by
topic.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxspec.data.samples import Sample

BASELINE = "baseline"
SHOWN = (
    *("method", "group", "n_turns", "total_new_tokens", "MAT", "draft_accept_mean"),
    "speedup_paired",
)
SUMMARY = (
    *("method", "group", "n_samples", "n_turns", "total_new_tokens", "total_wall_time"),
    *("total_draft_time", "total_target_time", "MAT", "draft_accept_mean"),
    *("speedup_paired", "speedup_global"),
)


@dataclass(frozen=True)
class Turn:
    """Hold one answer and its cost."""

    text: str
    tokens: tuple[int, ...]
    steps: int
    """Target passes after prefill."""
    accepted: int | None
    """Accepted drafted tokens; None without a draft."""
    wall_time: float | None
    """Seconds, this answer's share of its batch; None for a recorded target."""


def answer_row(sample: Sample, turns: Sequence[Turn]) -> dict[str, Any]:
    """Return one line of an answer file."""
    choice: dict[str, Any] = {
        "index": 0,
        "turns": [turn.text for turn in turns],
        "idxs": [turn.steps for turn in turns],
        "new_tokens": [len(turn.tokens) for turn in turns],
        "token_ids": [list(turn.tokens) for turn in turns],
    }
    if all(turn.wall_time is not None for turn in turns):
        choice["wall_time"] = [turn.wall_time for turn in turns]
    if all(turn.accepted is not None for turn in turns):
        choice["acceptance_length"] = [(turn.accepted or 0) / max(turn.steps, 1) for turn in turns]
    return {"question_id": sample.id, **dict(sample.labels), "choices": [choice]}


def summary_rows(answers: dict[str, list[tuple[Sample, list[Turn]]]]) -> list[dict[str, Any]]:
    """Return MMSpec's summary: each method over all samples and each topic.

    MAT is new tokens over target passes after prefill (over new tokens for the baseline, hence 1).
    Prefill's token is counted, so MAT is a little above `tokens_per_pass`. speedup_paired is the
    mean over turns of the ratio of tokens/s to the baseline's, speedup_global the ratio of the
    totals.
    """
    plain = {
        (sample.id, i): turn for sample, turns in answers[BASELINE] for i, turn in enumerate(turns)
    }
    rows = []
    for method, answered in answers.items():
        for group in ("ALL", *dict.fromkeys(_topic(sample) for sample, _ in answered)):
            turns_of_group = [
                (sample, turns) for sample, turns in answered if group in ("ALL", _topic(sample))
            ]
            pairs = [
                (turn, plain[sample.id, i])
                for sample, turns in turns_of_group
                for i, turn in enumerate(turns)
            ]
            row = {"method": method, "group": group, "n_samples": len(turns_of_group)}
            counts = _counts([turn for turn, _ in pairs])
            rows.append(dict.fromkeys(SUMMARY, "") | row | counts | _times(pairs))
    return rows


def _topic(sample: Sample) -> str:
    return dict(sample.labels).get("topic", "")


def _counts(turns: Sequence[Turn]) -> dict[str, Any]:
    tokens = sum(len(turn.tokens) for turn in turns)
    passes = sum(len(turn.tokens) if turn.accepted is None else turn.steps for turn in turns)
    stood = [turn.accepted for turn in turns if turn.accepted is not None]
    counts: dict[str, Any] = {"n_turns": len(turns), "total_new_tokens": tokens}
    counts["MAT"] = tokens / passes if passes else ""
    return counts | ({"draft_accept_mean": sum(stood) / max(passes, 1)} if stood else {})


def _times(pairs: Sequence[tuple[Turn, Turn]]) -> dict[str, Any]:
    """Return seconds and speed-ups from pairs of a method's turn and the baseline's."""
    timed = [
        (len(turn.tokens), turn.wall_time, len(plain.tokens), plain.wall_time)
        for turn, plain in pairs
        if turn.wall_time and plain.wall_time
    ]
    if not timed:
        return {}
    tokens, seconds, plain_tokens, plain_seconds = (sum(column) for column in zip(*timed))
    return {
        "total_wall_time": seconds,
        "speedup_paired": sum(n / t / (m / u) for n, t, m, u in timed) / len(timed),
        "speedup_global": tokens / seconds / (plain_tokens / plain_seconds),
    }


def summary_csv(rows: Sequence[dict[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, SUMMARY, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
