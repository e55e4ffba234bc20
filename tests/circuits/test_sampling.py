"""Draws of every circuit against its own enumerated joint, by chi-square with fixed seeds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from bytejax.circuits import CP, FF, HMM, BTree, Theta
from tests.circuits.enumeration import all_windows, log_joint, random_theta

DRAWS = 100_000
CIRCUITS = [FF(3), CP(4, 3), HMM(4, 2), BTree(4, 3), BTree(5, 2)]
SAMPLERS = ["sample", "sequential", "conditioned", "given_first"]
LEVEL = 0.001 / (len(CIRCUITS) * len(SAMPLERS))
VOCAB = 3


def chi_square(x: np.ndarray, log_probs: np.ndarray) -> float:
    """p-value of draws x [N, n] under the table of log-probabilities; cells that expect fewer than 5 are pooled."""
    expected = np.exp(log_probs.reshape(-1)) * len(x)
    counts = np.bincount(np.ravel_multi_index(x.T, log_probs.shape), minlength=expected.size)
    assert counts[expected == 0].sum() == 0
    small = expected < 5
    cells = [np.append(a[~small], a[small].sum()) for a in (counts, expected)]
    cells = [a[cells[1] > 0] for a in cells]
    return scipy.stats.chisquare(cells[0], cells[1] * cells[0].sum() / cells[1].sum()).pvalue


@functools.cache
def parameters(circuit):
    theta = random_theta(circuit, VOCAB, seed=11)
    return Theta(*(jnp.asarray(x, jnp.float32) for x in theta)), log_joint(circuit, theta)


@functools.cache
def draws(circuit, sampler):
    def one(t, key):
        if sampler == "sample":
            return circuit.sample(t, key)
        if sampler == "conditioned":
            return circuit.sample(circuit.condition(t, 1), key)
        return circuit.sample_with_conditionals(t, key, 1 if sampler == "given_first" else None)[0]

    keys = jax.random.split(jax.random.key(2024 + SAMPLERS.index(sampler)), DRAWS)
    return np.asarray(jax.jit(jax.vmap(one, (None, 0)))(parameters(circuit)[0], keys))


@pytest.mark.parametrize("circuit", CIRCUITS, ids=str)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_draws_follow_the_circuit(circuit, sampler):
    table = parameters(circuit)[1]
    if sampler in ("conditioned", "given_first"):
        table = np.where(np.arange(VOCAB).reshape(-1, *[1] * (table.ndim - 1)) == 1, table, -np.inf)
        table = table - np.logaddexp.reduce(table.reshape(-1))
    assert chi_square(draws(circuit, sampler), table) > LEVEL


@pytest.mark.parametrize("circuit", CIRCUITS[1:], ids=str)
def test_independent_positions_would_be_noticed(circuit):
    """The same marginals without their dependence are rejected: the test above can fail."""
    table = parameters(circuit)[1]
    axes = range(table.ndim)
    marginals = [np.logaddexp.reduce(np.moveaxis(table, i, 0).reshape(VOCAB, -1), 1) for i in axes]
    x = all_windows(table.ndim, VOCAB)
    independent = sum(marginals[i][x[:, i]] for i in axes).reshape(table.shape)
    assert chi_square(draws(circuit, "sample"), independent) < LEVEL


def test_a_batch_is_drawn_independently():
    circuit = BTree(4, 3)
    t = Theta(*(jnp.broadcast_to(x, (DRAWS, *x.shape)) for x in parameters(circuit)[0]))
    x = np.asarray(jax.jit(circuit.sample)(t, jax.random.key(5)))
    assert chi_square(x, parameters(circuit)[1]) > LEVEL
