"""Decide which drafted tokens are accepted, and which token follows them.

Algorithm 1 of Leviathan et al. 2023 accepts the draft token x, drawn from q, with probability
min(1, p(x)/q(x)). It replaces the first rejected token by a draw from the residual
norm(max(0, p - q)). The outcome is distributed exactly as p. With one-hot p and q (temperature 0)
this is greedy matching.

In a tree, the later siblings of x are tried before that draw (SpecInfer, Miao et al. 2024). The
residual becomes the new p, and the next sibling was drawn from q without x, renormalised. So each
sibling is one more step of the same algorithm, and the outcome still follows the first p.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.cache import TreeMask
from jaxspec.sampling import argmax, draw
from jaxspec.typing import Array, Bool, Float, Int, Shaped


class TokenTree(struct.PyTreeNode):
    """Describe the shape of a drafted tree.

    Node 0 is the newest committed token; the nodes from 1 on are drafted.
    """

    parents: Int[Array, "B nodes"]
    """Parents of the nodes from 1 on. Parents come before children, and siblings are in the order
    of their draws."""
    expanded: Int[Array, "B nodes+1"]
    """Index of the draft's distribution after each node; -1 if the draft has not read the node."""
    mask: TreeMask
    """Depths and ancestors of all nodes, with which the target reads them."""
    tries: int = struct.field(pytree_node=False)
    """Maximum nodes that can be tried: all children of the nodes on one path."""
    depth: int = struct.field(pytree_node=False)
    """Number of nodes on the longest path, J."""


class Draft(struct.PyTreeNode):
    """Propose J tokens per row; with `tree`, the nodes of a tree whose paths have up to J nodes.

    There is a distribution for each of the J places, or for each node that the draft has read.
    """

    tokens: Int[Array, "B J"]
    """Drafted tokens; -1 where nothing was drafted. There `probs` are 0, so the place is rejected,
    and the next token is drawn from the target's distribution."""
    probs: Float[Array, "B reads V"] | None
    """Distributions that the tokens were drawn from; the mixture, for an ensemble. None if they
    were not drawn: then a token x is accepted with probability p(x), as if q were 1 at x."""
    view_probs: Float[Array, "R B reads V"]
    """Each view's own distribution at the temperature, from which a weighting learns."""
    tree: TokenTree | None = None

    @property
    def before(self) -> Bool[Array, "#B T J"]:
        """Return whether a drafted token comes before each of the target's J + 1 scores."""
        if self.tree is not None:
            return self.tree.mask.seen[..., 1:]
        length = self.tokens.shape[1]
        return jnp.tri(length + 1, length, -1, dtype=bool)[None]


class Verdict(struct.PyTreeNode):
    """Count the accepted tokens of each row, and hold the token after them."""

    count: Int[Array, " B"]
    next_token: Int[Array, " B"]
    """Correction of the first rejected token, or a bonus if all were accepted."""
    path: Int[Array, "B J"] | None = None
    """Accepted nodes of a tree, in order; 0 from `count` on."""


def match(best: Int[Array, "B T"], draft: Draft) -> Verdict:
    """Verify a block of greedy rows, as `rejection` against distributions one-hot at `best` would.

    best: The target's likeliest tokens after the newest token and after each drafted one.
    """
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
    """Verify a block against the target's distributions.

    p: Distributions after the newest token and after each drafted one.
    """
    return (rejection if draft.tree is None else tree_rejection)(p, draft, keys, greedy)


def rejection(
    p: Float[Array, "B T V"], draft: Draft, keys: Array, greedy: Bool[Array, " B"]
) -> Verdict:
    """Verify a chain against the target's distributions at its J places and the place after them.

    With `p` of J places only, [B, J, V], there is no bonus, and the next token of a row that
    accepts all J is undefined.
    """
    q, length = draft.probs, draft.tokens.shape[1]
    assert q is not None
    accept_keys, next_keys = jnp.unstack(jax.vmap(jax.random.split)(keys), axis=1)
    tokens = draft.tokens[..., None]
    p_x = jnp.take_along_axis(p[:, :length], tokens, axis=-1)[..., 0]
    q_x = jnp.take_along_axis(q, tokens, axis=-1)[..., 0]
    u = jax.vmap(lambda key: jax.random.uniform(key, (length,)))(accept_keys)
    # A token to which q gives no mass, or NaN, was not drawn from q.
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
    """Return max(0, p - q), unnormalised, or p itself.

    For p = [.5, .3, .2] and q = [.2, .6, .2] this is [.3, 0, 0]. Rows keep p if they get a bonus
    token, if rounding leaves nothing, or if q contains NaN.
    """
    excess = jnp.maximum(p - q, 0.0)
    whole = bonus | ~(excess.sum(-1) > 0)
    return jnp.where(whole[:, None], p, excess)


class _Walk(struct.PyTreeNode):
    """Carry each row's way down a tree."""

    node: Int[Array, " B"]
    tried: Int[Array, " B"]
    """Last node that was tried; only later nodes can still be tried."""
    p: Float[Array, "B V"]
    """Law of the token after `node`, given that the children tried so far were rejected."""
    q: Float[Array, "B V"]
    """Distribution of the next child, not normalised; all zero if the child was not drawn."""
    count: Int[Array, " B"]
    path: Int[Array, "B J"]


def tree_rejection(
    p: Float[Array, "B T V"], draft: Draft, keys: Array, greedy: Bool[Array, " B"]
) -> Verdict:
    """Verify a tree against the target's distributions at its nodes; walk down from the root.

    Let the root have the children 1 and 2, with the tokens a and b. Node 1 is accepted with
    probability p(a)/q(a). If it is rejected, p becomes norm(max(0, p - q)), q loses a, and node 2
    is accepted with probability p(b)/q(b). If node 2 is rejected too, the next token is drawn from
    the new p. If it is accepted, its own children are tried, with the distributions of target and
    draft after b.

    A child may not come from q, because q has no mass left or `draft.probs` is None. Then q counts
    as 1 at the child. At temperature 0 this holds for every child except the first, and the walk
    follows the target's argmax as far as the tree does.
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
        """Accept or reject the next untried child of each row's node."""
        untried = (tree.parents == walk.node[:, None]) & (order > walk.tried[:, None])
        exists = jnp.any(untried, axis=1)
        child = argmax(untried) + 1
        token = _pick(draft.tokens, child - 1)
        here = jax.nn.one_hot(token, p.shape[-1], dtype=p.dtype)
        mass = walk.q.sum(-1, keepdims=True)
        q = jnp.where(mass > 0, walk.q / jnp.where(mass > 0, mass, 1.0), here)
        accepted = exists & (_pick(u, child - 1) * _pick(q, token) < _pick(walk.p, token))
        rejected = exists & ~accepted
        excess = residual(walk.p, q, bonus=~rejected)
        excess = jnp.where(rejected[:, None], excess / excess.sum(-1, keepdims=True), excess)
        next_depth = jnp.arange(tree.depth) == walk.count[:, None]
        return _Walk(
            node=jnp.where(accepted, child, walk.node),
            tried=jnp.where(exists, child, walk.tried),
            p=jnp.where(accepted[:, None], _pick(p, child), excess),
            q=jnp.where(
                accepted[:, None],
                draft_at(child),
                jnp.where(rejected[:, None], walk.q * (1 - here), walk.q),
            ),
            count=walk.count + accepted,
            path=jnp.where(next_depth & accepted[:, None], child[:, None], walk.path),
        )

    root = jnp.zeros(p.shape[0], jnp.int32)
    walk = _Walk(
        root, root, p[:, 0], draft_at(root), root, jnp.zeros((p.shape[0], tree.depth), jnp.int32)
    )
    walk = jax.lax.fori_loop(0, tree.tries, attempt, walk)
    return Verdict(walk.count, draw(next_keys, walk.p, greedy), walk.path)


def chain_of_path(
    draft: Draft, path: Int[Array, "B J"]
) -> tuple[Draft, Int[Array, "B J+1"], Int[Array, "B J+1"]]:
    """Return the accepted path of a tree as a chain.

    Also return the root with the nodes of the path, and the index of the draft's distribution after
    each of them (-1: none). Let nodes 2 and 5 be accepted of at most three, and let the draft have
    read the root and then node 2: the results are [0, 2, 5, 0] and [0, 1, -1, 0]. Entries past the
    accepted nodes are undefined.
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


def _pick(values: Shaped[Array, "B T ..."], at: Int[Array, " B"]) -> Shaped[Array, "B ..."]:
    """Return values[b, at[b]]."""
    return jnp.take_along_axis(values, at.reshape(-1, *[1] * (values.ndim - 1)), axis=1)[:, 0]
