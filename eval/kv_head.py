"""KV heads against separate drafts, in the form of AASD's Table 1: speed-up, acceptance, tokens a pass and a second.

    python -m eval.kv_head aasd --limit 20
    python -m eval.kv_head aasd --heads attention=runs/attention/hf "text only=runs/drop/hf" \\
        --baselines FT-LLaVA=runs/ft_llava/hf FT-LLaMA=runs/ft_llama/hf LLaVA-text=runs/ft_llava/hf:T

Lines are the preset's rows, the drafts of --baselines, the preset's own head, what is left of it without the target's
keys and values of images, or of text, or without its projector (not trained again), and the heads of --heads. Writes
results.json, records.jsonl and table.md into --out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxspec.command import input_errors, script_name
from jaxspec.config import LvlmConfig
from jaxspec.decoding.engine import Engine
from jaxspec.decoding.loading import LoadedHead, LoadedModel
from jaxspec.errors import InputError
from jaxspec.evaluation.block_efficiency import compare, row_engines
from jaxspec.evaluation.command import load_models, parse_command
from jaxspec.evaluation.config import EvalConfig, Row
from jaxspec.evaluation.kv_head import foretold
from jaxspec.evaluation.report import begin, describe_run, finish, markdown, show, write_results
from jaxspec.evaluation.tables import Table, draft_table


@dataclass(frozen=True)
class Options:
    """What this script takes besides the preset's fields."""

    heads: tuple[str, ...] = ()
    """NAME=DIRECTORY of further heads of the same target, such as ablations that were trained."""
    baselines: tuple[str, ...] = ()
    """NAME=DIRECTORY of drafts, or NAME=DIRECTORY:VIEW. Without a view LVLMs are shown M and text models T."""
    gammas: tuple[int, ...] = (3, 5)
    """Drafted tokens a block."""
    out: Path = Path("runs/kv_head")
    """Directory for results.json, records.jsonl and table.md."""


def main(args: Sequence[str] | None = None) -> None:
    """Measures the preset's rows and head, its ablations, other heads and other drafts."""
    preset, config, options = parse_command(Options, __doc__, args)
    if config.kv_head is None:
        raise InputError(f"preset {preset}: names no kv_head; give one with --kv-head")
    given = vars(config) | vars(options)
    out = begin(options.out, given)
    target, draft, captioner = load_models(config, views=[*(name for row in config.rows for name in row.views), "kv"])
    assert target.head is not None
    heads = ablations(target.head)
    for name, path in map(named, options.heads):
        other = target.with_head(path).head
        assert other is not None
        heads[name] = other
    drafts = {name: separate_draft(config, target, place) for name, place in map(named, options.baselines)}
    plain = Engine(replace(target, head=None), None, config.plain())
    passes = foretold(config, plain, heads, options.gammas) if config.temperature == 0 else {}
    run = describe_run(preset, given)
    rows: list[dict[str, Any]] = []
    records: list[dict[str, Any]] = []
    table: Table = "", [], [], []
    for gamma in options.gammas:
        config = replace(config, gamma=gamma)
        engines = row_engines(config, target, draft, captioner)
        engines |= {name: Engine(target, other, config.engine(row)) for name, (other, row) in drafts.items()}
        engines |= {
            name: Engine(replace(target, head=head), None, config.engine(Row(name, ("kv",))))
            for name, head in heads.items()
        }
        for measured, answers in compare(config, plain, engines):
            told = (passes.get((row["dataset"], row["turn"], row["row"], gamma)) for row in measured)
            rows += [row | {"foretold": tau} for row, tau in zip(measured, told)]
            records += answers
            table = draft_table(config, rows)
            write_results(out, run, rows, records, markdown(*table))  # a run that is stopped keeps whole sets
    finish(out, options.out)
    show(*table)


def ablations(own: LoadedHead) -> dict[str, LoadedHead]:
    """The head, and what is left of it."""
    heads = {"KV head": own}
    if own.config.pools:
        heads["- image KV"] = LoadedHead(replace(own.config, pooling="drop", slot_bias=False), own.params)
        heads["- projector"] = LoadedHead(replace(own.config, pooling="none", slot_bias=False), own.params)
    if own.config.reads_text:
        heads["- text KV"] = LoadedHead(replace(own.config, reads_text=False), own.params)
    return heads


def separate_draft(config: EvalConfig, target: LoadedModel, place: str) -> tuple[LoadedModel, Row]:
    """The draft of DIRECTORY or DIRECTORY:VIEW, and the row that decodes with it."""
    path, view = shown(place)
    draft = LoadedModel.load(path, jnp.dtype(config.dtype), tiles=config.tiles, beside=target)
    view = view or ("M" if isinstance(draft.config, LvlmConfig) else "T")
    return draft, Row(place, (view,))


def shown(place: str) -> tuple[str, str]:
    """DIRECTORY:VIEW in two; the view is empty where none is named."""
    path, _, view = place.rpartition(":")
    return (path, view) if path and "/" not in view else (place, "")


def named(entry: str) -> tuple[str, str]:
    """NAME=PLACE in two."""
    name, _, place = entry.partition("=")
    if not (name and place):
        raise InputError(f"{entry!r} is not NAME=DIRECTORY")
    return name, place


if __name__ == "__main__":
    with input_errors(script_name()):
        main()
