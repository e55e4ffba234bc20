"""Acceptance of trees: the longest right path, and the exact law of what is kept and added."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from bytejax.decoding import trees
from bytejax.drafters.base import Children
from bytejax.models.base import Block

V, DEPTH = 4, 2
LEVEL = 0.001 / 4


@functools.cache
def law_of(seed, *prefix, sharp=1.0):
    """A random law after a prefix, to a power."""
    law = np.random.default_rng([seed, *prefix]).dirichlet(np.full(V, 0.7)) ** sharp
    return law / law.sum()


def drawn_trees(draws, seed, sharp):
    """Two children of the root and two of the first child, drawn without replacement from q, and their laws."""
    rng = np.random.default_rng(seed)
    q_of = lambda *prefix: law_of(99, *map(int, prefix), sharp=sharp)
    p_of = lambda *prefix: law_of(1, *map(int, prefix))
    ids = np.zeros((draws, 5), np.int32)
    q = np.zeros((draws, 5, V))
    p = np.zeros((draws, 5, V))
    order = lambda law: np.argsort(-(np.log(law) + rng.gumbel(size=V)))
    for d in range(draws):
        ids[d, 1:3] = order(q_of())[:2]
        ids[d, 3:] = order(q_of(ids[d, 1]))[:2]
        q[d, 0], q[d, 1] = q_of(), q_of(ids[d, 1])
        p[d, 0], p[d, 1], p[d, 2] = p_of(), p_of(ids[d, 1]), p_of(ids[d, 2])
        p[d, 3], p[d, 4] = p_of(ids[d, 1], ids[d, 3]), p_of(ids[d, 1], ids[d, 4])
    return ids, q, p


PARENTS = (0, 0, 0, 1, 1)


def outcome_law(first, second, draws, seed=0):
    """Counts of the first two ids: those kept, the one added, and where only one came out, a draw from its law."""
    rng, counts = np.random.default_rng(seed), np.zeros((V, V), int)
    for a, b in zip(first, second):
        counts[a, b if b >= 0 else rng.choice(V, p=law_of(1, int(a)))] += 1
    expected = np.array([[law_of(1)[a] * law_of(1, a)[b] for b in range(V)] for a in range(V)]) * draws
    return stats.chisquare(counts.ravel(), expected.ravel()).pvalue


@pytest.mark.parametrize("sharp", [0.5, 2.0])
@pytest.mark.parametrize("rule", ["recursive", "match"])
def test_kept_and_added_ids_have_the_targets_law(rule, sharp):
    draws = 100_000
    ids, q, p = drawn_trees(draws, 3, sharp)
    block = Block.tree(jnp.asarray(ids), PARENTS)
    laws = jnp.asarray(np.log(p), jnp.float32)
    keys = jax.random.split(jax.random.key(7), draws)
    if rule == "match":
        noise = jax.random.gumbel(jax.random.key(8), (draws, 3, V))
        verdict = jax.jit(trees.match)(block, laws, noise)
    else:
        all_ids = jnp.broadcast_to(jnp.arange(V), (draws, 5, V))
        children = Children(all_ids, jnp.log(jnp.asarray(q, jnp.float32)))
        verdict = jax.jit(trees.recursive)(
            block, laws, children, keys, jax.random.gumbel(jax.random.key(8), (draws, V))
        )
    kept, path, bonus = (np.asarray(x) for x in (verdict.kept, verdict.path, verdict.bonus))
    emitted = np.full((draws, 3), -1)
    for n in range(3):
        rows = kept == n
        emitted[rows, :n] = np.take_along_axis(ids, path[:, 1:], axis=1)[rows, :n]
        emitted[rows, n] = bonus[rows]
    assert all((kept == n).mean() > 0.05 for n in range(3))
    assert outcome_law(emitted[:, 0], emitted[:, 1], draws) > LEVEL


def test_children_tried_out_of_order_are_noticed():
    """Sorted by probability instead of the order of the draw, recursive rejection is not exact."""
    draws = 100_000
    ids, q, p = drawn_trees(draws, 3, 0.5)
    by_probability = np.take_along_axis(q[:, 0], ids[:, 1:3], axis=1)
    swap = by_probability[:, 0] < by_probability[:, 1]
    ids = ids[:, :3]
    ids[swap, 1:] = ids[swap, 2:0:-1]
    p = np.stack([p[:, 0], *(np.array([law_of(1, i) for i in range(V)])[ids[:, c]] for c in (1, 2))], axis=1)
    children = Children(jnp.broadcast_to(jnp.arange(V), (draws, 3, V)), jnp.log(jnp.asarray(q[:, :3], jnp.float32)))
    verdict = trees.recursive(
        Block.tree(jnp.asarray(ids), (0, 0, 0)),
        jnp.asarray(np.log(p), jnp.float32),
        children,
        jax.random.split(jax.random.key(7), draws),
        jax.random.gumbel(jax.random.key(8), (draws, V)),
    )
    first = np.where(verdict.kept > 0, ids[np.arange(draws), np.asarray(verdict.path)[:, 1]], verdict.bonus)
    assert stats.chisquare(np.bincount(first, minlength=V), law_of(1) * draws).pvalue < 1e-6


@pytest.mark.parametrize("static", [True, False])
def test_the_longest_right_path_is_kept(static):
    """Against a walk in Python, over random trees with repeated siblings and cut rows."""
    rng = np.random.default_rng(0)
    b, n = 64, 12
    rows = lambda: [0, *(int(rng.integers(0, i)) for i in range(1, n))]
    parents = [rows()] * b if static else [rows() for _ in range(b)]
    ids = rng.integers(0, 2, (b, n))
    draft = rng.random((b, n)) < 0.9
    draft[:, 0] = False
    for row in range(b):
        for i in range(1, n):
            draft[row, i] &= parents[row][i] == 0 or draft[row, parents[row][i]]
    laws = rng.normal(size=(b, n, 3)) + [1, 1, 0]
    block = Block.tree(jnp.asarray(ids, jnp.int32), tuple(parents[0]) if static else jnp.asarray(parents, jnp.int32))
    verdict = trees.match(block.replace(is_draft=jnp.asarray(draft)), jnp.asarray(laws), None)
    for row in range(b):
        choice, best = laws[row].argmax(-1), [0]
        walks = [[0]]
        while walks:
            walk = walks.pop()
            best = max(best, walk, key=len)
            last = walk[-1]
            walks += [
                [*walk, i]
                for i in range(1, n)
                if draft[row, i] and parents[row][i] == last and ids[row, i] == choice[last]
            ]
        assert int(verdict.kept[row]) == len(best) - 1
        got = verdict.path[row, : len(best)].tolist()
        assert ids[row][got].tolist()[1:] == ids[row][best].tolist()[1:]
        assert int(verdict.bonus[row]) == choice[got[-1]]


def test_all_choices_of_two_levels_are_reachable():
    """Every pair of ids comes out of a full tree with no pass but this one."""
    ids = [0, *range(V), *(i for _ in range(V) for i in range(V))]
    parents = (0, *([0] * V), *(1 + i for i in range(V) for _ in range(V)))
    block = Block.tree(jnp.asarray([ids], jnp.int32), parents)
    for a, b in itertools.product(range(V), range(V)):
        laws = np.zeros((1, len(ids), V))
        laws[0, 0, a] = laws[0, 1 + a, b] = 1
        verdict = trees.match(block, jnp.asarray(laws), None)
        assert verdict.kept[0] == 2 and [ids[i] for i in verdict.path[0, 1:3].tolist()] == [a, b]
