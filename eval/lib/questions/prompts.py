"""Write the exact prompts of a measurement to `prompts.jsonl`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from eval.lib.output.tables import Record
from jaxspec.engine.engine import Engine
from jaxspec.engine.requests import Request
from jaxspec.prompts.rows import PromptRow


def prompt_records(
    part: Record, engines: Iterable[Engine], requests: Sequence[Request]
) -> Iterator[Record]:
    """Yield what each model reads of each request, once for each form and configuration.

    `ids` are the token ids, with `[id, count]` for a run of image slots; `text` is what the ids
    say, special tokens included, with one placeholder for each run.

    Args:
      part: Fields of each record, such as its set and turn.
    """
    recorded = set()
    for engine in engines:
        forms = engine.assembly.forms
        keys = [(form.name, form.view.name, form.model.config) for form in forms]
        fresh = [i for i, key in enumerate(keys) if key not in recorded]
        recorded |= set(keys)
        for request in engine.batcher.read(requests) if fresh else ():
            for i in fresh:
                reader, view, _ = keys[i]
                ids = runs(request.rows[i])
                flat = [each[0] if isinstance(each, list) else each for each in ids]
                text = engine.encoder.tokenizer.decode(flat, skip_special_tokens=False)
                names = {"sample": request.prompt.sample, "reader": reader, "view": view}
                yield part | names | {"text": text, "ids": ids}


def runs(row: PromptRow) -> list[int | list[int]]:
    """Return a prompt's ids, with `[id, count]` in place of the slots that show one image.

    The row [1, 9, 9, 5] with slots of an image in the middle becomes [1, [9, 2], 5].
    """
    slots = zip(row.tokens.tolist(), row.images.tolist(), strict=True)
    ids: list[int | list[int]] = []
    for (token, image), run in groupby(slots):
        count = len(list(run))
        ids += [token] * count if image < 0 else [[token, count]]
    return ids
