"""Distil sequences: a target answers a source's questions (arXiv 1606.07947).

Each chunk is a JSONL file that appears whole. A stopped run goes on with the first missing chunk,
and shards on several machines take every n-th. Answers depend only on the sample, its number
and the seed. A conversation ends at an answer that is too long, or empty.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from etils import epath
from tqdm import tqdm

from jaxspec.cluster import map_over_processes, on_first, process, sole_on_first
from jaxspec.data.samples import Sample
from jaxspec.decoding.settings import HOTTEST
from jaxspec.engine.engine import Engine, Request
from jaxspec.engine.requests import nth_seed
from jaxspec.errors import InputError, check_counts, check_numbers, check_seed
from jaxspec.files import write_text, writing
from jaxspec.prompts.encoder import Prompt
from jaxspec.prompts.placeholders import PLACEHOLDER
from jaxspec.training.loop.signatures import check_unchanged

Folder = Path | epath.Path | str
"""A local folder, or an address such as gs://bucket/answers."""
TURNS = 64
"""More turns than a conversation has, so that no two samples share a seed."""


@dataclass(frozen=True)
class Regeneration:
    """Hold the inputs that decide the answers. A folder holds the chunks of one work."""

    target: str
    """Name and fingerprint of the target."""
    data: str
    """Name and fingerprint of the data set."""
    samples: int
    """Number of samples, the source's first."""
    temperature: float = 0.0
    """0 is greedy."""
    max_new_tokens: int = 256
    seed: int = 0
    chunk: int = 256
    """Samples of one chunk."""

    def __post_init__(self) -> None:
        check_counts(samples=self.samples, max_new_tokens=self.max_new_tokens, chunk=self.chunk)
        check_numbers(0, HOTTEST, temperature=self.temperature)
        check_seed(self.seed)

    @property
    def chunks(self) -> int:
        return -(-self.samples // self.chunk)


def regenerate(
    engine: Engine,
    source: Sequence[Sample],
    work: Regeneration,
    folder: Folder,
    shard: tuple[int, int] = (0, 1),
) -> int:
    """Write a folder's or bucket's missing chunks, and return how many chunks there are now.

    Each of several processes answers its share of a chunk, and the first writes it.

    Args:
      shard: (i, n): take every n-th chunk from the i-th on.

    Raises InputError if the folder holds chunks of another `work`, or another run writes the shard.
    """
    folder = epath.Path(folder)

    def missing() -> list[int]:
        _claim(folder, work)
        chunks = range(shard[0], work.chunks, shard[1])
        return [chunk for chunk in chunks if not _file(folder, chunk).exists()]

    def answer(members: Sequence[int]) -> list[dict[str, Any]]:
        return _answer(engine, {i: source[i] for i in members}, work)

    with sole_on_first(str(folder / "shard_{}_of_{}.lock".format(*shard))):
        mine, first = on_first(missing), process()[0] == 0
        total = sum(len(_members(work, chunk)) for chunk in mine)
        with tqdm(total=total, unit="sample", desc=folder.name, disable=not first) as bar:
            for chunk in mine:
                rows = map_over_processes(answer, _members(work, chunk))
                text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                on_first(partial(_write, _file(folder, chunk), text))
                bar.update(len(rows))
    return on_first(lambda: sum(_file(folder, chunk).exists() for chunk in range(work.chunks)))


def regenerated(
    source: Sequence[Sample], work: Regeneration, folder: Folder, keep_cut: bool = False
) -> Iterator[Sample]:
    """Yield the source's samples with the new answers, without samples that have none.

    Args:
      folder: Folder of all chunks.
      keep_cut: Keep the beginnings of answers that were too long.

    Raises InputError where the source holds other samples than were answered.
    """
    for row in _rows(work, folder):
        sample = source[row["sample"]]
        if row["id"] != sample.id:
            raise InputError(
                f"{folder}: number {row['sample']} is {sample.id!r}, but was {row['id']!r} when "
                "it was answered; give the answered data, or another name"
            )
        turns = row["turns"]
        if keep_cut and row["cut"] and row["cut"][1].strip():
            turns = [*turns, row["cut"]]
        if turns:
            count = sum(question.count(PLACEHOLDER) for question, _ in turns)
            yield replace(sample, turns=tuple(map(tuple, turns)), images=sample.images[:count])


def losses(work: Regeneration, folder: Folder) -> tuple[dict[str, int], str]:
    """Count the refused conversations, empty answers among them, and those that a long answer cut.

    Also return a line with both counts, the commonest reason of a refusal, and the folder.
    """
    reasons, cut = Counter[str](), 0
    for row in _rows(work, folder):
        reasons.update([row["refused"]] if row["refused"] else [])
        cut += row["cut"] is not None
    refused = reasons.total()
    first = "".join(f", such as: {reason}" for reason, _ in reasons.most_common(1))
    counted = f"{refused} were refused and {cut} cut at {work.max_new_tokens} tokens"
    return {"refused": refused, "cut": cut}, f"{counted}{first} ({folder} has all)"


def _rows(work: Regeneration, folder: Folder) -> Iterator[dict[str, Any]]:
    files = (_file(epath.Path(folder), chunk) for chunk in range(work.chunks))
    return (json.loads(line) for file in files for line in file.read_text().split("\n") if line)


def _claim(folder: epath.Path, work: Regeneration) -> None:
    path, new = folder / "work.json", asdict(work)
    if path.exists():
        written = json.loads(path.read_text())
        old = {name: written.get(name) for name in new}
        check_unchanged(old, new, f"{folder}: holds answers of", "give another name")
    _write(path, json.dumps(new, indent=1) + "\n")


def _write(path: epath.Path, text: str) -> None:
    """Write a text that readers see whole or not at all, as an object in a bucket is."""
    if "://" not in str(path):
        return write_text(Path(path), text)
    with writing(str(path)):
        path.write_text(text)


def _file(folder: epath.Path, chunk: int) -> epath.Path:
    return folder / f"{chunk:06d}.jsonl"


def _members(work: Regeneration, chunk: int) -> range:
    return range(chunk * work.chunk, min((chunk + 1) * work.chunk, work.samples))


def _answer(engine: Engine, samples: dict[int, Sample], work: Regeneration) -> list[dict[str, Any]]:
    """Return a row for each sample: its answered turns, and the turn whose answer was too long.

    All samples' first turns are decoded together, then all second ones.
    """
    rows: dict[int, dict[str, Any]] = {
        i: {"sample": i, "id": sample.id, "turns": [], "cut": None, "refused": None}
        for i, sample in samples.items()
    }
    last: dict[int, tuple[Prompt, Sequence[int]]] = {}
    turn, unfinished = 0, list(samples)
    while unfinished:
        requests: dict[int, Request] = {}
        prompts: dict[int, Prompt] = {}
        for i in unfinished:
            try:
                prompts[i] = prompt = _prompt(engine, samples[i], turn, last.get(i))
                seed = nth_seed(work.seed, i * TURNS + turn)
                request = Request(prompt, work.max_new_tokens, work.temperature, seed=seed)
                engine.check(request)
                requests[i] = request
            except InputError as error:
                rows[i]["refused"] = str(error)
        results = engine.generate(list(requests.values()))
        for i, result in zip(requests, results, strict=True):
            last[i] = prompts[i], result.tokens
            answered = samples[i].turns[turn][0], result.text
            if result.tokens[-1] not in engine.batcher.eos:
                rows[i]["cut"] = answered
            elif result.text:
                rows[i]["turns"].append(answered)
            else:
                rows[i]["refused"] = f"sample {samples[i].id}: the answer is empty"
        turn += 1
        unfinished = [
            i
            for i in requests
            if not (rows[i]["cut"] or rows[i]["refused"]) and turn < len(samples[i].turns)
        ]
    return list(rows.values())


def _prompt(
    engine: Engine, sample: Sample, turn: int, last: tuple[Prompt, Sequence[int]] | None
) -> Prompt:
    """Return the prompt of a turn with its images. `last` is the previous prompt and its answer."""
    question = sample.question(turn)
    if not "".join(question[-1].texts).strip():
        raise InputError(f"sample {sample.id}: no question, so there is nothing to answer")
    if last is None:
        return engine.encoder.prompt(question)
    return engine.encoder.follow_up(*last, question)
