"""The head: declarations, counts, both forms of the leaves, and scores in chunks."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bytejax import parameters
from bytejax.circuits import CP, FF, HMM, BTree, head, make
from bytejax.circuits.base import gather_scores
from bytejax.circuits.scores import leaf_scores
from bytejax.errors import InputError
from tests.circuits.enumeration import quick_jit

D, V = 6, 7
CIRCUITS = [FF(3), CP(4, 3), HMM(3, 3), BTree(5, 3)]
CONFIGS = [head.HeadConfig(c, D, V, k) for c, k in itertools.product(CIRCUITS, (None, 2))]
configs = pytest.mark.parametrize("config", CONFIGS, ids=str)


def random_params(config, seed=0, dtype=jnp.float32):
    shapes = parameters.flatten(parameters.abstract(head.table(config), dtype))
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {name: 0.5 * jax.random.normal(key, s.shape, dtype) for key, (name, s) in zip(keys, shapes.items())}


@pytest.mark.parametrize("name, millions", [("ff", 21.0), ("cp", 671.2), ("btree", 729.9), ("hmm", 734.1)])
def test_counts_of_the_paper(name, millions):
    config = head.HeadConfig(make(name, 16, 1 if name == "ff" else 32), width=4096, vocab=320, adapter_rank=None)
    assert round(head.count(config) / 1e6, 1) == millions


def test_count_of_the_low_memory_head():
    n, r, v, d, k = 8, 16, 258, 192, 4
    config = head.HeadConfig(CP(n, r), d, v, k)
    assert head.count(config) == n * v * d + n * r * k * d + n * r * v * k + r * d


@configs
def test_initial_components_are_equal_but_learn_apart(config):
    params = parameters.init(head.table(config), jax.random.key(0))
    assert ("sums" in params) == (config.circuit.rank > 1)
    assert ("bias" in params) == isinstance(config.circuit, HMM)
    leaves = params["leaves" if config.adapter_rank is None else "shared"]
    assert 0.0120 < np.abs(leaves).max() <= head.UNIFORM
    if config.adapter_rank is None:
        return
    hidden = jax.random.normal(jax.random.key(1), (4, D))
    theta = head.theta(params, config, hidden)
    np.testing.assert_array_equal(theta.leaves, np.broadcast_to(theta.leaves[:, :, :1], theta.leaves.shape))
    x = jnp.zeros((4, config.circuit.window), jnp.int32)
    gradient = jax.grad(lambda p: config.circuit.log_prob(head.theta(p, config, hidden), x).sum())(params)
    assert all(np.abs(a - b).max() > 1e-4 for a, b in itertools.pairwise(gradient["up"][0]))


@pytest.mark.parametrize("chunk", [4, 11, 100])
@pytest.mark.parametrize("config", CONFIGS[2:6], ids=str)
def test_scores_in_chunks_are_those_of_theta(config, chunk):
    circuit, params = config.circuit, random_params(config)
    hidden = jax.random.normal(jax.random.key(1), (11, D))
    x = jax.random.randint(jax.random.key(2), (11, circuit.window), 0, V).at[::3, -1].set(-100)
    seen = x >= 0

    def direct(params, hidden):
        theta = head.theta(params, config, hidden)
        return theta.sums, jnp.where(seen[..., None], gather_scores(theta.leaves, jnp.where(seen, x, 0)), 0)

    def chunked(params, hidden):
        return jax.nn.log_softmax(head.sum_logits(params, config, hidden, hidden)), leaf_scores(
            params, config, hidden, hidden, x, chunk
        )

    def both(f):
        def loss(params, hidden):
            sums, scores = f(params, hidden)
            return jnp.sum(circuit.prefix_from_scores(sums, scores, seen))

        return quick_jit(lambda *a: (f(*a), jax.grad(loss, argnums=(0, 1))(*a)))(params, hidden)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), both(direct), both(chunked))


def test_bfloat16_parameters_give_float32_theta_and_a_gradient_summed_in_float32():
    config = head.HeadConfig(CP(3, 2), D, V, None)
    params = random_params(config, dtype=jnp.bfloat16)
    hidden = jax.random.normal(jax.random.key(1), (4096, D), jnp.bfloat16)
    x = jnp.zeros((4096, 3), jnp.int32)
    assert head.theta(params, config, hidden).leaves.dtype == jnp.float32

    def loss(params, hidden):
        return -jnp.sum(leaf_scores(params, config, hidden, hidden, x, chunk=16))

    gradient = jax.jit(jax.grad(loss))(params, hidden)["leaves"]
    wide = [jax.tree.map(lambda a: a.astype(jnp.float32), a) for a in (params, hidden)]
    exact = jax.jit(jax.grad(loss))(*wide)["leaves"]
    assert gradient.dtype == jnp.bfloat16
    # 256 chunks summed in bfloat16 would stop growing far from here; rounding each once is within its 8 bits.
    np.testing.assert_allclose(gradient, exact, atol=0.01 * np.abs(exact).max())


@configs
def test_from_unembeddings(config):
    params, circuit = random_params(config), config.circuit
    matrices = jax.random.normal(jax.random.key(3), (2, V, D))
    theta = head.theta(head.from_unembeddings(params, config, matrices), config, jnp.eye(D))
    expected = jax.nn.log_softmax(jnp.einsum("dD,mvD->dmv", jnp.eye(D), matrices))
    for z in range(circuit.rank):
        np.testing.assert_allclose(theta.leaves[:, :2, z], expected, atol=1e-5)
    np.testing.assert_allclose(theta.leaves[:, 2:], head.theta(params, config, jnp.eye(D)).leaves[:, 2:], atol=1e-6)
    more = head.from_unembeddings(params, config, jnp.ones((9, V, D)))  # more heads than places: the rest is not used
    assert jax.tree.map(jnp.shape, more) == jax.tree.map(jnp.shape, params)


@pytest.mark.parametrize(
    "build, part",
    [
        (lambda: head.HeadConfig(CP(3, 2), 0, 7, None), "width must be a positive integer, got 0"),
        (lambda: head.HeadConfig(CP(3, 2), 6, 7, 0), "adapter_rank must be a positive integer, got 0"),
        (
            lambda: head.from_unembeddings({}, head.HeadConfig(CP(3, 2), 6, 7, None), jnp.ones((2, 6, 6))),
            "expected heads [m, 7, 6], got (2, 6, 6)",
        ),
    ],
)
def test_bad_input_is_named(build, part):
    with pytest.raises(InputError, match=r"^[^\n]*$") as error:
        build()
    assert part in str(error.value)
