"""Find evaluation sets by name: picturebook's, the papers', MMSpec, your own; and second turns.

Sets without second turns get the kinds of TABED's two-turn runs, under picturebook's names.
`question` is the next sample's question, with its images; `caption`, `summary` and `story` are
requests about the first turn; `fact` and `sum` take a question of NQ and of GSM8K. TABED does not
print the wording; it is that of its released code (furiosa-ai/TABED, tabed/datamodules/dataset.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from jaxspec.data.benchmarks import BENCHMARKS, benchmark_samples, few_shot_samples
from jaxspec.data.conversations import own_samples
from jaxspec.data.samples import Sample
from jaxspec.errors import InputError, nearest
from picturebook import FOLLOW_UPS, SYNTHETIC_SETS, test_set

MMSPEC = "mmspec"
SETS = (*SYNTHETIC_SETS, *BENCHMARKS, MMSPEC)
REQUESTS = {
    "caption": "Provide a detailed caption for the provided image.",
    "summary": "Summarize the previous answer.",
    "story": "Can you use the previous responses to write a long story for children?",
}
SOURCES = {"fact": "nq", "sum": "gsm8k"}
"""Kinds that ask a question of another set, and that set's name in the registry."""

REMARKS = {
    "pope": "POPE is the whole set, as in TABED's released code; its text names the subset of "
    "LMMs-Eval-Lite.",
    "llava-bench": "LLaVA-Bench is asked with the instruction to reason that TABED prints; its "
    "released code asks without.",
    "scienceqa": "ScienceQA is asked its questions with images, with their options and without "
    "their hints; AASD prints no prompt.",
    "coco": "COCO is asked for a description in detail; AASD prints no prompt.",
}
"""Remarks on a set, shown next to its numbers."""
CHAT = (
    "Questions are in the target's chat form. LLaVA's is `USER: ... ASSISTANT:`, as in TABED's "
    "released code, without the system prompt that Vicuna has in haotian-liu/LLaVA."
)

AGAIN = (
    "Second turns are in the words of TABED's released code. The first answer keeps its end token, "
    "which that code takes out."
)

BORROWED = {
    "fact": "{question}. Provide a comprehensive and detailed explanation, including the reasoning "
    "and background information.",
    "sum": "{question}. Provide a detailed explanation.\nLet's think step by step.",
}


def evaluation_set(
    name: str,
    limit: int = 100,
    turns: int = 1,
    kinds: Sequence[str] = tuple(FOLLOW_UPS),
    data: Mapping[str, Path] | None = None,
    shots: Mapping[str, Path | None] | None = None,
    images: Path | None = None,
) -> Sequence[Sample]:
    """Return the first `limit` samples of a set, with one turn or two.

    Args:
      turns: 1 or 2. MMSpec and your own sets have turns of their own; with 2, samples without a
        second turn are left out. In other sets sample i gets a follow-up of kind i modulo the
        number of `kinds`.
      kinds: Names of `FOLLOW_UPS`.
      data: Places of local copies of benchmarks, and of MMSpec; other benchmarks are read from the
        hub. Any other name is a set of your own, in a form of docs/data.md.
      shots: Benchmarks to ask after worked examples, and places of local copies of the examples;
        None reads them from the hub.
      images: Folder of the images of your own sets; None takes the folder of their files.

    Raises InputError for an unknown set, with the nearest name, and for data that cannot be read.
    """
    data, shots = data or {}, shots or {}
    check_names((name,), tuple(data))
    if name in SYNTHETIC_SETS:
        return test_set(name, limit, turns, kinds)
    if name == MMSPEC and name not in data:
        raise InputError(f"set {MMSPEC}: no data; give its prompt file with --data {MMSPEC}=PATH")
    if name == MMSPEC:
        return _with_turns(read_prompts(data[name]), name, turns, limit)
    if name not in BENCHMARKS:
        return _with_turns(own_samples(name, data[name], images), name, turns, limit)
    rows = benchmark_samples(name, data.get(name))
    if name in shots:
        rows = few_shot_samples(name, data.get(name), shots[name])
    samples = list(islice(rows, limit))
    if turns == 1:
        return samples
    borrowed = {
        kind: list(islice(benchmark_samples(source, data.get(source)), limit))
        for kind, source in SOURCES.items()
        if kind in kinds
    }
    return add_follow_ups(samples, kinds, borrowed)


def read_prompts(path: Path) -> Iterator[Sample]:
    """Return the conversations of an MMSpec file: {id, image, turns, category, topic}."""
    return own_samples(MMSPEC, path, labels=("topic", "category"))


def remarks(names: Sequence[str], turns: Sequence[int] = (1,)) -> list[str]:
    """Return the sentences below tables of these sets, about how benchmarks are asked."""
    if not set(names) & set(BENCHMARKS):
        return []
    notes = [REMARKS[name] for name in names if name in REMARKS]
    return [CHAT, *([AGAIN] if 2 in turns else []), *notes]


def _with_turns(samples: Iterable[Sample], name: str, turns: int, limit: int) -> list[Sample]:
    """Return the first samples with at least so many turns."""
    dialogues = list(islice((sample for sample in samples if len(sample.turns) >= turns), limit))
    if not dialogues:
        what = "samples" if turns == 1 else "sample with a second turn"
        raise InputError(
            f"set {name}: no {what} in its file; add one, or give other --sets or --turns"
        )
    return dialogues


def check_names(names: Sequence[str], extra: Sequence[str] = ()) -> None:
    """Raise InputError for the first unknown set, with the nearest name."""
    for name in names:
        if name not in SETS and name not in extra:
            allowed = (*SETS, *extra, "NAME=FILE.jsonl")
            raise InputError(f"sets: unknown set {name!r}; {nearest(name, allowed)}")


def add_follow_ups(
    samples: Sequence[Sample], kinds: Sequence[str], borrowed: Mapping[str, Sequence[Sample]]
) -> list[Sample]:
    """Return the samples with a second turn: sample i gets kind i modulo the number of kinds.

    Args:
      kinds: Names among `FOLLOW_UPS`. Samples without images skip `caption`.
      borrowed: Samples of the sets in `SOURCES` by kind; sample i asks question i modulo their
        number.
    """
    if unknown := [kind for kind in kinds if kind not in FOLLOW_UPS]:
        raise InputError(
            f"follow-ups: unknown kind {unknown[0]!r}; {nearest(unknown[0], tuple(FOLLOW_UPS))}"
        )
    out = []
    for i, sample in enumerate(samples):
        possible = [kind for kind in kinds if kind != "caption" or sample.images]
        if not possible:
            raise InputError(
                f"follow-ups: {sample.dataset} has no images to caption; use other kinds"
            )
        kind = possible[i % len(possible)]
        if kind == "question":
            following = samples[(i + 1) % len(samples)]
            sample = replace(sample, images=(*sample.images, *following.images))
            turn = following.turns[0]
        elif kind in BORROWED:
            question, reference = borrowed[kind][i % len(borrowed[kind])].turns[0]
            question = _sentence(question) if kind == "fact" else question
            turn = BORROWED[kind].format(question=question), reference
        else:
            turn = (REQUESTS[kind], "")
        out.append(replace(sample, turns=(*sample.turns, turn)))
    return out


def _sentence(question: str) -> str:
    """Return a question of NQ with a capital and without a question mark."""
    return question.rstrip(" ?").capitalize()
