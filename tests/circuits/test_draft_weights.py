"""A head arranged for drafting its first bytes only: the same law of those bytes as the whole head's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bytejax import circuits, parameters
from bytejax.circuits import Theta, draft_head, head

D, V, N = 6, 5, 5


def make(name, adapter, feed):
    circuit = circuits.make(name, N, 1 if name == "ff" else 3)
    config = head.HeadConfig(circuit, D, V, adapter, feed)
    params = parameters.init(head.table(config), jax.random.key(0))
    noise = lambda x: x + jax.random.normal(jax.random.key(x.size), x.shape)
    return config, jax.tree.map(noise, params)


@pytest.mark.parametrize("feed", [None, 4])
@pytest.mark.parametrize("adapter", [None, 2])
@pytest.mark.parametrize("name", ["ff", "cp", "hmm", "btree"])
def test_the_law_of_the_first_places_is_the_whole_heads(name, adapter, feed):
    config, params = make(name, adapter, feed)
    circuit = config.circuit
    hidden, first = jax.random.normal(jax.random.key(1), (4, D)), jnp.array([0, 4, 2, 2])
    sums, leaves = head.logits(params, config, hidden, first)
    whole = circuit.normalise(sums, leaves)
    for places in range(1, N + 1):
        weights = draft_head.draft_weights(params, config, places)
        part = draft_head.draft_logits(weights, config, hidden, first)
        rows = circuit.rows_above(places)
        np.testing.assert_allclose(part[0][:, rows], sums[:, rows], atol=1e-5)
        np.testing.assert_allclose(part[1], leaves[:, :places], atol=1e-5)
        theta = Theta(*map(jax.nn.log_softmax, part))
        drafts = circuit.greedy(theta, first=first)
        np.testing.assert_array_equal(drafts, circuit.greedy(whole, first=first)[:, :places])
        keys = jax.random.split(jax.random.key(places), 4)
        x, log_q = jax.vmap(circuit.sample_with_conditionals)(theta, keys, first)
        assert x.shape == (4, places) and (x[:, 0] == first).all()
        expected = circuit.conditionals(whole, jnp.pad(x, ((0, 0), (0, N - places))))[:, 1:places]
        np.testing.assert_allclose(log_q[:, 1:], expected, atol=1e-4)


def test_sums_of_later_places_are_left_out():
    config, params = make("hmm", 2, 4)
    size = lambda places: sum(x.size for x in jax.tree.leaves(draft_head.draft_weights(params, config, places)))
    per_place = V * D + 3 * 2 * D + 3 * V * 2 + 3 * 3 * D  # unembedding, adapters down and up, one transition
    assert size(4) - size(3) == per_place
