"""Compute the logits of a pairing's models before each token of reference answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from eval.lib.collaborative.theory import acceptance
from jaxspec.cache import KVCache
from jaxspec.data.samples import Sample
from jaxspec.decoding.collaboration.combination import Combination
from jaxspec.decoding.inputs import Member
from jaxspec.engine.engine import Engine
from jaxspec.engine.requests import Request
from jaxspec.prompts.encoder import Prompt
from jaxspec.prompts.rows import pad_rows
from jaxspec.sampling import tempered
from jaxspec.typing import Array, Float, Int, Params

REFERENCE_BATCH = 8


@dataclass(frozen=True)
class References:
    """Hold the logits of all models before each token of the reference answers."""

    logits: np.ndarray
    """[M, N, V]."""
    tokens: np.ndarray
    """[N]."""

    def nats(self, combination: Combination) -> float:
        """Return the mean of -log r(token) at temperature 1, in nats a token."""
        return self._mean_nats(self._combined(combination, 1.0))

    def nats_alone(self) -> list[float]:
        """Return the nats per token of each model by itself."""
        return [self._mean_nats(probs) for probs in self._alone(1.0)]

    def alphas(self, combination: Combination, temperature: float = 1.0) -> list[float]:
        """Return each model's mean of 1 - TV(d, r); at temperature 0, of equal best tokens."""
        soft = self._combined(combination, temperature or 1.0)
        if temperature:
            return [float(acceptance(d, soft).mean()) for d in self._alone(temperature)]
        best = np.asarray(combination.best(jnp.asarray(self.logits), jnp.asarray(soft)))
        return [float((logits.argmax(-1) == best).mean()) for logits in self.logits]

    def _combined(self, combination: Combination, temperature: float) -> np.ndarray:
        return np.asarray(
            combination.soft(jnp.asarray(self.logits), jnp.full(len(self.tokens), temperature))
        )

    def _alone(self, temperature: float) -> np.ndarray:
        return np.asarray(
            tempered(jnp.asarray(self.logits), jnp.full(len(self.tokens), temperature))
        )

    def _mean_nats(self, probs: np.ndarray) -> float:
        chances = probs[np.arange(len(self.tokens)), self.tokens]
        return float(-np.log(np.maximum(chances, 1e-30)).mean())


def read_references(
    engine: Engine, questions: Sequence[tuple[Sample, Prompt]], most: int
) -> References:
    """Run all models over the samples' prompts and the first `most` tokens of references."""
    parts = [
        _read(engine, questions[at : at + REFERENCE_BATCH], most)
        for at in range(0, len(questions), REFERENCE_BATCH)
    ]
    logits, tokens = zip(*parts)
    return References(np.concatenate(logits, axis=1), np.concatenate(tokens))


def _read(
    engine: Engine, questions: Sequence[tuple[Sample, Prompt]], most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return each model's logits of the reference answers, and the tokens, over all samples."""
    encoder = engine.encoder
    samples, prompts = zip(*questions)
    reference_ids = [
        encoder.tokenizer.encode(s.turns[0][1], add_special_tokens=False) for s in samples
    ]
    answers = [np.asarray([*tokens, encoder.eos][:most], np.int32) for tokens in reference_ids]
    state = engine.prefill([Request(prompt, most) for prompt in prompts])
    padding = [np.zeros(0, np.int32)] * (state.count.shape[0] - len(answers))
    # The prompt's last token is read again, for the logits after it.
    read = [np.asarray([p.tokens[-1], *a[:-1]]) for p, a in zip(prompts, answers, strict=True)]
    tokens, length = pad_rows([*read, *padding], most)
    real = np.arange(most) < length[:, None]
    targets, _ = pad_rows([*answers, *padding], most)
    program, weights = engine.assembly.program, engine.assembly.params["models"]
    members = zip(program.members, weights, state.target, strict=True)
    logits = [
        np.asarray(_score(model, params, tokens, cache))[real] for model, params, cache in members
    ]
    return np.stack(logits), targets[real]


@partial(jax.jit, static_argnums=0)
def _score(
    member: Member, params: Params, tokens: Int[Array, "B T"], cache: KVCache
) -> Float[Array, "B T V"]:
    logits, _ = member.model.extend(params, tokens, cache.replace(length=cache.length - 1))
    return logits.astype(jnp.float32)
