"""What compares a head's conditionals with the target's own laws: distillation, and accept lengths to expect.

Both need every conditional q(. | x_<j) of a window, [n, v] per position, where the likelihood needs n numbers.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from bytejax.circuits import head
from bytejax.circuits.head import HeadConfig
from bytejax.parameters import Params
from bytejax.training.losses import IGNORE, chunked, discounts, taken, weighted_windows, windows


def window_kl(
    params: Params,
    config: HeadConfig,
    hidden: jax.Array,
    labels: jax.Array,
    laws: jax.Array,
    gamma: float,
    chunk: int,
    boundaries: Sequence[int] = (),
    first: float = 1.0,
    positions: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Discounted KL divergence of every place's conditional from the target's law (MtPC, Appendix J).

    laws [B, T, v]: the target's log-probabilities of the label at every position; the rest is as in
    `losses.window_loss`. Conditionals are given the labels before them, with ignored ones summed out; a place whose
    label is ignored counts nothing. Returns the loss [], a sum over sequences, and KL(target || head) per place [n].
    """
    n = config.circuit.window
    x, share, _ = weighted_windows(labels, n, boundaries, positions)
    hidden = taken(hidden, positions)
    where = jnp.broadcast_to(jnp.arange(labels.shape[1]), labels.shape) if positions is None else positions
    rows = jnp.broadcast_to(jnp.arange(len(labels))[:, None], where.shape)
    flat = tuple(a.reshape(-1, *a.shape[2:]) for a in (hidden, x, share, rows, where))
    chunk = min(chunk, flat[0].shape[0])

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(total, batch):
        hidden, x, share, row, place = batch
        ahead = jnp.minimum(place[:, None] + jnp.arange(n), labels.shape[1] - 1)
        log_p = laws[row[:, None], ahead]
        log_q = _conditionals(params, config, hidden, x)[..., : log_p.shape[-1]]
        kl = jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1)
        return total + jnp.sum(jnp.where(x != IGNORE, share * kl, 0), 0), None

    zero = jnp.zeros(n, laws.dtype)
    per_place = jax.lax.scan(step, zero, chunked(flat, chunk, (0, IGNORE, 0, 0, 0)))[0]
    return jnp.sum(discounts(n, gamma, first) * per_place), per_place


def expected_accept_lengths(
    params: Params, config: HeadConfig, hidden: jax.Array, labels: jax.Array, laws: jax.Array, stride: int
) -> dict[str, jax.Array]:
    """Accept lengths that a head would have on this text, were every draft the text's own next byte.

    A window's first byte is given, as under `--bonus condition`, so that the estimate is
    1 + sum_{j=2..n} prod_{i=2..j} a_i. In sampling a_i = sum_x min(p_i(x), q_i(x)), the chance that token-wise
    verification keeps a draft; in greedy decoding a_i is 1 where the two laws have the same arg-max, else 0.

    hidden [B, T, d], labels [B, T], laws as in `window_kl`; stride: of the positions looked at. The means over windows
    without ignored labels: {"greedy" [], "sampling" []}, 0 where there is none.
    """
    n, t = config.circuit.window, labels.shape[1]
    starts = jnp.arange(0, max(t - n + 1, 1), stride)
    ahead = jnp.minimum(starts[:, None] + jnp.arange(n), t - 1)
    x, log_p = windows(labels, n)[:, starts], laws[:, ahead]
    log_q = _conditionals(params, config, hidden[:, starts], x)[..., : log_p.shape[-1]]
    valid = (x != IGNORE).all(-1)

    def mean(accepted):
        lengths = 1 + jnp.sum(jnp.cumprod(accepted[..., 1:], -1), -1)
        return jnp.sum(jnp.where(valid, lengths, 0)) / jnp.maximum(jnp.sum(valid), 1)

    same = jnp.argmax(log_p, -1) == jnp.argmax(log_q, -1)
    overlap = jnp.sum(jnp.minimum(jnp.exp(log_p), jnp.exp(log_q)), -1)
    return {"greedy": mean(same.astype(log_p.dtype)), "sampling": mean(overlap)}


def _conditionals(params: Params, config: HeadConfig, hidden: jax.Array, x: jax.Array) -> jax.Array:
    """hidden [..., d], x [..., n] with IGNORE where unknown -> log q(. | x_<j) for every j, [..., n, v]."""
    theta = head.theta(params, config, hidden, x[..., 0])
    return config.circuit.conditionals(theta, jnp.maximum(x, 0), x != IGNORE)
