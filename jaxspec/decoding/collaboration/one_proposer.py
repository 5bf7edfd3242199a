"""Decode collaboratively: one model proposes, and all models score."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxspec.cache import KVCache
from jaxspec.decoding.collaboration import proposals
from jaxspec.decoding.collaboration.proposals import SharedState
from jaxspec.decoding.inputs import Member
from jaxspec.decoding.processors import processed
from jaxspec.decoding.speculative import next_token
from jaxspec.sampling import Sampling
from jaxspec.typing import Array, Params


@dataclass(frozen=True)
class OneProposer(proposals.Collaboration):
    """Let one model propose every run, and all models score it."""

    members: tuple[Member, ...]
    gamma: int
    """Proposals in each run; 0 is standard collaborative decoding."""
    proposer: int = 0
    bonus: bool = False
    """Whether a fully accepted run adds a token, for which the proposer reads its last proposal."""

    @property
    def spare_slots(self) -> int:
        return self.gamma + 1

    @property
    def most_tokens(self) -> int:
        return self.gamma + 1

    def step(self, params: Params, state: SharedState, options: Sampling) -> SharedState:
        """Run once for all rows: propose, score, verify, commit."""
        live = (~state.done).astype(jnp.int32)
        last, history = state.newest, state.history
        places = self.gamma + (self.bonus or not self.gamma)
        model = self.members[self.proposer].model

        def propose(
            carry: tuple[Array, KVCache, Array | None], place: Array
        ) -> tuple[tuple[Array, KVCache, Array | None], tuple[Array, Array]]:
            """Read the newest token, and draw the next one from the proposer's scores."""
            token, cache, drafted = carry
            logits, cache = model.extend(params["models"][self.proposer], token[:, None], cache)
            scores = logits
            if history is not None and drafted is not None:
                behind = history.behind(drafted, (jnp.arange(places) < place)[None, None])
                scores = processed(logits, behind, options.processors)
            token = next_token(scores[:, 0], state.count + place, options)
            if drafted is not None:
                drafted = drafted.at[:, place].set(token)
            return (token, cache, drafted), (token, logits[:, 0])

        logits, caches = [], []
        with jax.named_scope("propose"):
            proposed = None if history is None else jnp.zeros((len(last), places), jnp.int32)
            start = (last, state.target[self.proposer], proposed)
            (_, cache, _), (tokens, draft_logits) = jax.lax.scan(propose, start, jnp.arange(places))
            drafted = jnp.moveaxis(tokens, 0, 1)[:, : self.gamma]
        with jax.named_scope("score"):
            block = jnp.concatenate([last[:, None], drafted], axis=1)[:, :places]
            for m, member in enumerate(self.members):
                if m == self.proposer:
                    scores, extended = jnp.moveaxis(draft_logits, 0, 1), cache
                else:
                    scores, extended = member.model.extend(
                        params["models"][m], block, state.target[m]
                    )
                logits.append(scores)
                caches.append(extended.replace(length=state.target[m].length))
                passes = places if m == self.proposer else 1
                state = proposals.count_calls(state, m, passes * live, passes)
        with jax.named_scope("verify"):
            checked = proposals.check_run(
                params, state, jnp.stack(logits), drafted, self.proposer, options
            )
            count = checked.verdict.count
            more = (count < self.gamma) | (places > self.gamma)
        state = state.replace(target=tuple(caches))
        most = live * (count + more)
        return proposals.commit_run(state, drafted, checked, self.proposer, most, options)
