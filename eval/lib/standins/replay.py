"""Replay recorded greedy answers as a target, for models that are too large to run here.

At temperature 0 verification needs only the target's next token. After accepted drafts this is the
recorded answer's next token, and nothing is read behind a rejected draft. So a target that replays
the recorded tokens gives exactly the acceptance of the recorded model. Features that need its
probabilities are refused: temperature above 0, and weightings that learn from probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import KVCache, TreeMask
from jaxspec.config import LlavaConfig, text_config, with_text
from jaxspec.data.rows import DataRow, local_rows
from jaxspec.data.samples import text_of
from jaxspec.decoding.settings import LARGEST, Processing, count_within
from jaxspec.engine.batches.batcher import Batcher
from jaxspec.engine.compile_cache import Held
from jaxspec.engine.config import EngineConfig
from jaxspec.engine.engine import Engine, LoadedModel, Request
from jaxspec.engine.memory import Sizes
from jaxspec.engine.requests import EncodedRequest, each, encode
from jaxspec.errors import InputError
from jaxspec.loading.models import LoadedDraft
from jaxspec.models.inputs import PromptRows
from jaxspec.models.language_model import LanguageModel
from jaxspec.prompts.captions import Captioner
from jaxspec.prompts.encoder import Prompt
from jaxspec.typing import Array, Float, Int, Params

PREFIX = "replay:"
NO_LIMIT = 2**30
"""Context length of a recorded target, which does not read its prompts."""


@dataclass(frozen=True)
class ReplayModel(LanguageModel):
    """Say recorded tokens as a `LanguageModel` whose parameters are {"answers": [B, C]}.

    The cache's length counts the answer's tokens that were read.
    """

    @property
    def has_vision(self) -> bool:
        return False

    def embed(
        self, params: Params, rows: PromptRows, features: Any = None, pool: Any = None
    ) -> Float[Array, "B L 0"]:
        """Return empty embeddings, since prompts are not read."""
        return jnp.zeros((*rows.tokens.shape, 0))

    def prefill(
        self,
        params: Params,
        embeds: Float[Array, "B L 0"],
        rows: PromptRows,
        slots: int,
        layers: tuple[int, ...] | None = None,
    ) -> tuple[Float[Array, "B V"], KVCache]:
        """Return the first token of every answer, as one-hot logits; there are no hidden states."""
        none = jnp.zeros_like(rows.length)
        return self._say(params, none[:, None])[:, 0], KVCache(k=(), v=(), length=none, shift=none)

    def extend(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        cache: KVCache,
        tree: TreeMask | None = None,
    ) -> tuple[Float[Array, "B T V"], KVCache]:
        """Return the answer's tokens after the next T, or after the nodes of a tree."""
        width = tokens.shape[1]
        steps = jnp.arange(width)[None] if tree is None else tree.depth
        places = jnp.broadcast_to(cache.length[:, None] + 1 + steps, tokens.shape)
        return self._say(params, places), cache.replace(length=cache.length + width)

    def _say(self, params: Params, places: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        answers = params["answers"]
        tokens = jnp.take_along_axis(answers, jnp.minimum(places, answers.shape[1] - 1), axis=1)
        return jax.nn.one_hot(tokens, self.text.vocab_size)


@dataclass(frozen=True, kw_only=True)
class RecordedTarget(LoadedModel):
    """Load a target from a file of greedy answers, with the draft's tokeniser and vocabulary."""

    source: Path
    answers: Mapping[tuple[str, int], tuple[int, ...]] = field(hash=False)
    """(sample, turn from 1) -> new tokens, EOS included where it was reached."""

    @classmethod
    def read(cls, path: Path, draft: LoadedModel) -> RecordedTarget:
        """Read JSONL: MMSpec's answer lines, or {sample, turn, text or token_ids}.

        Texts are encoded with the draft's tokeniser and end in EOS, unless a line's `new_tokens`
        shows that the answer was cut before EOS. Raises InputError for sampled answers, for two
        different answers to one sample and turn, and for texts with another number of tokens than
        recorded.
        """
        text = text_config(draft.config)
        if text is not draft.config and not isinstance(draft.config, LlavaConfig):
            raise InputError(
                f"{PREFIX}{path}: needs a draft that is a text model or a LLaVA; give another"
            )
        answers: dict[tuple[str, int], tuple[int, ...]] = {}
        for row, sample, turn, tokens in _read(path, draft):
            if answers.setdefault((sample, turn), tokens) != tokens:
                raise InputError(
                    f"{row.origin}: an earlier line answers {sample}, turn {turn}; keep one of them"
                )
        if not answers:
            raise InputError(f"{PREFIX}{path}: no answers in it; record some")
        config = with_text(draft.config, max_position_embeddings=NO_LIMIT)
        return cls(config, {}, draft.tokenizer, None, source=path, answers=answers)

    @property
    def model(self) -> ReplayModel:
        return ReplayModel(self.config)

    @property
    def images(self) -> None:
        return None

    def answer(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the recorded tokens of a prompt; InputError if there is no answer."""
        recorded = self.answers.get((prompt.sample, prompt.turn))
        if recorded is None:
            raise InputError(
                f"{PREFIX}{self.source}: no answer of turn {prompt.turn} to sample "
                f"{prompt.sample!r}; record it, or choose other --sets, --turns or --limit"
            )
        return recorded

    def table(self, prompts: Sequence[Prompt], batch: int) -> dict[str, Array]:
        """Return the parameters of `ReplayModel`: a row per prompt, padded to `batch` rows.

        The width fits the longest answer, so that all batches share one compiled program.
        """
        out = np.zeros((batch, max(map(len, self.answers.values()))), np.int32)
        for row, prompt in enumerate(prompts):
            tokens = self.answer(prompt)
            out[row, : len(tokens)] = tokens
        return {"answers": jnp.asarray(out)}


class RecordedBatcher(Batcher):
    """Give each batch its recorded answers in place of the target's parameters.

    Answers belong to the rows of one batch, so no row takes a second request.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.most = self.config.batch_size

    def rooms(self, sizes: Sizes) -> list[int]:
        """Return one size, since caches hold nothing."""
        return [sizes.new]

    def read(
        self, requests: Sequence[Request | str], refused: dict[int, str] | None = None
    ) -> list[EncodedRequest]:
        limited = each(self._limited, encode(self.encoder, requests))
        return super().read(limited, refused)

    def _limited(self, request: EncodedRequest) -> EncodedRequest:
        """Return the request with at most as many new tokens as the recorded answer."""
        if request.temperature > 0:
            raise InputError(
                f"temperature {request.temperature}: recorded answers are greedy; give 0"
            )
        if request.logprobs is not None:
            raise InputError("logprobs: recorded answers have no probabilities; leave it out")
        if Processing.of([request.settings], self.eos):
            raise InputError("recorded answers have no scores; give no penalties, biases or bans")
        length = len(self.recorded.answer(request.prompt))
        return replace(request, max_new_tokens=min(request.max_new_tokens, length))

    @property
    def recorded(self) -> RecordedTarget:
        target = self.assembly.lead
        assert isinstance(target, RecordedTarget)
        return target

    def held(self, requests: Sequence[EncodedRequest]) -> Held:
        rows = self.rows(len(requests))
        answers = self.recorded.table([request.prompt for request in requests], rows)
        return Held(self.program, self.mesh, {**self.assembly.params, "target": answers})


class RecordedEngine(Engine):
    """Run an engine whose target is a `RecordedTarget`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.config, EngineConfig)
        self.batcher = RecordedBatcher(self.assembly, self.config, self.batcher.captioner)
        if self.assembly.program.sources and not self.config.rule.hard_labels:
            raise InputError(
                f"weighting {self.config.weighting}: learns from probabilities, but recorded "
                "answers have none"
            )

    def logprobs(self, request: Request | str, tokens: Sequence[int]) -> np.ndarray:
        """Raise InputError, since the record has no probabilities."""
        raise InputError(
            "logprobs: recorded answers have no probabilities; give a target that is loaded"
        )


def engine_of(
    target: LoadedModel,
    draft: LoadedDraft | Sequence[LoadedDraft] | None,
    config: EngineConfig,
    captioner: Captioner | None = None,
) -> Engine:
    """Return an engine for a loaded or recorded target."""
    kind = RecordedEngine if isinstance(target, RecordedTarget) else Engine
    return kind(target, draft, config, captioner)


def _read(path: Path, draft: LoadedModel) -> Iterator[tuple[DataRow, str, int, tuple[int, ...]]]:
    """Yield row, sample, turn and tokens of every recorded answer."""
    for row in local_rows(path):
        warmth, turn = row.values.get("temperature"), row.values.get("turn", 1)
        if warmth:
            raise InputError(
                f"{row.origin}: drawn at temperature {warmth!r:.60}; record greedy answers"
            )
        if "choices" in row.values:
            sample, answers = answers_of(row)
        else:
            sample = next(
                (row.values[key] for key in ("sample", "id", "question_id") if key in row.values),
                None,
            )
            if sample is None:
                raise InputError(f"{row.origin}: no column sample, id or question_id; give one")
            if not _counts(turn):
                raise InputError(f"{row.origin}: turn {turn!r:.60}; give a whole number, 1 or more")
            answers = [(row.values.get("text"), row.values.get("token_ids"), None)]
        for number, answer in enumerate(answers, 1 if "choices" in row.values else turn):
            yield row, str(sample), number, _tokens(row, *answer, draft)


def answers_of(row: DataRow) -> tuple[str, list[tuple[str, list[int] | None, int | None]]]:
    """Return a line's id, and (text, token ids, number of tokens) of each turn's first choice.

    Token ids and numbers are None if the line lacks them.
    """
    name = text_of(row, ("question_id", "id"))
    try:
        choice = row.values["choices"][0]
        texts = choice["turns"]
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise TypeError
        columns = [choice.get(key) or [None] * len(texts) for key in ("token_ids", "new_tokens")]
        return name, list(zip(texts, *columns, strict=True))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{row.origin}: 'choices' holds no list 'turns' of answers, or new_tokens of another "
            "length; use MMSpec's output format"
        ) from error


_counts = count_within(1, LARGEST)


def _tokens(row: DataRow, text: Any, ids: Any, count: Any, draft: LoadedModel) -> tuple[int, ...]:
    """Return the ids of an answer; `count` is its recorded number of tokens, or None."""
    size = text_config(draft.config).vocab_size
    if ids is not None:
        valid = isinstance(ids, list) and all(type(i) is int and 0 <= i < size for i in ids)
        if not (valid and ids):
            raise InputError(
                f"{row.origin}: token_ids is no list of ids from 0 to {size - 1}; use the draft's "
                "tokeniser"
            )
        return tuple(ids)
    if not isinstance(text, str):
        raise InputError(f"{row.origin}: neither text nor token_ids; give one of them")
    if count is not None and not _counts(count):
        raise InputError(f"{row.origin}: new_tokens {count!r:.60}; give a whole number, 1 or more")
    tokens = draft.tokenizer.encode(text, add_special_tokens=False)
    if count not in (None, len(tokens), len(tokens) + 1):
        raise InputError(
            f"{row.origin}: new_tokens {count!r}, but the draft's tokeniser makes {len(tokens)} of "
            "the text, or one more with EOS; use the target's tokeniser, or give token_ids"
        )
    end = draft.tokenizer.eos_token_id
    return tuple(tokens if end is None or len(tokens) == count else [*tokens, end])
