"""An engine that changes its plan writes what plain decoding writes, and learns what pays."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.decoding.sources.lookup import Lookup
from jaxspec.decoding.state import DecodeStats
from jaxspec.engine.batches import batcher
from jaxspec.engine.batches.pace import Pace
from jaxspec.engine.compile_cache import Held
from jaxspec.engine.engine import Engine, EngineConfig, LoadedModel, Request, Result
from jaxspec.engine.evidence import Progress, Shadow
from jaxspec.engine.policy import BUDGET, DEBT, STALE, Choice, Gain, Policy, cost_file
from jaxspec.errors import InputError
from jaxspec.sharding import make_mesh
from tests import tiny

NEW = 24


def choose_at_random(monkeypatch: pytest.MonkeyPatch, *plans: int) -> set[int]:
    """Let engines choose among these plans, or all, every few tokens; return the numbers of those
    that were used.
    """
    rng, used = np.random.default_rng(0), set[int]()

    def choose(self: Policy, rows: Any, sizes: str, program: Any, unread: Any) -> Choice:
        used.add(plan := int(rng.choice(plans or len(self.plans))))
        return Choice(plan, int(rng.integers(1, 6)), False, sizes, program)

    monkeypatch.setattr(Policy, "choose", choose)
    return used


def requests() -> list[Request]:
    """Return greedy requests: with images and without, limits, a stop string, and penalties."""
    page, changed = tiny.page(0), {"repetition_penalty": 1.2, "logprobs": 2}
    return [
        Request("What is this?", NEW, images=[page]),
        Request("Hi", 3),
        Request("Tell me", NEW, **changed),
        Request("a", NEW, stop=["a"], images=[page], **changed),
        Request("Say it", NEW - 5),
    ]


def shown(result: Result) -> tuple[Any, ...]:
    return result.tokens, result.text, result.finish_reason, result.stop_string


def engines(target: LoadedModel, draft: LoadedModel, **options: Any) -> tuple[Engine, Engine]:
    """Return an engine that chooses, and a plain one."""
    plain = EngineConfig(batch_size=2, width=options.get("width"))
    auto = replace(plain, gamma="auto", **options)
    return Engine(target, draft, auto), Engine(target, config=plain)


@pytest.mark.parametrize(
    "options",
    [{"weighting": "mt-paper", "trace": True}, *tiny.rarer({"width": 8})],
    ids=["list", "one width"],
)
def test_answers_are_the_plain_ones(
    target: LoadedModel,
    draft: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    """Answers whose plan changes while rows are refilled and caches grow are the plain ones."""
    used = choose_at_random(monkeypatch)
    monkeypatch.setattr(batcher, "FIRST", 8)
    auto, plain = engines(target, draft, **options)
    names = {plan.name for plan in auto.assembly.plans}
    assert names == {"plain", "draft 2", "draft 5", "lookup 7", "draft + lookup 5"}
    expected, results = plain.generate(requests()), auto.generate(requests())
    assert [*map(shown, results)] == [*map(shown, expected)]
    assert len(used) == len(names)
    for result in results:
        assert sum(use.tokens for use in result.plans.values()) == len(result.tokens) - 1
        assert sum(use.blocks for use in result.plans.values()) == result.stats.steps
        trace = result.trace
        assert (trace is not None) == ("trace" in options)
        if trace:
            assert len(trace["place"]) == len(result.tokens)
            sums = [sum(weights) for weights in trace["weights"]]
            assert all(abs(total - 1) < 1e-3 or not total for total in sums)
    np.testing.assert_allclose(results[2].logprobs, expected[2].logprobs, atol=1e-4)


@pytest.mark.full
def test_streams_sessions_and_live_batches(
    target: LoadedModel, draft: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_at_random(monkeypatch, 0, 4)
    auto, plain = engines(target, draft)
    asked = requests()
    expected = plain.generate(asked)
    *_, streamed = auto.stream(asked[3])
    assert shown(streamed) == shown(expected[3])
    turns = [("What is this?", [tiny.page(0)]), ("And this?", []), ("Why?", [tiny.page(1)])]
    tiny.check_session(auto, turns, new=12, plain=plain)
    results = tiny.run_live(auto.live(asked), dict(enumerate(auto.batcher.read(asked))))
    assert [shown(results[i]) for i in range(len(expected))] == [*map(shown, expected)]


@pytest.mark.full
def test_a_mesh(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    choose_at_random(monkeypatch, 0, 4)
    split = LoadedModel.load(pair[0], mesh=make_mesh(model=2))
    auto, plain = engines(split, LoadedModel.load(pair[1]))
    assert [*map(shown, auto.generate(requests()))] == [*map(shown, plain.generate(requests()))]


def test_an_answer_that_stops_within_a_run(target: LoadedModel, draft: LoadedModel) -> None:
    """What was written behind a stop string is no part of the text that lookup is asked about."""
    auto, plain = engines(target, draft)
    prompt = auto.encoder.completion("H")
    (first,) = plain.encoder.tokenizer.convert_ids_to_tokens(
        plain.generate(Request(prompt, 2)).tokens[:1]
    )
    request = Request(prompt, NEW, stop=[first])
    assert shown(auto.generate(request)) == shown(plain.generate(request))


def test_blocks_with_a_grammar_have_costs_of_their_own(target: LoadedModel) -> None:
    engine = Engine(target, config=EngineConfig(views=("lookup",), gamma="auto"))
    policy = engine.batcher.policy
    assert policy is not None
    policy.file, policy.earlier = None, {}
    form = {"type": "choice", "choice": ["qwertyuiopasdfghjklzxcvbnm"]}
    for options in ({}, *[{"response_format": form}] * 3):  # first runs are no measurements
        engine.generate(Request("Hi", NEW, **options))
    assert {sizes.endswith(" guided") for sizes in policy.sizes} == {False, True}


def test_a_draft_alone_has_short_plans(target: LoadedModel, draft: LoadedModel) -> None:
    """A draft alone has plans no longer than what the counts of blocks have places for."""
    engine = Engine(target, draft, EngineConfig(views=("M",), gamma="auto"))
    assert [plan.name for plan in engine.assembly.plans] == ["plain", "draft 2", "draft 5"]
    result = engine.generate(requests()[0])
    assert len(result.stats.drafted_at) == 5
    assert shown(result) == shown(Engine(target).generate(requests()[0]))


def test_what_it_cannot_choose(target: LoadedModel, draft: LoadedModel) -> None:
    """An engine with a tree or without drafts has no plans to choose from, and a width leaves out
    plans that have no room.
    """
    assert not Engine(target, draft, EngineConfig(gamma="auto", tree="2")).assembly.plans
    assert not Engine(target, config=EngineConfig(gamma="auto")).assembly.plans
    names = [
        plan.name
        for plan in Engine(target, draft, EngineConfig(gamma="auto", width=4)).assembly.plans
    ]
    assert names == ["plain", "draft 2", "draft 3", "lookup 3", "draft + lookup 3"]
    with pytest.raises(InputError, match="gamma: 'fast'"):
        EngineConfig(gamma="fast")  # pyright: ignore


PLANS: Any = [
    SimpleNamespace(name=name, drafting=drafting, gamma=gamma)
    for name, drafting, gamma in (
        ("plain", (), 0),
        ("lookup 7", (1,), 7),
        ("head 2", (0,), 2),
        ("head + lookup 5", (0, 1), 5),
    )
]
NAMES = [plan.name for plan in PLANS]
MS = 10.0, 11.0, 14.0, 16.0
"""Milliseconds of a block of each plan."""


def learned(
    policy: Policy,
    chances: dict[tuple[int, ...], float],
    tokens: int,
    slow: float = 1.0,
    stall: tuple[int, float] = (-1, 1.0),
) -> list[str]:
    """Return the plans that decode a request of these chances of acceptance, in order.

    Args:
      slow: How much longer three of ten runs of a draft take than the others.
      stall: Number of a run, and how much longer it takes.
    """
    beliefs, names, rng, done, run = {}, [], np.random.default_rng(0), 0, 0
    while done < tokens:
        choice = policy.choose([beliefs], "1x64", "")
        plan, before, blocks = policy.plans[choice.plan], done, 0
        drafted, accepted = np.zeros(7, int), np.zeros(7, int)
        while done - before < choice.tokens:
            hits = rng.random(plan.gamma) < chances.get(plan.drafting, 0.0)
            count = int(np.cumprod(hits).sum())
            drafted[: plan.gamma] += 1
            accepted[:count] += 1
            blocks, done = blocks + 1, done + 1 + count
        stats = DecodeStats(blocks, done - before, drafted, accepted, None)  # pyright: ignore
        ms = blocks * MS[choice.plan] * (slow if choice.plan and rng.random() < 0.3 else 1)
        ms, run = ms * (stall[1] if run == stall[0] else 1), run + 1
        policy.observe(choice, ms, 0.0, [Gain(beliefs, stats)])
        names += [plan.name] * blocks
    return names


def rate(chances: dict[tuple[int, ...], float], names: list[str]) -> float:
    """Return the expected tokens a millisecond of blocks of these plans."""
    tokens = {
        plan.name: sum(chances.get(plan.drafting, 0.0) ** n for n in range(1, plan.gamma + 1))
        for plan in PLANS
    }
    ms = {plan.name: ms for plan, ms in zip(PLANS, MS, strict=True)}
    return sum(1 + tokens[name] for name in names) / sum(ms[name] for name in names)


def test_it_finds_what_pays_for_each_text() -> None:
    """An engine finds the plan that pays for each text, here texts of which each has another best
    plan, plain among them.
    """
    texts = {
        "lookup 7": {(1,): 0.9, (0,): 0.5, (0, 1): 0.8},
        "head 2": {(1,): 0.05, (0,): 0.8, (0, 1): 0.6},
        "head + lookup 5": {(1,): 0.3, (0,): 0.7, (0, 1): 0.9},
        "plain": {(1,): 0.02, (0,): 0.05, (0, 1): 0.05},
    }
    policy = Policy(PLANS)
    for _ in range(2):
        for best, chances in texts.items():
            names = learned(policy, chances, 1500)
            late = names[len(names) // 2 :]
            assert rate(chances, late) > 0.85 * rate(chances, [best]), best
            assert policy.lost <= BUDGET * policy.spent + 2 * max(MS)


@pytest.mark.parametrize(
    ("text", "best"), [([*range(9)] * 20, "lookup 7"), ([*range(180)], "plain")]
)
def test_what_lookup_would_draft_needs_no_trial(text: list[int], best: str) -> None:
    """A plain answer that repeats itself shows that lookup pays; another, that it does not."""
    plans = [SimpleNamespace(**vars(plan), foreseen=lambda *_: None) for plan in PLANS[:2]]
    plans[1].foreseen = Lookup(len(text)).foreseen
    policy, zeros = Policy(plans), np.zeros(7, int)  # pyright: ignore
    for plan, ms in 2 * [*enumerate(MS[:2])]:
        policy.measured(plan, "1x64", ms)
    pace = Pace(policy, plans)  # pyright: ignore
    for end in range(20, 181, 16):
        stats: Any = DecodeStats(end, end, zeros, zeros, None)  # pyright: ignore
        answer = Progress(stats, np.array(text[:9]), tuple(text[9:end]), False)
        pace.learn(16 * MS[0], 0.0, {5: answer})
    policy.lost = policy.spent  # so that nothing is tried
    assert NAMES[policy.choose([pace.beliefs[5]], "1x64", "").plan] == best
    pace.forget([5])
    assert not pace.beliefs
    assert not pace.answers
    assert not pace.shadows


def test_a_shadow_counts_the_blocks_that_a_loop_would_have_run() -> None:
    """A shadow counts the blocks that a loop would have run, in whatever parts the tokens come."""
    hits = np.random.default_rng(0).random(500) < 0.8
    drafted, accepted, at = np.zeros(4), np.zeros(4), 0
    while at < len(hits):
        run = np.cumprod(hits[at : at + 4]).astype(int)
        if at + len(run) < len(hits) or not run.all():  # its last token is there
            drafted += 1
            accepted[: len(run)] += run
        at += int(run.sum()) + 1
    shadow = Shadow(4)
    parts = [shadow.add(hits[i : i + 7], 4) for i in range(0, len(hits), 7)]
    np.testing.assert_array_equal(sum(part.drafted for part in parts), drafted)
    np.testing.assert_array_equal(sum(part.accepted for part in parts), accepted)


def test_drafts_lose_little_though_most_of_their_runs_promise_gains() -> None:
    policy, chances = Policy(PLANS), {(1,): 0.6, (0,): 0.6, (0, 1): 0.6}
    names = learned(policy, chances, 8000, slow=8.0)
    tokens = rate(chances, names) * sum(MS[NAMES.index(name)] for name in names)
    assert set(names) > {"plain"}
    assert policy.spent / MS[0] <= (1 + BUDGET) * tokens + 2 * DEBT


@pytest.mark.parametrize(("run", "longer"), [(1, 10.0), (7, 10.0), (4, 1000.0), (8, 1000.0)])
def test_a_run_that_the_machine_stalls_decides_nothing_for_good(run: int, longer: float) -> None:
    """A run of any plan that took far longer is forgotten: later the best plan decodes."""
    texts = {
        "head 2": {(1,): 0.05, (0,): 0.8, (0, 1): 0.6},
        "plain": {(1,): 0.02, (0,): 0.05, (0, 1): 0.05},
    }
    for best, chances in texts.items():
        names = learned(Policy(PLANS), chances, 8000, stall=(run, longer))
        assert rate(chances, names[-1000:]) > 0.85 * rate(chances, [best]), best


def test_threads_share_a_policy() -> None:
    """Threads that decode with one engine, and are switched often, learn of new sizes at once."""
    policy, before = Policy(PLANS), sys.getswitchinterval()

    def decode(thread: int) -> None:
        for size in range(16):
            for plan in range(len(PLANS)):
                policy.measured(plan, f"{thread}x{size}", 1.0)
            policy.choose([{}], f"{thread}x{size}", "")
            policy.report()

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(decode, range(4)))
    finally:
        sys.setswitchinterval(before)
    assert len(policy.sizes) == 64


@pytest.mark.parametrize(("spent", "tried"), [(500.0, False), (800.0, True)])
def test_a_trial_may_lose_what_its_expected_blocks_take(spent: float, tried: bool) -> None:
    """A trial is made only if what its blocks are expected to lose is at most 2 % of the time
    spent. Two tokens are one block, whose 30 ms may gain 1.96 tokens; 1.87 count, by the margin.

    In them plain decoding gains 3, so about 11.6 ms are lost, which are 2 % of 580 ms.
    """
    policy = Policy([PLANS[0], PLANS[2]], spent=spent)
    for plan, ms in enumerate((10.0, 30.0)):
        policy.measured(plan, "1x64", ms)
        policy.measured(plan, "1x64", ms)
        policy.compiled.add((plan, ""))
    policy.blocks = STALE + 1
    assert policy.choose([{}], "1x64", "").trial is tried


def test_a_programs_first_run_is_no_measurement() -> None:
    policy, beliefs, zeros = Policy(PLANS), [{}], np.zeros(7, int)
    nothing = Gain({}, DecodeStats(0, 0, zeros, zeros, None))  # pyright: ignore
    policy.observe(Choice(0, 1, False, "1x64", ""), 1.0, 900.0, [nothing])  # an answer of one token
    for compiled_ms, plan in ((900.0, 0), (0.0, 0), (0.0, 0), (900.0, 1), (0.0, 1)):
        choice = policy.choose(beliefs, "1x64", "")
        assert choice.plan == plan
        ms = (10 if compiled_ms else 1) * MS[plan]
        stats = DecodeStats(1, 1, np.zeros(7, int), np.zeros(7, int), None)  # pyright: ignore
        policy.observe(choice, ms, compiled_ms, [Gain(beliefs[0], stats)])
    assert policy.debt < 2
    assert [policy.cost(i, "1x64") for i in (0, 1)] == [MS[0], MS[1]]


@pytest.mark.parametrize(("ms", "tokens"), [(60.0, [1, 2, 2]), (2.0, [1, 2, 10])])
def test_plain_decoding_is_measured_twice_before_all_else(ms: float, tokens: list[int]) -> None:
    """Plain decoding is measured twice before all else, for no more tokens than 20 ms need, so that
    short answers gain too.
    """
    policy, zeros = Policy(PLANS), np.zeros(7, int)
    choices = []
    for count in tokens:
        choices.append(choice := policy.choose([{}], "1x64", ""))
        stats = DecodeStats(count, count, zeros, zeros, None)  # pyright: ignore
        policy.observe(choice, count * ms, 0.0, [Gain({}, stats)])
    assert [(choice.plan, choice.tokens) for choice in choices] == [(0, count) for count in tokens]
    assert policy.choose([{}], "1x64", "").plan


@pytest.mark.parametrize(
    ("plan", "measured", "least"),
    [
        ("head 2", {}, 20.0),
        ("head 2", {"lookup 7": 60.0}, 20.0),
        ("head 2", {"head + lookup 5": 60.0}, 20.0),
        ("lookup 7", {"head 2": 10.0}, 20.0),
        ("head + lookup 5", {"head 2": 30.0}, 30.0),
        ("head + lookup 5", {"head 2": 30.0, "lookup 7": 76.0}, 60.0),
    ],
)
def test_a_plan_costs_no_less_than_its_sources_do(
    plan: str, measured: dict[str, float], least: float
) -> None:
    """A plan that was never measured costs no less than plain decoding, nor than a measured plan
    with some of its sources, in proportion to its length.
    """
    known = {0: 20.0} | {NAMES.index(name): ms for name, ms in measured.items()}
    assert Policy(PLANS).least_cost(NAMES.index(plan), known) == pytest.approx(least)


def test_a_run_whose_draft_first_read_what_others_wrote_says_nothing_of_its_blocks() -> None:
    """A run whose draft reads first counts only if it was cheaper than known; lookup reads none."""
    plans = [SimpleNamespace(**vars(plan), foreseen=lambda *_: None) for plan in PLANS]
    plans[1].foreseen = Lookup(100).foreseen
    policy, zeros, text = Policy(plans), np.zeros(7, int), tuple(range(100))  # pyright: ignore
    for plan, ms in enumerate(MS):
        policy.measured(plan, "", ms)
        policy.compiled.add((plan, None))
    pace, end = Pace(policy, plans), 1  # pyright: ignore
    costs = []
    for plan, blocks, ms in (
        (0, 40, MS[0]),
        (2, 2, 20.0),
        (2, 2, 18.0),
        (3, 2, 18.0),
        (0, 40, MS[0]),
        (3, 2, 9.0),
        (1, 2, 12.0),
    ):
        pace.choice, end = Choice(plan, blocks, True), end + blocks
        stats: Any = DecodeStats(end - 1, end - 1, zeros, zeros, None)  # pyright: ignore
        pace.learn(blocks * ms, 0.0, {7: Progress(stats, np.zeros(1, int), text[:end], False)})
        costs.append(list(policy.costs[f"{plans[plan].name}|"]))
    assert costs == [
        [10.0, 10.0],
        [14.0],
        [14.0, 18.0],
        [16.0, 18.0],
        [10.0, 10.0, 10.0],
        [16.0, 18.0, 9.0],
        [11.0, 12.0],
    ]


@pytest.mark.parametrize(("blocks", "tokens"), [(3, 100), (1, 2000)])
def test_what_a_draft_must_read_first_counts_as_a_cost_of_its_choice(
    blocks: int, tokens: int
) -> None:
    """Reading is no loss of the blocks behind it, but later it may make plain decoding better."""
    policy = Policy([PLANS[0], PLANS[2]], spent=1e4)
    for plan, ms in enumerate((10.0, 14.0, 10.0, 14.0)):
        policy.measured(plan % 2, "1x64", ms)
        policy.compiled.add((plan % 2, ""))
    all_of_them = np.full(policy.places, blocks)
    stats = DecodeStats(blocks, 3 * blocks, all_of_them, all_of_them, None)  # pyright: ignore
    ms = 14.0 * blocks + 2.0 * tokens
    choice = Choice(1, 4, True, "1x64", "")
    policy.observe(choice, ms, 0.0, [Gain({}, stats, unread={0: tokens})])
    assert policy.reading == {0: pytest.approx(0.2)}
    assert policy.debt == 0
    choices = [policy.choose([{}], "1x64", "", {0: unread}) for unread in (0, 300)]
    assert [choice.plan for choice in choices] == [1, 0]


def test_the_middle_of_three_runs_counts() -> None:
    policy = Policy(PLANS)
    for ms in (50.0, 8.0, 9.0, 40.0):
        policy.measured(0, "1x64", ms)
    assert policy.cost(0, "1x64") == 9.0


def test_a_row_that_ends_within_a_run_is_no_loss() -> None:
    """A row that ends within a run counts for no loss if the other row gained more tokens than
    plain blocks would in the time.
    """
    policy, zeros = Policy(PLANS), np.zeros(7, int)
    policy.measured(0, "2x64", MS[0])
    policy.measured(3, "2x64", 1.3 * MS[0])
    policy.compiled.add((3, ""))
    gains = [
        Gain({}, DecodeStats(steps, tokens, zeros, zeros, None), ended)  # pyright: ignore
        for steps, tokens, ended in ((2, 3, True), (20, 40, False))
    ]
    policy.observe(Choice(3, 40, False, "2x64", ""), 20 * 1.3 * MS[0], 0.0, gains)
    assert policy.debt == 0


def test_costs_of_other_sizes_are_in_proportion_to_plain_decodings() -> None:
    policy = Policy(PLANS)
    for plan, ms in ((0, 40.0), (1, 80.0)):
        policy.measured(plan, "8x64", ms)
    policy.measured(0, "1x64", 10.0)
    assert policy.cost(1, "1x64") == 20
    policy.measured(1, "1x64", 12.0)
    assert policy.cost(1, "1x64") == 12


def test_costs_outlive_the_process(tmp_path: Path) -> None:
    """Costs outlive the process in a file; one that is damaged, or of other plans, counts as
    none.
    """
    file = tmp_path / "costs.json"
    first = Policy(PLANS, file)
    for plan, ms in enumerate(MS):
        first.measured(plan, "1x64", ms)
    second = Policy(PLANS, file)
    assert [second.cost(i, "1x64") for i in range(4)] == list(MS)
    assert second.cost(1, "8x512") == MS[1]  # until it is measured
    for ms in (2 * MS[1], 3 * MS[1]):
        second.measured(1, "1x64", ms)
    assert second.cost(1, "1x64") == 2 * MS[1]
    second.measured(1, "1x64", 4 * MS[1])
    assert Policy(PLANS, file).cost(1, "1x64") == 3 * MS[1]
    assert first.report() == (
        "a block of 1 rows and 64 slots: plain 10 ms, "
        "lookup 7 11 ms (pays from 1.10 tokens per pass), "
        "head 2 14 ms (pays from 1.40 tokens per pass), "
        "head + lookup 5 16 ms (pays from 1.60 tokens per pass)"
    )
    for text in (
        "",
        "{",
        "[1]",
        '{"plain|1x64": "x"}',
        '{"plain|1x64": -1}',
        json.dumps({"a": None}),
    ):
        file.write_text(text)
        assert Policy(PLANS, file).cost(0, "1x64") is None


def test_costs_are_kept_in_folders_only() -> None:
    """Costs are kept where programs are, except in a bucket, whose address is no folder."""
    setting, before = "jax_compilation_cache_dir", jax.config.values["jax_compilation_cache_dir"]
    try:
        for folder, kept in (("programs", True), ("gs://bucket/programs", False), (None, False)):
            jax.config.update(setting, folder)
            assert (cost_file(PLANS, Held("", None, {})) is not None) == kept
    finally:
        jax.config.update(setting, before)


def test_warmup_says_what_plans_cost(
    target: LoadedModel, draft: LoadedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, _ = engines(target, draft)
    assert engine.batcher.policy is not None
    engine.warmup(requests()[1])
    said = capsys.readouterr().err
    assert said.count("(pays from") == 4, said
    # A program's first run is no measurement, and of each plan there are three more.
    assert {*map(len, engine.batcher.policy.costs.values())} == {3}
    assert engine.generate(requests()[1]).compile_ms == 0
