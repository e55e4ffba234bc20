"""Divergence from the target and expected accept lengths, against sums written out position by position."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bytejax import circuits, parameters
from bytejax.circuits import head as heads
from bytejax.training.distill import expected_accept_lengths, window_kl
from bytejax.training.losses import IGNORE, discounts, window_loss, windows

B, T, D, V, STOP = 2, 11, 6, 5, 4


@pytest.fixture(params=[("ff", None), ("hmm", 4), ("btree", None)], ids=["ff", "fed hmm", "btree"])
def case(request):
    name, feed = request.param
    circuit = circuits.make(name, 3, 1 if name == "ff" else 2)
    config = heads.HeadConfig(circuit, D, V + 1, None, feed)  # one id more than the target has
    params = parameters.init(heads.table(config), jax.random.key(0))
    params = jax.tree.map(lambda x: 0.4 * jax.random.normal(jax.random.key(x.size), x.shape), params)
    hidden, labels = (
        jax.random.normal(jax.random.key(1), (B, T, D)),
        jax.random.randint(jax.random.key(2), (B, T), 0, V),
    )
    labels = labels.at[0, 4].set(IGNORE).at[1, 6].set(STOP).at[1, 9:].set(IGNORE)
    laws = jax.nn.log_softmax(jax.random.normal(jax.random.key(3), (B, T, V)))
    return params, config, hidden, labels, laws


def conditionals(params, config, hidden, x):
    """log q(. | x_<j), ignored bytes summed out by hand: over every value they might have."""
    fills = [i for i, value in enumerate(x) if value == IGNORE]
    rows = []
    for j in range(len(x)):
        gone = [i for i in fills if i < j]
        total = 0
        for values in itertools.product(range(V + 1), repeat=len(gone)):
            y = np.maximum(np.array(x), 0)
            y[gone] = list(values)
            theta = heads.theta(params, config, hidden, jnp.asarray(x[0]))
            log_q = config.circuit.conditionals(theta, jnp.asarray(y))
            prefix = sum(log_q[i, y[i]] for i in range(j))
            total = total + jnp.exp(log_q[j] + prefix)
        rows.append(jnp.log(total / total.sum()))
    return jnp.stack(rows)


@pytest.mark.parametrize("subset", [False, True])
def test_divergence_is_the_sum_over_windows(case, subset):
    params, config, hidden, labels, laws = case
    n, gamma, first = 3, 0.8, 0.5
    positions = jnp.asarray([[0, 2, 3, 7], [1, 4, 5, 6]]) if subset else None
    value, per_place = window_kl(params, config, hidden, labels, laws, gamma, 4, (STOP,), first, positions)
    x = np.asarray(windows(labels, n, (STOP,)))
    want = np.zeros(n)
    for b in range(B):
        starts = range(T) if positions is None else positions[b].tolist()
        count = np.maximum((x[b, starts] != IGNORE).sum(0), 1)
        for t in starts:
            log_q = conditionals(params, config, hidden[b, t], x[b, t])[:, :V]
            for j in range(n):
                if x[b, t, j] != IGNORE:
                    p = np.exp(laws[b, t + j])
                    want[j] += float((p * (laws[b, t + j] - log_q[j])).sum()) / count[j]
    np.testing.assert_allclose(per_place, want, rtol=2e-4)
    np.testing.assert_allclose(value, (discounts(n, gamma, first) * want).sum(), rtol=2e-4)


def test_windows_that_count(case):
    params, config, hidden, labels, _ = case
    everywhere = jnp.broadcast_to(jnp.arange(T), (B, T))
    arguments = (params, config, hidden, labels, 0.9, 4, (STOP,), 1.0)
    whole, aux = window_loss(*arguments)
    np.testing.assert_allclose(window_loss(*arguments, everywhere)[0], whole, rtol=1e-6)
    some, fewer = window_loss(*arguments, everywhere[:, :3])
    assert (fewer["count"] < aux["count"]).all() and float(abs(some - whole)) > 1e-3


def test_expected_accept_lengths(case):
    params, config, hidden, labels, laws = case
    got = expected_accept_lengths(params, config, hidden, labels, laws, 2)
    sampling, greedy = [], []
    for b in range(B):
        for t in range(0, T - 2, 2):
            x = np.asarray(labels[b, t : t + 3])
            if (x != IGNORE).all():
                q = np.exp(conditionals(params, config, hidden[b, t], x))[:, :V]
                p = np.exp(laws[b, t : t + 3])
                overlap, same = np.minimum(p, q).sum(-1), p.argmax(-1) == q.argmax(-1)
                sampling.append(1 + overlap[1] + overlap[1] * overlap[2])
                greedy.append(1 + same[1] + same[1] * same[2])
    assert len(sampling) > 3
    np.testing.assert_allclose(got["sampling"], np.mean(sampling), rtol=1e-4)
    np.testing.assert_allclose(got["greedy"], np.mean(greedy), rtol=1e-6)
    nothing = expected_accept_lengths(params, config, hidden, jnp.full((B, T), IGNORE), laws, 2)
    assert nothing == {"greedy": 0, "sampling": 0}
