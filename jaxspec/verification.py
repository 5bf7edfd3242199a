"""Accept rules: which drafted tokens are accepted, and which token follows them.

Leviathan et al. 2023, Algorithm 1: the draft token x, drawn from q, is accepted with probability
min(1, p(x)/q(x)); the first rejected one is replaced by a draw from the residual
norm(max(0, p - q)). The outcome is distributed exactly as p. With one-hot p and q (temperature 0)
this is greedy matching.

In a tree the siblings that followed x are tried before that draw (SpecInfer, Miao et al. 2024): the
residual is the law p of what is still to be emitted, and the next sibling was drawn from q without
x, renormalised. So each sibling is one more step of the same algorithm, and the outcome is still p.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.cache import TreeMask
from jaxspec.sampling import argmax, draw
from jaxspec.typing import Array, Bool, Float, Int


class TokenTree(struct.PyTreeNode):
    """The shape of a drafted tree. Node 0 is the newest committed token, the nodes from 1 on are
    drafted."""

    parents: Int[Array, "B nodes"]
    """Parents of the nodes from 1 on. Parents come before children, siblings in the order in which
    they were drawn."""
    expanded: Int[Array, "B nodes+1"]
    """Which of the draft's distributions was at this node; -1 where the draft has not read it."""
    mask: TreeMask
    """How the target reads all nodes."""
    tries: int = struct.field(pytree_node=False)
    """The most nodes that can be tried: all children of the nodes on one path."""
    depth: int = struct.field(pytree_node=False)
    """Nodes on the longest path, J."""


class Draft(struct.PyTreeNode):
    """A block of J proposed tokens a row; or, with `tree`, of nodes of a tree whose paths have up
    to J.

    The distributions are those at the J places, or at the E nodes that the draft has read.
    """

    tokens: Int[Array, "B J"]
    """-1 where nothing was drafted. There `probs` are 0, so the place is rejected, and the token
    after the others is drawn from the target's distribution."""
    probs: Float[Array, "B J V"] | None
    """The very distributions that the tokens were drawn from (for an ensemble, the mixture). None:
    they were not drawn, and a token x is accepted with probability p(x), as if drawn from the
    distribution that is 1 at x."""
    view_probs: Float[Array, "R B J V"]
    """Each view's own distribution at temperature; what a weighting learns from."""
    tree: TokenTree | None = None


class Verdict(struct.PyTreeNode):
    """How many drafted tokens of each row stand, and the token after them (correction or bonus)."""

    count: Int[Array, " B"]
    next_token: Int[Array, " B"]
    path: Int[Array, "B J"] | None = None
    """In a tree, the nodes that stand, in order; from `count` on they are 0."""


def match(best: Int[Array, "B T"], draft: Draft) -> Verdict:
    """Verify a block of greedy rows: `rejection` against what is one-hot at `best`, the target's
    likeliest tokens after the newest token and after each drafted one."""
    tree = draft.tree
    if tree is None:
        count = jnp.cumprod(
            draft.tokens == best[:, : draft.tokens.shape[1]], axis=1, dtype=jnp.int32
        ).sum(axis=1)
        return Verdict(count, _pick(best, jnp.minimum(count, best.shape[1] - 1)))
    path, node, accepted = [], jnp.zeros(best.shape[0], jnp.int32), True
    for _ in range(tree.depth):
        fits = (tree.parents == node[:, None]) & (draft.tokens == _pick(best, node)[:, None])
        accepted &= jnp.any(fits, axis=1)
        node = jnp.where(accepted, argmax(fits) + 1, node)
        path.append(jnp.where(accepted, node, 0))
    walked = jnp.stack(path, axis=1)
    return Verdict((walked > 0).sum(axis=1), _pick(best, node), walked)


def verify(
    p: Float[Array, "B T V"], draft: Draft, keys: Array, greedy: Bool[Array, " B"]
) -> Verdict:
    """Verify a block against the target's distributions after the newest token and after each
    drafted one."""
    return (rejection if draft.tree is None else tree_rejection)(p, draft, keys, greedy)


def rejection(
    p: Float[Array, "B J+1 V"], draft: Draft, keys: Array, greedy: Bool[Array, " B"]
) -> Verdict:
    """Verify a chain against the target's distributions at the J drafted places and the one after
    them.

    Without the latter, `p` being [B, J, V], there is no bonus: the next token of a row that accepts
    all is rubbish.
    """
    q, length = draft.probs, draft.tokens.shape[1]
    assert q is not None
    accept_keys, next_keys = jnp.unstack(jax.vmap(jax.random.split)(keys), axis=1)
    chosen = draft.tokens[..., None]
    p_x = jnp.take_along_axis(p[:, :length], chosen, axis=-1)[..., 0]
    q_x = jnp.take_along_axis(q, chosen, axis=-1)[..., 0]
    u = jax.vmap(lambda key: jax.random.uniform(key, (length,)))(accept_keys)
    # What q gives no mass, or none that is a number, was not drawn from it.
    accepted = jnp.cumprod((q_x > 0) & (u * q_x < p_x), axis=1, dtype=jnp.int32)
    count = accepted.sum(axis=1)
    at = count[:, None, None]

    def drawn() -> Array:
        p_next = jnp.take_along_axis(p, jnp.minimum(at, p.shape[1] - 1), axis=1)[:, 0]
        q_next = jnp.take_along_axis(q, jnp.minimum(at, length - 1), axis=1)[:, 0]
        return draw(next_keys, residual(p_next, q_next, count == length), greedy)

    if p.shape[1] > length:
        return Verdict(count, drawn())
    return Verdict(
        count, jax.lax.cond(jnp.any(count < length), drawn, lambda: jnp.zeros_like(count))
    )


def residual(p: Array, q: Array, bonus: Array) -> Array:
    """Return max(0, p - q), unnormalised: of p = [.5, .3, .2] and q = [.2, .6, .2], [.3, 0, 0].

    It is p itself where no draft token stood against it, where rounding left nothing, and where q
    holds what is not a number.
    """
    left = jnp.maximum(p - q, 0.0)
    whole = bonus | ~(left.sum(-1) > 0)
    return jnp.where(whole[:, None], p, left)


class _Walk(struct.PyTreeNode):
    """A row's way down a tree."""

    node: Int[Array, " B"]
    tried: Int[Array, " B"]
    """The last node that was tried; all that can still be tried come after it."""
    p: Float[Array, "B V"]
    """The law of the token after `node`, given that the children tried so far fell."""
    q: Float[Array, "B V"]
    """What the next child was drawn from, not normalised. All zero: it was not drawn."""
    count: Int[Array, " B"]
    path: Int[Array, "B J"]


def tree_rejection(
    p: Float[Array, "B nodes+1 V"], draft: Draft, keys: Array, greedy: Bool[Array, " B"]
) -> Verdict:
    """Verify a tree against the target's distributions at its nodes, walking down from the root.

    If the root has the children 1 and 2, with the tokens a and b, node 1 is accepted with
    probability p(a)/q(a). If it is rejected, p becomes norm(max(0, p - q)), q loses a, and node 2
    is accepted with probability p(b)/q(b) of these. If that is rejected too, the next token is
    drawn from the new p; if it is accepted, its own children are tried, against the target's and
    the draft's distributions after b.

    A child that is no draw from q, because nothing of q was left or `draft.probs` is None, counts
    as drawn from the distribution that is 1 at it. At temperature 0 so do all except the first, and
    the walk follows the target's argmax as far as the tree does.
    """
    tree = draft.tree
    assert tree is not None
    nodes = draft.tokens.shape[1]
    order = jnp.arange(1, nodes + 1)
    accept_keys, next_keys = jnp.unstack(jax.vmap(jax.random.split)(keys), axis=1)
    u = jax.vmap(lambda key: jax.random.uniform(key, (nodes,)))(accept_keys)

    def draft_at(node: Array) -> Array:
        if draft.probs is None:
            return jnp.zeros_like(p[:, 0])
        return _pick(draft.probs, jnp.maximum(_pick(tree.expanded, node), 0))

    def attempt(_: Array, walk: _Walk) -> _Walk:
        untried = (tree.parents == walk.node[:, None]) & (order > walk.tried[:, None])
        exists = jnp.any(untried, axis=1)
        child = argmax(untried) + 1
        token = _pick(draft.tokens, child - 1)
        here = jax.nn.one_hot(token, p.shape[-1], dtype=p.dtype)
        mass = walk.q.sum(-1, keepdims=True)
        q = jnp.where(mass > 0, walk.q / jnp.where(mass > 0, mass, 1.0), here)
        accepted = exists & (_pick(u, child - 1) * _pick(q, token) < _pick(walk.p, token))
        rejected = exists & ~accepted
        left = residual(walk.p, q, bonus=~rejected)
        left = jnp.where(rejected[:, None], left / left.sum(-1, keepdims=True), left)
        place = jnp.arange(tree.depth) == walk.count[:, None]
        return _Walk(
            node=jnp.where(accepted, child, walk.node),
            tried=jnp.where(exists, child, walk.tried),
            p=jnp.where(accepted[:, None], _pick(p, child), left),
            q=jnp.where(
                accepted[:, None],
                draft_at(child),
                jnp.where(rejected[:, None], walk.q * (1 - here), walk.q),
            ),
            count=walk.count + accepted,
            path=jnp.where(place & accepted[:, None], child[:, None], walk.path),
        )

    root = jnp.zeros(p.shape[0], jnp.int32)
    walk = _Walk(
        root, root, p[:, 0], draft_at(root), root, jnp.zeros((p.shape[0], tree.depth), jnp.int32)
    )
    walk = jax.lax.fori_loop(0, tree.tries, attempt, walk)
    return Verdict(walk.count, draw(next_keys, walk.p, greedy), walk.path)


def along_path(
    draft: Draft, path: Int[Array, "B J"]
) -> tuple[Draft, Int[Array, "B J+1"], Int[Array, "B J+1"]]:
    """Return a verified tree as the chain of the nodes that stand, for all that treats both alike.

    With it come the root and the nodes on the path, and which of the draft's distributions was at
    each of them (-1: none). If nodes 2 and 5 stand of three places, and the draft has read the root
    and then node 2, these are [0, 2, 5, 0] and [0, 1, -1, 0]. What lies past the nodes that stand
    is rubbish.
    """
    assert draft.tree is not None
    nodes = jnp.pad(path, ((0, 0), (1, 0)))
    read = jnp.take_along_axis(draft.tree.expanded, nodes, axis=1)
    at = jnp.maximum(read[:, :-1], 0)[..., None]
    chain = Draft(
        tokens=jnp.take_along_axis(draft.tokens, jnp.maximum(path - 1, 0), axis=1),
        probs=None if draft.probs is None else jnp.take_along_axis(draft.probs, at, axis=1),
        view_probs=jnp.take_along_axis(draft.view_probs, at[None], axis=2),
    )
    return chain, nodes, read


def _pick(values: Float[Array, "B T ..."], at: Int[Array, " B"]) -> Float[Array, "B ..."]:
    """Return values[b, at[b]]."""
    return jnp.take_along_axis(values, at.reshape(-1, *[1] * (values.ndim - 1)), axis=1)[:, 0]
