"""Acceptance rules: which drafts of a block stay, and the law of the byte after them.

A rule for chains sees drafts d_1..d_M, the law p_i of the target at each of them and after the last, and, where drafts
were sampled, the law q_i each was sampled from. It keeps the first s drafts and says from which law the next byte
comes, so that text stays distributed as the target's own. What becomes of that byte is the loop's affair. For trees see
`decoding.trees`.

Letters: B batch, N block rows, M drafts, V vocabulary.
"""

import jax
import jax.numpy as jnp
from flax import struct

from bytejax.decoding.logits import Warp

BONUS = 1  # what a draw's key is folded with


class Chain(struct.PyTreeNode):
    """Drafts in a line, with what is known about them.

    drafts: [B, M] int32. count: [B] int32, how many of them are drafts; the rest was cut, not rejected.
    log_p: [B, M + 1, V] float32, row i the target's law at draft i given those before, the last row after them all;
        normalised, or in greedy decoding logits with banned ids at -inf.
    log_q: [B, M, V] float32, or None where drafts were not sampled.
    """

    drafts: jax.Array
    count: jax.Array
    log_p: jax.Array
    log_q: jax.Array | None = None


class Verdict(struct.PyTreeNode):
    """What a rule decides.

    kept: [B] int32, drafts that stay. law: [B, V] float32, log-weights of the next byte, not always normalised; or
        None, where the byte has been chosen already, bonus [B] int32.
    path: [B, nodes] int32, the block's rows that stay, root first, then anything; None for the first ones of a chain.
    """

    kept: jax.Array
    law: jax.Array | None
    path: jax.Array | None = None
    bonus: jax.Array | None = None


def greedy(chain: Chain) -> Verdict:
    """Keeps the longest prefix that the target's own arg-max would have written."""
    kept = _leading(chain, chain.drafts == jnp.argmax(chain.log_p[:, :-1], axis=-1))
    return Verdict(kept, row(chain.log_p, kept))


def token_wise(chain: Chain, keys: jax.Array) -> Verdict:
    """Speculative sampling (Leviathan et al. 2023; Chen et al. 2023).

    Draft i is accepted with probability min(1, p_i / q_i). After a rejection the byte comes from the normalised
    positive part of p - q; after the last draft, and where the drafts were cut, from p. keys [B].
    """
    if chain.drafts.shape[1] == 0:
        return everything(chain)
    log_q = chain.log_q
    ok = jnp.log(_uniform(chain, keys)) < _of_drafts(chain, chain.log_p[:, :-1]) - _of_drafts(chain, log_q)
    kept = _leading(chain, ok)
    p = row(chain.log_p, kept)
    excess = jnp.maximum(jnp.exp(p) - jnp.exp(row(log_q, jnp.minimum(kept, log_q.shape[1] - 1))), 0)
    return Verdict(kept, _after(chain, kept, p, excess))


def block(chain: Chain, keys: jax.Array) -> Verdict:
    """Block verification (Sun et al. 2024, arXiv 2403.10444): on average never fewer drafts than token-wise.

    With P_0 = 1 and P_i = min(1, P_{i-1} p_i(d_i) / q_i(d_i)), draft i of M may end the block with probability
    h_i = Z_i / (Z_i + 1 - P_i), Z_i the mass of max(P_i p_{i+1} - q_{i+1}, 0), and h_M = P_M. The longest prefix that
    passes stays; the next byte comes from that positive part, after the last draft (or a cut) from p. keys [B].
    """
    if chain.drafts.shape[1] == 0:
        return everything(chain)
    m = chain.drafts.shape[1]
    steps = jnp.cumsum(_of_drafts(chain, chain.log_p[:, :-1]) - _of_drafts(chain, chain.log_q), axis=1)
    steps = jnp.pad(steps, ((0, 0), (1, 0)))  # log of the products of ratios, without the cap
    product = jnp.exp(steps - jax.lax.cummax(steps, axis=1))  # P_0..P_M
    excess = jnp.maximum(product[:, :-1, None] * jnp.exp(chain.log_p[:, :-1]) - jnp.exp(chain.log_q), 0)
    mass = jnp.pad(excess.sum(-1), ((0, 0), (0, 1)))
    total = mass + 1 - product
    h = jnp.where(total > 0, mass / jnp.where(total > 0, total, 1), 1)
    place = jnp.arange(m + 1)
    h = jnp.where(place == chain.count[:, None], product, h)[:, 1:]
    passed = (_uniform(chain, keys) < h) & (place[1:] <= chain.count[:, None])
    kept = jnp.max(jnp.where(passed, place[1:], 0), axis=1).astype(jnp.int32)
    return Verdict(kept, _after(chain, kept, row(chain.log_p, kept), row(excess, jnp.minimum(kept, m - 1))))


def match(chain: Chain, noise: jax.Array) -> Verdict:
    """Keeps the longest prefix that equals the target's own draws, one from each law: "sample and match".

    Valid however the drafts were made, if without knowing the noise [B, M + 1, V] (Gumbel); for drafts that are not
    sampled as good as any rule. The text is the one that autoregression writes with the same noise.
    """
    choices = jnp.argmax(chain.log_p + noise, axis=-1).astype(jnp.int32)
    kept = _leading(chain, chain.drafts == choices[:, :-1])
    return Verdict(kept, None, bonus=row(choices, kept))


def everything(chain: Chain) -> Verdict:
    """Keeps every draft unseen. Lossy: only for measuring the throughput that no verification could exceed."""
    return Verdict(chain.count, row(chain.log_p, chain.count))


RULES = {"block": block, "token": token_wise}  # for chains drawn from known laws
NAMES = (*RULES, "match", "recursive")


def choose(law: jax.Array, warp: Warp, keys: jax.Array) -> jax.Array:
    """The next byte from its law [B, V]: its arg-max in greedy decoding, else a draw. -> [B] int32."""
    return jnp.argmax(law, -1).astype(jnp.int32) if warp.greedy else sample(law, keys, BONUS)


def sample(log_probs: jax.Array, keys: jax.Array, purpose: int) -> jax.Array:
    """One id per row by the Gumbel arg-max.

    An id of probability 0 is never drawn. log_probs [B, V], keys [B] -> [B].
    """
    return jnp.argmax(log_probs + gumbel(keys, purpose, log_probs.shape[1]), axis=-1).astype(jnp.int32)


def gumbel(keys: jax.Array, purpose: int, vocab: int) -> jax.Array:
    """The noise of `sample`. keys [...] -> [..., V]."""
    draw = lambda key: jax.random.gumbel(jax.random.fold_in(key, purpose), (vocab,))
    return jax.vmap(draw)(keys.reshape(-1)).reshape(*keys.shape, vocab)


def _leading(chain: Chain, ok: jax.Array) -> jax.Array:
    """How many drafts pass before the first that does not. ok [B, M] -> [B] int32."""
    ok = ok & (jnp.arange(ok.shape[1]) < chain.count[:, None])
    return jnp.cumprod(ok, axis=-1, dtype=jnp.int32).sum(-1, dtype=jnp.int32)


def _after(chain: Chain, kept: jax.Array, p: jax.Array, excess: jax.Array) -> jax.Array:
    """The law after a rejection is the excess [B, V]; p where all drafts stay, or where rounding made the rejection."""
    rejected = (kept < chain.count) & (excess.sum(-1) > 0)
    return jnp.where(rejected[:, None], jnp.log(excess), p)


def _uniform(chain: Chain, keys: jax.Array) -> jax.Array:
    return jax.vmap(lambda k: jax.random.uniform(jax.random.fold_in(k, 0), chain.drafts.shape[1:]))(keys)


def _of_drafts(chain: Chain, rows: jax.Array) -> jax.Array:
    return jnp.take_along_axis(rows, chain.drafts[..., None], axis=2)[..., 0]


def row(rows: jax.Array, s: jax.Array) -> jax.Array:
    """Row s of each batch row. rows [B, N, ...], s [B] -> [B, ...]."""
    index = s.reshape(-1, *(1,) * (rows.ndim - 1))
    return jnp.take_along_axis(rows, index, axis=1)[:, 0]
