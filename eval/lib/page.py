"""The page of a run: its table, figures, and answers coloured by who drafted each token."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, select_autoescape

from eval.lib.figures import TITLES
from eval.lib.tables import Record, Table
from jaxspec.data.images import to_rgb
from jaxspec.files import write_text

SHOWN = 3
"""Number of samples of each set and turn whose text is shown."""
ASKED = ("dataset", "sample", "turn", "follow_up")
"""Fields of a record that identify its question."""


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
      questions: Prompt text and images, keyed by a record's fields `ASKED`.
    """
    page = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=select_autoescape(default=True)
    )
    html = page.get_template("page.html.jinja").render(
        **table._asdict(),
        run=run,
        figures=[(TITLES[figure.stem], _data(figure.read_bytes())) for figure in figures],
        samples=_samples(records, questions),
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
    out: dict[tuple[Any, ...], Record] = {}
    shown: dict[tuple[str, int], set[str]] = {}
    for record in records:
        trace = record.get("trace")
        if not trace:
            continue
        chosen = shown.setdefault((record["dataset"], record["turn"]), set())
        if record["sample"] not in chosen and len(chosen) >= SHOWN:
            continue
        chosen.add(record["sample"])
        key = tuple(record.get(field) for field in ASKED)
        if key not in out:
            text, images = questions.get(key, ("", ()))
            out[key] = dict(zip(("dataset", "sample", "turn"), key))
            out[key] |= {"question": text, "images": [_picture(image) for image in images]}
            out[key]["rows"] = []
        views = record["views"]
        fields = (trace[name] for name in ("pieces", "place", "agree", "weights"))
        tokens = [
            (piece, token_class(place, agree), _tip(views, place, agree, weights))
            for piece, place, agree, weights in zip(*fields, strict=True)
        ]
        length = record["tokens_per_pass"]
        out[key]["rows"].append(
            {"name": record["row"], "views": views, "tokens": tokens, "length": length}
        )
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


def _picture(image: Any) -> str:
    """Return the image as a data URL, at most 160 pixels a side."""
    image = to_rgb(image)
    image.thumbnail((160, 160))
    file = io.BytesIO()
    image.save(file, "PNG")
    return _data(file.getvalue())


def _data(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()
