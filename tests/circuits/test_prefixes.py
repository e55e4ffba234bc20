"""The tree of a circuit's most probable prefixes against brute force."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bytejax.circuits import CP, FF, HMM, BTree, Theta
from bytejax.circuits.prefixes import best_prefixes, level_sizes
from tests.circuits.enumeration import log_joint, log_marginals, quick_jit, random_theta

CASES = [(FF(4), 3), (CP(5, 3), 4), (HMM(5, 3), 3), (BTree(5, 3), 4), (BTree(6, 3), 4), (BTree(2, 3), 5)]
cases = pytest.mark.parametrize("circuit, vocab", CASES, ids=str)


def all_prefixes(circuit, theta, first):
    """log q of every sequence of bytes that may follow the first one, shorter than the window."""
    joint, *_ = log_marginals(log_joint(circuit, theta))[1:], None
    return {
        (first, *map(int, rest)): float(table[(first, *rest)] - joint[0][first])
        for table in joint
        for rest in np.ndindex(table.shape[1:])
    }


def texts(tree):
    """The prefix of every node, from its parents; they come before it."""
    ids, parents, _ = map(np.asarray, tree)
    assert parents[0] == 0 and (parents[1:] < np.arange(1, len(ids))).all()
    found = [(int(ids[0]),)]
    for i in range(1, len(ids)):
        found.append((*found[parents[i]], int(ids[i])))
    assert [len(x) for x in found] == sorted(len(x) for x in found)
    return found


def trees(circuit, thetas, firsts, count, beam):
    one = functools.partial(best_prefixes, circuit, count=count, beam=beam)
    thetas = Theta(*(jnp.asarray(np.stack(x), jnp.float32) for x in zip(*thetas, strict=True)))
    found = quick_jit(jax.vmap(one))(thetas, jnp.asarray(firsts))
    return [jax.tree.map(lambda x, i=i: x[i], found) for i in range(len(firsts))]


@cases
def test_nodes_are_the_most_probable_prefixes(circuit, vocab):
    """Flat, peaked and very peaked; with a beam of all nodes but the root nothing is lost."""
    count, firsts = min(9, sum(level_sizes(circuit.window, vocab, 8))), [0, 2, 1, 1]
    thetas = [random_theta(circuit, vocab, seed, scale) for seed, scale in enumerate((1.0, 1.0, 3.0, 10.0))]
    for theta, first, tree in zip(thetas, firsts, trees(circuit, thetas, firsts, count, 8), strict=True):
        known, found = all_prefixes(circuit, theta, first), texts(tree)
        best = sorted(known.values(), reverse=True)[:count]
        assert len(set(found)) == count and found[0] == (first,)
        np.testing.assert_allclose(tree.log_q, [known[x] for x in found], rtol=0, atol=2e-5)
        np.testing.assert_allclose(sorted(tree.log_q, reverse=True), best, rtol=0, atol=2e-5)


@cases
def test_impossible_prefixes_come_last_and_certain_ones_stay_in_order(circuit, vocab):
    """Only id 1 is possible; then every id, but all with the same probability: equals must not lose their parents."""
    only = random_theta(circuit, vocab, 1, banned=[i for i in range(vocab) if i != 1])
    even = Theta(only.sums, np.full_like(only.leaves, -np.log(vocab)))
    count = min(9, sum(level_sizes(circuit.window, vocab, 8)))
    certain, flat = trees(circuit, [only, even], [1, 1], count, 8)
    possible = np.asarray(certain.log_q) > -np.inf
    assert possible.sum() == min(count, circuit.window) and not np.isnan(certain.log_q).any()
    np.testing.assert_allclose(certain.log_q[possible], 0, atol=1e-6)
    chain = [(1,) * (i + 1) for i in range(possible.sum())]
    assert [x for x, ok in zip(texts(certain), possible, strict=True) if ok] == chain
    assert possible[np.asarray(certain.parents)[possible]].all()
    assert len(set(texts(flat))) == count


def test_a_narrow_beam_follows_fewer():
    circuit, vocab = BTree(5, 3), 4
    theta = random_theta(circuit, vocab, 3)
    (tree,) = trees(circuit, [theta], [2], 7, 2)
    known, found = all_prefixes(circuit, theta, 2), texts(tree)
    assert level_sizes(5, vocab, 2) == [1, 2, 2, 2, 2] and max(np.bincount([len(x) for x in found])) <= 2
    np.testing.assert_allclose(tree.log_q, [known[x] for x in found], rtol=0, atol=2e-5)


def test_leaves_of_the_first_places_are_enough():
    circuit, vocab = HMM(5, 3), 3
    theta = random_theta(circuit, vocab, 4)
    (tree,) = trees(circuit, [theta._replace(leaves=theta.leaves[:3])], [1], 9, 8)
    known = {x: q for x, q in all_prefixes(circuit, theta, 1).items() if len(x) <= 3}
    np.testing.assert_allclose(sorted(tree.log_q), sorted(sorted(known.values())[-9:]), rtol=0, atol=2e-5)
