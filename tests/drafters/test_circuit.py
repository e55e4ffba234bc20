"""What a circuit drafter proposes: its circuit's conditionals, from the last kept position and the right root."""

import jax.numpy as jnp
import numpy as np
import pytest

from bytejax.circuits import head
from bytejax.decoding.logits import make_warp
from bytejax.drafters.base import Draft, Outcome
from bytejax.drafters.circuit import CircuitDrafter
from bytejax.models.base import Block, Extended
from tests.decoding.tiny import make_head, make_target


@pytest.fixture(scope="module", params=[None, 6], ids=["plain", "fed"])
def case(request):
    target = make_target()
    params, config = make_head(target, "hmm", feed_width=request.param)
    return target, params, config, CircuitDrafter.create(params, config, draft_tokens=3)


@pytest.mark.parametrize("accepted", [0, 1, 3, 4])
def test_proposals_are_the_conditionals_after_what_was_accepted(case, accepted):
    """Rows of a batch accept differently; 0 leaves a row's features as they were."""
    target, params, config, drafter = case
    old, hidden = jnp.ones((2, 24)), jnp.arange(2 * 4 * 24.0).reshape(2, 4, 24) % 7 - 3
    block, path = Block.chain(jnp.zeros((2, 4), jnp.int32)), jnp.tile(jnp.arange(4), (2, 1))
    outcome = Outcome(Draft(block), Extended(hidden, {}, None), None, None, path, jnp.array([accepted, 2]))
    state = drafter.observe(old, target, outcome)
    features = jnp.stack([hidden[0, accepted - 1] if accepted else old[0], hidden[1, 1]])
    np.testing.assert_array_equal(state, features)

    root = jnp.array([7, 11])
    draft = drafter.propose(state, root, None, make_warp(target.vocab, 0.0, 0, 1.0))
    assert draft.block.ids.shape == (2, 4) and (draft.block.ids[:, 0] == root).all()
    theta = head.theta(params, config, features, root)
    x = jnp.pad(draft.block.ids, ((0, 0), (0, 1)))
    best = jnp.argmax(config.circuit.conditionals(theta, x), -1)
    np.testing.assert_array_equal(draft.block.ids[:, 1:], best[:, 1:4])


def test_a_window_of_one_drafts_nothing():
    target = make_target()
    drafter = CircuitDrafter.create(*make_head(target, "btree", window=1))
    draft = drafter.propose(jnp.ones((2, 24)), jnp.array([1, 2]), None, make_warp(target.vocab, 0.0, 0, 1.0))
    assert drafter.block_width == 1 and draft.block.ids.tolist() == [[1], [2]]
