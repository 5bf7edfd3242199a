"""Read conversations from files in all forms of `data/forms.py`, to train on and to evaluate.

Files are a `.json` list, `.jsonl`, `.jsonl.gz` or parquet. Training counts, logs and skips rows
that cannot be read, and counts what it does not read of others: columns that look like part of the
conversation, those that say what is learned, answers before questions and questions at the end.
Evaluation raises InputError at the first such row.

Image paths are relative to the file's folder, to its `images/`, or to the folder that is given.
"""

from __future__ import annotations

import json
import os
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from jaxspec.data.forms import Remark, read_row, remarks
from jaxspec.data.hub import on_disk
from jaxspec.data.rows import DataRow, json_list, raised, rows_and_errors
from jaxspec.data.samples import Sample
from jaxspec.errors import InputError, check_counts, located
from jaxspec.files import writing

_ADVICE: dict[Remark, str] = {
    "not read": "put what belongs to the conversation into its questions and answers",
    "not obeyed": "every answer is learned alike, so leave out what should not be",
    "left out": "only questions with answers are learned",
}
THREADS = 8
"""Rows that are read at a time: decoding their images takes longest."""


@dataclass
class Skipped:
    """Count unreadable rows, at most `limit`, and write {id, reason} of each to `log`."""

    limit: int
    log: Path
    count: int = field(default=0, init=False)
    _reasons: Counter[str] = field(default_factory=Counter, init=False)
    """How often each reason was given, without the row's origin."""
    remarks: Counter[tuple[Remark, str]] = field(default_factory=Counter, init=False)
    """Number of rows, by each remark on rows that are read."""

    def start(self) -> None:
        """Remove an earlier run's log."""
        with writing(self.log):
            self.log.parent.mkdir(parents=True, exist_ok=True)
            self.log.unlink(missing_ok=True)

    def add(self, name: str, reason: InputError) -> None:
        self.count += 1
        self._reasons[str(reason).partition(": ")[2] or str(reason)] += 1
        with writing(self.log), self.log.open("a", encoding="utf-8") as log:
            log.write(json.dumps({"id": name, "reason": str(reason)}, ensure_ascii=False) + "\n")
        if self.count > self.limit:
            raise InputError(
                f"data: {self.count} rows cannot be read, but only {self.limit} may be skipped; "
                f"mend them, or raise the limit ({self.log} has all of them); the last: {reason}"
            ) from reason

    def summary(self) -> str:
        """Return how many rows were skipped, the commonest reason, and the log."""
        if not self._reasons:
            return "the file holds no rows; name another"
        ((reason, count),) = self._reasons.most_common(1)
        return f"{self.count} rows were skipped, {count} of them: {reason} ({self.log} has all)"

    def lines(self) -> list[str]:
        """Return a line about skipped rows, and one about each kind of remark on others."""
        lines = []
        if self.count:
            lines.append(f"skipped {self.count} rows that cannot be read: {self.log}")
        for kind, advice in _ADVICE.items():
            names = [
                f"{name} ({count:,} row{'s' * (count > 1)})"
                for (remark, name), count in self.remarks.items()
                if remark == kind
            ]
            lines += [f"{kind}: {', '.join(names)}; {advice}"] if names else []
        return lines


def readable(
    path: Path, skipped: Skipped, images: Path | None = None, frames: int = 8, outside: bool = False
) -> Iterator[Sample]:
    """Yield the conversations of a file, or of a folder's parquet or JSONL files, in their order.

    Raises InputError for too many unreadable rows, a missing folder of images, and frames below 1.

    Args:
      path: A file, a folder, or `hub:OWNER/NAME/FILE`.
      skipped: Receiver of the unreadable rows.
      images: Folder of relative image paths; None means the file's folder, or `images/` in it.
      frames: Maximum frames of a video, spread evenly over all frames.
      outside: Whether to read images outside of that folder; a stranger's row may name any file.
    """
    check_counts(frames=frames)
    rows = _rows(path, images)
    skipped.start()
    with ThreadPoolExecutor(THREADS) as pool:
        waiting: deque[tuple[DataRow, str, Future[Sample]]] = deque()
        for number, row in enumerate(rows):
            if isinstance(row, InputError):
                skipped.add(str(number), row)
                continue
            row = replace(row, confined=not outside)
            name = str(row.values.get("id", number))
            waiting.append((row, name, pool.submit(read_row, row, frames)))
            if len(waiting) >= 4 * THREADS:
                yield from _finished(*waiting.popleft(), skipped)
        while waiting:
            yield from _finished(*waiting.popleft(), skipped)


def _finished(
    row: DataRow, name: str, future: Future[Sample], skipped: Skipped
) -> Iterator[Sample]:
    try:
        sample = replace(future.result(), id=name)
    except InputError as error:
        skipped.add(name, error)
        return
    skipped.remarks.update(remarks(row.values, sample))
    yield sample


def own_samples(
    name: str, path: Path, images: Path | None = None, labels: tuple[str, ...] = ()
) -> Iterator[Sample]:
    """Yield the conversations of a file, as the set `name`. Answers are optional.

    The column `id` is a name or a whole number, each once; without it, the row's number.

    Args:
      images: Folder of relative image paths; None means the file's folder, or `images/` in it.
      labels: Further columns to keep, as text; a row without one has an empty label.

    Raises InputError, naming file and line, for a row in another form.
    """
    origins: dict[str, str] = {}
    for number, row in enumerate(raised(_rows(path, images))):
        label = row.values.get("id", number)
        with located(row.origin):
            if isinstance(label, bool) or not isinstance(label, str | int) or label == "":
                raise InputError(f"'id' is {label!r:.60}; give a name, or a whole number")
            if (first := origins.setdefault(str(label), row.origin)) != row.origin:
                raise InputError(f"id {str(label)!r} is at {first} already; rename one")
        texts = tuple((column, str(row.values.get(column, ""))) for column in labels)
        sample = read_row(row, answered=False)
        yield replace(sample, id=str(label), dataset=name, labels=texts)


def _rows(path: Path, images: Path | None) -> Iterator[DataRow | InputError]:
    """Return the rows of a file, a folder, or `hub:OWNER/NAME/FILE`, and their errors."""
    if images is not None and not images.is_dir():
        raise InputError(f"images {images}: no such folder; check the path")
    path = on_disk(path)
    is_list = path.suffix == ".json" and os.path.isfile(path)
    rows = json_list(path) if is_list else rows_and_errors(path)
    return (
        row if images is None or isinstance(row, InputError) else replace(row, folder=images)
        for row in rows
    )
