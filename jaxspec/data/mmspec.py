"""MMSpec's own files: prompts in, answers and the summary out (arXiv 2603.14989).

A prompt is a line {id, image, turns, category, topic}, as of your own data (`jaxspec.data.samples`). An answer is a
line {question_id, topic, category, choices: [{turns, idxs, new_tokens, wall_time, acceptance_length}]}, lists by turn,
and one file holds one method; this project adds `token_ids`, for replay. `idxs` are target passes after prefill,
`new_tokens` count prefill's token, and `acceptance_length` is the mean number of drafted tokens that a pass accepted,
the form in which MMSpec stores MSD; plain decoding has none. MMSpec's draft_time and target_time are left out: one
compiled loop does not tell them apart.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxspec.data.rows import DataRow, local_rows
from jaxspec.data.samples import Sample, own_sample, text_of
from jaxspec.errors import InputError

SUMMARY: tuple[str, ...] = (
    "method", "group", "n_samples", "n_turns", "total_new_tokens", "total_wall_time", "total_draft_time",
    "total_target_time", "MAT", "draft_accept_mean", "speedup_paired", "speedup_global",
)  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """One answer and what it took."""

    text: str
    tokens: tuple[int, ...]
    steps: int
    """Target passes after prefill."""
    accepted: int | None
    """Drafted tokens that stood; None without a draft."""
    wall_time: float | None
    """Seconds; of a batch, this answer's share. None of a recorded target."""


def read_prompts(path: Path) -> Iterator[Sample]:
    """Yield the conversations of an MMSpec file; the answers are empty."""
    for row in local_rows(path):
        labels = tuple((name, str(row.values.get(name, ""))) for name in ("topic", "category"))
        yield replace(own_sample("mmspec", row), labels=labels)


def answers_of(row: DataRow) -> tuple[str, list[tuple[str, list[int] | None, int | None]]]:
    """Return the id of a line of answers, and (text, token ids, number of tokens) by turn; the first choice counts.

    Token ids and numbers are None where the line does not tell them.
    """
    name = text_of(row, ("question_id", "id"))
    try:
        choice = row.values["choices"][0]
        texts = choice["turns"]
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise TypeError
        told = [choice.get(key) or [None] * len(texts) for key in ("token_ids", "new_tokens")]
        return name, list(zip(texts, *told, strict=True))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{row.place}: 'choices' holds no list 'turns' of answers, or new_tokens of another length; "
            "use MMSpec's output format"
        ) from error


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


def summary_rows(answers: dict[str, list[tuple[Sample, list[Turn]]]], baseline: str) -> list[dict[str, Any]]:
    """Return MMSpec's summary: each method over all samples and each topic. Cells that were not measured are empty.

    MAT is new tokens over target passes after prefill (over new tokens for the baseline, hence 1), with prefill's
    token among the new ones: a little above `mean_acceptance_length`. speedup_paired is the mean over turns of the
    ratio of tokens/s to the baseline's, speedup_global the ratio of the totals.
    """
    plain = {(sample.id, i): turn for sample, turns in answers[baseline] for i, turn in enumerate(turns)}
    rows = []
    for method, answered in answers.items():
        for group in ("ALL", *dict.fromkeys(_topic(sample) for sample, _ in answered)):
            chosen = [(sample, turns) for sample, turns in answered if group in ("ALL", _topic(sample))]
            pairs = [(turn, plain[sample.id, i]) for sample, turns in chosen for i, turn in enumerate(turns)]
            named = {"method": method, "group": group, "n_samples": len(chosen)}
            rows.append(dict.fromkeys(SUMMARY, "") | named | _counts([turn for turn, _ in pairs]) | _times(pairs))
    return rows


def _topic(sample: Sample) -> str:
    return dict(sample.labels).get("topic", "")


def _counts(turns: Sequence[Turn]) -> dict[str, Any]:
    tokens = sum(len(turn.tokens) for turn in turns)
    passes = sum(len(turn.tokens) if turn.accepted is None else turn.steps for turn in turns)
    stood = [turn.accepted for turn in turns if turn.accepted is not None]
    counts = {"n_turns": len(turns), "total_new_tokens": tokens, "MAT": tokens / passes if passes else ""}
    return counts | ({"draft_accept_mean": sum(stood) / max(passes, 1)} if stood else {})


def _times(pairs: Sequence[tuple[Turn, Turn]]) -> dict[str, Any]:
    """Return seconds and speed-ups, of pairs of a method's turn and the baseline's."""
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
