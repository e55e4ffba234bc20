"""Every method of every circuit against brute-force enumeration."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from circuits.enumeration import all_windows, log_conditionals, log_joint, log_marginals, random_theta
from jax.test_util import check_grads

from bytejax.circuits import CP, FF, HMM, BTree, Theta, make
from bytejax.errors import InputError

CASES = [
    *((FF(1), 5), (FF(6), 3)),
    *((CP(1, 3), 4), (CP(4, 4), 5), (CP(5, 1), 3)),
    *((HMM(1, 2), 4), (HMM(2, 3), 5), (HMM(3, 1), 4), (HMM(4, 4), 4), (HMM(5, 2), 3), (HMM(6, 3), 3)),
    *((BTree(1, 3), 4), (BTree(2, 3), 5), (BTree(3, 4), 4), (BTree(4, 1), 4), (BTree(4, 3), 4), (BTree(5, 4), 4)),
    (BTree(6, 3), 5),
]
cases = pytest.mark.parametrize("circuit, vocab", CASES, ids=lambda c: getattr(c, "name", c) and str(c))
DTYPES = {"float64": {"rtol": 0, "atol": 1e-12}, "float32": {"rtol": 1e-6, "atol": 1e-5}}
dtypes = pytest.mark.parametrize("dtype", DTYPES)
scales = pytest.mark.parametrize("scale", [1.0, 30.0], ids=["flat", "peaked"])


@contextlib.contextmanager
def precision(dtype, theta):
    """The parameters in that dtype, and the float64 table of what was really rounded to it."""
    with jax.enable_x64(dtype == "float64"):
        yield Theta(*(jnp.asarray(x, dtype) for x in theta))


def check(got, want, dtype, message=""):
    assert np.asarray(got).dtype == dtype
    np.testing.assert_allclose(np.asarray(got), want, **DTYPES[dtype], err_msg=message)


@cases
@dtypes
@scales
def test_likelihoods_and_conditionals(circuit, vocab, dtype, scale):
    theta = random_theta(circuit, vocab, seed=1, scale=scale)
    with precision(dtype, theta) as t:
        table = log_joint(circuit, t)
        marginals, conditionals = log_marginals(table), log_conditionals(table)
        assert abs(marginals[0]) < (1e-12 if dtype == "float64" else 1e-5)  # total mass 1: the sums go the right way
        x = all_windows(circuit.window, vocab)
        check(jax.jit(circuit.log_prob)(t, x), table.reshape(-1), dtype)
        prefixes = jax.jit(circuit.prefix_log_probs)(t, x)
        rows = jax.jit(circuit.conditionals)(t, x)
        for i in range(circuit.window):
            before = tuple(x[:, :i].T)
            check(prefixes[:, i], marginals[i + 1][(*before, x[:, i])], dtype, f"prefix {i + 1}")
            check(rows[:, i], np.broadcast_to(conditionals[i][before], rows[:, i].shape), dtype, f"conditional {i + 1}")
        i = circuit.window // 2
        check(circuit.conditional(t, x[::7, :i]), rows[::7, i], dtype)


@cases
@dtypes
def test_ignored_positions_are_summed_out(circuit, vocab, dtype):
    rng = np.random.default_rng(2)
    with precision(dtype, random_theta(circuit, vocab, seed=2)) as t:
        table = log_joint(circuit, t)
        x = all_windows(circuit.window, vocab)[rng.permutation(vocab**circuit.window)[:16]]
        observed = rng.random(x.shape) < 0.5
        prefixes = np.asarray(circuit.prefix_log_probs(t, np.where(observed, x, -100), observed))
        for row, seen, got in zip(x, observed, prefixes):
            for i in range(circuit.window):
                index = tuple(row[j] if j <= i and seen[j] else slice(None) for j in range(circuit.window))
                check(got[i], np.logaddexp.reduce(table[index].reshape(-1)), dtype)
        gain = np.diff(prefixes, axis=-1, prepend=0)
        assert np.all(gain[~observed] == 0)
        assert np.all(gain[observed] < 0)


@cases
@dtypes
def test_condition(circuit, vocab, dtype):
    with precision(dtype, random_theta(circuit, vocab, seed=3)) as t:
        table, x = log_joint(circuit, t), all_windows(circuit.window, vocab)
        first = np.arange(vocab)
        given = jax.jit(circuit.condition)(t, first)
        assert given.sums.shape == (vocab, *t.sums.shape) and given.leaves.shape == (vocab, *t.leaves.shape)
        np.testing.assert_allclose(np.logaddexp.reduce(np.asarray(given.sums), -1), 0, atol=1e-6)
        posterior = table.reshape(vocab, -1) - np.logaddexp.reduce(table.reshape(vocab, -1), -1)[:, None]
        expected = np.where(x[:, 0] == first[:, None], np.tile(posterior, vocab)[:, : len(x)], -np.inf)
        for byte in first:
            expected[byte, x[:, 0] == byte] = posterior[byte]
        got = circuit.log_prob(Theta(*(a[:, None] for a in given)), x[None])
        check(got, expected, dtype)


@cases
@dtypes
@scales
def test_drafts(circuit, vocab, dtype, scale):
    for seed in range(4, 9):
        with precision(dtype, random_theta(circuit, vocab, seed, scale)) as t:
            conditionals = log_conditionals(log_joint(circuit, t))
            explanation = log_joint(circuit, t, close=np.max)
            best = explanation[tuple(np.asarray(circuit.mode(t)))]
            assert best >= explanation.max() - 1e-4 * (dtype == "float32")
            for first in (None, vocab - 1):
                greedy = np.asarray(circuit.greedy(t, first))
                drawn, log_q = circuit.sample_with_conditionals(t, jax.random.key(seed), first)
                assert greedy.dtype == drawn.dtype == np.int32
                for i in range(circuit.window):
                    if i == 0 and first is not None:
                        assert greedy[0] == drawn[0] == first
                        assert np.array_equal(np.exp(log_q[0]), np.arange(vocab) == first)
                        continue
                    row = conditionals[i][tuple(greedy[:i])]
                    assert row[greedy[i]] >= row.max() - 1e-5
                    row = conditionals[i][tuple(np.asarray(drawn)[:i])]
                    possible = row > -70  # below, a draft may call a byte impossible
                    check(log_q[i][possible], row[possible], dtype)
                    assert np.all(np.asarray(log_q)[i][~possible] < -60)


@cases
def test_drafts_from_conditioned_parameters_agree_with_a_given_first_byte(circuit, vocab):
    t, first = circuit.init(jax.random.key(0), vocab, batch=(6,)), jnp.arange(6) % vocab
    given = circuit.condition(t, first)
    assert np.array_equal(circuit.greedy(given), circuit.greedy(t, first))
    key = jax.random.key(1)
    x, log_q = circuit.sample_with_conditionals(t, key, first)
    y, log_r = circuit.sample_with_conditionals(given, key)
    assert np.array_equal(x, y) and np.array_equal(x[:, 0], first)
    np.testing.assert_allclose(np.exp(log_q), np.exp(log_r), atol=1e-6)
    for draft in (circuit.mode(given), circuit.sample(given, key)):
        assert np.array_equal(draft[:, 0], first)


@cases
def test_banned_bytes(circuit, vocab):
    """Leaves of -inf: no NaN anywhere, no mass on a banned byte, finite gradients."""
    t = Theta(*(jnp.asarray(x, jnp.float32) for x in random_theta(circuit, vocab, seed=5, banned=(0, 2))))
    x = all_windows(circuit.window, vocab)
    legal = ~np.isin(x, (0, 2)).any(-1)
    table = log_joint(circuit, t).reshape(-1)
    assert np.array_equal(np.isfinite(table), legal)
    np.testing.assert_allclose(circuit.log_prob(t, x), table, rtol=1e-6, atol=1e-5)
    prefixes, rows = circuit.prefix_log_probs(t, x), circuit.conditionals(t, x)
    np.testing.assert_allclose(prefixes[:, -1], table, rtol=1e-6, atol=1e-5)
    assert not np.isnan(prefixes).any() and not np.isnan(rows).any()
    np.testing.assert_allclose(np.exp(rows).sum(-1), 1, atol=1e-5)
    drafts = [circuit.mode(t), circuit.greedy(t), circuit.sample(t, jax.random.key(0))]
    drafts.append(circuit.sample_with_conditionals(t, jax.random.key(0))[0])
    assert not np.isin(drafts, (0, 2)).any()

    def total(t):
        return jnp.sum(circuit.prefix_log_probs(t, x[legal])) + jnp.sum(circuit.log_prob(t, x[legal]))

    assert all(np.isfinite(g).all() for g in jax.grad(total)(t))
    everything = jax.grad(lambda t: jnp.sum(jnp.exp(circuit.prefix_log_probs(t, x))))(t)
    assert all(np.isfinite(g).all() for g in everything)


@cases
def test_a_first_byte_without_mass_leaves_the_latents_alone(circuit, vocab):
    t = Theta(*(jnp.asarray(x, jnp.float32) for x in random_theta(circuit, vocab, seed=6, banned=(1,))))
    given = circuit.condition(t, 1)
    np.testing.assert_array_equal(given.sums, t.sums)
    np.testing.assert_array_equal(given.leaves[1:], t.leaves[1:])
    np.testing.assert_array_equal(np.exp(given.leaves[0]), np.tile(np.arange(vocab) == 1, (circuit.rank, 1)))
    assert np.array_equal(circuit.greedy(t, 1), circuit.greedy(given))


@cases
def test_leading_axes_broadcast(circuit, vocab):
    t = circuit.init(jax.random.key(2), vocab, batch=(2, 1))
    assert t.sums.shape == (2, 1, circuit.sum_rows, circuit.rank)
    assert t.leaves.shape == (2, 1, circuit.window, circuit.rank, vocab)
    x = all_windows(circuit.window, vocab)[:3]
    for method in (circuit.log_prob, circuit.prefix_log_probs, circuit.conditionals):
        got = method(t, x)
        assert got.shape[:2] == (2, 3)
        for i, j in np.ndindex(2, 3):
            np.testing.assert_allclose(got[i, j], method(Theta(t.sums[i, 0], t.leaves[i, 0]), x[j]), atol=1e-5)
        np.testing.assert_allclose(method(Theta(t.sums[0, 0], t.leaves[0, 0]), x), got[0], atol=1e-5)
    for draft in (circuit.mode, circuit.greedy, lambda t: circuit.sample(t, jax.random.key(0))):
        assert draft(t).shape == (2, 1, circuit.window)
    x, log_q = circuit.sample_with_conditionals(t, jax.random.key(0))
    assert x.shape == (2, 1, circuit.window) and log_q.shape == (2, 1, circuit.window, vocab)


@pytest.mark.parametrize("circuit", [FF(3), CP(3, 2), HMM(3, 2), BTree(5, 2)], ids=str)
def test_gradients(circuit):
    with jax.enable_x64(True):
        t = Theta(*(jnp.asarray(x) for x in random_theta(circuit, 3, seed=7)))
        x = all_windows(circuit.window, 3)[5:9]
        observed = np.random.default_rng(0).random(x.shape) < 0.7
        check_grads(lambda t: circuit.prefix_log_probs(t, x, observed), (t,), order=1, modes=["rev"])
        check_grads(lambda t: circuit.log_prob(t, x), (t,), order=1, modes=["rev"])


def test_steps_are_the_differences_of_the_prefixes():
    circuit = BTree(8, 3)
    t = circuit.init(jax.random.key(3), 6, batch=(4,))
    x = circuit.sample(t, jax.random.key(4))
    scores = jnp.take_along_axis(t.leaves, x[..., None, None], -1)[..., 0]
    steps, prefixes = circuit.step_log_probs(t.sums, scores), circuit.prefix_from_scores(t.sums, scores)
    np.testing.assert_allclose(np.cumsum(steps, -1), prefixes, atol=1e-5)
    np.testing.assert_allclose(prefixes, circuit.prefix_log_probs(t, x), atol=1e-6)


@pytest.mark.parametrize("window, expected", [(3, [2, 1]), (5, [2, 3]), (7, [4, 3]), (9, [4, 5]), (13, [6, 7])])
def test_an_odd_window_is_split_as_the_reference_splits_it(window, expected):
    from bytejax.circuits.btree import halves

    assert [stop - start for start, stop in halves((4, 4 + window))] == expected


def test_number_of_sum_rows():
    for n in range(1, 10):
        assert FF(n).sum_rows == CP(n, 3).sum_rows == 1
        assert HMM(n, 3).sum_rows == 1 + 3 * (n - 1)
        assert BTree(n, 3).sum_rows == 1 + 3 * max(n - 2, 0)


def test_parameters_are_normalised_in_float32_at_least():
    circuit = CP(2, 3)
    t = circuit.normalise(jnp.zeros((1, 3), jnp.bfloat16), jnp.ones((2, 3, 5), jnp.bfloat16))
    assert t.sums.dtype == t.leaves.dtype == jnp.float32
    np.testing.assert_allclose(np.exp(t.leaves).sum(-1), 1, atol=1e-6)


def test_make():
    assert make("btree", 8, 16) == BTree(8, 16) and make("ff", 4) == FF(4) and FF(4).rank == 1
    assert hash(make("hmm", 3, 2)) == hash(HMM(3, 2))


@pytest.mark.parametrize(
    "build, part",
    [
        (lambda: make("tree", 4, 2), "unknown circuit 'tree': choose one of ff, cp, hmm, btree"),
        (lambda: make("cp", 0, 2), "circuit cp: window must be a positive integer, got 0"),
        (lambda: make("hmm", 4, 2.0), "circuit hmm: rank must be a positive integer, got 2.0"),
        (lambda: make("ff", 4, 16), "circuit ff has rank 1, got 16"),
        (lambda: CP(3, 2).log_prob(CP(3, 2).init(jax.random.key(0), 4), jnp.zeros(4, int)), "windows of 3 bytes"),
        (lambda: CP(3, 2).conditional(CP(3, 2).init(jax.random.key(0), 4), [1, 2, 3]), "fewer bytes than the window"),
    ],
)
def test_bad_input_is_named(build, part):
    with pytest.raises(InputError, match=r"^[^\n]*$") as error:
        build()
    assert part in str(error.value)
