"""Does the target see? Accuracy on picturebook's attribute questions, by greedy decoding."""

from __future__ import annotations

from collections import defaultdict

from tqdm import tqdm

from jaxspec.data.picturebook import probe_set
from jaxspec.decoding.engine import Engine, Request


def probe_accuracy(engine: Engine, per_kind: int = 40) -> dict[str, float]:
    """Share of right answers to questions of what, where, colour, count and sign on the test split, and their mean."""
    samples = probe_set(per_kind)
    right: dict[str, list[bool]] = defaultdict(list)
    batch = engine.config.batch_size
    with tqdm(total=len(samples), desc="attributes", unit="question", delay=1) as bar:
        for start in range(0, len(samples), batch):
            some = samples[start : start + batch]
            asked = [Request(engine.encoder.prompt(s.turns[0][0], s.images), max_new_tokens=32) for s in some]
            for sample, result in zip(some, engine.generate(asked), strict=True):
                for probe in sample.probes:
                    right[probe.kind].append(probe.correct(result.text))
            bar.update(len(some))
    accuracy = {kind: sum(values) / len(values) for kind, values in right.items()}
    return accuracy | {"all": sum(accuracy.values()) / len(accuracy)}
