"""Write the page of a run: its table, figures, and answers coloured by who drafted each token."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from eval.lib.output.plotting import TITLES
from eval.lib.output.tables import Record, Table
from jaxspec.data.images import to_rgb
from jaxspec.files import write_text
from jaxspec.prompts.placeholders import PLACEHOLDER

SHOWN = 3
"""Number of samples of each set and turn whose text is shown."""
ASKED = ("dataset", "sample", "turn", "follow_up")
"""Fields of a record that identify its question."""


DRAWN = 128
"""Maximum pixels a side of picturebook's images."""
LEGEND = {
    "target": "written by the target",
    "several": "drafted: several views predicted it",
    "mixture": "drafted: only the mixture predicted it",
    **{f"view{i}": f"drafted: only view {i + 1} predicted it" for i in range(4)},
}
"""Meanings of the CSS classes of tokens."""


def write_html(
    path: Path,
    run: Record,
    table: Table,
    figures: Sequence[Path],
    records: Sequence[Record],
    questions: Mapping[tuple[Any, ...], tuple[str, Sequence[Any]]],
) -> None:
    """Write the page.

    Args:
      records: Records of answers; those with a `trace` are shown, up to SHOWN samples of each set
        and turn.
      questions: Prompt text and images, keyed by a record's fields `ASKED`. The marks in the text
        are those of the last images.
    """
    samples = _samples(records, questions)
    kinds = {kind for sample in samples for row in sample["rows"] for _, kind, _ in row["tokens"]}
    page = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    html = page.get_template("page.html.jinja").render(
        **table._asdict(),
        run={name: _words(value) for name, value in run.items()},
        figures=[(TITLES[figure.stem], _data(figure.read_bytes())) for figure in figures],
        samples=samples,
        legend={kind: meaning for kind, meaning in LEGEND.items() if kind in kinds},
    )
    write_text(path, html)


def token_class(place: int, agree: Sequence[bool] | None) -> str:
    """Return a token's CSS class, by its writer and the views that predicted it.

    `place` is its place in the block; it is negative if the target wrote the token.
    """
    if place < 0:
        return "target"
    right = [i for i, a in enumerate(agree or ()) if a]
    if len(right) == 1:
        return f"view{right[0] % 4}"
    return "several" if right else "mixture"


def _samples(
    records: Sequence[Record], questions: Mapping[tuple[Any, ...], tuple[str, Sequence[Any]]]
) -> list[Record]:
    """Return the first samples of each set and turn, with the rows' coloured tokens."""
    out: dict[tuple[Any, ...], Record] = {}
    samples: dict[tuple[str, int], set[str]] = {}
    for record in records:
        trace = record.get("trace")
        if not trace:
            continue
        names = samples.setdefault((record["dataset"], record["turn"]), set())
        if record["sample"] not in names and len(names) >= SHOWN:
            continue
        names.add(record["sample"])
        key = tuple(record.get(field) for field in ASKED)
        if key not in out:
            text, images = questions.get(key, ("", ()))
            out[key] = dict(zip(("dataset", "sample", "turn"), key))
            out[key] |= {"question": _numbered(text, len(images)), "images": map(_picture, images)}
            out[key]["rows"] = []
        views = record["views"]
        fields = (trace[name] for name in ("pieces", "place", "agree", "weights"))
        tokens = [
            (piece, token_class(place, agree), _tip(views, place, agree, weights))
            for piece, place, agree, weights in zip(*fields, strict=True)
        ]
        row = {"name": _with_views(record["row"], views), "tokens": tokens}
        out[key]["rows"].append(row | {"length": record["tokens_per_pass"]})
    return list(out.values())


def _tip(
    views: Sequence[str], place: int, agree: Sequence[bool] | None, weights: Sequence[float]
) -> str:
    """Return the tooltip of a token."""
    parts = ["written by the target" if place < 0 else f"drafted at place {place + 1}"]
    if agree is not None:
        right = [view for view, a in zip(views, agree) if a]
        parts.append("likeliest of " + (", ".join(right) or "no view"))
    parts.append("weights " + ", ".join(f"{view} {w:.2f}" for view, w in zip(views, weights)))
    return "; ".join(parts)


def _with_views(row: str, views: Sequence[str]) -> str:
    """Return a row's name, with its views unless these are its name."""
    return row if row == ",".join(views) else f"{row} ({', '.join(views)})"


def _numbered(question: str, images: int) -> str:
    """Return a question with the numbers of its images, the last ones, in place of their marks."""
    if images == 1:  # it is shown above the question
        return question.replace(PLACEHOLDER, "").strip()
    first, *texts = question.split(PLACEHOLDER)
    start = images - len(texts) + 1
    return first + "".join(f"[image {start + i}]{text}" for i, text in enumerate(texts))


def _words(value: Any) -> str:
    """Return a value of a run in words, without entries that are empty."""
    if isinstance(value, Mapping):
        entries = {name: entry for name, entry in value.items() if entry not in (None, "", [], {})}
        return "; ".join(f"{name} {_inner(entry)}" for name, entry in entries.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_inner, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _inner(value: Any) -> str:
    return f"({_words(value)})" if isinstance(value, Mapping) else _words(value)


def _picture(image: Any) -> tuple[str, str]:
    """Return the CSS class of an image and its data URL, at most 640 pixels a side.

    Small images are drawn ones, whose pixels are enlarged; others are JPEG.
    """
    image = to_rgb(image)
    small = max(image.size) <= DRAWN
    image.thumbnail((640, 640))
    file = io.BytesIO()
    image.save(file, "PNG" if small else "JPEG")
    return "drawn" if small else "", _data(file.getvalue(), "png" if small else "jpeg")


def _data(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64," + base64.b64encode(content).decode()
