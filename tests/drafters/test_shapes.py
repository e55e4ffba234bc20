"""Shapes of static trees: the best one for measured accuracies against brute force, and what is no tree."""

import itertools

import numpy as np
import pytest

from bytejax import InputError
from bytejax.drafters import shapes


def paths_of(shape):
    paths = [()]
    for parent, rank in zip(shape.parents[1:], shape.ranks[1:], strict=True):
        paths.append((*paths[parent], rank))
    assert [len(path) for path in paths] == list(shape.depths)
    return paths


def worth(paths, accuracies):
    """Expected number of accepted drafts, depths being independent."""
    return sum(np.prod([accuracies[d][rank] for d, rank in enumerate(path)]) for path in paths if path)


@pytest.mark.parametrize("nodes", range(2, 9))
@pytest.mark.parametrize("seed", range(4))
def test_the_likeliest_tree_is_the_best_of_all(seed, nodes):
    rng = np.random.default_rng(seed)
    accuracies = [np.sort(rng.random(ranks))[::-1] * share for ranks, share in ((4, 1), (3, 0.9), (1, 0.8))]
    every = [p for depth in (1, 2, 3) for p in itertools.product(*(range(len(x)) for x in accuracies[:depth]))]

    def grow(chosen, rest):
        """All prefix-closed sets of the right size."""
        if len(chosen) == nodes - 1:
            yield chosen
            return
        for i, path in enumerate(rest):
            elder = (*path[:-1], path[-1] - 1)
            if (path[:-1] in chosen or len(path) == 1) and (path[-1] == 0 or elder in chosen):
                yield from grow((*chosen, path), rest[i + 1 :])

    best = max(worth(paths, accuracies) for paths in grow((), every))
    shape = shapes.likeliest(accuracies, nodes)
    assert shape.nodes == nodes
    np.testing.assert_allclose(worth(paths_of(shape), accuracies), best, rtol=1e-12)


def test_the_likeliest_tree_of_certain_candidates_is_their_chain():
    shape = shapes.likeliest([[1.0, 0.0], [1, 0.0], [0.5, 0.5]], 4)
    assert paths_of(shape) == [(), (0,), (0, 0), (0, 0, 0)]


def test_there_may_be_fewer_nodes_than_asked_for():
    shape = shapes.likeliest([[0.5, 0.2], [0.1]], 50)
    assert set(paths_of(shape)) == {(), (0,), (1,), (0, 0), (1, 0)} and shape.depth == 2 and shape.most_children == 2


@pytest.mark.parametrize(
    ("accuracies", "nodes", "message"),
    [
        ([[0.5]], 1, "nodes = 1: a tree has a root and"),
        ([[0.5]], True, "nodes = True"),
        ([[0.5]], "3", "nodes = '3'"),
        ([], 3, "at least one candidate per depth"),
        ([[0.5], []], 3, "at least one candidate per depth"),
        ([[0.5, 1.5]], 3, "from 0 to 1"),
        ([[float("nan")]], 3, "from 0 to 1"),
        ([0.5], 3, "a list of numbers for every depth"),
        ([["half"]], 3, "a list of numbers for every depth"),
        (7, 3, "a list of numbers for every depth"),
    ],
)
def test_accuracies_that_make_no_tree(accuracies, nodes, message):
    with pytest.raises(InputError, match=message) as e:
        shapes.likeliest(accuracies, nodes)
    assert "\n" not in str(e.value)


def test_paths_in_any_order_make_a_tree():
    shape = shapes.from_paths([[1], [0, 0], (0,), [], [1, 0], [1, 1]])
    assert paths_of(shape) == [(), (0,), (1,), (0, 0), (1, 0), (1, 1)]
    assert shape.parents == (0, 0, 0, 1, 2, 2) and (shape.nodes, shape.depth, shape.most_children) == (6, 2, 2)
    assert shape == shapes.from_children([[2], [1, 2]])
    assert shapes.spine([3, 2]) == shapes.from_paths([(0,), (1,), (2,), (0, 0), (0, 1)])


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([[0], [1, 0]], r"not prefix-closed: it has \[1, 0\] without \[1\]"),
        ([[0, 0, 0], [0]], r"it has \[0, 0, 0\] without \[0, 0\]"),
        ([[0], [2]], r"the tree has \[2\] without its sibling \[1\]"),
        ([[0], [0, 1]], r"the tree has \[0, 1\] without its sibling \[0, 0\]"),
        ([[-1]], r"a list of ranks from 0 on, got \[-1\]"),
        ([[0.0]], "a list of ranks from 0 on"),
        ([[]], "the tree is empty"),
        ([], "the tree is empty"),
    ],
)
def test_paths_that_are_no_tree(paths, message):
    with pytest.raises(InputError, match=message):
        shapes.from_paths(paths)
