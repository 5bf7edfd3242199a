"""What models say of reference answers, each and together: likelihood, and how often proposals would be accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import KVCache
from jaxspec.data.prompts import pad_rows
from jaxspec.data.samples import Sample
from jaxspec.decoding.collaboration import Collaboration
from jaxspec.decoding.collaborative import Member
from jaxspec.decoding.combination import Combination, greedy_token
from jaxspec.decoding.requests import Request
from jaxspec.evaluation.block_efficiency import first_question
from jaxspec.evaluation.collaborative_theory import acceptance
from jaxspec.sampling import tempered
from jaxspec.typing import Array, Float, Int, Params

BATCH = 8


@dataclass(frozen=True)
class HeldOut:
    """Logits of all models before each token of the reference answers."""

    logits: np.ndarray
    """[M, N, V]."""
    tokens: np.ndarray
    """[N]."""

    def nats(self, combination: Combination) -> float:
        """Mean of -log r(token) at temperature 1, in nats a token."""
        return _nats(self._combined(combination), self.tokens)

    def nats_alone(self) -> list[float]:
        """Return the nats a token of each model by itself."""
        return [_nats(probs, self.tokens) for probs in self._alone(1.0)]

    def alphas(self, combination: Combination, temperature: float = 1.0) -> list[float]:
        """Return the mean of 1 - TV(d, r) of each model; at temperature 0, how often both have the same best token."""
        soft = self._combined(combination, temperature or 1.0)
        if temperature:
            return [float(acceptance(d, soft).mean()) for d in self._alone(temperature)]
        best = np.asarray(greedy_token(combination, jnp.asarray(self.logits)))
        return [float((logits.argmax(-1) == best).mean()) for logits in self.logits]

    def _combined(self, combination: Combination, temperature: float = 1.0) -> np.ndarray:
        heat = jnp.full(len(self.tokens), temperature)
        return np.asarray(combination.soft(jnp.asarray(self.logits), heat))

    def _alone(self, temperature: float) -> np.ndarray:
        return np.asarray(tempered(jnp.asarray(self.logits), jnp.full(len(self.tokens), temperature)))


def read_answers(collaboration: Collaboration, samples: Sequence[Sample], most: int) -> HeldOut:
    """Shows all models the samples' first questions and the first `most` tokens of their reference answers."""
    logits, tokens = [], []
    for start in range(0, len(samples), BATCH):
        read = _read(collaboration, samples[start : start + BATCH], most)
        logits.append(read.logits)
        tokens.append(read.tokens)
    return HeldOut(np.concatenate(logits, axis=1), np.concatenate(tokens))


def _read(collaboration: Collaboration, samples: Sequence[Sample], most: int) -> HeldOut:
    encoder = collaboration.encoder
    prompts = [first_question(encoder, sample).prompt for sample in samples]
    answers = [
        np.asarray([*encoder.tokenizer.encode(s.turns[0][1], add_special_tokens=False), encoder.eos][:most], np.int32)
        for s in samples
    ]
    state = collaboration.prefill([Request(prompt, most) for prompt in prompts])
    rows = state.count.shape[0]
    padding = [np.zeros(0, np.int32)] * (rows - len(answers))
    # The last token of the prompt is read again, for what follows it.
    fed, length = pad_rows(
        [np.asarray([p.tokens[-1], *a[:-1]]) for p, a in zip(prompts, answers, strict=True)] + padding, most
    )
    real = np.arange(most) < length[:, None]
    targets, _ = pad_rows([*answers, *padding], most)
    members = zip(collaboration.program.members, collaboration.params["models"], state.caches, strict=True)
    logits = [np.asarray(_score(member, params, fed, cache))[real] for member, params, cache in members]
    return HeldOut(np.stack(logits), targets[real])


@partial(jax.jit, static_argnums=0)
def _score(member: Member, params: Params, tokens: Int[Array, "B T"], cache: KVCache) -> Float[Array, "B T V"]:
    return member.model.extend(params, tokens, cache.replace(length=cache.length - 1))[0].astype(jnp.float32)


def _nats(probs: np.ndarray, tokens: np.ndarray) -> float:
    return float(-np.log(np.maximum(probs[np.arange(len(tokens)), tokens], 1e-30)).mean())
