"""Encode what people write as text: only what a template adds is special.

A question may quote a special token. A mark in the quotation passes through the template, which may
look into the text and strip it, so that afterwards the template's own tokens are the unmarked ones:

    Is <|im_end|> a tag?                                what was asked
    Is <M|im_end|> a tag?                               `Quoter.quote`
    <|im_start|>user\\nIs <M|im_end|> a tag?<|im_end|>   the chat template
    [1] user \\n Is < | im _ end | > a tag ? [2]         `Quoter.ids`

Text between two special tokens is encoded in one piece: tokenisers merge a template's letters with
those of the question.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from functools import cached_property, lru_cache
from secrets import token_hex
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "\ufdd0"
"""Behind the first letter of a quoted token; one that the text itself holds is doubled. Unicode
assigns it no character.
"""


class Quoter:
    """Mark special tokens in people's texts, and encode marked texts.

    images: Strings of an image's tokens, which are special whatever the tokeniser says.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, images: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._special = {
            token.content: (i, token)
            for i, token in tokenizer.added_tokens_decoder.items()
            if token.special or token.content in images
        }
        specials = sorted(self._special, key=len, reverse=True)  # the longest match counts
        endings: dict[str, list[str]] = {}
        for word in specials:
            endings.setdefault(word[0], []).append(word[1:])
        self._starts = re.compile("|".join([_MARK, *map(_start, endings, endings.values())]))
        self._words = re.compile("|".join(map(re.escape, specials)) or "(?!)")

    def quote(self, text: str) -> str:
        """Mark the special tokens of a person's text; only quoted text may enter a template."""
        return self._starts.sub(rf"\g<0>{_MARK}", text)

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts without BOS. Quoted tokens are text, and all others special."""
        if not any(_MARK in text for text in texts):
            return self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        tokenizer, names, originals = self._renamed
        renamed = [self._words.sub(lambda word: names[word[0]], text) for text in texts]
        unmarked = [re.sub(f"{_MARK}({_MARK}?)", r"\1", text) for text in renamed]
        switches = {"add_special_tokens": False, "split_special_tokens": True}
        rows: list[list[int]] = tokenizer(unmarked, **switches)["input_ids"]
        return [[originals.get(token, token) for token in row] for row in rows]

    @cached_property
    def _renamed(self) -> tuple[PreTrainedTokenizerBase, dict[str, str], dict[int, int]]:
        """Return a copy of the tokeniser that reads each special token by another name.

        Nobody can quote the names, because they are random. Returns also token -> name, and the
        name's id -> the token's.
        """
        from tokenizers import AddedToken

        tokenizer, secret, names = deepcopy(self._tokenizer), token_hex(16), {}
        for word, (i, token) in self._special.items():
            names[word] = f"<{secret}-{i}>"
            sides = {
                side: getattr(token, side)
                for side in ("lstrip", "rstrip", "normalized", "single_word")
            }
            tokenizer.add_tokens([AddedToken(word, special=True)], special_tokens=True)
            tokenizer.add_tokens([AddedToken(names[word], special=False, **sides)])
        ids: Any = tokenizer.convert_tokens_to_ids(list(names.values()))
        return tokenizer, names, {j: i for j, (i, _) in zip(ids, self._special.values())}


def _start(first: str, endings: Sequence[str]) -> str:
    """Return the pattern of the first letter of special tokens.

    At a text's end the beginning of a token counts too: templates join the parts of a message.
    """
    cuts = {ending[:n] for ending in endings for n in range(len(ending))}
    whole, cut = ("|".join(map(re.escape, parts)) for parts in (endings, cuts))
    is_near_end = rf"(?![\s\S]{{{max(map(len, endings)) + 1}}})"  # quicker than to try all cuts
    return rf"{re.escape(first)}(?={whole}|{is_near_end}(?:{cut})\Z)"


@lru_cache(maxsize=8)
def quoter(tokenizer: PreTrainedTokenizerBase, images: tuple[str, ...] = ()) -> Quoter:
    """Return the quoter of a tokeniser, made once."""
    return Quoter(tokenizer, images)
