"""Count tokens per pass of every method on recorded answers, by topic, with intervals over
prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from eval.lib.output.bars import Bar, bars_svg
from eval.lib.output.intervals import interval
from eval.lib.output.report import Run
from eval.lib.output.tables import Record, Table, number, percent
from eval.lib.questions.mmspec_files import BASELINE, Turn, summary_csv, summary_rows
from eval.lib.questions.sets import MMSPEC
from eval.lib.recorded.answers import (
    PUBLISHED,
    Conversation,
    Published,
    read_conversations,
    read_published,
    repeated_answers,
)
from eval.lib.recorded.config import RecordedConfig
from eval.lib.recorded.methods import Answers, History, Similar, Source, passes_of
from jaxspec.data.samples import Sample
from jaxspec.errors import reading
from jaxspec.files import write_text

ALL = "all"
REPLAYED = "Replayed: drafts without the target's hidden states"
RECORDED = "Recorded: trained heads that read them, in trees"
NAMES = {"eagle": "EAGLE", "eagle2": "EAGLE-2", "eagle3": "EAGLE-3", "msd": "MSD"}
NAMES |= {"vispec": "ViSpec"}


@dataclass(frozen=True)
class Tally:
    """Count a method's new tokens and target passes after prefill, by conversation and turn."""

    name: str
    drafts: str
    """Form of its drafts: a tree, or a chain of some length."""
    counts: Mapping[str, Sequence[tuple[int, int]]]
    identical: float | None = None
    """Share of answers that equal the target's own; None for a replay, where all do."""
    plotted: bool = True
    """Whether the figure shows it."""


def replay_recorded(config: RecordedConfig, run: Run) -> None:
    """Measure drafts against recorded answers, next to the counts of published methods."""
    conversations, methods = measure(config)
    run.rows = rows_of(config, conversations, methods)
    run.records = list(records_of(conversations, methods))
    summary = summary_rows(summary_answers(conversations, methods))
    write_text(run.folder / "summary.csv", summary_csv(summary))
    write_text(run.folder / "bars.svg", recorded_figure(run.rows, methods))
    run.write(recorded_table(config, conversations, run.rows))


def measure(config: RecordedConfig) -> tuple[tuple[Conversation, ...], list[Tally]]:
    """Read the record, and return its conversations and the counts of all methods."""
    folder = config.places[MMSPEC]
    conversations = read_conversations(folder, config.tokenizer, config.folds, config.limit)
    published = [_published(*entry, conversations) for entry in read_published(folder).items()]
    sources: dict[str, Source] = {
        "history": History(config.order),
        "table": Answers(conversations, config.order),
        "similar": Similar(conversations, config.order, nearest=config.nearest),
    }
    for method in tqdm(config.methods, "replay", unit="method"):
        counts = {}
        for entry in conversations:
            passes = zip(entry.turns, passes_of(method, sources, entry), strict=True)
            counts[entry.id] = [(len(turn.answer), spent) for turn, spent in passes if turn.exact]
        drafts = f"tree of {method.nodes}" if method.nodes else f"chain of {method.gamma}"
        published.append(Tally(method.name, drafts, counts, plotted=method.plotted))
    return conversations, published


def _published(
    name: str, by_sample: Mapping[str, Published], conversations: Sequence[Conversation]
) -> Tally:
    """Return the recorded counts of a method, on the turns that the replay uses."""
    counts, same = {}, []
    for conversation in conversations:
        used = [i for i, turn in enumerate(conversation.turns) if turn.exact]
        with reading(f"{PUBLISHED}: {name} lacks a turn of {conversation.id}", "add its counts"):
            of_turns = by_sample[conversation.id]
            counts[conversation.id] = [(of_turns.new_tokens[i], of_turns.passes[i]) for i in used]
            same += [of_turns.identical[i] for i in used]
    return Tally(NAMES.get(name, name), "recorded tree", counts, float(np.mean(same)))


def rows_of(
    config: RecordedConfig, conversations: Sequence[Conversation], methods: Sequence[Tally]
) -> list[Record]:
    """Return a row for each method and topic, with the interval of its tokens per pass."""
    rows = []
    for method in methods:
        for topic in (ALL, *dict.fromkeys(conversation.topic for conversation in conversations)):
            here = [
                method.counts[conversation.id]
                for conversation in conversations
                if topic in (ALL, conversation.topic)
            ]
            sums = np.asarray(
                [[sum(new - 1 for new, _ in turns), sum(n for _, n in turns)] for turns in here]
            )
            low, high = interval(sums, config.resamples, config.seed)
            tokens, passes = sums.sum(0).tolist()
            rows.append(
                {"method": method.name, "drafts": method.drafts, "topic": topic}
                | {"turns": sum(map(len, here)), "tokens": tokens, "passes": passes}
                | {"tokens_per_pass": tokens / max(passes, 1)}
                | {"low": low, "high": high, "token_identity_rate": method.identical}
            )
    return rows


def records_of(conversations: Sequence[Conversation], methods: Sequence[Tally]) -> Iterator[Record]:
    """Yield every conversation's counts: [new tokens, passes] of each used turn, by method."""
    for conversation in conversations:
        counts = {method.name: method.counts[conversation.id] for method in methods}
        fields = {"sample": conversation.id, "topic": conversation.topic}
        yield fields | {"fold": conversation.fold, "counts": counts}


def recorded_table(
    config: RecordedConfig, conversations: Sequence[Conversation], rows: Sequence[Record]
) -> Table:
    """Return a line per method: tokens per pass over all prompts, its interval, and by topic."""
    topics = list(dict.fromkeys(row["topic"] for row in rows))
    cells = []
    for name in dict.fromkeys(row["method"] for row in rows):
        by_topic = {row["topic"]: row for row in rows if row["method"] == name}
        whole, same = by_topic[ALL], by_topic[ALL]["token_identity_rate"]
        first, *numbers = (number(by_topic[topic]["tokens_per_pass"]) for topic in topics)
        bounds = f"{whole['low']:.2f} to {whole['high']:.2f}"
        identical = "100%" if same is None else percent(same)
        cells.append([name, whole["drafts"], first, bounds, *numbers, identical])
    turns = [turn for conversation in conversations for turn in conversation.turns]
    left_out = sum(not turn.exact for turn in turns)
    notes = [
        f"{len(conversations)} prompts, {len(turns)} turns; {left_out} turns are left out, because "
        "the tokeniser does not give their recorded number of tokens. Tokens per pass: new tokens "
        "after prefill's, over target passes after prefill, pooled; 95 %: bootstrap over prompts.",
        "recorded tree: counts of real runs with the target's hidden states; identical is the "
        "share of their answers that equal the target's own. Other drafts are replayed against the "
        "recorded greedy answers, which are then identical by construction.",
        f"history: n-grams of the prompt and the answer so far, with up to {config.order} tokens "
        f"of context. table: n-grams of the answers in the other {config.folds - 1} of "
        f"{config.folds} folds. similar: that table, mixed equally with one of the "
        f"{config.nearest} answers to the most similar prompts in it. "
        f"{repeated_answers(conversations)} answers occur word for word in "
        "another fold.",
    ]
    header = ["method", "drafts", topics[0], "95 %", *topics[1:], "identical"]
    return Table("MMSpec with recorded answers of LLaVA-1.5-7B", header, cells, notes)


def recorded_figure(rows: Sequence[Record], methods: Sequence[Tally]) -> str:
    """Return bars of the plotted methods' tokens per pass over all prompts, as SVG."""
    whole = {row["method"]: row for row in rows if row["topic"] == ALL}
    groups: dict[str, list[Bar]] = {REPLAYED: [], RECORDED: []}
    for method in methods:
        row = whole[method.name]
        bar = Bar(method.name, row["tokens_per_pass"], row["low"], row["high"])
        if method.plotted:
            groups[REPLAYED if method.identical is None else RECORDED].append(bar)
    for bars in groups.values():
        bars.sort(key=lambda bar: bar.value)
    title = "Tokens per pass of LLaVA-1.5-7B on MMSpec"
    return bars_svg(title, groups, "1: plain decoding")


def summary_answers(
    conversations: Sequence[Conversation], methods: Sequence[Tally]
) -> dict[str, list[tuple[Sample, list[Turn]]]]:
    """Return the counts as answers without text, for MMSpec's summary."""
    answers: dict[str, list[tuple[Sample, list[Turn]]]] = {}
    for conversation in conversations:
        sample = Sample(conversation.id, MMSPEC, (), (), labels=(("topic", conversation.topic),))
        plain = [
            Turn("", tuple(turn.answer), len(turn.answer) - 1, None, None)
            for turn in conversation.turns
            if turn.exact
        ]
        answers.setdefault(BASELINE, []).append((sample, plain))
        for method in methods:
            turns = [
                Turn("", (0,) * new, passes, new - 1 - passes, None)
                for new, passes in method.counts[conversation.id]
            ]
            answers.setdefault(method.name, []).append((sample, turns))
    return answers
