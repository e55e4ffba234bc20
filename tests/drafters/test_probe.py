"""Embedding-space probing: the blocks' layout, the trees, the masks' embedding, and what the masks say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bytejax
from bytejax.decoding.logits import make_warp
from bytejax.drafters.base import Draft, Outcome, Prompt
from bytejax.drafters.probe import Probe, State, with_lookup
from bytejax.drafters.text import Text
from bytejax.models.base import Block, Extended
from tests.decoding.tiny import make_target

GREEDY = make_warp(23, 0.0, 0, 1.0)


def state_of(ids, probs, text=None):
    ids, probs = jnp.asarray([ids]), jnp.asarray([probs])
    return State(jnp.zeros((1, 4)), ids, jnp.log(probs), text)


@pytest.mark.parametrize(
    ("widths", "masks", "rows"),
    [([4], 1, 10), ([14], 1, 30), ([29], 1, 60), ([7, 2], 2, 30), ([15, 4], 2, 60), ([15, 10, 4], 3, 120)],
)
def test_blocks_have_the_papers_sizes_and_order(widths, masks, rows):
    drafter = Probe.create(rows, masks, widths, prune=False)
    nodes = 1 + sum(widths)
    assert (drafter.block_width, drafter.nodes) == (rows, nodes)
    m = drafter.candidates
    state = state_of(np.arange(masks * m).reshape(masks, m).tolist(), np.full((masks, m), 0.01).tolist())
    block = drafter.propose(state, jnp.asarray([50]), None, GREEDY).block
    depths = block.depths()[0].tolist()
    assert depths[:nodes] == [0] + [d for d, width in enumerate(widths, 1) for _ in range(width)]
    reach = np.asarray(block.ancestors()[0])
    for u in range(nodes):
        for j in range(masks):
            row = nodes + u * masks + j
            assert depths[row] == depths[u] + j + 1
            own = {nodes + u * masks + i for i in range(j + 1)}
            assert set(np.flatnonzero(reach[row])) == set(np.flatnonzero(reach[u])) | own
    assert block.embeds_mask[0].tolist() == [False] * nodes + [True] * (rows - nodes)
    spine = [0, *(1 + sum(widths[:d]) for d in range(len(widths)))]
    for d in range(1, len(widths) + 1):  # only the first node of a depth has children
        assert {int(block.parents[0, i]) for i in range(nodes) if depths[i] == d} == {spine[d - 1]}


def test_the_dynamic_tree_has_the_largest_products():
    drafter = Probe.create(18, 2, prune=False)  # six nodes
    p1, p2 = [0.5, 0.2, 0.15, 0.05, 0.01], [0.6, 0.3, 0.05, 0.02, 0.01]
    state = state_of([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]], [p1, p2])
    block = drafter.propose(state, jnp.asarray([0]), None, GREEDY).block
    # products: .5 .2 .15 .05 .01 and, below id 1, .3 .15 .025 .01 .005; of the equal .15 the shallower comes first
    assert block.ids[0, :6].tolist() == [0, 1, 2, 3, 6, 7] and block.parents[0, :6].tolist() == [0, 0, 0, 0, 1, 1]


def test_hits_come_first_and_masks_have_the_rest():
    drafter = with_lookup(budget=12, longest=2, draft_tokens=3, prune=False)
    text = Text(jnp.asarray([[5, 6, 7, 8, 1, 5, 0, 0, 0, 0, 0, 0]]), jnp.asarray([6]))
    state = state_of([[1, 2, 3, 4, 9]], [[0.5, 0.2, 0.1, 0.05, 0.01]], text)
    block = drafter.propose(state, jnp.asarray([6]), None, GREEDY).block
    assert block.ids[0, :6].tolist() == [6, 7, 8, 1, 1, 2] and block.parents[0, :6].tolist() == [0, 0, 1, 2, 0, 0]
    assert with_lookup(budget=12, rule="bytes").lookup.draft_tokens == 2  # of five
    block = drafter.propose(state, jnp.asarray([0]), None, GREEDY).block  # nothing matches
    assert block.ids[0, :6].tolist() == [0, 1, 2, 3, 4, 9] and block.parents[0, :6].tolist() == [0] * 6


def test_repeats_are_passed_over():
    drafter = Probe.create(12, 2, [2, 1], prune=True)
    state = state_of([[8, 3, 2, 1], [3, 8, 5, 1]], [[0.4, 0.3, 0.2, 0.1]] * 2)
    ids = drafter.propose(state, jnp.asarray([8]), None, GREEDY).block.ids
    assert ids[0, :4].tolist() == [8, 3, 2, 8]  # 8 repeats the root; then 3 repeats its parent
    ids = Probe.create(12, 2, [2, 1], prune=False).propose(state, jnp.asarray([8]), None, GREEDY).block.ids
    assert ids[0, :4].tolist() == [8, 8, 3, 3]


def test_the_embedding_follows_every_committed_id_in_order():
    target, rate = make_target(), 0.3
    drafter = Probe.create(12, 2, rate=rate, prune=False)
    ids = jnp.asarray([[3, 9, 4, 0], [5, 0, 0, 0], [1, 2, 3, 4]])
    accepted = jnp.asarray([3, 1, 0])
    before = jax.random.normal(jax.random.key(0), (3, 24))
    block = Block.chain(jnp.pad(ids, ((0, 0), (0, 8))))
    path = jnp.broadcast_to(jnp.arange(4), (3, 4))
    hidden = jax.random.normal(jax.random.key(1), (3, 12, 24))
    state = State(before, jnp.zeros((3, 2, 3), jnp.int32), jnp.zeros((3, 2, 3)), None)
    outcome = Outcome(Draft(block), Extended(hidden, {}, None), None, GREEDY, path, accepted)
    after = drafter.observe(state, target, outcome)
    for row, count in enumerate(accepted.tolist()):
        want = before[row]
        for i in ids[row, :count].tolist():
            want = want + rate * (target.embed(jnp.asarray(i)) - want)
        np.testing.assert_allclose(after.embedding[row], want, atol=1e-5)
    for row, owner in ((0, 2), (1, 0)):  # the last accepted node's masks
        best = jax.lax.top_k(target.unembed(hidden[row, 4 + 2 * owner : 6 + 2 * owner]), 3)[1]
        np.testing.assert_array_equal(after.ids[row], best)
    np.testing.assert_array_equal(after.ids[2], state.ids[2])


def test_masks_after_the_prompt_say_what_they_would_say_in_the_text():
    """A mask is a position whose embedding is the prompt's mean: the same numbers as from a target with such an id."""
    target = make_target()
    ids, lengths = jnp.asarray([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0]]), jnp.asarray([5, 3])
    drafter = Probe.create(8, 2, rate=0.0, prune=False)
    extended, cache = target.prefill(ids, lengths, target.init_cache(2, 32, 8))
    state = drafter.init(target, Prompt(ids, lengths, extended, cache, GREEDY, 32))
    for row, n in enumerate(lengths.tolist()):
        text = ids[row, :n]
        mean = target.params["embedding"][text].mean(0)
        np.testing.assert_allclose(state.embedding[row], mean, atol=1e-5)
        table = target.params["embedding"].at[22].set(mean)
        masked = target.replace(params=target.params | {"embedding": table})
        logits = masked.logits(jnp.concatenate([text, jnp.asarray([22, 22])])[None])[0, -2:]
        best, want = jax.lax.top_k(jax.nn.log_softmax(logits), drafter.candidates)
        np.testing.assert_array_equal(state.ids[row], want)
        np.testing.assert_allclose(state.log_probs[row], best, atol=1e-4)


@pytest.mark.parametrize("start", ["last", "gaussian", "mu+5"])
def test_other_first_embeddings(start):
    target = make_target()
    ids = jax.random.randint(jax.random.key(0), (1, 12), 0, 23)
    extended, cache = target.prefill(ids, jnp.asarray([12]), target.init_cache(1, 32, 8))
    state = Probe.create(8, start=start).init(target, Prompt(ids, jnp.asarray([12]), extended, cache, GREEDY, 32))
    table = target.params["embedding"]
    want = {"last": table[ids[0, -8:]].mean(0), "mu+5": table.mean(0) + 5 * table.std(0)}
    if start in want:
        np.testing.assert_allclose(state.embedding[0], want[start], rtol=1e-4, atol=1e-4)
    else:
        assert float(jnp.abs(state.embedding - table.mean(0)).max()) > 0.1
    drafted = bytejax.generate(target, [ids[0].tolist()], drafter=Probe.create(8, start=start), max_new_tokens=4)
    assert drafted.ids == bytejax.generate(target, [ids[0].tolist()], max_new_tokens=4).ids
