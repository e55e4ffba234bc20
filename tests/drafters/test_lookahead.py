"""Lookahead decoding: the block of the published mask, the pool, the window's shift."""

import jax.numpy as jnp
import numpy as np
import pytest

from bytejax.decoding.logits import make_warp
from bytejax.drafters.base import Draft, Outcome, Prompt
from bytejax.drafters.lookahead import Lookahead
from bytejax.models.base import Extended
from tests.decoding.tiny import make_target


def start(drafter, target, rows, spare=8):
    ids, lengths = jnp.asarray(rows), jnp.asarray([len(row) for row in rows])
    return drafter.init(target, Prompt(ids, lengths, None, None, None, ids.shape[1] + spare))


@pytest.mark.parametrize(
    ("n", "w", "g", "rows"), [(3, 4, 1, 10), (4, 5, 5, 30), (5, 8, 7, 60), (5, 7, 7, 56), (2, 3, 2, 5)]
)
def test_blocks_see_what_the_publication_lets_them_see(n, w, g, rows):
    target = make_target()
    drafter = Lookahead.create(target, w, n, g)
    state = start(drafter, target, [[1, 2, 3, 4]])
    block = drafter.propose(state, jnp.asarray([9]), None, None).block
    reach, depths = np.asarray(block.ancestors()[0]), block.depths()[0].tolist()
    assert block.width == drafter.block_width == rows and block.nodes == 1 + g * (n - 1)
    for guess in range(g):
        for j in range(n - 1):
            row = 1 + guess * (n - 1) + j
            assert depths[row] == j + 1
            assert set(np.flatnonzero(reach[row])) == {0} | {1 + guess * (n - 1) + i for i in range(j + 1)}
    at = lambda line, column: block.nodes + line * w + column - 1 if line or column else 0
    for line in range(n - 1):
        for column in range(w):
            row = at(line, column)
            assert depths[row] == line + column and int(block.ids[0, row]) == (
                9 if row == 0 else int(state.window[0, line, column])
            )
            seen = {at(0, c) for c in range(column + 1)} | {at(i, column) for i in range(line + 1)}
            assert set(np.flatnonzero(reach[row])) == seen
    assert not block.is_draft.any()  # the pool is empty


def test_the_pool_keeps_the_newest_and_moves_what_it_has():
    target = make_target()
    drafter = Lookahead.create(target, 2, 3, 2)
    state = start(drafter, target, [[1, 2, 3, 4]])
    pool, keys = state.pool, state.keys
    put = lambda pool, keys, x, where=True: drafter._insert(pool, keys, jnp.asarray([x]), jnp.asarray([where]))
    for ngram in ([7, 1, 1], [7, 2, 2], [7, 1, 1]):
        pool, keys = put(pool, keys, ngram)
    assert pool[0, 7].tolist() == [[1, 1], [2, 2]]
    pool, keys = put(pool, keys, [7, 3, 3])
    assert pool[0, 7].tolist() == [[3, 3], [1, 1]]
    same, _ = put(pool, keys, [7, 4, 4], False)
    assert same[0, 7].tolist() == [[3, 3], [1, 1]]
    draft = drafter.propose(state.replace(pool=pool, keys=keys), jnp.asarray([7]), None, None)
    assert draft.block.ids[0, :5].tolist() == [7, 3, 3, 1, 1] and draft.block.is_draft[0, :5].tolist() == [
        0,
        1,
        1,
        1,
        1,
    ]
    few = drafter.replace(places=5)  # 2 and 7 share a place: the newer one has it
    pool, keys = few._insert(state.pool[:, :5], state.keys[:, :5], jnp.asarray([[7, 1, 1]]), jnp.asarray([True]))
    assert not few.propose(state.replace(pool=pool, keys=keys), jnp.asarray([2]), None, None).block.is_draft.any()
    pool, keys = few._insert(pool, keys, jnp.asarray([[2, 5, 6]]), jnp.asarray([True]))
    assert pool[0, 2].tolist() == [[5, 6], [-1, -1]] and keys[0, 2] == 2


def test_a_cycle_completes_ngrams_and_shifts_the_window():
    target = make_target()
    drafter = Lookahead.create(target, 3, 3, 2)
    state = start(drafter, target, [[1, 2, 3, 4], [5, 6, 7, 8]]).replace(cycles=jnp.asarray([5, 0]))
    block = drafter.propose(state, jnp.asarray([9, 9]), None, None).block
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(2, block.width, 24)), jnp.float32)
    path = jnp.zeros((2, block.nodes), jnp.int32)
    common = int(jnp.argmax(target.unembed(hidden[0, -1])))  # banned, it does not come into the window
    warp = make_warp(target.vocab, 0.0, 0, 1.0, [common])
    outcome = lambda n: Outcome(Draft(block), Extended(hidden, {}, None), None, warp, path, jnp.asarray([n, 1]))
    after = drafter.observe(state, target, outcome(1))
    new = jnp.argmax(target.unembed(hidden[:, -3:]).at[..., common].set(-jnp.inf), -1)
    window = state.window.at[:, 0, 0].set(9)
    assert after.window.tolist() == jnp.stack([window[:, 1], new], 1).tolist()
    for column in range(3):
        key, *tail = [*window[0, :, column].tolist(), int(new[0, column])]
        assert tail in after.pool[0, key].tolist()
    assert (after.pool[1] == -1).all()  # its window is not full yet: what it holds is still random
    assert after.cycles.tolist() == [3, 1]
    idle = drafter.observe(state, target, outcome(0))
    assert idle.window[0].tolist() == state.window[0].tolist() and (idle.pool[0] == -1).all()


def test_the_prompts_own_ngrams():
    target = make_target()
    drafter = Lookahead.create(target, 2, 3, 2, from_prompt=True)
    state = start(drafter, target, [[1, 2, 3, 1, 2, 4]])
    assert state.pool[0, 1].tolist() == [[2, 4], [2, 3]] and state.pool[0, 2].tolist() == [[3, 1], [-1, -1]]
    assert (state.pool[0, 4] == -1).all()
