"""Write answers in OpenAI's form: whole, or in parts as server-sent events.

Where a request asks for a `trace`, fields that OpenAI does not have are in `jaxspec`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxspec import __version__
from jaxspec.engine.metrics import acceptance_metrics
from jaxspec.engine.requests import Result
from jaxspec.prompts.encoder import PromptEncoder
from jaxspec.serve.bodies import Job
from jaxspec.serve.worker import Ticket

SPECULATIVE = (
    *("mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram"),
    *("num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens", "num_spec_tokens"),
)
"""Fields of vLLM's `metrics.speculative_decoding`."""


def error_body(
    message: str, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return the body of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def event(body: dict[str, Any] | str) -> bytes:
    """Return a server-sent event."""
    text = body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)
    return f"data: {text}\n\n".encode()


@dataclass
class Answer:
    """Write the answer to one body.

    Attributes:
      chats: Whether choices are messages of an assistant, not texts.
      tickets: One for each choice.
      name: The request's id, in lower case letters, digits and a few signs.
    """

    job: Job
    model: str
    chats: bool
    tickets: Sequence[Ticket]
    encoder: PromptEncoder
    name: str
    created: int = field(default_factory=lambda: int(time.time()))
    sent: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """Characters of text and of reasoning, and tokens, that were sent of each choice."""
    place: int | None = None
    """Newest place in the queue that was sent."""

    def whole(self) -> dict[str, Any]:
        """Return the body of the whole answer."""
        choices = []
        for i, ticket in enumerate(self.tickets):
            result = _ended(ticket)
            content: dict[str, Any] = {"text": result.text}
            if self.chats:
                message = {"role": "assistant", "content": result.text, "refusal": None}
                message |= {"reasoning_content": result.reasoning} if result.reasoning else {}
                content = {"message": message}
            choices.append(self._choice(i, result, content, 0))
        return self._body(choices) | counts(self.tickets)

    def begin(self) -> Iterator[bytes]:
        """Yield the events before the first token."""
        for i in range(len(self.tickets)) if self.chats else ():
            choice = {"delta": {"role": "assistant", "content": ""}, "index": i}
            yield event(self._chunk([choice | {"logprobs": None, "finish_reason": None}]))

    def parts(self, fresh: Mapping[int, Result]) -> Iterator[bytes]:
        """Yield an event for each choice that is longer now, and for a new place in the queue.

        A ticket itself may have a still longer answer.
        """
        place = max(ticket.waiting for ticket in self.tickets)
        if self.job.trace and place != self.place:
            self.place = place
            yield event(self._chunk([]) | {"jaxspec": {"waiting": place}})
        for i, result in fresh.items():
            text_end, reasoning_end, start = self.sent.get(i, (0, 0, 0))
            text, reasoning = result.text[text_end:], result.reasoning[reasoning_end:]
            self.sent[i] = len(result.text), len(result.reasoning), len(result.tokens)
            facts = result.finish_reason or result.logprobs or self.job.trace
            if not (text or reasoning or facts):
                continue
            content: dict[str, Any] = {"text": text}
            if self.chats:
                delta = {"reasoning_content": reasoning, "content": text}
                content = {"delta": {name: value for name, value in delta.items() if value}}
            yield event(self._chunk([self._choice(i, result, content, start)]))

    def end(self) -> Iterator[bytes]:
        """Yield the events after the last token."""
        if self.job.usage:
            yield event(self._body([], stream=True) | counts(self.tickets))
        yield event("[DONE]")

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        body = self._body(choices, stream=True)
        return body | {"usage": None} if self.job.usage else body

    def _body(self, choices: list[dict[str, Any]], stream: bool = False) -> dict[str, Any]:
        kind = "chat.completion" if self.chats else "text_completion"
        return {
            "id": f"{'chatcmpl' if self.chats else 'cmpl'}-{self.name}",
            "object": f"{kind}.chunk" if stream and self.chats else kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"jaxspec-{__version__}",
            "choices": choices,
        }

    def _choice(
        self, i: int, result: Result, content: dict[str, Any], start: int
    ) -> dict[str, Any]:
        """Return a choice with its facts of the tokens from `start` on."""
        choice: dict[str, Any] = {"index": i, **content, "finish_reason": result.finish_reason}
        choice["logprobs"] = logprobs(result, start, self.encoder, self.chats)
        if not self.job.trace:
            return choice
        prompt = {"prompt": len(self.tickets[i].request.rows[0])}
        return choice | {"jaxspec": _trace(result, start) | prompt}


def _ended(ticket: Ticket) -> Result:
    assert ticket.result is not None
    assert ticket.result.finish_reason is not None
    return ticket.result


def logprobs(result: Result, start: int, encoder: PromptEncoder, chats: bool) -> Any:
    """Return the log probabilities of an answer's tokens from `start` on; None without any."""
    if result.logprobs is None or result.top_logprobs is None:
        return None

    def piece(token: int) -> str:
        return encoder.text([token], after=[token]) or encoder.tokenizer.decode([token])

    def entry(token: int, value: float) -> dict[str, Any]:
        text = piece(token)
        content = None if "\ufffd" in text else [*text.encode()]
        return {"token": text, "logprob": value, "bytes": content}

    columns = (result.tokens, result.logprobs, result.top_logprobs)
    places = list(zip(*(column[start:] for column in columns)))
    if chats:
        return {
            "content": [
                entry(token, value) | {"top_logprobs": [entry(*pair) for pair in top.items()]}
                for token, value, top in places
            ],
            "refusal": None,
        }
    return {
        "tokens": [piece(token) for token, _, _ in places],
        "token_logprobs": [value for _, value, _ in places],
        "top_logprobs": [
            {piece(token): value for token, value in reversed(top.items())} for *_, top in places
        ],
        "text_offset": None,
    }


def counts(tickets: Sequence[Ticket]) -> dict[str, Any]:
    """Return the numbers of tokens as `usage`, and those of drafts as vLLM's `metrics`.

    OpenAI's `accepted_prediction_tokens` count what a client predicts, not what a draft does.
    """
    results = [_ended(ticket) for ticket in tickets]
    prompts = {id(ticket.request.prompt): len(ticket.request.rows[0]) for ticket in tickets}
    prompt, new = sum(prompts.values()), sum(len(result.tokens) for result in results)
    pairs = reversed([*zip(tickets, results)])  # the first choice counts: it may keep the prompt
    cached = {id(ticket.request.prompt): result.cached for ticket, result in pairs}
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
        "completion_tokens": new,
        "total_tokens": prompt + new,
    }
    drafts = acceptance_metrics([result.stats for result in results])
    steps, longest = drafts["num_spec_steps"], len(drafts["acceptance_histogram"]) - 1
    if not (steps and longest):
        return {"usage": usage}
    drafts["mean_acceptance_length"] = 1 + drafts["num_accepted_draft_tokens"] / steps
    drafts["num_spec_tokens"] = longest
    speculative = {name: drafts[name] for name in SPECULATIVE}
    return {"usage": usage, "metrics": {"speculative_decoding": speculative}}


def _trace(result: Result, start: int) -> dict[str, Any]:
    """Return where the tokens from `start` on came from, and the clocks of the answer so far."""
    trace = result.trace or {}
    return {
        "tokens": list(result.tokens[start:]),
        **{name: values[start:] for name, values in trace.items()},
        "passes": int(result.stats.steps),
        "emitted": int(result.stats.emitted),
        "prefill_ms": round(result.prefill_ms, 3),
        "decode_ms": round(result.decode_ms, 3),
    }
