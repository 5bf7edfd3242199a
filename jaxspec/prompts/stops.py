"""The text of an answer that may end at a string, whole or while it is written."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from jaxspec.prompts.encoder import PromptEncoder


def cut(
    encoder: PromptEncoder, tokens: list[int], stops: Sequence[str]
) -> tuple[str, list[int], str | None]:
    """Return the text before the first stop string, the tokens that complete it, and the string.

    The fewest tokens decide whose text holds any of the strings, so that the answer does not depend
    on the number of tokens between two looks at it.
    """
    text = encoder.decode(tokens)
    if not any(stop in text for stop in stops):
        return text, tokens, None

    def holds(count: int) -> bool:
        text = encoder.decode(tokens[:count])
        return any(stop in text for stop in stops)

    tokens = tokens[: bisect_left(range(len(tokens)), True, key=holds)]
    text = encoder.decode(tokens)
    stop = min((stop for stop in stops if stop in text), key=text.find)
    return text[: text.index(stop)], tokens, stop


def text_so_far(before: str, text: str, stops: Sequence[str]) -> str:
    """Return the part of an unfinished answer's text that no later token changes.

    An incomplete character, or a text that may become a stop string, is held back.

    before: The part that an earlier call returned, with which the new one begins.
    """
    letters = text.rstrip("\ufffd").rstrip()
    longer = letters if letters.startswith(before) else before
    overlaps = (n for stop in stops for n in range(1, len(stop)) if longer.endswith(stop[:n]))
    return longer[: max(len(longer) - max(overlaps, default=0), len(before))]
