"""N-gram hits and candidates in one tree, against a plain search."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bytejax
from bytejax import InputError
from bytejax.drafters import combined
from bytejax.drafters.circuit_tree import CircuitTree
from tests.decoding.tiny import make_drafter, make_target, near_tie

VOCAB = 4


def random_tree(rng, size):
    """Candidates with unequal children, parents before their children and never below them in score."""
    parents, scores, ids, depths, taken = [], [], [], [], {}
    while len(parents) < size:
        parent = int(rng.integers(-1, len(parents)))
        used = taken.setdefault(parent, set())
        if len(used) == VOCAB:
            continue
        ids.append(int(rng.choice([x for x in range(VOCAB) if x not in used])))
        used.add(ids[-1])
        parents.append(parent)
        scores.append((0.0 if parent < 0 else scores[parent]) - float(rng.uniform(0.1, 2)))
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return parents, scores, ids, max(depths) + 1


def paths(parents, ids, root):
    found = []
    for parent, i in zip(parents, ids):
        found.append((*(() if parent == root else found[parent - (root + 1)]), i))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_hits_come_first_and_no_path_takes_two_rows(seed):
    rng, rows = np.random.default_rng(seed), 6
    trees = [random_tree(rng, 9) for _ in range(rows)]
    chain = rng.integers(0, VOCAB, (rows, 5)).astype(np.int32)
    hits = np.asarray([0, 1, 2, 3, 5, 5])
    for row, (parents, _, ids, _) in enumerate(trees[:5]):  # some of the hits are candidates too
        longest = max(paths(parents, ids, -1), key=len)
        chain[row, : len(longest)] = longest[:5]
    array = lambda i, dtype: jnp.asarray(np.asarray([t[i] for t in trees], dtype))
    candidates = combined.Candidates(array(2, "i4"), array(0, "i4"), array(1, "f4"), max(t[3] for t in trees))
    count = 7
    got = jax.jit(lambda c, chain, hits: combined.best(c._replace(depth=candidates.depth), count, chain, hits))(
        candidates._replace(depth=0), jnp.asarray(chain), jnp.asarray(hits)
    )
    for row, (parents, scores, ids, _) in enumerate(trees):
        held = [tuple(chain[row, : d + 1].tolist()) for d in range(min(hits[row], count))]
        every = paths(parents, ids, -1)
        best = sorted((i for i, path in enumerate(every) if path not in held), key=lambda i: -scores[i])
        expected = {*held, *(every[i] for i in best[: count - len(held)])}
        valid = np.asarray(got.valid[row])
        drawn = [int(x) for x in got.ids[row]]
        assert all(int(p) <= i for i, p in enumerate(got.parents[row]))  # row i + 1 follows an earlier row
        assert valid[np.asarray(got.parents[row])[valid & (np.asarray(got.parents[row]) > 0)] - 1].all()
        found = paths([int(p) for p in got.parents[row]], drawn, 0)
        assert drawn[: len(held)] == chain[row, : len(held)].tolist()
        kept = [path for path, ok in zip(found, valid) if ok]
        assert len(kept) == len(set(kept)) and set(kept) == expected


@pytest.mark.parametrize("name", ["btree", "ff"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_circuit_with_a_lookup_writes_the_targets_text(name, temperature):
    target, prompts = make_target(), [[1, 2, 3] * 5, [4] * 17, [7]]
    head = make_drafter(target, name, scale=5.0)
    drafter = CircuitTree.create(head, 9, lookup="tokens")
    options = dict(max_new_tokens=50, temperature=temperature, seed=2)
    plain = bytejax.generate(target, prompts, **options)
    both = bytejax.generate(target, prompts, drafter=drafter, **options)
    for prompt, a, b in zip(prompts, plain.ids, both.ids):
        assert a == b or (temperature == 0 and near_tie(target, prompt, a, b))
    alone = bytejax.generate(target, prompts, drafter=CircuitTree.create(head, 5), **options)
    assert both.stats.target_forwards < alone.stats.target_forwards < plain.stats.target_forwards


def test_a_lookup_beside_a_circuit_is_an_option_of_trees():
    head = make_drafter(make_target(), "btree")
    with pytest.raises(InputError, match="lookup is an option of trees"):
        CircuitTree.over(head, None, None, "bytes")
    with pytest.raises(InputError, match="unknown rule 'lines'"):
        CircuitTree.create(head, 9, lookup="lines")
    assert CircuitTree.create(head, 9, lookup="bytes").lookup.draft_tokens == 4
    assert CircuitTree.create(head, 2, lookup="bytes").lookup.draft_tokens == 1
