"""Follow what the rows of a batch write, from their tokens to results."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.decoding.processors import NO_TOKEN
from jaxspec.decoding.trace import trace_record
from jaxspec.engine.batches.batcher import Batcher
from jaxspec.engine.batches.pace import Pace
from jaxspec.engine.evidence import Progress
from jaxspec.engine.requests import EncodedRequest, Result
from jaxspec.prompts.stops import ReasonedText


class Start(NamedTuple):
    """Say how a request took its row."""

    prefill_ms: float
    decode_ms: float
    """Milliseconds of the loop before it joined."""
    cached: int = 0
    """Number of prompt tokens that were not read again."""


@dataclass
class Written:
    """Hold the answers so far of requests that have a row or had one, by their numbers."""

    batcher: Batcher
    pace: Pace | None
    requests: dict[int, EncodedRequest] = field(default_factory=dict)
    starts: dict[int, Start] = field(default_factory=dict)
    texts: dict[int, ReasonedText] = field(default_factory=dict)
    """Tokens and texts so far."""
    so_far: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Fields of the results so far."""

    def begin(self, requests: Mapping[int, EncodedRequest], start: Start) -> None:
        """Take requests whose rows begin."""
        self.requests |= requests
        self.starts |= dict.fromkeys(requests, start)

    def extend(self, i: int, row: int, columns: Mapping[str, Any]) -> bool:
        """Add the new tokens of a row to the answer to request `i`; return whether it stops.

        columns: Fields of the state as numpy arrays.
        """
        trace, record = columns["trace"], columns["logprobs"]
        request, fields = self.requests[i], self.so_far.setdefault(i, {})
        if i not in self.texts:
            encoder, records = self.batcher.encoder, trace is not None
            self.texts[i] = ReasonedText(encoder, request.prompt, request.stop, records)
        text = self.texts[i]
        before = len(text.tokens)
        text.extend(columns["tokens"][row, before : columns["count"][row]].tolist())
        new = slice(before, len(text.tokens))
        if trace is not None:
            part = {"pieces": text.pieces[new], "reasoning": text.reasons[new]}
            part |= trace_record(trace, row, new)
            earlier = fields.get("trace", {})
            fields["trace"] = {name: [*earlier.get(name, ()), *part[name]] for name in part}
        if record is not None and request.logprobs is not None:
            part = record.of_row(row, new, request.logprobs)
            fields |= {name: (*fields.get(name, ()), *part[name]) for name in part}
        fields |= {
            "text": text.text,
            "reasoning": text.reasoning,
            "tokens": tuple(text.tokens),
            "stats": jax.tree.map(
                lambda x: x[row].item() if x.ndim == 1 else x[row], columns["stats"]
            ),
            "stop_string": text.stop,
        }
        return text.stop is not None

    def progress(self, numbers: Iterable[int]) -> dict[int, Progress]:
        """Return what a policy sees of these requests' answers."""
        answers = {}
        for i in numbers:
            row, fields = self.requests[i].rows[0], self.so_far[i]
            prompt = np.where(row.images < 0, row.tokens, NO_TOKEN)
            ended = "finish_reason" in fields
            answers[i] = Progress(fields["stats"], prompt, fields["tokens"], ended)
        return answers

    def end(self, i: int) -> None:
        """Note why an answer has ended."""
        text, form = self.texts[i], self.requests[i].settings.response_format
        ended = any(token in self.batcher.eos for token in text.tokens[-1:])
        ended &= form is None or form.is_whole(text.tokens)
        self.so_far[i]["finish_reason"] = "stop" if ended or text.stop is not None else "length"

    def result(self, i: int, decode_ms: float, rows: int) -> Result:
        """Return the answer so far.

        Args:
          decode_ms: Milliseconds of the loop up to now.
          rows: Number of rows that decode.
        """
        start = self.starts[i]
        times = {"prefill_ms": start.prefill_ms, "decode_ms": decode_ms - start.decode_ms}
        more = {"batch": rows, "caption_ms": self.requests[i].caption_ms, "cached": start.cached}
        plans = {} if self.pace is None else self.pace.uses[i]
        return Result(**self.so_far[i], **times, **more, plans=plans)

    def forget(self, numbers: Collection[int]) -> None:
        """Drop requests that are answered, or that nobody waits for."""
        for fields in (self.requests, self.texts, self.so_far, self.starts):
            for i in numbers:
                fields.pop(i, None)
        if self.pace is not None:
            self.pace.forget(numbers)
