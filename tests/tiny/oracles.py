"""These references are independent of the library: filters as plain loops, and the goodness of fit
of counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats

from jaxspec.decoding.settings import Settings


def numpy_distribution(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float
) -> np.ndarray:
    """Return what one row of logits [V] draws its next token from, in float64."""
    if temperature == 0:
        return np.eye(logits.size)[np.argmax(logits)]
    return numpy_filtered(numpy_softmax(logits, temperature), top_k, top_p)


def numpy_processed(
    logits: np.ndarray, settings: Settings, prompt: Sequence[int], new: Sequence[int]
) -> np.ndarray:
    """Return one row of logits [V] after the processors, without `min_new_tokens`."""
    scores, text = np.asarray(logits, np.float64).copy(), [*prompt, *new]
    for token, amount in settings.logit_bias.items():
        scores[token] += amount
    for token in {*text} & {*range(scores.size)}:
        penalty = settings.repetition_penalty
        scores[token] *= penalty if scores[token] < 0 else 1 / penalty
    for token in {*new}:
        scores[token] -= settings.frequency_penalty * new.count(token)
        scores[token] -= settings.presence_penalty
    size = settings.no_repeat_ngram_size
    for end in range(size, len(text) + 1) if size else ():
        *before, token = text[end - size : end]
        if before == text[len(text) - size + 1 :] and token < scores.size:
            scores[token] = -np.inf
    for *prefix, token in settings.bad_words:
        if text[len(text) - len(prefix) :] == prefix:
            scores[token] = -np.inf
    scores[[*settings.suppress_tokens, *(() if new else settings.begin_suppress_tokens)]] = -np.inf
    if settings.response_format is not None:
        words = -(-scores.size // 32)
        mask = settings.response_format.mask(0, [*new], words).view(np.uint8)
        scores[np.unpackbits(mask, bitorder="little")[: scores.size] == 0] = -np.inf
    return scores


def numpy_softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    scaled = np.asarray(logits, np.float64) / temperature
    probs = np.exp(scaled - scaled.max())
    return probs / probs.sum()


def numpy_filtered(probs: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Keep the `top_k` likeliest tokens, then the fewest of those whose mass reaches `top_p`,
    renormalised.
    """
    ranked = sorted(range(probs.size), key=lambda token: -probs[token])[: top_k or probs.size]
    whole = probs[ranked].sum()
    kept, mass = [], 0.0
    for token in ranked:
        kept.append(token)
        mass += probs[token] / whole
        if top_p < 1 and mass >= top_p:
            break
    out = np.zeros_like(probs)
    out[kept] = probs[kept] / probs[kept].sum()
    return out


def clear_of_the_cut(probs: np.ndarray, top_k: int, top_p: float, margin: float = 1e-5) -> bool:
    """Return whether no rounding of float32 can change which tokens the filters keep."""
    ranked = np.sort(probs)[::-1]
    k = min(top_k or probs.size, probs.size)
    mass = np.cumsum(ranked[:k]) / ranked[:k].sum()
    cuts = [k, 1 + int(np.searchsorted(mass, top_p))] if top_p < 1 else [k]
    ties = any(cut < probs.size and ranked[cut - 1] - ranked[cut] < margin for cut in cuts)
    return not ties and (top_p == 1 or bool(np.abs(mass - top_p).min() > margin))


def goodness_of_fit(counts: np.ndarray, probs: np.ndarray) -> float:
    """Return the p-value of the chi-square test that `counts` are draws from `probs`; 0 if
    something impossible was drawn.

    Outcomes expected less than five times are counted as one.
    """
    counts, probs = np.ravel(counts).astype(np.float64), np.ravel(probs).astype(np.float64)
    assert abs(probs.sum() - 1) < 1e-6, probs.sum()
    if counts[probs == 0].any():
        return 0.0
    order = np.argsort(-probs)
    counts, expected = counts[order], probs[order] * counts.sum()
    rare = max(int((expected >= 5).sum()), 1)
    pooled = [np.append(x[:rare], x[rare:].sum()) for x in (counts, expected)]
    if pooled[1][-1] < 5:
        pooled = [np.append(x[:-2], x[-2:].sum()) for x in pooled]
    return float(stats.chisquare(pooled[0], pooled[1] * counts.sum() / pooled[1].sum()).pvalue)
