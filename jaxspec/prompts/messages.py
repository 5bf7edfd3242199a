"""Define messages: what a system, a user and an assistant say, the one form of every prompt.

Questions, rows of data and lists of messages become these at the border.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Generic, Literal, Self, TypeVar

from jaxspec.prompts.placeholders import PLACEHOLDER, place_images

Source = TypeVar("Source", covariant=True)
"""An image of a message, such as `data.images.Pixels`. The encoder only counts images."""
Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class Message(Generic[Source]):
    """Hold one message: its texts and images in their order.

    Attributes:
      parts: Texts; None is an image.
      images: One image for each None.
      inline: Whether images keep their places between the texts. Otherwise the chat template
        places them; LLaVA's puts them before the texts.
    """

    role: Role
    parts: tuple[str | None, ...]
    images: tuple[Source, ...] = ()
    inline: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the texts without the images."""
        return tuple(part for part in self.parts if part is not None)

    def mapped(self, change: Callable[[str], str]) -> Self:
        """Return the message with each text changed."""
        return replace(self, parts=tuple(part and change(part) for part in self.parts))

    def text(self, image: str) -> str:
        """Return the message as one text, with `image` for each image.

        Without `inline`, each image is a line before the texts.
        """
        if self.inline:
            return "".join(image if part is None else part for part in self.parts)
        return f"{image}\n" * len(self.images) + "\n".join(self.texts)

    @property
    def marked(self) -> str:
        """Return the message as one text with `<image>` marks, which `user_message` reads.

        Images between texts keep their places.
        """
        before = self.parts[: len(self.images)]
        inline = self.inline or any(part is not None for part in before)
        return replace(self, inline=inline).text(PLACEHOLDER)


def user_message(question: str, images: Sequence[Source] = ()) -> Message[Source]:
    """Return the message of a question, in which `<image>` marks the place of an image.

    The chat template places images without marks, and those whose marks are lines before the text,
    as in LLaVA's data. Raises InputError where marks and images differ in number.
    """
    head = f"{PLACEHOLDER}\n" * len(images)
    text = place_images(question, len(images)).removeprefix(head)
    if PLACEHOLDER not in text:
        return Message("user", (*[None] * len(images), text), tuple(images))
    first, *texts = text.split(PLACEHOLDER)
    parts = [first, *(part for after in texts for part in (None, after))]
    return Message("user", tuple(part for part in parts if part != ""), tuple(images), True)


def dialogue(
    turns: Iterable[tuple[str, str]], images: Iterable[Source] = (), system: str = ""
) -> tuple[Message[Source], ...]:
    """Return the messages of questions and answers, with the images that the questions mark.

    system: System prompt; "" for none.
    """
    unused = iter(images)
    messages: list[Message[Source]] = [Message("system", (system,))] if system else []
    for question, answer in turns:
        messages.append(user_message(question, tuple(islice(unused, question.count(PLACEHOLDER)))))
        messages.append(Message("assistant", (answer,)))
    return tuple(messages)
