"""Make samples of conversations in the forms that people keep for training and evaluation.

docs/data.md has the table of `FORMS`, with two rows of each. The first form whose columns a row has
counts. A system prompt is a message, or the column `system` or `system_prompt`.

`image` and `images` are paths, data URLs, bytes or the hub's {bytes, path}. `video` is a folder of
frames, or a list of their paths. Frames are images: `<video>` becomes one mark per frame.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from jaxspec.data.images import StoredImage
from jaxspec.data.messages import CONTENTS, SPEAKERS, read_messages, role_of
from jaxspec.data.rows import DataRow
from jaxspec.data.samples import Sample, stored_image
from jaxspec.errors import InputError, located, reading
from jaxspec.prompts.messages import Message
from jaxspec.prompts.placeholders import PLACEHOLDER, VIDEO, place_in_turns

QUESTIONS = ("question", "query", "instruction", "prompt", "input")
ANSWERS = ("answer", "output", "response", "completion")
ABOUT = ("input", "context")
"""Columns of a text that the question is about."""
SYSTEM = ("system", "system_prompt")
LISTS = ("messages", "conversations", "conversation")
IMAGES = ("image", "images", "video")
SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
"""Suffixes of the frames in a folder."""
SPEECH = re.compile(
    r"(.*_)?(question|instruction|prompt|input|answer|output|response|completion|context|system"
    r"|conversation|message|dialogue|text|history|passage|article|hint|lecture|story|choice|option"
    r"|rationale|reasoning|thinking|thought|cot|explanation|solution|caption|tool|tool_call|query"
    r"|image|img|picture|photo|video|audio)s?(_(content|text|path|file|url|\d+))*",
    re.IGNORECASE,
)
"""Names of columns, and of a message's entries, that look like part of a conversation."""
_LEARNING = re.compile(
    r"(sample_|loss_)?weight|loss(_mask|_scale)?|train(ing|able|_detail)?|(?P<masked>masked)"
)
"""Names of columns, and of an answer's entries, that say what is learned, or else `masked`."""
_ENTRIES = {*SPEAKERS, *CONTENTS, "user", "assistant"}
"""Entries of messages that are read."""
_SPEAKER = re.compile(r"(?:^|\n)<(human|bot)>:")
"""Mark before each message in texts of the Open Instruction Generalist."""

Remark = Literal["not read", "not obeyed", "left out"]
Values = Mapping[str, Any]
Turns = list[tuple[str, str]]


def read_row(row: DataRow, frames: int = 8, answered: bool = True) -> Sample:
    """Return a row's conversation, its images decoded once. Raises InputError that names the row.

    Args:
      frames: Maximum frames of a video, spread evenly over all frames.
      answered: Leave out a question without an answer, and refuse empty answers.
    """

    def source(value: Any) -> StoredImage:
        is_read = isinstance(value, StoredImage)
        return value if is_read else stored_image(row, "messages", value)

    with located(row.origin):
        images = _images(row, frames)
        values = _messages(row.values)
        if row.values.get("video"):
            values = [_with_frames(value, len(images)) for value in values]
        messages = read_messages(values, images, source)
        system, turns = _turns(messages, answered)
        if answered and not all(answer.strip() for _, answer in turns):
            raise InputError("an answer is empty; there is nothing to learn from it")
        if any(PLACEHOLDER in answer for _, answer in turns):
            raise InputError(f"{PLACEHOLDER} in an answer; images belong to questions")
        questions, answers = zip(*turns)
        if row.values.get("video") and any(VIDEO in question for question in questions):
            raise InputError(f"{VIDEO} in a part of a message; give the message as one text")
        marks = sum(question.count(PLACEHOLDER) for question in questions)
        # A last question without an answer is left out, with its images.
        images = tuple(image for message in messages for image in message.images)[:marks]
        questions = place_in_turns(questions, len(images))
        pairs = tuple(zip(questions, answers, strict=True))
        return Sample(
            "", "", images, pairs, system=_system(row.values, system) if turns[0][0] else ""
        )


def remarks(values: Values, sample: Sample) -> list[tuple[Remark, str]]:
    """Return what of a row is not in its sample, which is to be trained on."""
    messages = [message for message in _messages(values) if isinstance(message, Mapping)]
    roles = [role for role in map(role_of, messages) if role != "system"]
    answers = [message for message in messages if role_of(message) == "assistant"]
    entries = [item for part in (values, *answers) for item in part.items()]
    names: dict[Remark, list[str]] = {
        "not read": _unread_columns(values, sample),
        "not obeyed": [name for name, value in entries if _changes_learning(name, value)],
        "left out": ["answers before the first question"] * (roles[0] == "assistant")
        + ["last questions without an answer"] * (roles[-1] == "user"),
    }
    return [(kind, name) for kind in names for name in dict.fromkeys(names[kind])]


def _changes_learning(name: str, value: Any) -> bool:
    """Return whether an entry masks or weights something in learning, unlike the rest."""
    if not (match := _LEARNING.fullmatch(name)):
        return False
    usual = match["masked"] is None
    values = value if isinstance(value, list) else [value]
    return any(each != usual for each in values if isinstance(each, int | float | Mapping))


def _unread_columns(values: Values, sample: Sample) -> list[str]:
    """Return the columns, and entries of messages, that look like speech and are not in a sample.

    A copy of a part of the sample is in it, and so is the whole conversation in another form.
    """
    texts = [_letters(text) for turn in sample.turns for text in turn]
    read = "\n".join([_letters(sample.system), *texts])

    def is_read(value: Any) -> bool:
        if isinstance(value, str):
            return _letters(value) in read or all(text in _letters(value) for text in texts)
        parts = value.values() if isinstance(value, Mapping) else value
        return not isinstance(value, bytes) and (
            not isinstance(value, list | Mapping) or all(map(is_read, parts))
        )

    columns = {name: value for name, value in values.items() if name not in IMAGES}
    names = ("prompt", *LISTS, "texts")
    form = next((name for name in names if isinstance(columns.get(name), list | Mapping)), "")
    for name in ("prompt", *ANSWERS) if form == "prompt" else (form,):
        messages = columns.pop(name, ())
        for message in messages if isinstance(messages, list) else ():
            entries = message.items() if isinstance(message, Mapping) else ()
            columns |= {
                entry: value
                for entry, value in entries
                if entry not in _ENTRIES | columns.keys() and not is_read(value)
            }
    return [
        name for name, value in columns.items() if SPEECH.fullmatch(name) and not is_read(value)
    ]


def _letters(text: str) -> str:
    """Return a text without spaces and the marks of images."""
    return re.sub(rf"\s+|{PLACEHOLDER}|{VIDEO}", "", text)


# Images


def _images(row: DataRow, frames: int) -> tuple[StoredImage, ...]:
    columns = [name for name in IMAGES if row.values.get(name)]
    if not columns:
        return ()
    if len(columns) > 1:
        raise InputError(f"images in {' and '.join(columns)}; keep one of these columns")
    values = row.values[columns[0]]
    values = values if isinstance(values, list) else [values]
    if columns[0] == "video":
        values = _frames(row, values, frames)
    return tuple(stored_image(row, columns[0], value) for value in values)


def _frames(row: DataRow, values: list[Any], frames: int) -> list[Any]:
    """Return at most `frames` frames of a video, spread evenly from the first to the last."""
    if len(values) == 1 and isinstance(values[0], str) and row.folder is not None:
        folder = row.folder / values[0]
        if not os.path.isdir(folder):
            raise InputError(f"video {values[0]!r:.60} is no folder of frames; extract them")
        names = (file.name for file in folder.iterdir() if file.suffix.lower() in SUFFIXES)
        values = [f"{values[0]}/{name}" for name in sorted(names, key=_by_numbers)]
        if not values:
            raise InputError(f"no frames in {folder}; extract them as {', '.join(SUFFIXES)}")
    last, count = len(values) - 1, min(frames, len(values))
    return [values[round(i * last / max(count - 1, 1))] for i in range(count)]


def _by_numbers(name: str) -> list[str | int]:
    """Return a key that sorts names by the values of their numbers: 9.png before 10.png."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _with_frames(message: Any, count: int) -> Any:
    """Return a message with one mark per frame in place of `<video>`."""
    if not isinstance(message, Mapping):
        return message
    return {
        name: text.replace(VIDEO, PLACEHOLDER * count) if isinstance(text, str) else text
        for name, text in message.items()
    }


# Messages


def _turns(messages: Sequence[Message], answered: bool) -> tuple[str, Turns]:
    """Return the system prompt, and (question, answer) by turns.

    Answers before the first question are left out.
    """
    system, turns, question = "", [], None
    for message in messages:
        text, role = message.marked.strip(), message.role
        if role == "system" and not turns and question is None:
            system = f"{system}\n{text}".strip()
        elif role == "user" and question is None:
            question = text
        elif role == "assistant" and question is not None:
            turns.append((question, text))
            question = None
        elif turns or question is not None or role != "assistant":
            raise InputError(f"message {text[:40]!r} of {role!r} is out of turn; mend the row")
    if question is not None and not answered:
        turns.append((question, ""))
    if not turns:
        what = "question with an answer" if answered else "question"
        raise InputError(f"no {what}; mend the row")
    return system, turns


def _system(values: Values, system: str) -> str:
    """Return the system prompt of a row's column, then of its message."""
    column = next((values[name] for name in SYSTEM if values.get(name)), "")
    if not isinstance(column, str):
        raise InputError(f"system prompt {column!r:.60} is no text; mend the row")
    column = column.strip()
    return system if column in system else f"{column}\n{system}".strip()


def _messages(values: Values) -> list[Any]:
    """Return the messages of the first form whose columns a row has."""
    for form in FORMS.values():
        messages = form(values)
        if messages is not None:
            return messages
    raise InputError(
        f"columns {list(values)!r:.200} hold no conversation; give messages, texts, turns, text, "
        f"or one of {', '.join(QUESTIONS)} with one of {', '.join(ANSWERS)}"
    )


def _message(role: Any, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _pairs(turns: Sequence[tuple[Any, Any]]) -> list[Any]:
    roles = ("user", "assistant")
    return [_message(role, text) for turn in turns for role, text in zip(roles, turn)]


def _questions(values: Values) -> list[Any] | None:
    """Read {turns: [question], reference}; answers are optional."""
    if "turns" not in values:
        return None
    turns, reference = values["turns"], values.get("reference")
    listed = isinstance(turns, list) and all(isinstance(t, str) and t.strip() for t in turns)
    if not turns or not listed:
        raise InputError(f"'turns' is {turns!r:.60}, not a list of questions; give one")
    is_list = isinstance(reference, list)
    answers = reference if is_list else [reference or "", *[""] * (len(turns) - 1)]
    if len(answers) != len(turns) or not all(isinstance(answer, str) for answer in answers):
        raise InputError(f"'reference' is {reference!r:.60}; give a text, or {len(turns)} texts")
    return _pairs(list(zip(turns, answers)))


def _ranked_replies(values: Values) -> list[Any] | None:
    """Read {prompt: {role, text, replies}}, by the replies that people ranked first."""
    prompt = values.get("prompt")
    if not isinstance(prompt, Mapping):
        return None

    def rank(reply: Any) -> float:
        return math.inf if reply.get("rank") is None else reply["rank"]

    path = [prompt]
    with reading("no message with replies", "mend the row"):
        while replies := path[-1].get("replies"):
            path.append(min(replies, key=rank))
        return [_message(message.get("role"), message.get("text")) for message in path]


def _prompt_and_completion(values: Values) -> list[Any] | None:
    """Read {prompt: [message], completion: [message] or text}."""
    prompt = values.get("prompt")
    if not isinstance(prompt, list):
        return None
    answer = next((values[name] for name in ANSWERS if name in values), [])
    return [*prompt, *(answer if isinstance(answer, list) else [_message("assistant", answer)])]


def _message_list(values: Values) -> list[Any] | None:
    """Read {messages: [{role, content}]} or {conversations: [{from, value}]}."""
    messages = next((values[name] for name in LISTS if values.get(name) is not None), None)
    return messages if messages is None or isinstance(messages, list) else [messages]


def _text_pairs(values: Values) -> list[Any] | None:
    """Read {texts: [{user, assistant}]}."""
    texts = values.get("texts")
    if not isinstance(texts, list):
        return None
    turns = []
    for turn in texts:
        if not isinstance(turn, Mapping) or not {"user", "assistant"} <= turn.keys():
            raise InputError(f"texts: {turn!r:.60} is no {{user, assistant}}; mend the row")
        turns.append((turn["user"], turn["assistant"]))
    return _pairs(turns)


def _question_and_answer(values: Values) -> list[Any] | None:
    """Read {question, answer}, with a text that the question is about, and earlier turns."""
    question = next((values[name] for name in QUESTIONS if name in values), None)
    answer = next((values[name] for name in ANSWERS if name in values), None)
    if not isinstance(question, str) or not isinstance(answer, str):
        return None
    about = [values.get(name) for name in ABOUT]
    parts = [question, *(part for part in about if isinstance(part, str) and part != question)]
    text = "\n".join(part.strip() for part in parts if part.strip())
    return [*_history(values.get("history")), *_pairs([(text, answer)])]


def _history(history: Any) -> list[Any]:
    """Return the messages before a question: a list of [question, answer], or of messages."""
    turns = history or []
    if isinstance(turns, list) and all(isinstance(turn, Mapping) for turn in turns):
        return turns
    for turn in turns if isinstance(turns, list) else [turns]:
        is_list = isinstance(turn, list) and all(isinstance(text, str) for text in turn)
        if not is_list or len(turn) != 2:
            raise InputError(f"history: {turn!r:.60} is no [question, answer]; mend the row")
    return _pairs(turns)


def _marked_text(values: Values) -> list[Any] | None:
    """Read {text} with `<human>:` and `<bot>:` before their messages."""
    text = values.get("text")
    if not isinstance(text, str) or not text.lstrip().startswith("<human>:"):
        return None
    _, *parts = _SPEAKER.split(text.lstrip())
    return [_message(role, text) for role, text in zip(parts[::2], parts[1::2], strict=True)]


def _plain_text(values: Values) -> list[Any] | None:
    """Read {text}, which is learned as it is, without roles."""
    text = values.get("text")
    return _pairs([("", text)]) if isinstance(text, str) else None


FORMS: dict[str, Callable[[Values], list[Any] | None]] = {
    "turns": _questions,
    "tree": _ranked_replies,
    "prompt and completion": _prompt_and_completion,
    "messages": _message_list,
    "texts": _text_pairs,
    "question and answer": _question_and_answer,
    "marked text": _marked_text,
    "text": _plain_text,
}
"""Form -> its reader, which returns a row's messages, or None for a row without its columns."""
