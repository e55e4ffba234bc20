"""What is minimised: the likelihood of the next byte, and of every window of bytes (MtPC, arXiv 2511.11346).

Labels are the inputs already shifted: labels[t] is the byte after input t, IGNORE where nothing is to be learned.
Everything is in nats, in at least float32, and is computed in chunks of positions that are rematerialised backwards.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from bytejax.circuits import head
from bytejax.circuits.head import HeadConfig
from bytejax.circuits.mixtures import weighted_steps
from bytejax.circuits.scores import leaf_scores
from bytejax.parameters import Params

IGNORE = -100


def windows(labels: jax.Array, n: int, boundaries: Sequence[int] = ()) -> jax.Array:
    """The next n labels of every position. labels [B, T] int -> [B, T, n], IGNORE past the end of the row.

    boundaries: ids that end a document (the last label a window may hold); labels after one are IGNORE, so that in
    packed rows no window crosses into the next document.
    """
    labels = jnp.asarray(labels)
    length = labels.shape[1]
    ends = jnp.isin(labels, jnp.asarray(boundaries, labels.dtype)) if len(boundaries) else jnp.zeros(labels.shape, bool)
    document = jnp.cumsum(ends, 1) - ends
    index = jnp.arange(length)[:, None] + jnp.arange(n)
    inside = index < length
    index = jnp.minimum(index, length - 1)
    same = document[:, index] == document[:, :, None]
    return jnp.where(inside & same, labels[:, index], IGNORE)


def discounts(n: int, gamma: float, first: float = 1.0) -> jax.Array:
    """Weights of the n places in the window: gamma^(j-1), place 1 times `first`, normalised by their sum. -> [n]"""
    powers = gamma ** jnp.arange(n) * jnp.where(jnp.arange(n) == 0, first, 1.0)
    return powers / jnp.sum(powers)


def taken(a: jax.Array, positions: jax.Array | None) -> jax.Array:
    """a [B, T, ...] at positions [B, K], or as it is for None."""
    if positions is None:
        return a
    return jnp.take_along_axis(a, positions.reshape(*positions.shape, *(1,) * (a.ndim - 2)), axis=1)


def weighted_windows(
    labels: jax.Array, n: int, boundaries: Sequence[int], positions: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The windows [B, K, n] that count; each label's share among its place's in the sequence; the number of those.

    labels [B, T], positions [B, K] or None for all.
    """
    x = taken(windows(labels, n, boundaries), positions)
    valid = x != IGNORE
    count = jnp.sum(valid, 1)
    return x, valid / jnp.maximum(count, 1)[:, None], count


def window_loss(
    params: Params,
    config: HeadConfig,
    hidden: jax.Array,
    labels: jax.Array,
    gamma: float,
    chunk: int,
    boundaries: Sequence[int] = (),
    first: float = 1.0,
    positions: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Discounted negative log-likelihood of all overlapping windows; ignored labels are summed out of the circuit.

    hidden [B, T, d] float; labels [B, T] int, IGNORE where not learned; gamma: discount per place; chunk: positions
    computed at once; boundaries: see `windows`; first: what the loss of place 1 counts beside the others. A drafter
    that is told its first byte never drafts it: with 0 the loss is the likelihood of the rest given that byte.
    positions [B, K]: the windows that count, by where they start; None for all (MtPC, Appendix G, takes a sample).

    Returns the loss [] and {"ce" [n], "count" [n]}. With l_j = log q(x_j | x_<j) and valid_j the labels that place j
    has in a sequence, ce_j = sum over sequences of -sum_t l_j / max(1, valid_j), and the loss is
    sum_j gamma^(j-1) ce_j / sum_j gamma^(j-1); the paper's formula leaves that last division out, its code
    does not. It is a *sum* over sequences: divide by B for the mean.
    """
    n = config.circuit.window
    x, share, count = weighted_windows(labels, n, boundaries, positions)
    hidden = taken(hidden, positions)
    flat = (hidden.reshape(-1, hidden.shape[-1]), x.reshape(-1, n), share.reshape(-1, n))
    ce = _window_cross_entropy(params, config, *flat, chunk)
    return jnp.sum(discounts(n, gamma, first) * ce), {"ce": ce, "count": jnp.sum(count, 0)}


def _window_cross_entropy(
    params: Params, config: HeadConfig, hidden: jax.Array, x: jax.Array, share: jax.Array, chunk: int
) -> jax.Array:
    """-sum_c share[c, j] log q(x_j | x_<j) for every place j. hidden [C, d], x and share [C, n] -> [n]."""
    late = head.fed(params, config, hidden, x[:, 0])
    scores = leaf_scores(params, config, hidden, late, x, min(chunk, hidden.shape[0]))
    return -weighted_steps(params, config, hidden, late, scores, x != IGNORE, share.astype(scores.dtype), chunk)


def next_byte_loss(
    features: jax.Array, labels: jax.Array, unembed: Callable | None = None, chunk: int = 1024
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean cross-entropy of the next byte over all labels that are not IGNORE.

    features [B, T, v] logits; or [B, T, d] hidden states with `unembed` (hidden -> logits), whose logits then exist for
    `chunk` positions at a time. labels [B, T] int. Returns the loss [] and {"ce" [], the same, "count" []}.
    """

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(total, batch):
        features, labels = batch
        logits = features if unembed is None else unembed(features)
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        hit = jnp.arange(logits.shape[-1]) == labels[:, None]
        log_prob = jnp.sum(jnp.where(hit, logits, 0), -1) - jax.nn.logsumexp(logits, -1)
        return total - jnp.sum(jnp.where(labels != IGNORE, log_prob, 0)), None

    flat = (features.reshape(-1, features.shape[-1]), labels.reshape(-1))
    chunk = flat[1].shape[0] if unembed is None else min(chunk, flat[1].shape[0])
    zero = jnp.zeros((), jnp.promote_types(features.dtype, jnp.float32))
    total = jax.lax.scan(step, zero, chunked(flat, chunk, (0, IGNORE)))[0]
    count = jnp.sum(labels != IGNORE)
    loss = total / jnp.maximum(count, 1)
    return loss, {"ce": loss, "count": count}


def chunked(arrays: Sequence[jax.Array], chunk: int, fill: Sequence[int]) -> tuple[jax.Array, ...]:
    """Each array [C, ...] -> [ceil(C / chunk), chunk, ...], the last chunk filled up with its `fill`."""
    chunks = -(-arrays[0].shape[0] // chunk)

    def split(a, value):
        padding = [(0, chunks * chunk - a.shape[0])] + [(0, 0)] * (a.ndim - 1)
        return jnp.pad(a, padding, constant_values=value).reshape(chunks, chunk, *a.shape[1:])

    return tuple(map(split, arrays, fill))
