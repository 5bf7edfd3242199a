"""Compare KV heads with separate drafts, as in AASD's Table 1: omega, alpha, tau and delta.

    python -m eval.kv_head aasd --limit 20
    python -m eval.kv_head aasd --heads attention=runs/attention/hf "text only=runs/drop/hf" \\
        --baselines FT-LLaVA=runs/ft_llava/hf LLaVA-text=runs/ft_llava/hf:T

The lines are the preset's rows, the drafts of --baselines, the preset's own head, and the heads of
--heads, such as ablations that are trained. --untrained adds the preset's head without its
projector, or without keys and values of images, of text, or of both, not trained again.
Writes results.json, records.jsonl, prompts.jsonl and table.md into --out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eval.lib.drafts.command_line import parse_command
from eval.lib.drafts.comparison import Group, compare
from eval.lib.drafts.config import EvalConfig, Variant
from eval.lib.drafts.loading import load_model, load_models, named_places, split_view
from eval.lib.drafts.published import papers_of, sources
from eval.lib.output.intervals import check_row, interval_table
from eval.lib.output.report import Run
from eval.lib.output.tables import (
    Label,
    Record,
    Table,
    answer_lengths,
    failures,
    mean_over,
    number,
    pivot,
    sample_counts,
    without_failed,
)
from eval.lib.questions.sets import remarks
from jaxspec.command import input_errors, script_name
from jaxspec.config import LvlmConfig
from jaxspec.engine.drafts import HEAD
from jaxspec.engine.engine import Engine
from jaxspec.errors import InputError, check_all_counts
from jaxspec.heads.kinds.kv_head.config import KVHeadConfig
from jaxspec.loading.models import LoadedHead, LoadedModel


@dataclass(frozen=True)
class Options:
    heads: tuple[str, ...] = ()
    """NAME=DIRECTORY of further heads for the same target, such as trained ablations."""
    baselines: tuple[str, ...] = ()
    """NAME=DIRECTORY of drafts, or NAME=DIRECTORY:VIEW. The default view is M for LVLMs and T for
    text models."""
    untrained: bool = False
    """Also remove parts of the preset's head without training it again."""
    against: str = ""
    """A draft or head, against which the table of intervals compares the others."""
    gammas: tuple[int, ...] = (3, 5)
    """Drafted tokens per block; --gamma gives one."""
    out: Path = Path("runs/kv_head/PRESET")
    """Directory for the results and table.md."""

    def __post_init__(self) -> None:
        if not self.gammas:
            raise InputError("gammas: none; give one or more")
        check_all_counts(gammas=self.gammas)


def main(args: Sequence[str] | None = None) -> None:
    """Measure alpha, tau (block efficiency), omega (walltime speed-up) and delta of drafts."""
    preset, config, options = parse_command(Options, __doc__, args)
    timed = f"the median of {config.repeats} runs by turns" if config.times else ""
    with Run(preset, vars(config) | vars(options), options.out, timed) as run:
        models = load_models(config)
        target = models.target
        trained = [draft for draft in models.drafts if isinstance(draft, LoadedHead)]
        if not trained:
            raise InputError(f"preset {preset}: has no KV head; give one with --draft")
        heads = {"KV head": trained[0]} | (ablations(trained[0]) if options.untrained else {})
        rows = [row.name for row in config.rows]
        more_heads = named_places("heads", options.heads, {*rows, *heads})
        baselines = named_places("baselines", options.baselines, {*rows, *heads, *more_heads})
        heads |= {name: LoadedHead.load(path, target) for name, path in more_heads.items()}
        drafts = {name: separate_draft(config, target, at) for name, at in baselines.items()}
        check_row(options.against, [*rows, *drafts, *heads])
        plain = Engine(target, None, config.plain())

        def parts() -> Iterator[Group]:
            for gamma in options.gammas:
                part = replace(config, gamma=gamma)
                engines = models.engines(part)
                for name, (other, row) in drafts.items():
                    engines[name] = Engine(target, other, part.engine(row))
                for name, head in heads.items():
                    engines[name] = Engine(target, head, part.engine(Variant(name, (HEAD,))))
                yield from compare(part, plain, engines, run.rows, run.keep)

        run.restore()

        def tables() -> list[Table]:
            whole = draft_table(config, run.rows, run.failed, more_heads | baselines)
            labels, every = {"draft": "row", "gamma": "gamma", "turn": "turn"}, {"avg": config.sets}
            return [whole, interval_table(run.records, labels, every, options.against)]

        run.collect(parts(), tables)


COUNTS = {"alpha": "draft_acceptance_rate", "tau": "tokens_per_pass"}
"""Columns for each draft length, and their fields in rows."""
FIELDS = {
    "omega": "speedup_call",
    "omega, loop": "speedup_measured",
    **COUNTS,
    "delta": "call_tokens_per_second",
    "delta, loop": "decode_tokens_per_second",
}
"""The same where passes are timed."""
Line = tuple[Sequence[str], Sequence[Record]]
"""Sets over which a line has means, and the rows of its draft."""


def draft_table(
    config: EvalConfig,
    rows: Sequence[Record],
    failed: Sequence[Record] = (),
    directories: Mapping[str, str] | None = None,
) -> Table:
    """Return AASD's Table 1: a line per set and draft, columns for each draft length.

    Args:
      directories: Directories of --heads and --baselines, by name.
    """
    gammas = sorted({row["gamma"] for row in rows})
    papers = papers_of(config, config.published)
    groups = {name: (name,) for name in config.sets}
    groups |= {"avg": config.sets} if len(config.sets) > 1 else {}

    def column(field: str, gamma: int | None = None) -> Callable[[Line], str]:
        def cell(line: Line) -> str:
            sets, drafted = line
            cells = [row for row in drafted if gamma in (None, row["gamma"])]
            return number(mean_over(cells, sets, field))

        return cell

    def printed(label: Label) -> Iterator[tuple[Label, Mapping[str, float]]]:
        name, draft = label
        where = (directories or {}).get(draft)
        for paper in papers if groups[name] == config.sets else ():
            numbers = paper.numbers[1].get(draft)
            if numbers and where == paper.places.get(draft):
                yield (name, f"{draft}, paper"), numbers

    whole = without_failed(rows, failed, "dataset", "row")
    lines = [
        ((group, draft), (sets, [row for row in whole if row["row"] == draft]))
        for group, sets in groups.items()
        for draft in dict.fromkeys(row["row"] for row in rows)
    ]
    fields = FIELDS if config.times else COUNTS
    columns = {
        f"{name} gamma={gamma}": column(fields[name], gamma) for gamma in gammas for name in fields
    }
    if config.times:
        columns["prefill ms"] = column("prefill_ms")

    def plain(field: str) -> str:
        return ", ".join(f"{name} {number(mean_over(rows, [name], field))}" for name in config.sets)

    notes = [
        f"{sample_counts(rows)} samples a set, turns {', '.join(map(str, config.turns))}, batch "
        f"{config.batch_size}, temperature {config.temperature:g}, {config.dtype}, "
        f"{(*rows, *failed)[0]['device']}. avg is the plain mean over sets.",
        "alpha: accepted over drafted tokens; tau: tokens per pass of the target, the bonus token "
        "counted.",
        *answer_lengths(rows, config.sets),
        *remarks(config.sets, config.turns),
    ]
    if config.times:
        notes += [
            "omega: tokens/s of whole calls, with the prefill of target and draft, over plain "
            "decoding's in the same run; delta: tokens/s of whole calls. loop: the same of the "
            "decode loop only. prefill ms: of target and draft, for each sample; the draft's own "
            "is this less plain decoding's.",
            f"Plain decoding: {plain('plain_call_tokens_per_second')} tokens/s of whole calls, "
            f"{plain('plain_tokens_per_second')} of the loop, {plain('plain_prefill_ms')} ms of "
            "prefill.",
        ]
    if config.temperature == 0:
        same = min((row["token_identity_rate"] for row in rows), default=0.0)
        notes.append(
            f"In every row at least {100 * same:.1f} % of the answers are plain decoding's, token "
            "for token."
        )
    if any(row["row"].endswith(UNTRAINED) for row in rows):
        notes.append("untrained: parts taken from the trained head, which was not trained for it.")
    notes += [*sources(config, papers), *failures(failed)]
    labels = "set", "draft"
    return pivot("Drafts of one target: AASD's Table 1", labels, lines, columns, printed, notes)


UNTRAINED = ", untrained"


def ablations(head: LoadedHead) -> dict[str, LoadedHead]:
    """Return what is left of a KV head without some of its parts, by name."""
    config = head.config
    if not isinstance(config, KVHeadConfig):
        return {}
    heads = {}
    blind: dict[str, Any] = {"pooling": "drop", "slot_bias": False}
    if config.pools:
        heads["- image KV"] = replace(config, **blind)
        heads["- projector"] = replace(config, pooling="none", slot_bias=False)
    if config.reads_text:
        heads["- text KV"] = replace(config, reads_text=False)
    if config.pools and config.reads_text:
        heads["- target's KV"] = replace(config, reads_text=False, **blind)
    return {name + UNTRAINED: replace(head, config=config) for name, config in heads.items()}


def separate_draft(
    config: EvalConfig, target: LoadedModel, entry: str
) -> tuple[LoadedModel, Variant]:
    """Load the draft of DIRECTORY or DIRECTORY:VIEW, and return it with its row of the table."""
    path, view = split_view(entry)
    draft = load_model(path, config.dtype, config.tiles, target)
    view = view or ("M" if isinstance(draft.config, LvlmConfig) else "T")
    return draft, Variant(entry, (view,))


if __name__ == "__main__":
    with input_errors(script_name()):
        main()
