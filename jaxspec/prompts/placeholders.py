"""Place image placeholders in the text of a question, and check that they fit its images."""

from __future__ import annotations

from collections.abc import Sequence

from jaxspec.errors import InputError

PLACEHOLDER = "<image>"
VIDEO = "<video>"


def place_images(question: str, images: int) -> str:
    """Return the question with one placeholder per image, as `place_in_turns` puts them."""
    return place_in_turns([question], images)[0]


def place_in_turns(questions: Sequence[str], images: int) -> list[str]:
    """Return a dialogue's questions with one placeholder per image.

    Questions without placeholders get all of them in front of the first question. Raises InputError
    where the placeholders and the images differ in number, and for text that is no UTF-8.
    """
    for question in questions:
        check_text(question)
    placed = sum(question.count(PLACEHOLDER) for question in questions)
    if images and not placed:
        return [f"{PLACEHOLDER}\n" * images + questions[0], *questions[1:]]
    if placed != images:
        raise InputError(
            f"prompt {questions[0][:60]!r}: {placed} {PLACEHOLDER} placeholders but "
            f"{images} images; write one placeholder per image, or none at all"
        )
    return list(questions)


def check_text(text: str, name: str = "prompt") -> None:
    """Raise InputError for a lone surrogate, as a command line has for bytes that are no UTF-8.

    name: What the error calls the text.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise InputError(f"{name} {text[:60]!r}: {half!r} is half a character") from None
