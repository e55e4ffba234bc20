"""Every method of every circuit against brute-force enumeration.

Compilation is what these tests cost, so each of them compiles one program and puts its variants on a batch axis.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bytejax.circuits import CP, FF, HMM, BTree, Theta, make
from bytejax.circuits.base import gather_scores
from bytejax.circuits.btree import halves
from bytejax.errors import InputError
from tests.circuits.enumeration import all_windows, log_conditionals, log_joint, log_marginals, quick_jit, random_theta

CASES = [
    *((FF(1), 5), (FF(4), 3), (CP(1, 3), 4), (CP(5, 4), 4)),
    *((HMM(1, 2), 4), (HMM(3, 1), 4), (HMM(4, 3), 5), (HMM(5, 4), 3)),
    *((BTree(1, 3), 4), (BTree(2, 3), 5), (BTree(3, 4), 4), (BTree(5, 4), 4), (BTree(6, 3), 5)),
]
FEW = [(FF(3), 4), (CP(4, 3), 4), (HMM(5, 3), 3), (BTree(5, 3), 4)]
TOLERANCE = {"float64": {"rtol": 0, "atol": 1e-12}, "float32": {"rtol": 1e-6, "atol": 1e-5}}
SCALES = (1.0, 10.0)  # flat and peaked parameters
LARGE = [(FF(4), 3), (CP(5, 4), 4), (HMM(5, 4), 3), (BTree(5, 4), 4)]
cases = pytest.mark.parametrize(
    "circuit, vocab, dtype", [(*c, "float64") for c in CASES] + [(*c, "float32") for c in LARGE], ids=str
)
few = pytest.mark.parametrize("circuit, vocab", FEW, ids=str)


def batch_of(thetas, dtype):
    return Theta(*(jnp.asarray(np.stack(x), dtype) for x in zip(*thetas)))


def check(got, want, dtype, message=""):
    assert got.dtype == dtype
    np.testing.assert_allclose(got, want, **TOLERANCE[dtype], err_msg=message)


@cases
def test_likelihoods_and_conditionals(circuit, vocab, dtype):
    n, x = circuit.window, all_windows(circuit.window, vocab)
    rng = np.random.default_rng(2)
    some = x[rng.permutation(len(x))[:16]]
    observed = rng.random(some.shape) < 0.5

    @quick_jit
    def queries(t):
        partly = circuit.prefix_log_probs(t, jnp.where(observed, some, -100), observed)
        full = (f(t, x) for f in (circuit.log_prob, circuit.prefix_log_probs, circuit.conditionals))
        return *full, circuit.conditional(t, x[::7, : n // 2]), partly

    with jax.enable_x64(dtype == "float64"):
        thetas = batch_of([random_theta(circuit, vocab, 1, scale) for scale in SCALES], dtype)
        results = jax.device_get(queries(Theta(*(a[:, None] for a in thetas))))
    for k in range(len(SCALES)):
        joint, prefixes, rows, middle, partly = (a[k] for a in results)
        table = log_joint(circuit, Theta(*(a[k] for a in thetas)))
        marginals, conditionals = log_marginals(table), log_conditionals(table)
        assert abs(marginals[0]) < 10 * TOLERANCE[dtype]["atol"]  # total mass 1: the sums are over the right axes
        check(joint, table.reshape(-1), dtype)
        for i in range(n):
            before = tuple(x[:, :i].T)
            check(prefixes[:, i], marginals[i + 1][(*before, x[:, i])], dtype, f"prefix {i + 1}")
            check(rows[:, i], np.broadcast_to(conditionals[i][before], rows[:, i].shape), dtype, f"conditional {i + 1}")
        check(middle, rows[::7, n // 2], dtype)
        check_ignored_are_summed_out(partly, table, some, observed, dtype)


def check_ignored_are_summed_out(prefixes, table, x, observed, dtype):
    for row, seen, got in zip(x, observed, prefixes):
        for i in range(len(row)):
            index = tuple(b if j <= i and s else slice(None) for j, (b, s) in enumerate(zip(row, seen)))
            check(got[i], np.logaddexp.reduce(table[index].reshape(-1)), dtype)
    gain = np.diff(prefixes, axis=-1, prepend=0)
    assert np.all(gain[~observed] == 0)
    assert np.all(gain[observed] <= 1e-5)


@cases
def test_condition(circuit, vocab, dtype):
    x, first = all_windows(circuit.window, vocab), np.arange(vocab)

    @quick_jit
    def posterior(t):
        given = circuit.condition(t, first)
        return given, circuit.log_prob(Theta(*(a[:, None] for a in given)), x)

    with jax.enable_x64(dtype == "float64"):
        t = batch_of([random_theta(circuit, vocab, 3)], dtype)
        given, got = jax.device_get(posterior(Theta(*(a[0] for a in t))))
    assert given.sums.shape == (vocab, *t.sums.shape[1:]) and given.leaves.shape == (vocab, *t.leaves.shape[1:])
    np.testing.assert_allclose(np.logaddexp.reduce(given.sums, -1), 0, atol=1e-6)
    table = log_joint(circuit, Theta(*(a[0] for a in t))).reshape(vocab, -1)
    expected = np.full((vocab, len(x)), -np.inf)
    for byte in first:
        expected[byte, x[:, 0] == byte] = table[byte] - np.logaddexp.reduce(table[byte])
    check(got, expected, dtype)


@cases
def test_drafts(circuit, vocab, dtype):
    first = vocab - 1

    @quick_jit
    def drafts(t):
        key, given = jax.random.key(5), jnp.int32(first)
        free = circuit.greedy(t), *circuit.sample_with_conditionals(t, key)
        return circuit.mode(t), free, (circuit.greedy(t, given), *circuit.sample_with_conditionals(t, key, given))

    thetas = [random_theta(circuit, vocab, seed, scale) for seed in range(4, 9) for scale in SCALES]
    with jax.enable_x64(dtype == "float64"):
        t = batch_of(thetas, dtype)
        modes, free, given = jax.device_get(drafts(t))
    for k in range(len(thetas)):
        one = Theta(*(a[k] for a in t))
        explanation = log_joint(circuit, one, close=np.max)
        assert explanation[tuple(modes[k])] >= explanation.max() - 1e-4 * (dtype == "float32")
        conditionals = log_conditionals(log_joint(circuit, one))
        for start, (greedy, drawn, log_q) in enumerate(([a[k] for a in free], [a[k] for a in given])):
            assert greedy.dtype == drawn.dtype == np.int32
            for i in range(start, circuit.window):
                row = conditionals[i][tuple(greedy[:i])]
                assert row[greedy[i]] >= row.max() - 1e-5
                check(log_q[i], conditionals[i][tuple(drawn[:i])], dtype)
        assert greedy[0] == drawn[0] == first
        assert np.array_equal(np.exp(log_q[0]), np.arange(vocab) == first)


@few
def test_drafts_from_conditioned_parameters_agree_with_a_given_first_byte(circuit, vocab):
    t, first = circuit.init(jax.random.key(0), vocab, batch=(6,)), jnp.arange(6) % vocab

    @quick_jit
    def drafts(t, first):
        given, key = circuit.condition(t, first), jax.random.key(1)
        either = [
            (circuit.greedy(*a), circuit.sample_with_conditionals(a[0], key, *a[1:])) for a in ((t, first), (given,))
        ]
        return *either, (circuit.mode(given), circuit.sample(given, key))

    (x, (y, log_q)), (u, (w, log_r)), others = drafts(t, first)
    assert np.array_equal(x, u) and np.array_equal(y, w)
    np.testing.assert_allclose(np.exp(log_q), np.exp(log_r), atol=1e-6)
    for draft in (x, y, *others):
        assert np.array_equal(draft[:, 0], first)


@few
def test_banned_bytes(circuit, vocab):
    """Leaves of -inf: no NaN anywhere, no mass on a banned byte, finite gradients."""
    t = Theta(*(jnp.asarray(x, jnp.float32) for x in random_theta(circuit, vocab, 5, banned=(0, 2))))
    x = all_windows(circuit.window, vocab)
    legal = ~np.isin(x, (0, 2)).any(-1)

    def likelihood(t):
        return jnp.sum(circuit.prefix_log_probs(t, x[legal])) + jnp.sum(circuit.log_prob(t, x[legal]))

    def mass(t):
        return jnp.sum(jnp.exp(circuit.prefix_log_probs(t, x)))

    @quick_jit
    def everything(t):
        key = jax.random.key(0)
        queries = [f(t, x) for f in (circuit.log_prob, circuit.prefix_log_probs, circuit.conditionals)]
        drafts = [
            circuit.mode(t),
            circuit.greedy(t),
            circuit.sample(t, key),
            circuit.sample_with_conditionals(t, key)[0],
        ]
        return queries, drafts, [jax.grad(likelihood)(t), jax.grad(mass)(t)]

    (joint, prefixes, rows), drafts, gradients = everything(t)
    table = log_joint(circuit, t).reshape(-1)
    assert np.array_equal(np.isfinite(table), legal)
    np.testing.assert_allclose(joint, table, rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(prefixes[:, -1], table, rtol=1e-6, atol=1e-5)
    assert not np.isnan(prefixes).any() and not np.isnan(rows).any()
    np.testing.assert_allclose(np.exp(rows).sum(-1), 1, atol=1e-5)
    assert not np.isin(drafts, (0, 2)).any()
    assert all(np.isfinite(g).all() for gradient in gradients for g in gradient)


@few
def test_a_first_byte_without_mass_leaves_the_latents_alone(circuit, vocab):
    t = Theta(*(jnp.asarray(x, jnp.float32) for x in random_theta(circuit, vocab, 6, banned=(1,))))
    given, drafts = quick_jit(lambda t: (circuit.condition(t, 1), circuit.greedy(t, 1)))(t)
    np.testing.assert_array_equal(given.sums, t.sums)
    np.testing.assert_array_equal(given.leaves[1:], t.leaves[1:])
    np.testing.assert_array_equal(np.exp(given.leaves[0]), np.tile(np.arange(vocab) == 1, (circuit.rank, 1)))
    assert np.array_equal(drafts, quick_jit(circuit.greedy)(given))


@few
def test_leading_axes_broadcast(circuit, vocab):
    t = circuit.init(jax.random.key(2), vocab, batch=(2, 1))
    assert t.sums.shape == (2, 1, circuit.sum_rows, circuit.rank)
    assert t.leaves.shape == (2, 1, circuit.window, circuit.rank, vocab)
    x = all_windows(circuit.window, vocab)[:3]
    key = jax.random.key(0)

    @quick_jit
    def queries(t, x):
        return circuit.log_prob(t, x), circuit.prefix_log_probs(t, x), circuit.conditionals(t, x)

    both, first = queries(t, x), queries(Theta(t.sums[0, 0], t.leaves[0, 0]), x)
    second = queries(Theta(t.sums[1, 0], t.leaves[1, 0]), x)
    for got, one, two in zip(both, first, second):
        np.testing.assert_allclose(got, np.stack([one, two]), atol=1e-5)
    for draft in (circuit.mode, circuit.greedy, lambda t: circuit.sample(t, key)):
        assert jax.eval_shape(draft, t).shape == (2, 1, circuit.window)
    x, log_q = jax.eval_shape(circuit.sample_with_conditionals, t, key)
    assert x.shape == (2, 1, circuit.window) and log_q.shape == (2, 1, circuit.window, vocab)


@few
def test_gradients(circuit, vocab):
    """Along a random direction, against a central difference in float64."""
    x = all_windows(circuit.window, vocab)[5:9]
    rng = np.random.default_rng(0)
    observed, weights = rng.random(x.shape) < 0.7, rng.normal(size=x.shape)

    def total(t):
        return jnp.sum(weights * circuit.prefix_log_probs(t, x, observed)) + jnp.sum(circuit.log_prob(t, x))

    @quick_jit
    def slopes(t, u):
        ahead, behind = (total(Theta(*(a + h * b for a, b in zip(t, u)))) for h in (1e-5, -1e-5))
        return sum(jnp.vdot(g, b) for g, b in zip(jax.grad(total)(t), u)), (ahead - behind) / 2e-5

    with jax.enable_x64(True):
        t = Theta(*(jnp.asarray(a) for a in random_theta(circuit, vocab, 7)))
        exact, difference = slopes(t, Theta(*(jnp.asarray(rng.normal(size=a.shape)) for a in t)))
    assert abs(exact) > 0.1
    np.testing.assert_allclose(exact, difference, rtol=1e-7)


def test_steps_are_the_differences_of_the_prefixes():
    circuit = BTree(8, 3)

    @quick_jit
    def everything(key):
        t = circuit.init(key, 6, batch=(4,))
        x = circuit.sample(t, key)
        scores = gather_scores(t.leaves, x)
        steps = circuit.step_log_probs(t.sums, scores)
        return steps, circuit.prefix_from_scores(t.sums, scores), circuit.prefix_log_probs(t, x)

    steps, from_scores, prefixes = everything(jax.random.key(3))
    np.testing.assert_allclose(np.cumsum(steps, -1), prefixes, atol=1e-5)
    np.testing.assert_allclose(from_scores, prefixes, atol=1e-6)


@pytest.mark.parametrize("window, expected", [(3, [2, 1]), (5, [2, 3]), (7, [4, 3]), (9, [4, 5]), (13, [6, 7])])
def test_an_odd_window_is_split_as_the_reference_splits_it(window, expected):
    assert [stop - start for start, stop in halves((4, 4 + window))] == expected


def test_number_of_sum_rows():
    for n in range(1, 10):
        assert FF(n).sum_rows == CP(n, 3).sum_rows == 1
        assert HMM(n, 3).sum_rows == 1 + 3 * (n - 1)
        assert BTree(n, 3).sum_rows == 1 + 3 * max(n - 2, 0)


def test_parameters_are_normalised_in_float32_at_least():
    t = CP(2, 3).normalise(jnp.zeros((1, 3), jnp.bfloat16), jnp.ones((2, 3, 5), jnp.bfloat16))
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
        (lambda: CP(3, 2).log_prob(None, jnp.zeros((2, 4), int)), "windows of 3 bytes, got shape (2, 4)"),
        (lambda: CP(3, 2).conditional(None, [1, 2, 3]), "fewer bytes than the window of 3, got 3"),
    ],
)
def test_bad_input_is_named(build, part):
    with pytest.raises(InputError, match=r"^[^\n]*$") as error:
        build()
    assert part in str(error.value)
