"""Scores of whole windows under a circuit head, for training: the logits never exist all at once.

Letters: n window, r rank, v vocabulary, d model width, k adapter rank, C positions, c those of a chunk.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from bytejax.circuits.head import ADAPTED, HeadConfig, wide_dtype
from bytejax.parameters import Params

COMPONENTS = 32  # at once: their gradient is summed apart before it is written


def leaf_scores(
    params: Params, config: HeadConfig, hidden: jax.Array, late: jax.Array, windows: jax.Array, chunk: int
) -> jax.Array:
    """Log-probability of each window's bytes under each component, without ever holding all the logits.

    hidden and late (see `fed`) [C, d]; windows [C, n] int, negative where ignored (the score is then 0); chunk: how
    many of the C positions at once -> [C, n, r], at least float32. One place in the window is done at a time (of a full
    head at most COMPONENTS of its components), `chunk` positions of it at a time, so that the logits alive are
    [r, v, chunk], forwards and backwards; a gradient is summed in float32.
    """
    n, r = config.circuit.window, config.circuit.rank
    chunks = -(-hidden.shape[0] // chunk)
    padding = chunks * chunk - hidden.shape[0]
    x = jnp.pad(windows.T, ((0, 0), (0, padding)), constant_values=-1).reshape(-1, chunks, chunk)
    split = lambda h: jnp.pad(h, ((0, padding), (0, 0))).reshape(chunks, chunk, -1)
    leaf = {name: params[name] for name in (("leaves",) if config.adapter_rank is None else ADAPTED)}
    parts = r // COMPONENTS if config.adapter_rank is None and r % COMPONENTS == 0 else 1
    if parts > 1:
        leaf = {"leaves": params["leaves"].reshape(n * parts, COMPONENTS, *params["leaves"].shape[2:])}
    first = jnp.repeat(jnp.arange(n) == 0, parts)
    features = (split(hidden),) if hidden is late else (split(hidden), split(late))
    scores = _place_scores(leaf, features, (jnp.repeat(x, parts, axis=0), first))  # [n parts, chunks, r / parts, chunk]
    return scores.transpose(1, 3, 0, 2).reshape(chunks * chunk, n, r)[: hidden.shape[0]]


@jax.custom_vjp
def _place_scores(
    leaf: Mapping[str, jax.Array], features: tuple[jax.Array, ...], labels: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """leaf: weights, n leading; features: of place 1 and of the others, or of all -> scores [n, chunks, r, chunk].

    features [chunks, chunk, d] each; labels: x [n, chunks, chunk], and which of the n are of place 1, [n] bool.
    """
    return _place_scores_forward(leaf, features, labels)[0]


def _place_scores_forward(leaf, features, labels):
    def step(weights, batch):
        hidden, x = batch
        logits = _chunk_logits(weights, hidden)
        total = jax.nn.logsumexp(logits, 1)
        scores = jnp.sum(jnp.where(_hit(logits, x), logits, 0), 1) - total
        return weights, (jnp.where(x >= 0, scores, 0), total)

    def place(_, xs):
        weights, x, first = xs
        return None, jax.lax.scan(step, weights, (_features_of(features, first), x))[1]

    scores, totals = jax.lax.scan(place, None, (leaf, *labels))[1]
    return scores, (leaf, features, labels, totals)


def _place_scores_backward(saved, cotangent):
    # Only the log-normalisers were kept: the logits are made again, a chunk of a place at a time.
    leaf, features, (x, first), totals = saved
    widened = lambda tree: jax.tree.map(lambda a: jnp.zeros(a.shape, wide_dtype(a)), tree)

    def place(carry, xs):
        weights, x, totals, g, first = xs

        def step(sums, batch):
            hidden, x, total, g = batch
            logits, pull = jax.vjp(_chunk_logits, weights, hidden)
            slope = (_hit(logits, x) - jnp.exp(logits - total[:, None])) * jnp.where(x >= 0, g, 0)[:, None]
            weights_bar, hidden_bar = pull(slope)
            sums = jax.tree.map(lambda s, w: s + w.astype(s.dtype), sums, weights_bar)
            return sums, hidden_bar.astype(wide_dtype(hidden))

        batches = _features_of(features, first), x, totals, g
        weights_bar, hidden_bar = jax.lax.scan(step, widened(weights), batches)
        if len(carry) == 1:
            carry = (carry[0] + hidden_bar,)
        else:
            carry = carry[0] + jnp.where(first, hidden_bar, 0), carry[1] + jnp.where(first, 0, hidden_bar)
        return carry, jax.tree.map(lambda s, w: s.astype(w.dtype), weights_bar, weights)

    xs = (leaf, x, totals, cotangent, first)
    features_bar, leaf_bar = jax.lax.scan(place, widened(features), xs)
    return leaf_bar, jax.tree.map(lambda g, h: g.astype(h.dtype), features_bar, features), None


def _features_of(features: tuple[jax.Array, ...], first: jax.Array) -> jax.Array:
    """The features of a place, given whether it is the first."""
    return features[0] if len(features) == 1 else jnp.where(first, *features)


_place_scores.defvjp(_place_scores_forward, _place_scores_backward)


def _hit(logits: jax.Array, x: jax.Array) -> jax.Array:
    """Which logits [r, v, chunk] are those of the bytes x [chunk]. -> [1, v, chunk] bool."""
    return jnp.arange(logits.shape[1])[None, :, None] == x


def _chunk_logits(weights: Mapping[str, jax.Array], hidden: jax.Array) -> jax.Array:
    # The chunk is the last axis, so that sums over the vocabulary run along vector lanes: four times faster on CPU.
    wide = wide_dtype(hidden)
    if "leaves" in weights:
        return jnp.einsum("rvd,cd->rvc", weights["leaves"], hidden, preferred_element_type=wide)
    shared = jnp.einsum("vd,cd->vc", weights["shared"], hidden, preferred_element_type=wide)
    low = jnp.einsum("rkd,cd->rkc", weights["down"], hidden)
    adapted = jnp.einsum("rvk,rkc->rvc", weights["up"], low, preferred_element_type=wide)
    return _repeat(shared, adapted.shape[0]) + adapted


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _repeat(x: jax.Array, times: int) -> jax.Array:
    return jnp.broadcast_to(x, (times, *x.shape))


def _repeat_backward(times: int, _: None, g: jax.Array) -> tuple[jax.Array]:
    # The sum over the leading axis as a matrix product: XLA's own reduction of it is 50 times slower on CPU.
    return (jnp.tensordot(jnp.ones(times, g.dtype), g, 1),)


_repeat.defvjp(lambda x, times: (_repeat(x, times), None), _repeat_backward)
