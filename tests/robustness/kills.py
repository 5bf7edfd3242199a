"""SIGKILL comes at random moments, again and again: trainings, writers of tables and of prepared
data lose nothing.

`kill_trainings`, `kill_tables` and `kill_preparations` do so many kills of each, and raise
AssertionError where what comes of it in the end is not, to the bit, what comes of it undisturbed. A
life is a process forked from one that has imported all, so that most of it is work; it is killed
within the time that the work took undisturbed, and now and then before it begins. When one ends by
itself the result is compared, and the next run begins in an empty folder.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from eval.lib.output.report import begin, finish, write_results
from eval.lib.output.tables import Table, markdown
from jaxspec.data.prepared import Prepared, prepare
from picturebook.training import Picturebook
from tests.tiny import training
from tests.tiny.files import read_json, read_lines
from tests.training import child

EARLY = 0.1
"""Share of the time, before the work and behind it, in which kills are tried too."""
SETS, VERSIONS, SAMPLES = 3, 4, 60

_FORKS = get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.robustness.kills"])


@dataclass(frozen=True)
class Killed:
    """Count what was survived."""

    kills: int
    runs: int
    """Ended by themselves, all to the same bits."""


def kill_trainings(count: int, seed: int, folder: Path) -> Killed:
    """Kill trainings of two megabytes of parameters, a checkpoint every eight of 80 steps, so many
    times in all.
    """

    def check(run: Path) -> Any:
        lines, steps = training.metrics(run), child.LINE.steps
        assert [line["step"] for line in lines] == [*range(1, steps + 1)], (
            f"{run}: a line of metrics is lost"
        )
        assert [line["batch"] for line in lines] == [*range(steps)], (
            f"{run}: a batch is lost or seen twice"
        )
        ended = child.train_line(run, _no_batch)  # a finished run returns its saved parameters
        return np.asarray(ended["line"]["kernel"]).tobytes()

    return _kill(count, seed, folder, _train, check, lambda run: None)


def kill_tables(count: int, seed: int, folder: Path) -> Killed:
    """Kill a script that measures three sets and swaps its tables for those before, four times
    over.
    """

    return _kill(count, seed, folder, _write_tables, lambda run: _files(run / "out"), _check_tables)


def kill_preparations(count: int, seed: int, folder: Path) -> Killed:
    """Kill the preparation of sixty samples; no half of them is ever there, and no folder of a
    killed one stays.
    """

    def look(run: Path) -> None:
        if (run / "pages/2.0.0").exists():
            assert len(Prepared(run / "pages")) == SAMPLES, f"{run}: half of the samples"

    return _kill(count, seed, folder, _prepare, lambda run: _files(run / "pages"), look)


def _files(folder: Path) -> dict[str, bytes]:
    """Return all that lies in a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def _kill(
    count: int,
    seed: int,
    folder: Path,
    work: Callable[[str, Connection], None],
    check: Callable[[Path], Any],
    look: Callable[[Path], None],
) -> Killed:
    """Kill `work` until there were `count` kills and the last run has ended.

    Args:
      work: writes into a run's folder, and says when it begins.
      check: what a finished run has made.
      look: looks at what a kill left.
    """
    rng = random.Random(seed)
    took = _live(work, folder / "straight", None)
    assert took is not None
    expected, kills, runs = check(folder / "straight"), 0, 0
    while kills < count:
        run = folder / str(runs)
        while True:
            moment = rng.uniform(-EARLY, 1 + EARLY) * took if kills < count else None
            if _live(work, run, moment) is not None:
                break
            kills += 1
            look(run)
        assert check(run) == expected, f"{run}: another result than undisturbed"
        runs += 1
        shutil.rmtree(run)
    return Killed(kills, runs)


def _live(work: Callable[[str, Connection], None], run: Path, moment: float | None) -> float | None:
    """Run one life, and return the seconds that its work took, or None if it was killed.

    Args:
      moment: so many seconds after the work began; below 0, after the process did. None: never.
    """
    run.mkdir(parents=True, exist_ok=True)
    log, (ours, theirs) = run.with_suffix(".log"), _FORKS.Pipe()
    life = _FORKS.Process(target=_begin, args=(work, str(run), str(log), theirs))
    life.start()
    theirs.close()
    if moment is None or moment > 0:
        with suppress(EOFError):  # nothing was left to do
            ours.recv()
    start = time.perf_counter()
    life.join(None if moment is None else abs(moment))
    if life.is_alive():
        life.kill()
    life.join()
    assert life.exitcode in (0, -signal.SIGKILL), (
        f"{run}: exit {life.exitcode}\n{log.read_text()[-2000:]}"
    )
    return None if life.exitcode else time.perf_counter() - start


def _begin(work: Callable[[str, Connection], None], run: str, log: str, told: Connection) -> None:
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    work(run, told)


def _train(run: str, told: Connection) -> None:
    child.setup()
    child.train_line(Path(run), told.send)


def _no_batch(step: int) -> None:
    raise AssertionError("a finished run asked for a batch")


def _write_tables(run: str, told: Connection) -> None:
    """Write tables whose files say which version they are of; a run begins with the version behind
    the one that is there.
    """
    out = Path(run) / "out"
    told.send(None)
    for version in range(_version(out) + 1, VERSIONS):
        options = {"sets": SETS}
        fresh = begin(out, options)
        rows, records = [], []
        for part in range(SETS):
            rows.append({"set": part, "version": version})
            records += [
                {"set": part, "version": version, "tokens": [*range(50)]} for _ in range(300)
            ]
            cells = [[str(row["set"]), "300"] for row in rows]
            table = markdown(Table(f"Version {version}", ["set", "n"], cells))
            write_results(fresh, {"options": options}, rows, records, table)
        if out.exists():
            (out / "mine").touch()
        finish(fresh, out)


def _prepare(run: str, told: Connection) -> None:
    told.send(None)
    if not (Path(run) / "pages/2.0.0").exists():
        prepare("pages", Path(run), Picturebook(size=SAMPLES))


def _version(out: Path) -> int:
    return read_json(out / "results.json")["rows"][0]["version"] if out.exists() else -1


def _check_tables(run: Path) -> None:
    """Check that the directory, or the one that a killed swap has moved aside, is whole and of one
    version.
    """
    out = run / "out" if (run / "out").exists() else run / ".out.old"
    if out.exists():
        assert (out / "mine").exists() or _version(out) == 0, f"{out}: the user's file is lost"
        version = _version(out)
        rows = read_json(out / "results.json")["rows"]
        records = read_lines(out / "records.jsonl")
        assert len(rows) == SETS, f"{out}: some sets are missing"
        assert len(records) == SETS * 300, f"{out}: some records are missing"
        assert {row["version"] for row in rows + records} == {version}, (
            f"{out}: files of several versions"
        )
        assert (out / "table.md").read_text().startswith(f"# Version {version}\n"), (
            f"{out}: files of several versions"
        )
