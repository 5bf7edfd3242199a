"""One self-contained HTML page a run: the table, what its words mean, the figures, and answers coloured by who
drafted each token."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape

from jaxspec.data.images import to_rgb
from jaxspec.evaluation.figures import TITLES
from jaxspec.evaluation.tables import Table
from jaxspec.files import write_text

Record = dict[str, Any]
SHOWN = 3
"""Samples of each set and turn whose text is shown."""

WORDS = {
    "draft, target": "The draft is a small model that guesses tokens; the target is the large one whose answer it is. "
    "It checks the guesses, so that the answer is what it would have written alone.",
    "block, gamma": "The draft guesses gamma tokens in a row, a block; one pass of the target then checks all of them. "
    "Those up to the first wrong one are accepted.",
    "tokens per target pass": "Also called block efficiency: how many tokens of the answer a pass of the target gives, "
    "from 1, as in plain decoding, to gamma + 1. Numbers under the names of sets are these.",
    "correction, bonus": "What the target itself writes in each pass: the right token in place of the first wrong "
    "guess, or one more where the whole block was right.",
    "M, T, C, P": "Views, which are what the draft is shown of the prompt: all of it with its images (M); text only "
    "(T); captions in place of images (C); images pooled to fewer tokens (P).",
    "kv, KV head": "A draft that is one layer and reads the target's own keys and values, not the prompt.",
    "MT, MTCP": "Mixtures: the views of one draft run side by side, and it guesses from the weighted mean of what they "
    "say. Weights are fixed where a row is called static, and learned from checked tokens where it has a star.",
    "turn 1, turn 2": "The first question, and a second one after the target's own answer to the first.",
    "speed-up, predicted": "Tokens a second over those of plain decoding, measured in the same run; and what Eq. (1) "
    "of the papers makes of the times of one pass of the draft (T_q), of the target (T_p), and of the target over a "
    "block (T_p(J+1), J being gamma). Below 1 it is slower.",
    "identical": "How many answers equal those of plain decoding token for token.",
}
"""What the page says, for readers who do not know the field."""


def write_html(
    path: Path,
    run: Record,
    table: Table,
    figures: Sequence[Path],
    records: Sequence[Record],
    questions: Mapping[tuple[str, str, int], tuple[str, Sequence[Any]]],
) -> None:
    """Writes the page.

    Args:
      records: those with a `trace` are shown, up to SHOWN samples of each set and turn.
      questions: (dataset, sample, turn) -> the prompt's text and its images.
    """
    title, header, cells, notes = table
    page = Environment(loader=PackageLoader("jaxspec.evaluation", "."), autoescape=select_autoescape(default=True))
    html = page.get_template("report.html.jinja").render(
        title=title,
        header=header,
        cells=cells,
        notes=notes,
        run=run,
        words=WORDS,
        figures=[(TITLES[figure.stem], _data(figure.read_bytes())) for figure in figures],
        samples=_samples(records, questions),
    )
    write_text(path, html)


def token_class(place: int, agree: Sequence[bool] | None) -> str:
    """CSS class of a token: by whom it was written, and which views had it as their likeliest.

    `place` is its place in the block; below 0, the target wrote it.
    """
    if place < 0:
        return "target"
    right = [i for i, a in enumerate(agree or ()) if a]
    if len(right) == 1:
        return f"view{right[0] % 4}"
    return "several" if right else "mixture"


def _samples(
    records: Sequence[Record], questions: Mapping[tuple[str, str, int], tuple[str, Sequence[Any]]]
) -> list[Record]:
    out: dict[tuple[str, str, int], Record] = {}
    shown: dict[tuple[str, int], set[str]] = {}
    for record in records:
        trace = record.get("trace")
        if not trace:
            continue
        chosen = shown.setdefault((record["dataset"], record["turn"]), set())
        if record["sample"] not in chosen and len(chosen) >= SHOWN:
            continue
        chosen.add(record["sample"])
        key = (record["dataset"], record["sample"], record["turn"])
        if key not in out:
            text, images = questions.get(key, ("", ()))
            pictures = [_picture(image) for image in images]
            out[key] = {"dataset": key[0], "sample": key[1], "turn": key[2], "question": text, "images": pictures}
            out[key]["rows"] = []
        agree = trace["agree"]
        tokens = [
            (piece, token_class(place, agree[i]), _tip(record["views"], place, agree[i], trace["weights"][i]))
            for i, (piece, place) in enumerate(zip(trace["pieces"], trace["place"]))
        ]
        length = record["mean_acceptance_length"]
        out[key]["rows"].append(
            {"name": record["row"], "views": record["views"], "tokens": tokens, "length": length}
        )
    return list(out.values())


def _tip(views: Sequence[str], place: int, agree: Sequence[bool] | None, weights: Sequence[float]) -> str:
    """What is said when the pointer rests on a token."""
    parts = ["written by the target" if place < 0 else f"drafted at place {place + 1}"]
    if agree is not None:
        right = [view for view, a in zip(views, agree) if a]
        parts.append("likeliest of " + (", ".join(right) or "no view"))
    parts.append("weights " + ", ".join(f"{view} {w:.2f}" for view, w in zip(views, weights)))
    return "; ".join(parts)


def _picture(image: Any) -> str:
    """The image as a data URL, at most 160 pixels a side."""
    image = to_rgb(image)
    image.thumbnail((160, 160))
    file = io.BytesIO()
    image.save(file, "PNG")
    return _data(file.getvalue())


def _data(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()
