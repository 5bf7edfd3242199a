"""At temperature 0 speculation writes the target's own tokens, one for one, whatever the draft
proposes.

Everything runs on one batch of ragged prompts with 0 to 2 images, so that a combination of views
and gamma is compiled once: weights, parameters, limits, EOS ids and temperatures are traced. The
prompts and answers pass the draft's trained positions throughout.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache import KVCache
from jaxspec.decoding.inputs import PromptBatch
from jaxspec.decoding.state import DecodeState
from jaxspec.models.int8 import int8_params
from jaxspec.models.language_model import LanguageModel
from jaxspec.sampling import Sampling
from jaxspec.typing import Params
from tests import tiny

LENGTHS, IMAGES, B, NEW = [5, 3, 7, 5], [1, 0, 2, 1], 4, 25
NOBODY = (-1, -1)
"""EOS ids that no token has."""

TARGET, TARGET_PARAMS = tiny.lvlm(32, 2, seed=0)
INT8_PARAMS = int8_params(TARGET_PARAMS)
DRAFT_PARAMS = tiny.noisy(TARGET_PARAMS, 0.05)
HEADS = {
    "KV head": tiny.kv_head(TARGET, TARGET_PARAMS, feature="last_hidden"),
    "eagle": tiny.kv_head(
        TARGET, TARGET_PARAMS, feature="fused", target_layers=(0, 1, 2), window=12
    ),
    "eagle1": tiny.kv_head(TARGET, TARGET_PARAMS, feature="eagle1", images="unfused"),
    "one pass": tiny.kv_head(
        TARGET, TARGET_PARAMS, feature="last_hidden", parallel=True, markov=2, key_layers=(0, 1)
    ),
    "DFlash": tiny.kv_head(
        TARGET, TARGET_PARAMS, feature="block", target_layers=(0, 1), layers=2, window=12
    ),
    "DSpark": tiny.kv_head(
        *(TARGET, TARGET_PARAMS),
        feature="block",
        target_layers=(1,),
        layers=1,
        markov=2,
        anchored=True,
    ),
    "MTP": tiny.kv_head(TARGET, TARGET_PARAMS, feature="mtp"),
}
"""Each drafts as `head`; here it has a name of its own."""
SHAPES = [(3, None), (3, "dynamic:2:6"), *tiny.rarer((1, None), (7, None), (3, "2:9"))]
"""Draft lengths and trees."""
GRID = [
    (("M",), 3, None),
    *((("M", "T"), 3, tree) for tree in (None, "2:9", "dynamic:2:6")),
    (("M", "T", "C", "P"), 3, None),
    (("KV head",), 3, None),
    (("KV head",), 3, "2:5"),
    (("M", "T", "eagle"), 2, "dynamic:2:4"),
    (("eagle1",), 3, None),
    (("one pass",), 3, None),
    (("DFlash",), 5, None),
    (("DSpark",), 3, "2:5"),
    (("M", "DSpark", "lookup"), 3, None),
    (("MTP",), 3, None),
    (("lookup",), 3, None),
]
"""Each view, kind of head, shape and mixture once."""
RARER = [
    *(((view,), 3, None) for view in "TPC"),
    *((("M", "T"), gamma, None) for gamma in (1, 7)),
    (("M", "T", "KV head"), 3, None),
    (("eagle",), 3, None),
    (("eagle1",), 3, "dynamic:2:6"),
    (("one pass",), 3, "2:5"),
    (("DFlash",), 3, "dynamic:2:6"),
    (("MTP", "lookup"), 3, "dynamic:2:6"),
    (("lookup",), 3, "2:5"),
    (("M", "eagle", "lookup"), 3, None),
    (("M", "lookup"), 3, "dynamic:2:6"),
]
WEIGHTS = {
    1: [(1.0,)],
    3: [(0.2, 0.2, 0.6), (0.0, 0.0, 1.0)],
    2: [(0.5, 0.5), (1.0, 0.0), (0.0, 1.0), (0.2, 0.8)],
    4: [(0.25, 0.25, 0.25, 0.25), (0.1, 0.2, 0.3, 0.4)],
}


def head_of(views: tuple[str, ...]) -> tuple[Any, Params]:
    return next((HEADS[view] for view in views if view in HEADS), (None, {}))


def in_engine(views: tuple[str, ...]) -> tuple[str, ...]:
    return tuple("head" if view in HEADS else view for view in views)


def batch_of(*views: str) -> PromptBatch:
    head, _ = head_of(views)
    return tiny.prompts(LENGTHS, IMAGES, in_engine(views), head=head)


def plain(options: Sampling, target: Params = TARGET_PARAMS) -> list[list[int]]:
    return tiny.outputs(tiny.run_plain(TARGET, target, batch_of("M"), options, NEW))


def speculative(
    views: tuple[str, ...],
    gamma: int,
    options: Sampling,
    draft: tuple[LanguageModel, Params] = (TARGET, DRAFT_PARAMS),
    weights: tuple[float, ...] | None = None,
    batch: PromptBatch | None = None,
    target: Params = TARGET_PARAMS,
    **policy: Any,
) -> DecodeState:
    """Decode speculatively; `policy` sets the tree or the weighting."""
    head, head_params = head_of(views)
    batch = batch_of(*views) if batch is None else batch
    views = in_engine(views)
    spec = tiny.speculator(TARGET, draft[0], views, gamma, head=head, **policy)
    batch = batch if draft[0].has_vision else tiny.blind(batch)
    batch = batch if weights is None else tiny.weighted(batch, *weights)
    params = tiny.params_of(spec, target, draft[1], head_params)
    return tiny.run_speculative(spec, params, batch, options, NEW)


def check_stats(state: DecodeState) -> None:
    """Check the identities between the counts of a row."""
    count, stats = np.asarray(state.count), jax.tree.map(np.asarray, state.stats)
    places = np.arange(stats.histogram.shape[1])
    np.testing.assert_array_equal(stats.emitted, np.maximum(count, 1) - 1)
    np.testing.assert_array_equal(stats.histogram.sum(1), stats.steps)
    np.testing.assert_array_equal(stats.histogram @ places, stats.accepted_at.sum(1))
    # Each step emits its accepted drafts and one more, except where that one more was cut off.
    assert (stats.emitted <= stats.accepted_at.sum(1) + stats.steps).all()
    assert (stats.emitted >= stats.accepted_at.sum(1) + stats.steps - 1).all()
    assert (np.diff(stats.accepted_at, axis=1) <= 0).all()
    assert (np.diff(stats.drafted_at, axis=1) <= 0).all()
    assert (stats.accepted_at <= stats.drafted_at).all()
    np.testing.assert_array_equal(stats.drafted_at[:, 0], stats.steps)


def same_stats(one: DecodeState, other: DecodeState, rows: list[int] | None = None) -> bool:
    rows = list(range(B)) if rows is None else rows
    pairs = zip(jax.tree.leaves(one.stats), jax.tree.leaves(other.stats))
    return all(np.array_equal(np.asarray(x)[rows], y) for x, y in pairs)


def named(value: Any) -> str | None:
    """Return a parameter's part of a test's name, as `M,T` or `int8`."""
    if isinstance(value, tuple):
        return ",".join(value)
    return ("int8" if value is INT8_PARAMS else "float") if isinstance(value, dict) else None


@pytest.mark.parametrize(
    ("views", "gamma", "tree", "target"),
    [
        *((*case, TARGET_PARAMS) for case in GRID),
        (("M", "T"), 3, None, INT8_PARAMS),
        *tiny.rarer(*((*case, TARGET_PARAMS) for case in RARER)),
        *tiny.rarer((("KV head",), 3, None, INT8_PARAMS)),
    ],
    ids=named,
)
def test_speculation_writes_the_targets_tokens(
    views: tuple[str, ...], gamma: int, tree: str | None, target: Params
) -> None:
    """Speculation writes the target's tokens, float or int8, with some blocks accepted in part.
    Caches have slots in groups of 8.
    """
    options = tiny.sampling(B, new=NEW, eos=NOBODY)
    expected = plain(options, target)
    assert len({token for row in expected for token in row}) > 8  # not one token over and over
    for weights in WEIGHTS[len(views)]:
        state = speculative(views, gamma, options, weights=weights, tree=tree, target=target)
        assert tiny.outputs(state) == expected
        check_stats(state)
        parts = jax.tree.leaves(
            (state.target, state.drafter), is_leaf=lambda part: isinstance(part, KVCache)
        )
        assert {part.slots % 8 for part in parts if isinstance(part, KVCache)} == {0}
        histogram = np.asarray(state.stats.histogram).sum(0)
        assert histogram[0] > 0
        assert histogram[1:].sum() > 0
        assert gamma == 1 or histogram[1:gamma].sum() > 0, "no block was accepted in part"


@pytest.mark.parametrize("weighting", ["grid:window=4", *tiny.rarer("inverse_error_power")])
def test_weights_that_move_change_nothing_but_the_pace(weighting: str) -> None:
    options = tiny.sampling(B, new=NEW, eos=NOBODY)
    state = speculative(("M", "T"), 3, options, weighting=weighting)
    assert tiny.outputs(state) == plain(options)
    check_stats(state)
    assert not same_stats(state, speculative(("M", "T"), 3, options)), "the weights did not move"


@pytest.mark.parametrize("views", [("M", "T"), *tiny.rarer((("M", "eagle", "lookup"),))])
def test_weights_of_one_view_are_that_view(views: tuple[str, ...]) -> None:
    """A weight of 1 on one view gives that view's histogram and not only its tokens, so the grid's
    mixtures are known to differ.
    """
    options = tiny.sampling(B, new=NEW, eos=NOBODY)
    both = [speculative(views, 3, options, weights=tuple(np.eye(len(views))[r])) for r in range(2)]
    assert not same_stats(*both)
    for state, view in zip(both, views):
        assert same_stats(state, speculative((view,), 3, options))


@pytest.mark.parametrize(("gamma", "tree"), SHAPES)
def test_rows_stop_at_their_limits_and_at_eos(gamma: int, tree: str | None) -> None:
    for limits in (
        [0, 1, 2, 3],
        [NEW, 0, 7, 1],
        [1, 1, 1, 1],
        [gamma + 1, gamma + 2, gamma + 3, 2 * gamma],
    ):
        options = tiny.sampling(B, new=limits, eos=NOBODY)
        state = speculative(("M", "T"), gamma, options, tree=tree)
        assert tiny.outputs(state) == plain(options)
        assert state.count.tolist() == limits
        check_stats(state)
        if limits[2] == 2:  # the token after prefill's is the last: no other place is drafted
            assert state.stats.drafted_at[2].tolist() == [1] + [0] * (gamma - 1)
    unbounded, draft = (
        plain(tiny.sampling(B, new=NEW, eos=NOBODY)),
        (TARGET, tiny.noisy(TARGET_PARAMS, 0.02)),
    )
    cut_inside = 0
    for eos in sorted({token for row in unbounded for token in row}):
        options = tiny.sampling(B, new=NEW, eos=(-1, eos))
        expected = [row[: row.index(eos) + 1] if eos in row else row for row in unbounded]
        assert plain(options) == expected
        state = speculative(("M", "T"), gamma, options, draft=draft, tree=tree)
        assert tiny.outputs(state) == expected
        check_stats(state)
        accepted = np.asarray(state.stats.accepted_at).sum(1) + np.asarray(state.stats.steps)
        cut_inside += int((accepted > np.asarray(state.stats.emitted)).sum())
    assert gamma == 1 or cut_inside > 2, "no accepted draft was an EOS"


@pytest.mark.parametrize(
    ("weighting", "tree"), [("inverse_error_power:window=4", None), *tiny.rarer(("static", "2:9"))]
)
def test_a_row_of_a_batch_is_the_row_alone(weighting: str, tree: str | None) -> None:
    """A row of a batch, greedy or sampled, has the tokens and statistics of the row alone with the
    same key and padding.
    """
    options = tiny.sampling(
        B,
        temperature=[0.0, 1.0, 0.7, 0.0],
        top_k=[0, 0, 4, 3],
        top_p=[1.0, 0.9, 1.0, 0.5],
        new=[NEW, 9, NEW, 2],
    )
    batch = tiny.weighted(batch_of("M", "T"), 0.3, 0.7)
    together = speculative(("M", "T"), 3, options, batch=batch, weighting=weighting, tree=tree)
    check_stats(together)
    expected = plain(options.replace(temperature=jnp.zeros(B)))
    for b in range(B):
        row, row_options = tiny.take(batch, options, [b])
        alone = speculative(("M", "T"), 3, row_options, batch=row, weighting=weighting, tree=tree)
        assert tiny.outputs(alone) == [tiny.outputs(together)[b]]
        assert same_stats(together, alone, rows=[b])
        assert options.temperature[b] > 0 or tiny.outputs(alone) == [expected[b]]


@pytest.mark.parametrize(("gamma", "tree"), SHAPES)
def test_a_target_that_drafts_for_itself_is_never_wrong(gamma: int, tree: str | None) -> None:
    blocks = (NEW - 1) // (gamma + 1)
    new = 1 + blocks * (gamma + 1)
    for temperature, top_k, top_p in [
        (0.0, 0, 1.0),
        *([] if tree else [(1.0, 0, 1.0), (0.7, 8, 0.9)]),
    ]:
        options = tiny.sampling(B, temperature, new=new, eos=NOBODY, top_k=top_k, top_p=top_p)
        draft = TARGET, TARGET_PARAMS
        state = speculative(("M", "T"), gamma, options, draft=draft, weights=(1.0, 0.0), tree=tree)
        assert temperature > 0 or tiny.outputs(state) == plain(options)
        assert state.count.tolist() == [new] * B
        if tree != "dynamic:2:6":  # which may prefer wide trees to deep ones
            assert state.stats.steps.tolist() == [blocks] * B  # gamma + 1 tokens per block
            assert state.stats.histogram[:, gamma].tolist() == [blocks] * B


def test_a_text_draft_with_a_smaller_vocabulary() -> None:
    """A text draft with a smaller vocabulary, which can only read view T, never proposes the ids
    that it lacks and changes no token.
    """
    draft = tiny.resized(TARGET, DRAFT_PARAMS, tiny.VOCABULARY - 6)
    assert not draft[0].has_vision
    options = tiny.sampling(B, new=NEW, eos=NOBODY)
    state = speculative(("T",), 3, options, draft=draft)
    assert tiny.outputs(state) == plain(options)
    check_stats(state)
    assert np.asarray(state.stats.accepted_at).sum() > 5
    sampled = speculative(("T",), 3, tiny.sampling(B, 1.0, new=NEW, eos=NOBODY), draft=draft)
    assert (np.asarray(sampled.tokens) >= draft[0].text.vocab_size).any(), (
        "the target never wrote such an id"
    )


@pytest.mark.full
def test_a_text_target_with_a_draft_of_a_larger_vocabulary() -> None:
    """A text target is drafted for by a draft of a larger vocabulary, whose surplus ids are as
    likely as others and never proposed.
    """
    target, params = tiny.text_only(TARGET, TARGET_PARAMS)
    draft, draft_params = tiny.resized(TARGET, DRAFT_PARAMS, tiny.VOCABULARY + 6)
    batch = tiny.prompts(LENGTHS, [0] * B, ("T",)).replace(images=None)
    batch, spec = tiny.blind(batch), tiny.speculator(target, draft, ("T",), 3)
    both = tiny.params_of(spec, params, draft_params)
    options = tiny.sampling(B, new=NEW, eos=NOBODY)
    state = tiny.run_speculative(spec, both, batch, options, NEW)
    assert tiny.outputs(state) == tiny.outputs(tiny.run_plain(target, params, batch, options, NEW))
    check_stats(state)
    assert np.asarray(state.stats.accepted_at).sum() > 5
    sampled = tiny.run_speculative(
        spec, both, batch, tiny.sampling(B, 1.0, new=NEW, eos=NOBODY), NEW
    )
    assert (np.asarray(sampled.tokens) < tiny.VOCABULARY).all()


def test_a_draft_that_shares_the_tower_reads_the_targets_features() -> None:
    shared = dict(DRAFT_PARAMS) | {"vision_tower": TARGET_PARAMS["vision_tower"]}
    options = tiny.sampling(B, new=NEW, eos=NOBODY)
    own = speculative(("M", "T"), 3, options, draft=(TARGET, shared))
    spec = tiny.speculator(TARGET, TARGET, ("M", "T"), 3, shares_tower=True)
    blind = {name: leaf for name, leaf in shared.items() if name != "vision_tower"}
    params, batch = tiny.params_of(spec, TARGET_PARAMS, blind), tiny.blind(batch_of("M", "T"))
    state = tiny.run_speculative(spec, params, batch, options, NEW)
    assert tiny.outputs(state) == tiny.outputs(own) == plain(options)
    assert same_stats(own, state)
