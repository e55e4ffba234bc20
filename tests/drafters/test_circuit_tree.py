"""Trees from circuit heads: the circuit's best prefixes, and the target's own text."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bytejax
from bytejax import InputError
from bytejax.circuits import head
from bytejax.decoding.logits import make_warp
from bytejax.drafters.circuit import CircuitDrafter
from bytejax.drafters.circuit_tree import CircuitTree, State
from tests.decoding.tiny import make_drafter, make_head, make_target, near_tie

PROMPTS = [[1, 2, 3], [4] * 17, [7]]
HEADS = {
    "ff": dict(name="ff"),
    "cp lora": dict(name="cp", lora_layers=1),
    "hmm fed": dict(name="hmm", feed_width=6, draft_tokens=3),
    "btree": dict(name="btree", extra_ids=2),
}


def make_pair(name):
    target = make_target()
    return target, CircuitTree.create(make_drafter(target, **HEADS[name], scale=5.0), 9)


@pytest.mark.parametrize(("name", "batch"), [*((name, 3) for name in HEADS), ("btree", 1)])
def test_greedy_text_is_the_targets(name, batch):
    target, drafter = make_pair(name)
    plain = bytejax.generate(target, PROMPTS[:batch], max_new_tokens=60)
    drafted = bytejax.generate(target, PROMPTS[:batch], drafter=drafter, max_new_tokens=60)
    for prompt, a, b in zip(PROMPTS, plain.ids, drafted.ids):
        assert a == b or near_tie(target, prompt, a, b)
    assert drafted.stats.target_forwards < plain.stats.target_forwards


@pytest.mark.parametrize("name", HEADS)
def test_samples_are_those_of_autoregression(name):
    target, drafter = make_pair(name)
    options = dict(max_new_tokens=40, temperature=1.0, seed=3)
    plain = bytejax.generate(target, PROMPTS, **options)
    drafted = bytejax.generate(target, PROMPTS, drafter=drafter, **options)
    assert drafter.rules == ("match",) and drafted.ids == plain.ids
    assert drafted.stats.accepted > 0


@pytest.mark.parametrize("feed_width", [None, 6])
def test_a_block_holds_the_best_prefixes_after_the_root(feed_width):
    """Of the circuit that the head gives, conditioned on the root; warped as the target is, without its banned ids.

    Not fed, it thinks the first root impossible; the circuit then goes on as if it had not been seen.
    """
    target, banned = make_target(), (3, 5)
    params, config = make_head(target, "btree", window=3, feed_width=feed_width, extra_ids=1)
    drafter, circuit = CircuitTree.create(CircuitDrafter.create(params, config), 8), config.circuit
    drafter.check(target)
    state, root = jnp.linspace(-1, 1, 48).reshape(2, 24), jnp.array([7, 11])
    warp = make_warp(target.vocab, 0.7, 0, 0.9, banned)
    pairs = np.array(list(itertools.product(range(target.vocab), repeat=2)))

    @jax.jit
    def propose(state, root):
        sums, leaves = head.logits(params, config, state, root)
        theta = circuit.condition(head.Theta(warp.sums(sums), warp.log_probs(leaves)), root)
        x = jnp.concatenate([jnp.broadcast_to(root[:, None, None], (2, len(pairs), 1)), jnp.tile(pairs, (2, 1, 1))], -1)
        q = circuit.prefix_log_probs(jax.tree.map(lambda a: a[:, None], theta), x)
        return drafter.propose(State(state, None), root, None, warp).block, q

    block, q = propose(state, root)
    assert block.max_levels == 3 and not block.is_chain
    rows = (np.asarray(x) for x in (block.ids, block.parents, block.valid, q))
    for ids, parents, valid, log_q in zip(*rows, strict=True):
        known = {x[:n]: float(log_q[i, n]) for i, x in enumerate(map(tuple, pairs.tolist())) for n in (1, 2)}
        best = [x for x in sorted(known, key=known.get, reverse=True)[:7] if known[x] > -np.inf]
        paths = [()]
        for i in range(1, 8):
            paths.append((*paths[parents[i]], int(ids[i])))
        kept = [x for x, ok in zip(paths, valid, strict=True) if ok]
        assert len(best) >= 5 and set(kept[1:]) == set(best)
        assert not {*banned, target.vocab} & {*sum(kept, ())}
    np.testing.assert_array_equal(block.ids[:, 0], root)


def test_ids_without_mass_are_no_drafts():
    """With a nucleus of hardly anything there is one draft per place."""
    target = make_target()
    drafter = CircuitTree.create(make_drafter(target, "cp", scale=5.0), 12, beam=4)
    warp = make_warp(target.vocab, 0.01, 0, 1e-6)
    propose = jax.jit(lambda state, root: drafter.propose(State(state, None), root, None, warp).block)
    block = propose(jnp.ones((1, 24)), jnp.array([7]))
    assert block.valid.sum() == 5 and block.is_draft.sum() == 4
    assert block.valid[0, block.parents[0]][block.valid[0]].all()


def test_options(tmp_path):
    target = make_target()
    params, config = make_head(target, "cp")
    bytejax.save_head(tmp_path / "head", config, params, jnp.float32)
    drafter = bytejax.load_drafter(tmp_path / "head", target, tree=6, beam=2, draft_tokens=3)
    assert (drafter.block_width, drafter.beam, drafter.head.draft_tokens) == (6, 2, 3)
    assert bytejax.load_drafter(tmp_path / "head", target, tree=30).beam == 16
    assert isinstance(bytejax.load_drafter(tmp_path / "head", target, tree=None), CircuitDrafter)
    wrong = [
        (dict(tree=1), "tree must be an integer of at least 2"),
        (dict(tree="wide"), "tree must be an integer"),
        (dict(tree=4, beam=0), "beam must be an integer"),
        (dict(beam=3), "give tree"),
        (dict(tree=6, beam=1), "tree = 6: a beam of 1 over 4 bytes finds at most 5 nodes"),
    ]
    for options, message in wrong:
        with pytest.raises(InputError, match=message) as e:
            bytejax.load_drafter(tmp_path / "head", target, **options)
        assert "\n" not in str(e.value)
    with pytest.raises(InputError, match="window of 1"):
        CircuitTree.create(make_drafter(target, "btree", window=1), 4)
    with pytest.raises(InputError, match="trees, which are always verified"):
        bytejax.generate(target, PROMPTS, drafter=drafter, max_new_tokens=4, verify=False)
