"""The one place where logits become a distribution: temperature, top-k, top-p, banned ids, in float32."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from bytejax.errors import InputError


class Warp(struct.PyTreeNode):
    """Settings of the target's distribution; its law is what "lossless" refers to.

    temperature, top_p: float32 []; top_k: int32 []. Applied in the order temperature, top-k, top-p. Ids that tie with
        the last one kept are kept too.
    banned: [V] bool, ids that have probability 0.
    greedy: arg-max decoding; temperature and truncation are then ignored.
    truncates: whether top-k or top-p do anything (their search is left out of the program otherwise).
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    banned: jax.Array
    greedy: bool = struct.field(pytree_node=False)
    truncates: bool = struct.field(pytree_node=False)

    def masked(self, logits: jax.Array) -> jax.Array:
        """Logits with banned ids at -inf.

        Ids past V (a larger vocabulary than the target's) count as banned. [..., V'].
        """
        logits = logits[..., : self.banned.shape[0]].astype(jnp.float32)
        return jnp.where(self.banned, -jnp.inf, logits)

    def log_probs(self, logits: jax.Array) -> jax.Array:
        """Normalised float32 log-probabilities over the ids. [..., V'] -> [..., V]."""
        return self.sums(self.masked(logits))

    def sums(self, log_weights: jax.Array) -> jax.Array:
        """Tempered, truncated and renormalised log-weights over the last axis.

        No id is banned. [..., R] -> [..., R].
        """
        if self.greedy:
            return jax.nn.log_softmax(log_weights.astype(jnp.float32))
        log_probs = jax.nn.log_softmax(log_weights.astype(jnp.float32) / self.temperature)
        if not self.truncates:
            return log_probs
        return jax.nn.log_softmax(jnp.where(_kept(jnp.exp(log_probs), self.top_k, self.top_p), log_probs, -jnp.inf))


def make_warp(vocab: int, temperature: float, top_k: int, top_p: float, banned: Iterable[int] = ()) -> Warp:
    """Checked settings. temperature 0 is greedy; top_k 0 and top_p 1 keep everything. Raises InputError."""
    if not (np.isfinite(temperature) and (temperature == 0 or temperature >= 1e-3)):  # below, float32 logits overflow
        raise InputError(f"temperature must be 0 or a number of at least 0.001, got {temperature}")
    if not 1e-6 <= top_p <= 1:
        raise InputError(f"top_p must lie between 0.000001 and 1, got {top_p}")
    if not 0 <= top_k < 2**31:
        raise InputError(f"top_k must be >= 0 (0 keeps all) and below 2**31, got {top_k}")
    mask = np.zeros(vocab, bool)
    for i in banned:
        if not 0 <= i < vocab:
            raise InputError(f"banned id {i} is not an id of the target (0 to {vocab - 1})")
        mask[i] = True
    if mask.all():
        raise InputError("every id is banned")
    return Warp(
        temperature=jnp.float32(temperature if temperature > 0 else 1.0),
        top_k=jnp.int32(top_k or vocab),
        top_p=jnp.float32(top_p),
        banned=jnp.asarray(mask),
        greedy=temperature == 0,
        truncates=top_k > 0 or top_p < 1,
    )


def _kept(probs: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Mask of the top-k entries, and of the smallest set of largest entries among them whose share reaches top_p.

    Both sets are {probs >= threshold}; the largest threshold that qualifies is found by bisection over the float's bit
    pattern, which has the order of the value: exact in 30 steps, without a sort.
    """
    bits = jax.lax.bitcast_convert_type(probs, jnp.int32)
    in_top_k = bits >= _largest(bits, lambda mask: mask.sum(-1, keepdims=True) >= top_k)
    share = jnp.where(in_top_k, probs, 0)
    share = share / share.sum(-1, keepdims=True)
    enough = lambda mask: jnp.where(mask, share, 0).sum(-1, keepdims=True) >= top_p
    return in_top_k & ((bits >= _largest(bits, enough)) | (top_p >= 1))


def _largest(bits: jax.Array, qualifies) -> jax.Array:
    """Largest threshold t for which the set {bits >= t} qualifies.

    0 where none does. bits [..., V] -> [..., 1] int32.
    """

    def step(i, t):
        candidate = t + jnp.left_shift(jnp.int32(1), 29 - i)  # probabilities are at most 1.0, below 2**30 as bits
        return jnp.where(qualifies(bits >= candidate), candidate, t)

    return jax.lax.fori_loop(0, 30, step, jnp.zeros((*bits.shape[:-1], 1), jnp.int32))
