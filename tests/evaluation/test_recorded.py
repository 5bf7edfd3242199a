"""Drafts replayed against recorded answers need the exact passes, share nothing across folds, and
give the published counts.
"""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from eval import mmspec
from eval.lib.output.intervals import interval
from eval.lib.recorded.answers import (
    ANSWERS,
    PROMPTS,
    PUBLISHED,
    Conversation,
    Turn,
    read_conversations,
)
from eval.lib.recorded.methods import Answers, Lookup, Similar, mixture_passes, tree_passes
from eval.lib.recorded.ngrams import IMAGE, Distribution
from jaxspec.cache import TreeMask
from jaxspec.decoding.sources.lookup import Lookup as LookupSource
from jaxspec.decoding.sources.lookup import Text
from jaxspec.decoding.sources.source import Committed
from jaxspec.errors import InputError
from jaxspec.models.inputs import PromptRows, in_order
from jaxspec_demo import ASSETS


@pytest.mark.parametrize(
    ("tokens", "drafted"),
    [
        ([5, 6, 7, 8, 5, 6], [7, 8]),
        ([5, 6, 7, 5, 6, 9, 5, 6], [9, 5]),  # the latest of two matches
        ([5, IMAGE, 7, 5], [5, 5]),  # no draft shows an image: the commonest token
        ([IMAGE, 4, 9, 4, IMAGE, 9, IMAGE, 4], [9, 4]),  # and none matches one
        ([1, 2, 3], [1, 2]),
        ([1, 2, 7, 2, 9, 1], [2, 7]),  # the longer match goes first
        ([1, 2, 3, 4, 5, 2, 3, 4, 6, 1, 2, 3], [4, 6]),  # [2 3 4] was last followed by 6
        ([1, 1, 1], [1, 1]),
    ],
)
def test_the_replay_drafts_as_the_source_does(
    tokens: Sequence[int], drafted: Sequence[int]
) -> None:
    """In the replay, as in the source, a chain's tokens match earlier drafts, and a tree's nodes
    only what was verified.
    """
    source, read = LookupSource(10, alone=True), len(tokens) - 1
    prompt = jnp.asarray([[*tokens[:-1], *[0] * (12 - read)]])  # all cases have one shape
    rows = PromptRows(prompt, jnp.asarray([read]), in_order(prompt == IMAGE))
    cache: Any = None
    committed = Committed({}, jnp.asarray([tokens[-1:]]), jnp.asarray([1]), cache, 1)
    first, begun = source.begin(committed, Text.of(rows, 4))
    scores, scratch = [first[0, 0, 0]], begun
    for token in drafted:
        after, scratch = source.score(committed, scratch, jnp.asarray([[token]]))
        scores.append(after[0, 0, 0])
    replayed = started(Lookup(in_tree=False), tokens)
    for i, probs in enumerate(scores):
        np.testing.assert_allclose(dense(replayed.after([*tokens, *drafted[:i]])), probs, atol=1e-6)
    assert [int(probs.argmax()) for probs in scores[:-1]] == drafted
    mask = TreeMask(jnp.ones((1, 2), int), jnp.asarray([[[1, 1, 0], [1, 0, 1]]], bool))
    nodes = [drafted[0], 3]
    after, _ = source.score(committed, begun, jnp.asarray([nodes]), mask)
    replayed = started(Lookup(in_tree=True), tokens)
    for token, probs in zip(nodes, after[0, 0], strict=True):
        np.testing.assert_allclose(dense(replayed.after([*tokens, token])), probs, atol=1e-6)


def started(source: Lookup, tokens: Sequence[int]) -> Lookup:
    source.start(Conversation("a", "x", (Turn([], [], True),), 0), 0)
    source.read(tokens, 0)
    return source


def dense(distribution: Distribution) -> np.ndarray:
    return np.asarray([distribution.get(token, 0.0) for token in range(10)])


def test_a_block_ends_at_the_first_wrong_draft() -> None:
    """A block ends at the first wrong draft: from [1 2 3 4] the answer 1 2 3 9 1 2 3 4 takes two
    passes. [2 3 x] gives 9, which was never written, so the commonest token 1 is drafted behind it.
    """
    turn = Turn([1, 2, 3, 4, 7], [1, 2, 3, 9, 1, 2, 3, 4], exact=True)
    assert chain_passes(turn) == 2  # 1 | 2 3 9 | 1 2 3 4
    assert chain_passes(replace(turn, answer=[8, 9, 10])) == 2


def chain_passes(turn: Turn) -> int:
    conversation = Conversation("a", "x", (turn,), 0)
    return mixture_passes([Lookup(in_tree=False)], conversation, 0, 3)


def test_a_tree_of_levels_is_jaxspecs_dynamic_tree() -> None:
    """A tree of levels drafts as jaxspec's dynamic tree: after 1 the text has 2 and, earlier, 4, so
    a chain drafts 2, and a tree both.
    """
    turn = Turn([1, 4, 5, 1, 2, 3], [1, 4, 5], exact=True)
    conversation = Conversation("a", "x", (turn,), 0)
    assert mixture_passes([Lookup(in_tree=False)], conversation, 0, 2) == 2
    assert tree_passes([Lookup(in_tree=True)], conversation, 0, 4, 2, width=2) == 1


def talk(name: str, fold: int, answer: list[int]) -> Conversation:
    return Conversation(name, "chess", (Turn([1, 2], answer, exact=True),), fold)


def test_a_table_never_learns_from_its_own_fold() -> None:
    conversations = [
        talk("a", 0, [3, 4, 5, 6]),
        talk("b", 1, [3, 4, 5, 6]),
        talk("c", 1, [7, 8, 9]),
    ]
    table = Answers(conversations, 3)
    assert mixture_passes([table], conversations[0], 0, 5) == 1  # b taught all of it
    assert mixture_passes([table], conversations[2], 0, 5) == 2  # nothing taught 8 and 9


def test_answers_to_similar_prompts_count_more_and_never_those_of_the_own_fold() -> None:
    """Answers to similar prompts count more than others, and answers of the own fold never: most
    say 3 after 2; the one to the same question, with the rare token 9, says 7.
    """
    asked = [("a", 0, [9, 2], [4, 4]), ("own", 0, [9, 2], [5, 5]), ("near", 1, [9, 2], [7, 7])]
    asked += [(f"far{i}", 1, [8, 2], [3, 3]) for i in range(3)]
    talks = [
        Conversation(name, "x", (Turn(prompt, answer, True),), fold)
        for name, fold, prompt, answer in asked
    ]
    similar = Similar(talks, 1, nearest=1)
    similar.start(talks[0], 0)
    table, near = {3: 3 / 6, 7: 1 / 6}, {7: 1 / 2}  # after 2 the table saw 3 three times and 7 once
    expected = {token: (table.get(token, 0) + near.get(token, 0)) / 2 for token in (3, 7)}
    assert similar.after([9, 2]) == pytest.approx(expected)
    similar.start(talks[-1], 0)
    assert set(similar.after([8, 2])) == {4, 5}


def test_a_tree_holds_the_second_likeliest_token_too() -> None:
    """A tree holds the second likeliest token too: the table saw 3 twice after the prompt and 7
    once, so a chain drafts 3, and a tree of three nodes both.
    """
    conversations = [
        talk("a", 0, [2, 7, 8]),
        *(talk(f"b{i}", 1, [2, 3, 4]) for i in range(2)),
        talk("c", 1, [2, 7, 8]),
    ]
    table = Answers(conversations, 2)
    assert mixture_passes([table], conversations[0], 0, 1) == 2
    assert tree_passes([table], conversations[0], 0, nodes=1, depth=1) == 2  # the chain
    assert tree_passes([table], conversations[0], 0, nodes=4, depth=2) == 1


def test_intervals_hold_the_ratio_of_sums() -> None:
    sums = np.asarray([[10, 5], [30, 10], [5, 5], [8, 4]] * 20)
    low, high = interval(sums, 500, seed=0)
    assert low < sums[:, 0].sum() / sums[:, 1].sum() < high
    assert interval(sums[:1], 50, seed=0) == (2.0, 2.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with three prompts, two with one image, in files as MMSpec's."""
    said = {"m_1": ["A red page."], "m_2": ["A red page.", "It is red."], "m_3": ["Two."]}
    (tmp_path / "images").mkdir()
    for name, colour in (("a", "red"), ("b", "blue")):
        Image.new("RGB", (5, 5), colour).save(tmp_path / f"images/{name}.png")
    prompts = [
        {
            "id": name,
            "image": f"{'b' if name == 'm_3' else 'a'}.png",
            "turns": ["What?", "Why?"][: len(turns)],
        }
        | {"topic": "one" if name == "m_3" else "two", "category": "x"}
        for name, turns in said.items()
    ]
    (tmp_path / PROMPTS).write_text("".join(json.dumps(row) + "\n" for row in prompts))
    answers = [{"question_id": name, "choices": [{"turns": turns}]} for name, turns in said.items()]
    answers[2]["choices"][0]["new_tokens"] = [77]  # of another tokeniser
    (tmp_path / ANSWERS).write_text("".join(json.dumps(row) + "\n" for row in answers))
    published = [
        {"question_id": name, "method": "msd"}
        | {
            "new_tokens": [9] * len(turns),
            "idxs": [2] * len(turns),
            "identical": [True] * len(turns),
        }
        for name, turns in said.items()
    ]
    (tmp_path / PUBLISHED).write_text("".join(json.dumps(row) + "\n" for row in published))
    return tmp_path


def test_prompts_with_one_image_share_a_fold(folder: Path) -> None:
    first, second, third = read_conversations(folder, str(ASSETS / "mini/target"), 2, 10)
    assert (first.fold, second.fold, third.fold) == (0, 0, 0)
    assert [turn.exact for one in (first, second, third) for turn in one.turns] == [
        True,
        True,
        True,
        False,
    ]
    begin, later = second.turns
    assert begin.prompt.count(IMAGE) == 1
    assert later.prompt[: len(begin.prompt) + len(begin.answer)] == [*begin.prompt, *begin.answer]


def test_an_answer_that_is_missing_is_named(folder: Path) -> None:
    lines = (folder / ANSWERS).read_text().splitlines(keepends=True)
    (folder / ANSWERS).write_text("".join(lines[1:]))
    with pytest.raises(InputError, match="no answer to m_1; record it"):
        read_conversations(folder, str(ASSETS / "mini/target"), 2, 10)
    second = json.loads(lines[1])
    second["choices"][0]["turns"].pop()
    (folder / ANSWERS).write_text("".join([lines[0], json.dumps(second) + "\n", lines[2]]))
    with pytest.raises(InputError, match=r"not an answer to each question of m_2 .*; record them"):
        read_conversations(folder, str(ASSETS / "mini/target"), 2, 10)


@pytest.mark.parametrize(
    ("lacking", "message"),
    [
        ("idxs", r"published\.jsonl line 1: lacks a column \('idxs'\); give it"),
        ("", r"published\.jsonl: msd lacks a turn of m_1 \('m_1'\); add its counts"),
    ],
)
def test_counts_that_are_missing_are_named(folder: Path, lacking: str, message: str) -> None:
    """Counts of a published method that are missing are named: a column, or a conversation."""
    first, *others = (folder / PUBLISHED).read_text().splitlines(keepends=True)
    row = json.loads(first)
    row.pop(lacking, None)
    lines = [json.dumps(row) + "\n"] if lacking else []
    (folder / PUBLISHED).write_text("".join([*lines, *others]))
    files = ["--data", f"mmspec={folder}", "--tokenizer", str(ASSETS / "mini/target")]
    with pytest.raises(InputError, match=message):
        mmspec.main(["recorded", *files, "--out", str(folder / "out")])


def test_the_command_writes_table_counts_and_summary(folder: Path, tmp_path: Path) -> None:
    files = ["--data", f"mmspec={folder}", "--tokenizer", str(ASSETS / "mini/target")]
    given = [*files, "--out", str(tmp_path / "out")]
    mmspec.main(["recorded", *given, "--resamples", "50", "--order", "3"])
    found = json.loads((tmp_path / "out/results.json").read_text())["rows"]
    published = next(row for row in found if (row["method"], row["topic"]) == ("MSD", "all"))
    assert published["tokens_per_pass"] == 4.0  # (9 - 1) / 2, of the three turns that are used
    assert published["turns"] == 3
    assert all(row["tokens_per_pass"] >= 1 for row in found if row["tokens"])
    assert "1 turns are left out" in (tmp_path / "out/table.md").read_text()
    with (tmp_path / "out/summary.csv").open() as lines:
        assert {row["method"] for row in csv.DictReader(lines)} >= {
            "baseline",
            "MSD",
            "history, gamma 7",
        }
    texts = [
        text.text
        for text in ET.parse(tmp_path / "out/bars.svg").iter("{http://www.w3.org/2000/svg}text")
    ]
    assert texts[texts.index("MSD") + 1] == "4.00"
    assert "history, gamma 5" not in texts  # the longer chain is drawn
    (record, *_) = map(json.loads, (tmp_path / "out/records.jsonl").read_text().splitlines())
    assert record["counts"]["MSD"] == [[9, 2]]


def test_a_folder_without_a_tokenizer_is_one_line(tmp_path: Path) -> None:
    for name, message in (("nowhere", "'nowhere': no such directory"), (tmp_path, "tokenizer")):
        with pytest.raises(InputError, match=message):
            read_conversations(tmp_path, str(name), folds=2, limit=1)
