"""Thousands of damaged checkpoints, each from its seed: which are used, refused in one line, or else.

    python eval/robustness.py --out runs/robustness
    python eval/robustness.py --target path/to/hf --head path/to/head --first 5000

Each is a copy of a target and its KV head with one damage, of a kind that `jaxspec.evaluation.damage` names, and is
inspected, loaded and given a prompt with an image by a process apart. Writes results.json, records.jsonl (a line for
each damage) and table.md into --out. Exits with 1 if one ended in a traceback, took over 20 seconds or 2 GB.
"""

from __future__ import annotations

import multiprocessing
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tyro
from tqdm import tqdm

from configs.eval.mini import ASSETS
from jaxspec.checkpoints.export import export
from jaxspec.errors import check_counts
from jaxspec.evaluation.damage import KINDS, Outcome, outcome, use
from jaxspec.evaluation.report import begin, describe_run, finish, markdown, show, write_results
from jaxspec.runtime import human_bytes, input_errors

SECONDS, BYTES = 20.0, 2 << 30
"""What one damaged checkpoint may take."""
_SHARD = 4 << 20
_PATIENCE = 60.0
"""Seconds after which a process is ended that says nothing."""


def main(
    target: Path = ASSETS / "target",
    head: Path = ASSETS / "kv_head",
    out: Path = Path("runs/robustness"),
    damages: int = 5000,
    first: int = 0,
) -> None:
    """Damages checkpoints and counts what becomes of them.

    Args:
      target: directory of an LVLM.
      head: directory of its KV head.
      out: directory for results.json, records.jsonl and table.md.
      damages: how many.
      first: the first one's seed; the others follow.
    """
    given = dict(locals())
    check_counts(damages=damages)
    fresh = begin(out, given)
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        export(target, whole / "target", max_shard_bytes=_SHARD)
        shutil.copytree(head, whole / "head")
        use(whole)
        seeds = range(first, first + damages)
        found = list(tqdm(tried(Path(folder), seeds), "damages", damages, unit="damage"))
    rows = [summary(kind, [one for one in found if one.kind == kind]) for kind in KINDS] + [summary("all", found)]
    header = ["damage to", "tried", "used", "refused", "else", "longest", "most memory"]
    cells = [
        [*(str(row[name]) for name in header[:5]), f"{row['seconds']:.1f} s", human_bytes(row["growth"])]
        for row in rows
    ]
    notes = [f"{damages} damaged checkpoints, seeds {first} to {first + damages - 1}."]
    bad = [one for one in found if is_bad(one)]
    notes += [f"- {one.seed}, {one.kind}, {one.what}: {one.ended}" for one in bad]
    table = ("Damaged checkpoints", header, cells, notes)
    write_results(fresh, describe_run("damage", given), rows, [asdict(one) for one in found], markdown(*table))
    finish(fresh, out)
    show(*table)
    sys.exit(bool(bad))


def tried(folder: Path, seeds: Sequence[int]) -> Iterator[Outcome]:
    """The outcome of each seed's damage to `folder / "whole"`, by a process that is replaced if it does not answer."""
    pool = _process()
    try:
        for seed in seeds:
            scratch = Path(tempfile.mkdtemp(dir=folder))
            try:
                yield pool.apply_async(outcome, (folder / "whole", scratch, seed)).get(_PATIENCE)
            except multiprocessing.TimeoutError:
                pool.terminate()
                pool.join()
                pool = _process()
                kind = random.Random(seed).choice(list(KINDS))
                yield Outcome(seed, kind, "", f"no answer within {_PATIENCE:g} s", _PATIENCE, 0)
            shutil.rmtree(scratch, ignore_errors=True)
    finally:
        pool.terminate()
        pool.join()


def _process() -> Pool:
    return multiprocessing.get_context("spawn").Pool(1)


def is_bad(one: Outcome) -> bool:
    """Whether it ended otherwise than it may."""
    return not one.well or one.seconds > SECONDS or one.growth > BYTES


def summary(kind: str, found: Sequence[Outcome]) -> dict[str, Any]:
    """A row of the table."""
    ends = [one.ended for one in found if not is_bad(one)]
    return {
        "damage to": kind,
        "tried": len(found),
        "used": ends.count("used"),
        "refused": ends.count("refused"),
        "else": len(found) - len(ends),
        "seconds": max((one.seconds for one in found), default=0.0),
        "growth": max((one.growth for one in found), default=0),
    }


if __name__ == "__main__":
    with input_errors("robustness"):
        tyro.cli(main, description=__doc__)
