"""Try to break the library, and write a table of what happened.

    python -m tests.robustness damage --out results/robustness/damage
    python -m tests.robustness kills --out results/robustness/kills
    python -m tests.robustness settings --out results/robustness/settings

`damage` reads damaged checkpoints, rows, images and command lines; `kills` ends programs that write
at random moments; `settings` compares greedy answers under random settings with plain decoding.
Each writes results.json, records.jsonl and table.md into --out, and exits with 1 if something
broke.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import tyro
from tqdm import tqdm

from eval.lib.output.report import Run
from eval.lib.output.tables import Table
from jaxspec.command import input_errors
from jaxspec.engine.captioners import load_captioner
from jaxspec.engine.engine import LoadedModel
from jaxspec.errors import check_counts
from jaxspec.loading.models import load_draft
from jaxspec.runtime import human_bytes
from jaxspec_demo import ASSETS
from tests.robustness.damage import Outcome
from tests.robustness.kills import kill_preparations, kill_tables, kill_trainings
from tests.robustness.settings import DEVICES, try_settings
from tests.robustness.trials import TRIALS, is_bad, run, summary

KILLS = {
    "training": (kill_trainings, 0.5),
    "writer of tables": (kill_tables, 0.25),
    "prepare": (kill_preparations, 0.25),
}
"""What is killed, and its share of the kills."""


def damage(out: Path = Path("runs/robustness/damage"), count: int = 5000, seed: int = 0) -> None:
    """Read damaged checkpoints, rows, images and command lines: each is used, or refused in one
    line, soon.

    Args:
      out: directory for results.json, records.jsonl and table.md.
      count: damages.
      seed: the first one's; the others follow.
    """
    given = dict(locals())
    check_counts(count=count)
    measurement = Run("robustness", given, out)
    rows: list[dict[str, Any]] = []
    found: list[Outcome] = []
    for name, (_, share) in TRIALS.items():
        seeds = range(seed, seed + max(round(share * count), 1))
        some = list(tqdm(run(name, seeds), name, len(seeds), unit="damage"))
        rows.append(summary(name, some))
        found += some
    rows.append(summary("all", found))
    header = ["damage to", "tried", "used", "refused", "else", "longest", "most memory"]
    cells = [
        [
            *(str(row[column]) for column in header[:5]),
            f"{row['seconds']:.1f} s",
            human_bytes(row["growth"]),
        ]
        for row in rows
    ]
    bad = [one for one in found if is_bad(one)]
    notes = [f"Each damage is made from its seed, from {seed} on."]
    notes += [f"- {one.seed}, {one.kind}, {one.what}: {one.ended}" for one in bad]
    records = [asdict(one) for one in found]
    _write(
        measurement, rows, records, Table("Damaged input", header, cells, notes), broken=len(bad)
    )


def kills(out: Path = Path("runs/robustness/kills"), count: int = 200, seed: int = 0) -> None:
    """Kill programs that write at random moments, restart them, and compare results with
    undisturbed runs, to the bit.

    Args:
      out: directory for results.json, records.jsonl and table.md.
      count: kills, by SIGKILL.
      seed: of the moments.
    """
    given = dict(locals())
    check_counts(count=count)
    measurement = Run("robustness", given, out)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (kill, share) in KILLS.items():
            killed = kill(max(round(share * count), 1), seed, Path(folder) / name.replace(" ", "_"))
            # a loss raises AssertionError
            rows.append({"killed": name, **asdict(killed), "lost": 0})
            print(f"{name}: {killed}", file=sys.stderr)
    header = ["killed", "kills", "runs", "lost"]
    cells = [[str(row[column]) for column in header] for row in rows]
    notes = ["runs: those that ended by themselves, each with the bits of an undisturbed one."]
    _write(
        measurement, rows, rows, Table("SIGKILL at random moments", header, cells, notes), broken=0
    )


def settings(
    out: Path = Path("runs/robustness/settings"), count: int = 42, prompts: int = 240, seed: int = 0
) -> None:
    """Decode prompts under random settings: greedy answers of the mini pair are those of plain
    decoding.

    Args:
      out: directory for results.json, records.jsonl and table.md.
      count: settings.
      prompts: prompts of each.
      seed: of prompts and settings.
    """
    given = dict(locals())
    check_counts(count=count, prompts=prompts)
    jax.config.update("jax_num_cpu_devices", max(DEVICES))
    measurement = Run("robustness", given, out)
    target = LoadedModel.load(ASSETS / "mini" / "target")
    drafts = [load_draft(ASSETS / "mini" / name, target) for name in ("draft", "kv_head")]
    captioner = load_captioner(f"jax:{ASSETS / 'mini' / 'captioner'}", share_tower_with=target)
    rows = list(try_settings(target, drafts, captioner, count, prompts, seed))
    header = ["settings", "of them", "pairs", "identical"]
    kinds = {
        "all": lambda row: True,
        "with a draft": lambda row: row["kind"] == "draft",
        "with a KV head": lambda row: "head" in (row["views"] or ()),
        "chains": lambda row: row["kind"] == "draft" and row["tree"] is None,
        "chains of `auto` length": lambda row: row.get("gamma") == "auto",
        "trees": lambda row: bool(row.get("tree")),
        "with lookup": lambda row: "lookup" in (row["views"] or ()),
        "weights that learn": lambda row: (
            row.get("weighting", "static") not in ("static", "random")
        ),
        "on 2 devices": lambda row: row["devices"] == 2,
        "on 4 devices": lambda row: row["devices"] == 4,
        "models that write together": lambda row: row["kind"] == "collaborative",
    }
    cells = []
    for name, holds in kinds.items():
        some = [row for row in rows if holds(row)]
        pairs, identical = (sum(row[column] for row in some) for column in ("pairs", "identical"))
        cells.append([name, str(len(some)), str(pairs), str(identical)])
    notes = [
        f"{prompts} prompts, float32, up to 32 new tokens each; `records.jsonl` has every setting."
    ]
    table = Table("Greedy answers under random settings", header, cells, notes)
    _write(
        measurement, rows, rows, table, broken=sum(row["pairs"] - row["identical"] for row in rows)
    )


def _write(measurement: Run, rows: Any, records: Any, table: Table, broken: int) -> None:
    with measurement:
        measurement.rows, measurement.records = rows, records
        measurement.write(table)
    sys.exit(bool(broken))


if __name__ == "__main__":
    with input_errors("robustness"):
        tyro.extras.subcommand_cli_from_dict(
            {"damage": damage, "kills": kills, "settings": settings}, description=__doc__
        )
