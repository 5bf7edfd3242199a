"""`init_state` and `commit` equal a few lines of plain Python, for any sequence of blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jaxspec.cache import KVCache
from jaxspec.decoding.state import DecodeState, DecodeStats, commit, init_state, newest, step_keys
from jaxspec.sampling import Sampling
from jaxspec.verification import Verdict

from tests import tiny

B, J, SLOTS, PROMPT = 3, 3, 9, 5
TOKENS = st.integers(0, 4)


@dataclass
class Row:
    """One request: its tokens, and its limit."""

    limit: int
    eos: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    done: bool = False

    def add(self, block: list[int]) -> int:
        """Appends the block up to the first EOS or the limit; the number of tokens that were added."""
        before = len(self.tokens)
        for token in block:
            if not self.done and len(self.tokens) < self.limit:
                self.tokens.append(token)
                self.done = token in self.eos
        self.done = self.done or len(self.tokens) >= self.limit
        return len(self.tokens) - before


def per_row(values: st.SearchStrategy) -> st.SearchStrategy[list]:
    return st.lists(values, min_size=B, max_size=B)


blocks = st.lists(
    st.tuples(per_row(st.lists(TOKENS, min_size=J, max_size=J)), per_row(st.integers(0, J)), per_row(TOKENS)),
    max_size=4,
)


@jax.jit
def start(first: jax.Array, options: Sampling) -> DecodeState:
    cache = KVCache((), (), jnp.full(B, PROMPT, jnp.int32), jnp.zeros(B, jnp.int32))
    return init_state(first, cache, DecodeStats.zeros(B, J), options, SLOTS, None)


jit_commit = jax.jit(commit)


@given(per_row(TOKENS), per_row(st.integers(0, SLOTS)), st.tuples(st.integers(-1, 4), st.just(-1)), blocks)
def test_commit_equals_the_model(first: list[int], limits: list[int], eos: tuple[int, int], blocks: list) -> None:
    options = tiny.sampling(B, new=limits, eos=eos)
    state = start(jnp.asarray(first, jnp.int32), options)
    rows = [Row(limit, eos) for limit in limits]
    for row, token in zip(rows, first):
        row.add([token])
    stats = [
        {"steps": 0, "emitted": 0, "drafted": [0] * J, "accepted": [0] * J, "histogram": [0] * (J + 1)} for _ in rows
    ]

    for drafted, count, after in blocks:
        live = [not row.done for row in rows]
        room = [row.limit - len(row.tokens) for row in rows]
        verdict = Verdict(jnp.asarray(count, jnp.int32), jnp.asarray(after, jnp.int32))
        state, emitted = jit_commit(state, jnp.asarray(drafted, jnp.int32), verdict, options)
        added = [row.add([*drafted[b][: count[b]], after[b]]) for b, row in enumerate(rows)]
        assert emitted.tolist() == added
        for b in np.flatnonzero(live):
            accepted = min(count[b], added[b])
            stats[b]["steps"] += 1
            stats[b]["emitted"] += added[b]
            stats[b]["histogram"][accepted] += 1
            for place in range(J):
                stats[b]["drafted"][place] += place < room[b]
                stats[b]["accepted"][place] += place < accepted

    assert tiny.outputs(state) == [row.tokens for row in rows]
    assert state.done.tolist() == [row.done for row in rows]
    for b, row in enumerate(rows):
        assert state.target.length[b] == PROMPT + max(len(row.tokens) - 1, 0)
        assert not row.tokens or newest(state)[b] == row.tokens[-1]
        assert state.stats.steps[b] == stats[b]["steps"]
        assert state.stats.emitted[b] == stats[b]["emitted"]
        assert state.stats.drafted_at[b].tolist() == stats[b]["drafted"]
        assert state.stats.accepted_at[b].tolist() == stats[b]["accepted"]
        assert state.stats.histogram[b].tolist() == stats[b]["histogram"]


def test_a_full_buffer_is_not_written_past_its_end() -> None:
    options = tiny.sampling(B, new=SLOTS, eos=(-1, -1))
    state = start(jnp.arange(B, dtype=jnp.int32), options)
    drafted = jnp.full((B, J), 7, jnp.int32)
    for _ in range(4):
        verdict = Verdict(jnp.full(B, J, jnp.int32), jnp.full(B, 8, jnp.int32))
        state, _ = jit_commit(state, drafted, verdict, options)
    assert state.count.tolist() == [SLOTS] * B
    assert state.tokens.tolist() == [[b, 7, 7, 7, 8, 7, 7, 7, 8] for b in range(B)]


def test_step_keys_depend_on_the_row_its_position_and_the_stream_alone() -> None:
    options = tiny.sampling(B)
    data = {
        (b, count, stream): jax.random.key_data(step_keys(options, jnp.full(B, count), stream)[b]).tobytes()
        for b in range(B)
        for count in range(4)
        for stream in range(J + 1)
    }
    assert len(set(data.values())) == len(data)
    turned = options.replace(key_data=options.key_data[::-1])
    swapped = jax.random.key_data(step_keys(turned, jnp.asarray([3, 1, 2]), 1))
    assert swapped[0].tobytes() == data[2, 3, 1]
    assert swapped[2].tobytes() == data[0, 2, 1]
