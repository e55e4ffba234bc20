"""Weighted sums of a circuit's step log-probabilities, for training: the mixtures never exist for all positions at
once, and their gradient is summed in place.

Letters: n window, r rank, z rows of sums, d model width, C positions, c those of a chunk.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from bytejax.circuits import head
from bytejax.circuits.head import HeadConfig, wide_dtype
from bytejax.parameters import Params

LOGITS_AT_ONCE = 2**25  # of sums, of a chunk of positions
WEIGHTS_AT_ONCE = 2**24  # of the sums' gradient, beside the sum itself


def weighted_steps(
    params: Params,
    config: HeadConfig,
    hidden: jax.Array,
    late: jax.Array,
    scores: jax.Array,
    observed: jax.Array,
    share: jax.Array,
    chunk: int,
) -> jax.Array:
    """sum_c share[c, j] log q(x_j | x_<j) for every place j of the window.

    hidden and late (see `head.fed`) [C, d]; scores [C, n, r] of the windows' bytes; observed [C, n] bool, False where a
    byte is summed out; share [C, n], without a gradient; chunk: how many positions at once, at most -> [n].
    """
    mixture = {name: params[name] for name in ("sums", "bias") if name in params}
    fits = LOGITS_AT_ONCE // (config.circuit.sum_rows * config.circuit.rank)
    chunk = max(1, min(chunk, hidden.shape[0], fits))
    chunks = -(-hidden.shape[0] // chunk)

    def split(a):
        padding = [(0, chunks * chunk - a.shape[0])] + [(0, 0)] * (a.ndim - 1)
        return jnp.pad(a, padding).reshape(chunks, chunk, *a.shape[1:])

    features = (hidden,) if late is hidden else (hidden, late)
    batches = jax.tree.map(split, (features, scores, observed, jax.lax.stop_gradient(share)))
    return _weighted_steps(config, mixture, batches)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weighted_steps(config: HeadConfig, mixture: Mapping[str, jax.Array], batches: Any) -> jax.Array:
    def step(total, batch):
        features, scores, observed, share = batch
        logits = head.sum_logits(mixture, config, features[0], features[-1])
        return total + _chunk_steps(config, logits, scores, observed, share), None

    scores = batches[1]
    return jax.lax.scan(step, jnp.zeros(scores.shape[2], scores.dtype), batches)[0]


def _chunk_steps(config, logits, scores, observed, share):
    return jnp.sum(share * config.circuit.step_log_probs(jax.nn.log_softmax(logits), scores, observed), 0)


def _backward(config, saved, cotangent):
    mixture, batches = saved

    def step(bars, batch):
        features, scores, observed, share = batch
        logits, pull_features = jax.vjp(lambda f: head.sum_logits(mixture, config, f[0], f[-1]), features)
        _, pull = jax.vjp(lambda y, s: _chunk_steps(config, y, s, observed, share), logits, scores)
        logits_bar, scores_bar = pull(cotangent)
        if bars:
            bars = {"sums": _add_outer(config, bars["sums"], logits_bar, features)} | {
                name: bar + logits_bar.sum(0) for name, bar in bars.items() if name == "bias"
            }
        return bars, (pull_features(logits_bar)[0], scores_bar)

    zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, wide_dtype(w)), mixture)
    bars, (features_bar, scores_bar) = jax.lax.scan(step, zeros, batches)
    bars = jax.tree.map(lambda bar, w: bar.astype(w.dtype), bars, mixture)
    return bars, (features_bar, scores_bar, None, jnp.zeros_like(batches[3]))


_weighted_steps.defvjp(lambda config, *args: (_weighted_steps(config, *args), args), _backward)


def _add_outer(config: HeadConfig, total: jax.Array, logits_bar: jax.Array, features: tuple[jax.Array, ...]):
    """Adds sum_c logits_bar[c] x feature[c] to total [z, r, d], some blocks of rows at a time.

    Added at once, the products would take as much memory as the total.
    """
    circuit, outer = config.circuit, functools.partial(jnp.einsum, "czy,cd->zyd", preferred_element_type=total.dtype)
    early = jnp.asarray([k in circuit.blocks_above(1) for k in range(circuit.blocks)])
    feature = lambda k: features[0] if len(features) == 1 else jnp.where(early[k], *features)
    if len(features) == 1 and total.size <= WEIGHTS_AT_ONCE:
        return total + outer(logits_bar, features[0])
    total = total.at[:1].add(outer(logits_bar[:, :1], feature(0)))

    def add(k, total):
        start = 1 + (k - 1) * circuit.rank
        rows = jax.lax.dynamic_slice_in_dim(logits_bar, start, circuit.rank, 1)
        old = jax.lax.dynamic_slice_in_dim(total, start, circuit.rank, 0)
        return jax.lax.dynamic_update_slice_in_dim(total, old + outer(rows, feature(k)), start, 0)

    return jax.lax.fori_loop(1, circuit.blocks, add, total)
