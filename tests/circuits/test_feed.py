"""Heads that see the window's first byte: still one normalised law of the window, and the loss of exactly that law."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bytejax import circuits, parameters
from bytejax.circuits import head
from bytejax.circuits.scores import leaf_scores
from bytejax.training import losses

D, V, N = 6, 3, 4
CASES = [(name, adapter) for name in ("ff", "cp", "hmm", "btree") for adapter in (None, 2)]


def make(name, adapter):
    circuit = circuits.make(name, N, 1 if name == "ff" else 3)
    config = head.HeadConfig(circuit, D, V, adapter, feed_width=5)
    params = parameters.init(head.table(config), jax.random.key(0))
    noise = lambda x: x + jax.random.normal(jax.random.key(x.size), x.shape)
    return config, jax.tree.map(noise, params)


@pytest.mark.parametrize(("name", "adapter"), CASES)
def test_the_window_has_a_normalised_law(name, adapter):
    config, params = make(name, adapter)
    hidden = jax.random.normal(jax.random.key(1), (D,))
    x = jnp.asarray(list(itertools.product(range(V), repeat=N)))
    theta = head.theta(params, config, jnp.broadcast_to(hidden, (len(x), D)), x[:, 0])
    q = jnp.exp(config.circuit.log_prob(theta, x)).reshape(V, -1)
    np.testing.assert_allclose(q.sum(), 1, rtol=1e-5)
    unfed = config.circuit.conditional(head.theta(params, config, hidden), jnp.zeros(0, jnp.int32))
    np.testing.assert_allclose(q.sum(1), jnp.exp(unfed), rtol=1e-5)


@pytest.mark.parametrize(("name", "adapter"), CASES)
def test_the_loss_is_that_of_the_law(name, adapter):
    config, params = make(name, adapter)
    hidden = jax.random.normal(jax.random.key(1), (2, 9, D))
    labels = jax.random.randint(jax.random.key(2), (2, 9), 0, V)
    ce = losses.window_loss(params, config, hidden, labels, 0.9, 5)[1]["ce"]
    x = losses.windows(labels, N)
    theta = head.theta(params, config, hidden, x[..., 0])
    prefix = config.circuit.prefix_log_probs(theta, jnp.maximum(x, 0), x >= 0)
    steps = -jnp.diff(prefix, axis=-1, prepend=0) * (x >= 0) / jnp.maximum((x >= 0).sum(1), 1)[:, None]
    np.testing.assert_allclose(ce, steps.sum((0, 1)), rtol=1e-4)


def test_a_fresh_feed_changes_nothing():
    config, _ = make("btree", 2)
    params = parameters.init(head.table(config), jax.random.key(3))
    hidden = jax.random.normal(jax.random.key(1), (7, D))
    fed = head.theta(params, config, hidden, jnp.arange(7) % V)
    for a, b in zip(fed, head.theta(params, config, hidden), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize(("name", "adapter"), CASES)
def test_the_gradient_is_that_of_the_whole_logits(name, adapter):
    """Of the parameters and of the hidden states, through a hand-written backward pass, with a chunk that is padded."""
    config, params = make(name, adapter)
    circuit = config.circuit
    hidden = jax.random.normal(jax.random.key(1), (7, D))
    x = jax.random.randint(jax.random.key(2), (7, N), 0, V).at[2, 1:].set(losses.IGNORE)
    seen = x >= 0

    def direct(params, hidden):
        theta = head.theta(params, config, hidden, x[:, 0])
        return circuit.prefix_log_probs(theta, x, seen).sum()

    def chunked(params, hidden):
        late = head.fed(params, config, hidden, x[:, 0])
        scores = leaf_scores(params, config, hidden, late, x, chunk=3)
        return circuit.prefix_from_scores(
            jax.nn.log_softmax(head.sum_logits(params, config, hidden, late)), scores, seen
        ).sum()

    want, got = (jax.jit(jax.grad(f, argnums=(0, 1)))(params, hidden) for f in (direct, chunked))
    size = lambda a: float(np.abs(a).max())  # sums of many terms: float32 rounds to a share of the largest entry
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=0, atol=1e-5 * size(a) + 1e-6), want, got)
    assert np.abs(got[1]).max() > 1e-2
