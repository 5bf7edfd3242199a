"""Does the target see? Accuracy on picturebook's attribute questions, by greedy decoding."""

from __future__ import annotations

from collections import defaultdict

from jaxspec.data.picturebook import probe_set
from jaxspec.decoding.engine import Engine, Request


def probe_accuracy(engine: Engine, per_kind: int = 40) -> dict[str, float]:
    """Share of right answers to questions of what, where, colour, count and sign on the test split, and their mean."""
    samples = probe_set(per_kind)
    requests = [Request(engine.encoder.prompt(s.turns[0][0], s.images), max_new_tokens=32) for s in samples]
    right: dict[str, list[bool]] = defaultdict(list)
    for sample, result in zip(samples, engine.generate(requests), strict=True):
        for probe in sample.probes:
            right[probe.kind].append(probe.correct(result.text))
    accuracy = {kind: sum(values) / len(values) for kind, values in right.items()}
    return accuracy | {"all": sum(accuracy.values()) / len(accuracy)}
