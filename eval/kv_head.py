"""KV heads against separate drafts, in the form of AASD's Table 1: speed-up, acceptance, tokens a pass and a second.

    python -m eval.kv_head aasd --limit 20
    python -m eval.kv_head aasd --heads attention=runs/attention/hf "text only=runs/drop/hf" \\
        --baselines FT-LLaVA=runs/ft_llava/hf FT-LLaMA=runs/ft_llama/hf LLaVA-text=runs/ft_llava/hf:T

Lines are the preset's rows, the drafts of --baselines, the preset's own head, what is left of it without the target's
keys and values of images, of text, or all, or without its projector (not trained again), and the heads of --heads.
Writes results.json, records.jsonl and table.md into --out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from eval.lib.command_line import parse_command
from eval.lib.comparison import GROUP, compare, row_engines
from eval.lib.config import EvalConfig, Variant, load_model, load_models, named, shown
from eval.lib.report import Record, Run, Table, failures, mean, number
from eval.lib.simulation import predict_heads
from jaxspec.command import input_errors, script_name
from jaxspec.config import LvlmConfig
from jaxspec.decoding.engine import Engine
from jaxspec.errors import InputError
from jaxspec.loading import LoadedHead, LoadedModel


@dataclass(frozen=True)
class Options:
    heads: tuple[str, ...] = ()
    """NAME=DIRECTORY of further heads of the same target, such as ablations that were trained."""
    baselines: tuple[str, ...] = ()
    """NAME=DIRECTORY of drafts, or NAME=DIRECTORY:VIEW. Without a view LVLMs are shown M and text models T."""
    gammas: tuple[int, ...] = (3, 5)
    """Drafted tokens a block."""
    out: Path = Path("runs/kv_head/PRESET")
    """Directory for results.json, records.jsonl and table.md."""


def main(args: Sequence[str] | None = None) -> None:
    """Measures the preset's rows and head, its ablations, other heads and other drafts."""
    preset, config, options = parse_command(Options, __doc__, args)
    if config.kv_head is None:
        raise InputError(f"preset {preset}: names no kv_head; give one with --kv-head")
    with Run(preset, vars(config) | vars(options), options.out) as run:
        shown = [name for row in config.rows for name in row.views]
        target, draft, captioner = load_models(config, views=[*shown, "kv"])
        assert target.head is not None
        heads = ablations(target.head)
        for name, path in map(named, options.heads):
            other = target.with_head(path).head
            assert other is not None
            heads[name] = other
        drafts = {
            name: separate_draft(config, target, place)
            for name, place in map(named, options.baselines)
        }
        plain = Engine(replace(target, head=None), None, config.plain())
        predicted = (
            predict_heads(config, plain, heads, options.gammas) if config.temperature == 0 else {}
        )
        run.restore(GROUP)
        for gamma in options.gammas:
            config = replace(config, gamma=gamma)
            engines = row_engines(config, target, draft, captioner)
            engines |= {
                name: Engine(target, other, config.engine(row))
                for name, (other, row) in drafts.items()
            }
            engines |= {
                name: Engine(
                    replace(target, head=head), None, config.engine(Variant(name, ("kv",)))
                )
                for name, head in heads.items()
            }
            for rows, records, failed in compare(config, plain, engines, run.rows):
                found = (predicted.get((*map(row.get, GROUP), row["row"])) for row in rows)
                run.add(
                    [row | {"predicted_acceptance_length": t} for row, t in zip(rows, found)],
                    records,
                    failed,
                )
                run.write(draft_table(config, run.rows, run.failed))
        run.write(draft_table(config, run.rows, run.failed))


def draft_table(config: EvalConfig, rows: Sequence[Record], failed: Sequence[Record] = ()) -> Table:
    """Return AASD's Table 1: a line per set and draft, and for each draft length four columns. Turns are averaged."""
    gammas = sorted({row["gamma"] for row in rows})
    fields = {
        "omega": "speedup_measured",
        "alpha": "draft_acceptance_rate",
        "tau": "mean_acceptance_length",
        "delta": "decode_tokens_per_second",
    }
    header = ["set", "draft", *(f"{name} J={gamma}" for gamma in gammas for name in fields)]
    places = {name: (name,) for name in config.sets} | (
        {"avg": config.sets} if len(config.sets) > 1 else {}
    )
    papers = [paper for paper in config.published if paper.is_of(config)]
    cells = []
    for place, sets in places.items():
        for draft in dict.fromkeys(row["row"] for row in rows):
            found = [row for row in rows if row["row"] == draft and row["dataset"] in sets]
            if not {row["dataset"] for row in failed if row["row"] == draft}.isdisjoint(sets):
                found = []
            drawn = [[row for row in found if row["gamma"] == gamma] for gamma in gammas]
            cells.append(
                [
                    place,
                    draft,
                    *(number(mean(part, field)) for part in drawn for field in fields.values()),
                ]
            )
            for paper in papers if sets == config.sets else ():
                if printed := paper.numbers[1].get(draft):
                    cells.append(
                        [
                            place,
                            f"{draft}, paper",
                            *(number(printed.get(name)) for name in header[2:]),
                        ]
                    )
    plain = {name: [row for row in rows if row["dataset"] == name] for name in config.sets}
    rates = [
        f"{name} {number(mean(found, 'plain_tokens_per_second'))}" for name, found in plain.items()
    ]
    notes = [
        f"{config.limit} samples a set, turns {', '.join(map(str, config.turns))}, batch {config.batch_size}, "
        f"temperature {config.temperature:g}, {config.dtype}, {(*rows, *failed)[0]['device']}, "
        f"{config.repeats} runs by turns. avg is the plain mean over sets.",
        "omega: tokens/s of the loop over plain decoding's in the same run (the median over runs); alpha: accepted "
        "over drafted tokens; tau: tokens per target pass, the bonus token counted; delta: tokens/s. "
        f"Plain decoding: {', '.join(rates)} tokens/s.",
    ]
    if config.temperature == 0:
        same = min((row["token_identity_rate"] for row in rows), default=0.0)
        notes.append(
            f"In every row at least {100 * same:.1f} % of the answers are plain decoding's, token for token."
        )
    notes += [f"paper: {paper.source}." for paper in papers]
    told = [row for row in rows if row.get("predicted_acceptance_length")]
    if told:
        most = 100 * max(
            abs(row["mean_acceptance_length"] / row["predicted_acceptance_length"] - 1)
            for row in told
        )
        notes.append(
            f"One pass of training's attention over the answers gives the heads' tau within {most:.1f} %."
        )
    return Table("Drafts of one target: AASD's Table 1", header, cells, [*notes, *failures(failed)])


def ablations(own: LoadedHead) -> dict[str, LoadedHead]:
    """Return the head, and what is left of it."""
    heads = {"KV head": own}
    if own.config.pools:
        heads["- image KV"] = LoadedHead(
            replace(own.config, pooling="drop", slot_bias=False), own.params
        )
        heads["- projector"] = LoadedHead(
            replace(own.config, pooling="none", slot_bias=False), own.params
        )
    if own.config.reads_text:
        heads["- text KV"] = LoadedHead(replace(own.config, reads_text=False), own.params)
    if own.config.pools and own.config.reads_text:
        nothing = replace(own.config, pooling="drop", slot_bias=False, reads_text=False)
        heads["- target's KV"] = LoadedHead(nothing, own.params)
    return heads


def separate_draft(
    config: EvalConfig, target: LoadedModel, place: str
) -> tuple[LoadedModel, Variant]:
    """Load the draft of DIRECTORY or DIRECTORY:VIEW, and return it with the row that decodes with it."""
    path, view = shown(place)
    draft = load_model(path, config.dtype, config.tiles, target)
    view = view or ("M" if isinstance(draft.config, LvlmConfig) else "T")
    return draft, Variant(place, (view,))


if __name__ == "__main__":
    with input_errors(script_name()):
        main()
