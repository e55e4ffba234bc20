"""Acceptance of trees: which path of a block stays, and the byte after it. No loop runs on the host.

Letters: B batch, N block rows, L levels, V vocabulary.
"""

import jax
import jax.numpy as jnp

from bytejax.decoding.accept import Verdict, row
from bytejax.drafters.base import Children
from bytejax.models.base import Block


def match(block: Block, laws: jax.Array, noise: jax.Array | None) -> Verdict:
    """Keeps the longest path of drafts that the target itself would have written, choosing once at every node.

    The choice is the arg-max or, with noise [B, L, V], one draw per level from the target's law ("sample and match",
    the rule of Miao et al., SpecInfer, arXiv 2305.09781, for drafts that are not sampled): a child that carries it
    stays, else the choice is the next byte. Exact for every tree that was made without knowing the noise. Nodes of one
    level share it, since a path has one of each level; so siblings with the same id are harmless, and the text is the
    one that autoregression writes with the same noise. laws [B, N, V], after each row, row 0 the root.
    """
    n = laws.shape[1]
    depths = jnp.broadcast_to(block.depths(), block.ids.shape)
    if noise is not None:
        laws = laws + jnp.take_along_axis(noise, jnp.minimum(depths, noise.shape[1] - 1)[..., None], axis=1)
    choices = jnp.argmax(laws, -1).astype(jnp.int32)
    hit = block.is_draft & (jnp.take_along_axis(choices, block.parents, axis=1) == block.ids) | (jnp.arange(n) == 0)
    off_path = (block.ancestors() & ~hit[:, None]).any(-1)
    best = jnp.argmax(jnp.where(off_path, -1, depths), axis=1)
    return _verdict(block, best, jnp.take_along_axis(choices, best[:, None], axis=1)[:, 0])


def recursive(block: Block, laws: jax.Array, children: Children, keys: jax.Array, noise: jax.Array) -> Verdict:
    """Recursive rejection of children drawn without replacement (Jeon et al. 2024, arXiv 2402.14160).

    At a node with the target's law p, children are tried in the order in which they were drawn, which is that of their
    rows: x stays with probability min(1, p(x) / q(x)); else p becomes the normalised positive part of p - q, and q
    loses x and is normalised again. After the last child the next byte comes from what p then is.
    laws [B, N, V] log-probabilities; keys [B]; noise [B, V], of the next byte's draw.
    """
    b, n, v = laws.shape
    batch = jnp.arange(b)
    uniform = jax.vmap(lambda k: jax.random.uniform(jax.random.fold_in(k, 0), (n,)))(keys)

    def q_of(node):
        ids, log_q = row(children.ids, node), row(children.log_q, node)
        return jnp.zeros((b, v)).at[batch[:, None], ids].add(jnp.exp(log_q), mode="drop")

    def try_one(i, carry):
        node, p, q = carry
        x = block.ids[:, i]
        p_x, q_x = p[batch, x], q[batch, x]
        its = block.is_draft[:, i] & (block.parents[:, i] == node)
        kept = its & (uniform[:, i] * q_x < p_x)
        excess = jnp.maximum(p - q, 0)
        total = excess.sum(-1, keepdims=True)
        left = jnp.where(total > 0, excess / jnp.where(total > 0, total, 1), p)  # no mass: rounding made the rejection
        others = q.at[batch, x].set(0)
        rest = others.sum(-1, keepdims=True)
        others = others / jnp.where(rest > 0, rest, 1)
        new_node = jnp.where(kept, i, node)
        choose = lambda a, b, c: jnp.where(kept[:, None], a, jnp.where(its[:, None], b, c))
        return new_node, choose(jnp.exp(laws[:, i]), left, p), choose(q_of(new_node), others, q)

    root = jnp.zeros((b,), jnp.int32)
    node, p, _ = jax.lax.fori_loop(1, n, try_one, (root, jnp.exp(laws[:, 0]), q_of(root)))
    return _verdict(block, node, jnp.argmax(jnp.log(p) + noise, -1).astype(jnp.int32))


def _verdict(block: Block, last: jax.Array, bonus: jax.Array) -> Verdict:
    """The path that ends in row `last` [B]."""
    n = block.width
    line = row(jnp.broadcast_to(block.ancestors(), (len(last), n, n)), last)
    in_order = jnp.where(line, jnp.arange(n), n)  # a parent comes before its children
    path = jnp.argsort(in_order, axis=1).astype(jnp.int32)
    return Verdict(line.sum(-1, dtype=jnp.int32) - 1, None, path, bonus)
