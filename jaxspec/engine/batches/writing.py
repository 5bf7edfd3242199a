"""Follow what the rows of a batch write, from their tokens to results."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.decoding.processors import NO_TOKEN
from jaxspec.decoding.records import trace_record
from jaxspec.engine.batches.batcher import Batcher
from jaxspec.engine.batches.pace import Pace
from jaxspec.engine.evidence import Progress
from jaxspec.engine.requests import EncodedRequest, Result
from jaxspec.prompts.stops import ReasonedText, text_so_far


class Start(NamedTuple):
    """Say how a request took its row."""

    prefill_ms: float
    decode_ms: float
    """Milliseconds of the loop before it joined."""
    cached: int = 0
    """Number of prompt tokens that were not read again."""


@dataclass
class Writing:
    """Hold what a row writes for a request, or has written."""

    request: EncodedRequest
    start: Start
    text: ReasonedText
    """Tokens and text so far."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of the result so far; {} before any token is read. Until the answer ends, text and
    reasoning are what is not taken back."""


@dataclass
class Written:
    """Hold the answers so far of requests that have a row or had one, by their numbers."""

    batcher: Batcher
    pace: Pace | None
    answers: dict[int, Writing] = field(default_factory=dict)

    def begin(self, requests: Mapping[int, EncodedRequest], start: Start, traces: bool) -> None:
        """Take requests whose rows begin.

        traces: Whether to record the text of each token.
        """
        encoder = self.batcher.encoder
        for i, request in requests.items():
            text = ReasonedText(encoder, request.prompt, request.stop, traces)
            self.answers[i] = Writing(request, start, text)

    def extend(self, i: int, row: int, columns: Mapping[str, Any]) -> bool:
        """Add the new tokens of a row to the answer to request `i`; return whether it stops.

        columns: Fields of the state as numpy arrays.
        """
        trace, record = columns["trace"], columns["logprobs"]
        answer = self.answers[i]
        text, fields = answer.text, answer.fields
        before = len(text.tokens)
        text.extend(columns["tokens"][row, before : columns["count"][row]].tolist())
        new = slice(before, len(text.tokens))
        if trace is not None:
            part = {"pieces": text.pieces[new], "reasoning": text.reasons[new]}
            part |= trace_record(trace, row, new)
            earlier = fields.get("trace", {})
            fields["trace"] = {name: [*earlier.get(name, ()), *part[name]] for name in part}
        if record is not None and answer.request.logprobs is not None:
            part = record.of_row(row, new, answer.request.logprobs)
            fields |= {name: (*fields.get(name, ()), *part[name]) for name in part}
        fields |= {
            "text": text_so_far(fields.get("text", ""), text.text, answer.request.stop),
            "reasoning": text_so_far(fields.get("reasoning", ""), text.reasoning, ()),
            "tokens": tuple(text.tokens),
            "stats": jax.tree.map(
                lambda x: x[row].item() if x.ndim == 1 else x[row], columns["stats"]
            ),
            "stop_string": text.stop,
        }
        return text.stop is not None

    def progress(self, numbers: Iterable[int]) -> dict[int, Progress]:
        """Return what a policy sees of these requests' answers."""
        progress = {}
        for i in numbers:
            row, fields = self.answers[i].request.rows[0], self.answers[i].fields
            prompt = np.where(row.images < 0, row.tokens, NO_TOKEN)
            ended = "finish_reason" in fields
            progress[i] = Progress(fields["stats"], prompt, fields["tokens"], ended)
        return progress

    def end(self, i: int) -> None:
        """Note why an answer has ended, and its whole text."""
        text, form = self.answers[i].text, self.answers[i].request.settings.response_format
        ended = any(token in self.batcher.eos for token in text.tokens[-1:])
        ended &= form is None or form.is_whole(text.tokens)
        reason = "stop" if ended or text.stop is not None else "length"
        whole = {"text": text.text, "reasoning": text.reasoning, "finish_reason": reason}
        self.answers[i].fields |= whole

    def results(self, decode_ms: float, rows: int) -> dict[int, Result]:
        """Return the answers so far, by number.

        Args:
          decode_ms: Milliseconds of the loop up to now.
          rows: Number of rows that decode.
        """
        return {
            i: Result(
                **answer.fields,
                prefill_ms=answer.start.prefill_ms,
                decode_ms=decode_ms - answer.start.decode_ms,
                batch=rows,
                caption_ms=answer.request.caption_ms,
                cached=answer.start.cached,
                plans={} if self.pace is None else self.pace.uses[i],
            )
            for i, answer in self.answers.items()
            if answer.fields
        }

    def forget(self, numbers: Collection[int]) -> None:
        """Drop requests that are answered, or that nobody waits for."""
        for i in numbers:
            self.answers.pop(i, None)
        if self.pace is not None:
            self.pace.forget(numbers)
