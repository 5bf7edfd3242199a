"""Tables of measured rows in the papers' layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.evaluation.config import EvalConfig

Table = tuple[str, list[str], list[list[str]], list[str]]


def block_efficiency_table(config: EvalConfig, rows: Sequence[dict[str, Any]]) -> Table:
    """(title, header, cells, notes): a line per row of views and turn, a column per set, and the plain averages."""
    title = f"Block efficiency: tokens per target pass, gamma {config.gamma}, temperature {config.temperature:g}"
    told = any(row.published for row in config.rows)
    header = ["views", "turn", *config.sets, "avg", *["paper"] * told, "speed-up", "predicted", "identical"]
    cells = []
    for turn in config.turns:
        for row in config.rows:
            line = {r["dataset"]: r for r in rows if r["row"] == row.name and r["turn"] == turn}
            found = [line[name] for name in config.sets]
            cells.append(
                [
                    row.name,
                    str(turn),
                    *(_number(r["mean_acceptance_length"]) for r in found),
                    _mean(found, "mean_acceptance_length"),
                    *[_number(dict(enumerate(row.published, 1)).get(turn))] * told,
                    _mean(found, "speedup_measured"),
                    _mean(found, "speedup_predicted_with_verify"),
                    f"{100 * np.mean([r['token_identity_rate'] for r in found]):.1f}%",
                ]
            )
    notes = [
        f"{config.pair}. {_counts(rows)} samples a set, batch {config.batch_size}, {config.dtype}, "
        f"{rows[0]['device']}. avg is the plain mean over sets.",
        "speed-up: decode tokens/s over plain decoding of the same requests in the same run; predicted: Eq. (1) with "
        "T_q, T_p and T_p(J+1) as measured once a row, on the first set; identical: share of answers equal to plain "
        "decoding token for token.",
    ]
    learned = {row.name: row.weighting for row in config.rows if row.weighting not in ("static", row.name)}
    if learned:
        notes.append("Weights: " + ", ".join(f"{name} by {rule}" for name, rule in learned.items()) + ".")
    return title, header, cells, notes


def _counts(rows: Sequence[dict[str, Any]]) -> str:
    """The number of samples, or the least and the most where sets differ."""
    counts = {row["samples"] for row in rows}
    return " to ".join(map(str, sorted({min(counts), max(counts)})))


def draft_table(config: EvalConfig, rows: Sequence[dict[str, Any]]) -> Table:
    """AASD's Table 1: a line per set and draft, and for each draft length four columns. Turns are averaged."""
    gammas = sorted({row["gamma"] for row in rows})
    fields = {
        "omega": "speedup_measured",
        "alpha": "draft_acceptance_rate",
        "tau": "mean_acceptance_length",
        "delta": "decode_tokens_per_second",
    }
    header = ["set", "draft", *(f"{name} J={gamma}" for gamma in gammas for name in fields)]
    places = {name: (name,) for name in config.sets} | ({"avg": config.sets} if len(config.sets) > 1 else {})
    cells = []
    for place, sets in places.items():
        for draft in dict.fromkeys(row["row"] for row in rows):
            found = [row for row in rows if row["row"] == draft and row["dataset"] in sets]
            drawn = [[row for row in found if row["gamma"] == gamma] for gamma in gammas]
            cells.append([place, draft, *(_mean(part, field) for part in drawn for field in fields.values())])
    same = min(row["token_identity_rate"] for row in rows)
    plain = {name: [row for row in rows if row["dataset"] == name] for name in config.sets}
    rates = [f"{name} {_mean(found, 'plain_tokens_per_second')}" for name, found in plain.items()]
    notes = [
        f"{config.limit} samples a set, turns {', '.join(map(str, config.turns))}, batch {config.batch_size}, "
        f"temperature {config.temperature:g}, {config.dtype}, {rows[0]['device']}, {config.repeats} runs by turns. "
        "avg is the plain mean over sets.",
        "omega: tokens/s of the loop over plain decoding's in the same run (the median over runs); alpha: accepted "
        "over drafted tokens; tau: tokens per target pass, the bonus token counted; delta: tokens/s. "
        f"Plain decoding: {', '.join(rates)} tokens/s.",
    ]
    if config.temperature == 0:
        notes.append(f"In every row at least {100 * same:.1f} % of the answers are plain decoding's, token for token.")
    off = [row["mean_acceptance_length"] / row["foretold"] - 1 for row in rows if row.get("foretold")]
    if off:
        most = 100 * max(map(abs, off))
        notes.append(f"One pass of training's attention over the answers gives the heads' tau within {most:.1f} %.")
    return "Drafts of one target: AASD's Table 1", header, cells, notes


def _mean(rows: Sequence[dict[str, Any]], field: str) -> str:
    values = [row[field] for row in rows if row.get(field) is not None]
    return _number(float(np.mean(values)) if values else None)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def identity_table(config: EvalConfig, rows: Sequence[dict[str, Any]]) -> Table:
    """A line per row of views, gamma and batch, pooled over sets and turns."""
    header = ["views", "gamma", "batch", "answers", "identical", "first divergence", "largest logit gap"]
    cells = []
    for key in dict.fromkeys((row["row"], row["gamma"], row["batch"]) for row in rows):
        found = [row for row in rows if (row["row"], row["gamma"], row["batch"]) == key]
        answers = [row["samples"] for row in found]
        rate = np.average([row["token_identity_rate"] for row in found], weights=answers)
        first = [row["first_divergence"] for row in found if row["first_divergence"] is not None]
        gaps = [row["largest_logit_gap"] for row in found if row["largest_logit_gap"] is not None]
        cells.append(
            [
                *map(str, key),
                str(sum(answers)),
                f"{100 * rate:.2f} %",
                str(min(first)) if first else "-",
                f"{max(gaps):.2g}" if gaps else "-",
            ]
        )
    notes = [
        f"{config.limit} samples of each of {len(config.sets)} sets and {len(config.turns)} turns, "
        f"{config.dtype}, {rows[0]['device']}, temperature 0, against plain decoding.",
        "first divergence: the fewest tokens that an answer shares with its reference before they part. "
        "largest logit gap: the reference's token over the other one there, in one full forward pass of the target.",
    ]
    return "Token identity with plain decoding", header, cells, notes


def sampling_table(config: EvalConfig, rows: Sequence[dict[str, Any]]) -> Table:
    """A line per row of views and sampling options."""
    header = ["views", "gamma", "temp.", "top-p", "draws", "cells", "chi-square", "p-value"]
    cells = [
        [
            row["row"],
            str(row["gamma"]),
            f"{row['temperature']:g}",
            f"{row['top_p']:g}",
            str(row["samples"]),
            str(row["degrees"] + 1),
            f"{row['statistic']:.1f}",
            f"{row['p_value']:.3f}",
        ]
        for row in rows
    ]
    notes = [
        f"Beginnings of {rows[0]['tokens']} tokens, drawn with the draft and by plain decoding with other seeds; "
        "p-value of the two-sample chi-square test that both are distributed alike.",
    ]
    return "Sampled answers against plain decoding", header, cells, notes


def regret_table(config: EvalConfig, rows: Sequence[dict[str, Any]]) -> Table:
    """A line per rule and turn, pooled over the tokens of all sets, best block efficiency first."""
    views = ",".join(rows[0]["views"])
    title = f"Weightings of views {views}: losses a token and regret, gamma {config.gamma}"
    losses = ("kl", "rejections", "misses")
    header = ["weighting", "turn", "tau", "KL", "rejected", "missed", "R(KL)", "R(rej.)", "R(miss.)"]
    lines = []
    for rule, turn in dict.fromkeys((row["weighting"], row["turn"]) for row in rows):
        found = [row for row in rows if (row["weighting"], row["turn"]) == (rule, turn)]
        tokens = [row["tokens"] for row in found]
        blocks = sum(row["num_spec_steps"] for row in found)
        means = [float(np.average([row[f] for row in found], weights=tokens)) for f in losses]
        means += [float(np.average([row[f"regret_{f}"] for row in found], weights=tokens)) for f in losses]
        lines.append((turn, -sum(tokens) / blocks, rule, means))
    cells = [[rule, str(turn), f"{-tau:.3f}", *(f"{x:.3f}" for x in means)] for turn, tau, rule, means in sorted(lines)]
    notes = [
        f"{config.limit} samples of each of {len(config.sets)} sets; rules replayed on the target's greedy answers. "
        "tau: block efficiency. KL: KL(p, mixture) a token in nats; rejected: 1 - sum min(p, mixture), both at "
        "temperature 1; missed: share of tokens where the likeliest differ.",
        "R: the same less that of each answer's best fixed weights, chosen with hindsight for that loss on a grid.",
    ]
    return title, header, cells, notes
