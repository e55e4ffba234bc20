"""The most probable beginnings of a circuit's windows, as a tree: what to draft where a target verifies trees.

Letters: n window, r rank, v vocabulary, w prefixes in the beam, m nodes of the tree.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bytejax.circuits.base import Circuit, Theta


class Prefixes(NamedTuple):
    """Nodes of a tree, parents before their children, node 0 the given byte.

    ids, parents: [m] int32, the last byte of every prefix, and the node of the prefix without it (node 0 is its own).
    log_q: [m], the prefix's log-probability given node 0's byte; -inf where there are fewer than m possible prefixes.
    """

    ids: jax.Array
    parents: jax.Array
    log_q: jax.Array


def level_sizes(places: int, vocab: int, beam: int) -> list[int]:
    """How many prefixes `best_prefixes` compares at each place from the given byte on, which is the first."""
    sizes = [1]
    for _ in range(places - 1):
        sizes.append(min(beam, sizes[-1] * vocab))
    return sizes


def best_prefixes(circuit: Circuit, theta: Theta, first: jax.Array, count: int, beam: int) -> Prefixes:
    """The `count` prefixes with the largest q(x_1..x_i | x_1 = first), that of x_1 alone included.

    A prefix is never more probable than its own beginning, so they are a tree; of all trees of so many nodes, the one
    that a target distributed as q would follow furthest. At every place only the `beam` best prefixes go on. From
    beam = count - 1 on nothing is lost: whatever belongs to the tree is among the count - 1 best of its place.

    theta: without batch axes (use `jax.vmap`); its leaves may be only the first places of the window. first [] int.
    count: at most the sum of `level_sizes`.
    """
    leaves, v = theta.leaves, theta.leaves.shape[-1]
    top = jnp.maximum(jnp.max(leaves, -2), jnp.finfo(leaves.dtype).min)
    probs = jnp.exp(leaves - top[:, None])
    sizes = level_sizes(leaves.shape[0], v, beam)
    starts = np.cumsum([0, *sizes])  # of the levels, among all nodes

    walk = jax.tree.map(lambda x: x[None], circuit.begin(theta.sums))
    origin, ids, log_q = jnp.zeros((1,), jnp.int32), jnp.asarray(first, jnp.int32)[None], jnp.zeros((1,), leaves.dtype)
    levels = [(ids, origin, log_q)]
    for i in range(1, len(sizes)):
        walk = jax.tree.map(lambda x, origin=origin: x[origin], walk)
        walk = circuit.advance(theta.sums, walk, i - 1, leaves[i - 1].T[ids])
        laws = jnp.log(jnp.exp(walk.prior) @ probs[i]) + top[i]
        joint = log_q[:, None] + jnp.minimum(laws, 0)  # rounding must not lift a prefix above its own beginning
        log_q, best = jax.lax.top_k(joint.reshape(-1), sizes[i])
        origin, ids = best // v, (best % v).astype(jnp.int32)
        levels.append((ids, starts[i - 1] + origin, log_q))
    return _best(*(jnp.concatenate(parts) for parts in zip(*levels, strict=True)), count)


def _best(ids: jax.Array, parents: jax.Array, log_q: jax.Array, count: int) -> Prefixes:
    """The best nodes of a tree whose nodes lie level by level. Of equals the first counts, so parents are kept."""
    kept = jnp.sort(jax.lax.top_k(log_q, count)[1])
    place = jnp.cumsum(jnp.zeros_like(parents).at[kept].set(1)) - 1
    return Prefixes(ids[kept], place[parents[kept]].astype(jnp.int32), log_q[kept])
