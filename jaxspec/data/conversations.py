"""Conversations to train on, from files: LLaVA's JSON and its relatives, and text.

Files are a `.json` list, `.jsonl`, `.jsonl.gz` or parquet. A row is one of

| columns | as in |
|---|---|
| `conversations` of {from, value}, `image` or `images` | LLaVA, LLaVA-OneVision |
| `messages` of {role, content} | chat data |
| question and answer, under the names of `ASKED` and `ANSWERED` | GSM8K |
| the same, with `input` or `context` behind the question | Alpaca, Dolly |
| the same, with `history` of [question, answer] | LLaMA-Factory |
| `text`, with `<human>:` and `<bot>:` before what each says | OIG |
| `text` else | plain text, learned as it is, without roles: RedPajama |
| `prompt` of {role, text, replies}, the best ranked reply counts | OpenAssistant's trees |

A system prompt may be a message, or the column `system` or `system_prompt`.

`image` is a path, a list of paths, or the hub's {bytes, path}. `video` is a folder of frames, or a
list of their paths. Frames are images: `<video>` becomes one placeholder per frame. An unreadable
row raises InputError, and `readable` counts, logs and skips it. Columns that look like part of the
conversation and are not read are counted.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxspec.data.hub import on_disk
from jaxspec.data.images import StoredImage
from jaxspec.data.rows import DataRow, json_list, rows_and_errors
from jaxspec.data.samples import Sample, stored_image
from jaxspec.errors import InputError, check_counts, located, reading
from jaxspec.files import writing
from jaxspec.prompts.placeholders import PLACEHOLDER, VIDEO, place_in_turns

ROLES = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "bot"), "assistant"),
    "system": "system",
}
SPEAKER = re.compile(r"(?:^|\n)<(human|bot)>:")
"""Mark before each message in texts of the Open Instruction Generalist."""
ASKED = ("question", "instruction", "prompt", "input")
ANSWERED = ("answer", "output", "response", "completion")
BEHIND = ("input", "context")
"""Columns of a text that the question is about."""
SYSTEM = ("system", "system_prompt")
FORMS = ("prompt", "conversations", "messages")
"""Columns that hold a whole conversation, a tree or a list; the first one counts."""
IMAGES = ("image", "images", "video")
HEARD = re.compile(
    r"(.*_)?(question|instruction|prompt|input|answer|output|response|completion|context|system"
    r"|conversation|message|dialogue|text|history|passage|article|hint|lecture|story|choice|option"
    r"|rationale|reasoning|thinking|thought|cot|explanation|solution|caption|tool|tool_call|query"
    r"|image|img|picture|photo|video|audio)s?(_(content|text|path|file|url|\d+))*",
    re.IGNORECASE,
)
"""Names of columns, and of a message's entries, that look like part of a conversation."""
SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
"""Suffixes of the frames in a folder."""
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
    unread: Counter[str] = field(default_factory=Counter, init=False)
    """Rows by columns that look like part of the conversation, in which these are not read."""

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
                f"data: {self.count} rows cannot be read, and {self.limit} may be skipped; mend "
                f"them, or raise the limit ({self.log} has all of them); the last: {reason}"
            ) from reason

    def summary(self) -> str:
        """Return how many rows were skipped, the commonest reason, and the log."""
        if not self._reasons:
            return "the file holds no rows; name another"
        ((reason, count),) = self._reasons.most_common(1)
        return f"{self.count} rows were skipped, {count} of them: {reason} ({self.log} has all)"

    def lines(self) -> list[str]:
        """Return a line about skipped rows, and one about columns that are not read."""
        lines = []
        if self.count:
            lines.append(f"skipped {self.count} rows that cannot be read: {self.log}")
        if self.unread:
            columns = ", ".join(
                f"{name} ({count:,} row{'s' * (count > 1)})" for name, count in self.unread.items()
            )
            lines.append(
                f"not read: {columns}; put what belongs to the conversation into its questions "
                "and answers"
            )
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
      frames: Most frames of a video, spread evenly over all frames.
      outside: Whether to read images outside of that folder; a stranger's row may name any file.
    """
    check_counts(frames=frames)
    if images is not None and not images.is_dir():
        raise InputError(f"images {images}: no such folder; check the path")
    path = on_disk(path)
    skipped.start()
    is_list = path.suffix == ".json" and os.path.isfile(path)
    rows = json_list(path) if is_list else rows_and_errors(path)
    with ThreadPoolExecutor(THREADS) as pool:
        waiting: deque[tuple[DataRow, str, Future[Sample]]] = deque()
        for number, row in enumerate(rows):
            if isinstance(row, InputError):
                skipped.add(str(number), row)
                continue
            row = replace(row, folder=images or row.folder, confined=not outside)
            name = str(row.values.get("id", number))
            waiting.append((row, name, pool.submit(conversation, row, frames)))
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
    skipped.unread.update(_unread(row.values, sample))
    yield sample


def _unread(values: dict[str, Any], sample: Sample) -> list[str]:
    """Return the columns, and entries of messages, that look like speech and are not in a sample.

    A copy of a part of the sample is in it, and so is the whole conversation in another form.
    """
    texts = [_letters(text) for turn in sample.turns for text in turn]
    read = "\n".join(texts)

    def is_read(value: Any) -> bool:
        if isinstance(value, str):
            return _letters(value) in read or all(text in _letters(value) for text in texts)
        parts = value.values() if isinstance(value, Mapping) else value
        return not isinstance(value, bytes) and (
            not isinstance(value, list | Mapping) or all(map(is_read, parts))
        )

    entries = {name: value for name, value in values.items() if name not in IMAGES}
    form = next((name for name in FORMS if isinstance(entries.get(name), list | Mapping)), "")
    messages = entries.pop(form, ())
    for message in messages if isinstance(messages, list) else ():
        keys = {"role", "content"} if form == "messages" else {"from", "value"}
        unread = {name: text for name, text in message.items() if name not in keys | entries.keys()}
        entries |= {name: text for name, text in unread.items() if not is_read(text)}
    return [name for name, value in entries.items() if HEARD.fullmatch(name) and not is_read(value)]


def _letters(text: str) -> str:
    """Return a text without spaces and the marks of images."""
    return re.sub(rf"\s+|{PLACEHOLDER}|{VIDEO}", "", text)


def conversation(row: DataRow, frames: int = 8) -> Sample:
    """Return a row's sample, its images decoded once. Raises InputError that names the row."""
    with located(row.place):
        images, turns = _images(row, frames), _turns(row.values)
        questions = [question.replace(VIDEO, PLACEHOLDER * len(images)) for question, _ in turns]
        answers = [answer for _, answer in turns]
        if not all(answer.strip() for answer in answers):
            raise InputError("an answer is empty; there is nothing to learn from it")
        if any(PLACEHOLDER in answer for answer in answers):
            raise InputError(f"{PLACEHOLDER} in an answer; images belong to questions")
        questions = place_in_turns(questions, len(images))
        return Sample("", "", images, tuple(zip(questions, answers, strict=True)))


def _images(row: DataRow, frames: int) -> tuple[StoredImage, ...]:
    columns = [row.values[name] for name in IMAGES if row.values.get(name)]
    if not columns:
        return ()
    if len(columns) > 1:
        raise InputError("more than one of image, images and video; keep one")
    values = columns[0] if isinstance(columns[0], list) else [columns[0]]
    if row.values.get("video"):
        values = _frames(row, values, frames)
    return tuple(stored_image(row, "image", value) for value in values)


def _frames(row: DataRow, values: list[Any], frames: int) -> list[Any]:
    """Return at most `frames` frames of a video, spread evenly from the first to the last."""
    if len(values) == 1 and isinstance(values[0], str) and row.folder is not None:
        folder = row.folder / values[0]
        if not os.path.isdir(folder):
            raise InputError(f"video {values[0]!r:.60} is no folder of frames; extract them")
        values = sorted(
            f"{values[0]}/{file.name}"
            for file in folder.iterdir()
            if file.suffix.lower() in SUFFIXES
        )
        if not values:
            raise InputError(f"no frames in {folder}; extract them as {', '.join(SUFFIXES)}")
    last, count = len(values) - 1, min(frames, len(values))
    return [values[round(i * last / max(count - 1, 1))] for i in range(count)]


def _turns(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (question, answer) of every answered turn; plain text answers an empty question."""
    turns = _messages(values)
    system = next((values[name] for name in SYSTEM if values.get(name)), "")
    if not isinstance(system, str):
        raise InputError(f"system prompt {str(system)[:60]!r} is no text; mend the row")
    if turns[0][0] and system.strip() not in turns[0][0]:
        turns[0] = f"{system.strip()}\n{turns[0][0]}", turns[0][1]
    return turns


def _messages(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (question, answer) of every answered turn, without the column of a system prompt."""
    if isinstance(values.get("prompt"), Mapping):
        return _pairs(_best_path(values["prompt"]), "role", "text")
    if "conversations" in values:
        return _pairs(values["conversations"], "from", "value")
    if "messages" in values:
        return _pairs(values["messages"], "role", "content")
    question = next((values[name] for name in ASKED if name in values), None)
    answer = next((values[name] for name in ANSWERED if name in values), None)
    text = values.get("text")
    if isinstance(question, str) and isinstance(answer, str):
        about = [values.get(name) for name in BEHIND]
        parts = [question, *(part for part in about if isinstance(part, str) and part != question)]
        question = "\n".join(part.strip() for part in parts if part.strip())
        return [*_earlier(values.get("history")), (question, answer.strip())]
    if isinstance(text, str) and text.lstrip().startswith("<human>:"):
        _, *speeches = SPEAKER.split(text.lstrip())
        spoken = zip(speeches[::2], speeches[1::2], strict=True)
        messages = [{"from": who, "value": speech} for who, speech in spoken]
        return _pairs(messages, "from", "value")
    if isinstance(text, str):
        return [("", text.strip())]
    raise InputError(
        f"columns {list(values)!r:.200} hold no conversation; give conversations, messages, text, "
        f"or one of {', '.join(ASKED)} with one of {', '.join(ANSWERED)}"
    )


def _earlier(history: Any) -> list[tuple[str, str]]:
    """Return the turns before a question, from a list of [question, answer]."""
    turns = []
    for turn in history or ():
        if (
            not isinstance(turn, list)
            or len(turn) != 2
            or not all(isinstance(t, str) for t in turn)
        ):
            raise InputError(f"history: {str(turn)[:60]!r} is no [question, answer]; mend the row")
        turns.append((turn[0].strip(), turn[1].strip()))
    return turns


def _best_path(prompt: Any) -> list[Any]:
    """Return the messages of an OpenAssistant tree along the replies that people ranked first."""

    def rank(reply: Any) -> float:
        return math.inf if reply.get("rank") is None else reply["rank"]

    path = [prompt]
    with reading("no message with replies", "mend the row"):
        while replies := path[-1].get("replies"):
            path.append(min(replies, key=rank))
    return path


def _pairs(messages: Any, speaker: str, content: str) -> list[tuple[str, str]]:
    """Return pairs of question and answer.

    A system message precedes the first question. Answers before it, and a last question without an
    answer, are left out.
    """
    system, turns, question = "", [], None
    for message in messages if isinstance(messages, list) else [messages]:
        entry = message if isinstance(message, Mapping) else {}
        role, text = ROLES.get(str(entry.get(speaker))), entry.get(content)
        if role is None or not isinstance(text, str):
            raise InputError(f"{str(message)[:60]!r} is no message {{{speaker}, {content}}}")
        if role == "system" and not turns and question is None:
            system = f"{text.strip()}\n"
        elif role == "user" and question is None:
            system, question = "", system + text.strip()
        elif role == "assistant" and question is not None:
            turns.append((question, text.strip()))
            question = None
        elif turns or question is not None or role != "assistant":
            raise InputError(f"message {str(text)[:40]!r} of {role!r} is out of turn; mend the row")
    if not turns:
        raise InputError("no question with an answer; mend the row")
    return turns
