"""Acceptance rules: which drafts stay, and which byte the target adds after them.

Letters: B batch, N block rows, V vocabulary.
"""

import jax
import jax.numpy as jnp
from flax import struct

from bytejax.decoding.logits import Warp
from bytejax.models.base import Block


class Verdict(struct.PyTreeNode):
    """path: [B, N] int32, block rows in order, root first, of which the first `accepted` count.

    accepted: [B] int32, rows to keep: the root and s accepted drafts, 1 <= accepted <= N.
    bonus: [B] int32, the byte the target adds after them.
    """

    path: jax.Array
    accepted: jax.Array
    bonus: jax.Array


def greedy(block: Block, logits: jax.Array, warp: Warp) -> Verdict:
    """Keeps the longest prefix of a chain that the target's own arg-max would have written. logits [B, N, V]."""
    choice = jnp.argmax(warp.masked(logits), axis=-1).astype(jnp.int32)
    return _chain_verdict(block, block.ids[:, 1:] == choice[:, :-1], lambda s: _row(choice, s))


def token_wise(block: Block, log_q: jax.Array | None, logits: jax.Array, warp: Warp, keys: jax.Array) -> Verdict:
    """Speculative sampling of a chain (Leviathan et al. 2023; Chen et al. 2023).

    Draft i is accepted with probability min(1, p_i / q_i). After a rejection the byte is drawn from the normalised
    positive part of p - q; after the last draft, and where the draft was cut (not rejected), from p.
    log_q [B, N - 1, V], or None where the drafts were not sampled: each q is then a point mass; logits [B, N, V];
    keys [B].
    """
    log_p = warp.log_probs(logits)
    if block.width == 1:
        return _chain_verdict(block, jnp.zeros_like(block.ids[:, 1:], bool), lambda s: sample(_row(log_p, s), keys, 1))
    if log_q is None:
        log_q = jnp.where(jnp.arange(log_p.shape[-1]) == block.ids[:, 1:, None], 0.0, -jnp.inf)
    of_draft = lambda rows: jnp.take_along_axis(rows, block.ids[:, 1:, None], axis=2)[..., 0]
    uniform = jax.vmap(lambda k: jax.random.uniform(jax.random.fold_in(k, 0), (block.width - 1,)))(keys)
    ok = jnp.log(uniform) < of_draft(log_p[:, :-1]) - of_draft(log_q)

    def bonus(s):
        p = _row(log_p, s)
        excess = jnp.maximum(jnp.exp(p) - jnp.exp(_row(log_q, jnp.minimum(s, block.width - 2))), 0)
        rejected = (s < draft_len(block)) & (excess.sum(-1) > 0)  # no excess: a rejection that rounding made
        return sample(jnp.where(rejected[:, None], jnp.log(excess), p), keys, 1)

    return _chain_verdict(block, ok, bonus)


def everything(block: Block, logits: jax.Array, warp: Warp, keys: jax.Array) -> Verdict:
    """Accepts every draft unseen. Lossy: only for measuring the throughput that no verification could exceed."""
    pick = lambda s: jnp.argmax(warp.masked(_row(logits, s)), -1).astype(jnp.int32)
    draw = lambda s: sample(warp.log_probs(_row(logits, s)), keys, 1)
    return _chain_verdict(block, jnp.ones_like(block.ids[:, 1:], bool), pick if warp.greedy else draw)


def sample(log_probs: jax.Array, keys: jax.Array, purpose: int) -> jax.Array:
    """One id per row by the Gumbel arg-max.

    An id of probability 0 is never drawn. log_probs [B, V], keys [B] -> [B].
    """
    noise = jax.vmap(lambda k: jax.random.gumbel(jax.random.fold_in(k, purpose), log_probs.shape[1:]))(keys)
    return jnp.argmax(log_probs + noise, axis=-1).astype(jnp.int32)


def draft_len(block: Block) -> jax.Array:
    """Number of drafts of a chain that count. -> [B] int32."""
    return block.is_draft.sum(-1, dtype=jnp.int32)


def _chain_verdict(block: Block, ok: jax.Array, bonus) -> Verdict:
    """ok [B, N - 1]: whether each draft passes on its own; bonus: (accepted drafts [B]) -> [B]."""
    ok = ok & block.is_draft[:, 1:]
    s = jnp.cumprod(ok, axis=-1, dtype=jnp.int32).sum(-1, dtype=jnp.int32)
    path = jnp.broadcast_to(jnp.arange(block.width, dtype=jnp.int32), block.ids.shape)
    return Verdict(path, s + 1, bonus(s))


def _row(rows: jax.Array, s: jax.Array) -> jax.Array:
    """Row s of each batch row. rows [B, N, ...], s [B] -> [B, ...]."""
    index = s.reshape(-1, *(1,) * (rows.ndim - 1))
    return jnp.take_along_axis(rows, index, axis=1)[:, 0]
