"""N-gram hits and a drafter's own candidates in one tree: the hits first, the best candidates in the rows left.

Letters: B batch, T candidates, C ids of a hit, M rows after the root.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Candidates(NamedTuple):
    """Nodes that may follow a root, parents before their children.

    ids: [B, T] int32. parents: [B, T] or [1, T] int32, -1 for the root. scores: [B, T], never above the parent's; -inf
    for no node. depth: at most so many of them lie on one path.
    """

    ids: jax.Array
    parents: jax.Array
    scores: jax.Array
    depth: int


class Nodes(NamedTuple):
    """Rows after a root: ids, parents (rows of the block, the root is 0) [B, M] int32, valid [B, M] bool."""

    ids: jax.Array
    parents: jax.Array
    valid: jax.Array


def best(candidates: Candidates, count: int, chain: jax.Array, hits: jax.Array) -> Nodes:
    """`count` <= T nodes: the first `hits` [B] ids of chain [B, C] int32, then the candidates with the best scores.

    A candidate whose path the chain already holds takes no row; what continues it hangs from the chain.
    """
    ids, scores = candidates.ids, candidates.scores
    (b, t), m = ids.shape, count
    chain, hits = jnp.pad(chain[:, :m], ((0, 0), (0, max(m - chain.shape[1], 0)))), jnp.minimum(hits, m)[:, None]
    parents = jnp.broadcast_to(candidates.parents, (b, t))
    first, above = parents < 0, jnp.maximum(parents, 0)
    of_parent = lambda x: jnp.take_along_axis(x, above, axis=1)
    depth, held = jnp.zeros_like(parents), jnp.zeros((b, t), bool)
    for _ in range(candidates.depth):
        depth = jnp.where(first, 0, of_parent(depth) + 1)
        same = (depth < hits) & (ids == jnp.take_along_axis(chain, jnp.minimum(depth, m - 1), axis=1))
        held = same & (first | of_parent(held))

    top, chosen = jax.lax.top_k(jnp.where(held, -jnp.inf, scores), m)  # of equal ones the first: parents are kept
    kept = (top > -jnp.inf) & (jnp.arange(m) < m - hits)
    chosen = jnp.sort(jnp.where(kept, chosen, t), axis=1)
    row = 1 + hits + jnp.arange(m)
    row_of = jnp.zeros((b, t + 1), jnp.int32).at[jnp.arange(b)[:, None], chosen].set(row)
    parent_row = jnp.where(first, 0, jnp.where(of_parent(held), 1 + of_parent(depth), of_parent(row_of)))

    place = jnp.arange(m)
    in_chain, rank = place < hits, jnp.maximum(place - hits, 0)
    chosen = jnp.take_along_axis(chosen, rank, axis=1)
    there = chosen < t
    take = lambda x: jnp.where(there, jnp.take_along_axis(x, jnp.minimum(chosen, t - 1), axis=1), 0)
    return Nodes(
        ids=jnp.where(in_chain, chain, take(ids)).astype(jnp.int32),
        parents=jnp.where(in_chain, place, take(parent_row)).astype(jnp.int32),
        valid=in_chain | there,
    )
