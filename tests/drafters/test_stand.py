"""STAND's tables against a dictionary, its trees, and what it learns from."""

import jax
import jax.numpy as jnp
import numpy as np

from bytejax.decoding.logits import make_warp
from bytejax.drafters.base import Draft, Outcome, Prompt
from bytejax.drafters.stand import Stand
from bytejax.models.base import Block, Extended
from tests.decoding.tiny import make_target

VOCAB = 23
GREEDY, SAMPLED = make_warp(VOCAB, 0.0, 0, 1.0), make_warp(VOCAB, 1.0, 0, 1.0)


def start(drafter, row, spare=100):
    ids = jnp.asarray([row])
    return drafter.init(make_target(), Prompt(ids, jnp.asarray([len(row)]), None, None, None, ids.shape[1] + spare))


def merged(table, key, law, kept):
    """The c-th time counts 1 / c; the best stay."""
    old, seen = table.get(key, ({}, 0))
    top = dict(sorted(enumerate(law), key=lambda x: -x[1])[:kept])
    share = 1 / (seen + 1)
    both = {i: (1 - share) * old.get(i, 0) + share * top.get(i, 0) for i in {*old, *top}}
    table[key] = dict(sorted(both.items(), key=lambda x: -x[1])[:kept]), seen + 1


def test_tables_hold_running_means_of_the_targets_probabilities():
    drafter = Stand.create(budget=4, orders=(2, 1), slots=4096, kept=4, from_prompt=False)
    rng, text, table = np.random.default_rng(0), [3, 1], {}
    state = start(drafter, text)
    observe = jax.jit(lambda state, outcome: drafter.observe(state, None, outcome))
    for _ in range(40):
        laws = rng.normal(size=(1, 4, VOCAB)).astype("f") * 2
        ids, count = rng.integers(0, 3, 4), int(rng.integers(0, 4))
        block = Block.chain(jnp.asarray(ids, jnp.int32)[None])
        path = jnp.arange(4)[None]
        outcome = Outcome(Draft(block), Extended(None, {}, None), jnp.asarray(laws), None, path, jnp.asarray([count]))
        state = observe(state, outcome)
        for i in range(count):
            text.append(int(ids[i]))
            law = np.exp(laws[0, i]) / np.exp(laws[0, i]).sum()
            for order in (2, 1):
                merged(table, tuple(text[-order:]), law.tolist(), 4)
    assert state.text.ids[0, : len(text)].tolist() == text
    unknown = 0
    for pair in np.ndindex(3, 3):
        context = jnp.asarray([pair[::-1]])
        ids, log_probs = drafter._look_up(state.tables, context)
        want, _ = table.get(pair) or table[pair[1:]]
        unknown += pair not in table
        total = sum(want.values())
        got = {int(i): float(np.exp(p)) for i, p in zip(ids[0], log_probs[0]) if np.isfinite(p)}
        assert got.keys() == want.keys()
        for i, p in want.items():
            assert abs(got[i] - p / total) < 1e-4
    assert unknown < 9


def test_the_longest_known_suffix_counts_and_trees_follow_it():
    drafter = Stand.create(budget=6, orders=(3, 2, 1), slots=512, kept=3, accuracies=[[0.9, 0.5], [0.8], [0.7]])
    state = start(drafter, [1, 2, 3, 4, 9, 2, 3, 5, 1, 2])
    draft = drafter.propose(state, jnp.asarray([3]), None, GREEDY)
    parents, ids = drafter.shape.parents, draft.block.ids[0].tolist()
    valid = draft.block.is_draft[0].tolist()
    children = {ids[i]: ids[parents[i]] for i in range(1, 6) if valid[i]}
    assert children[4] == 3 and children[9] == 4  # 1 2 3 was followed by 4 and 9, though 2 3 was last followed by 5
    assert not drafter.propose(state, jnp.asarray([20]), None, GREEDY).block.is_draft.any()


def test_sampled_children_are_drawn_without_replacement_from_the_table():
    drafter = Stand.create(budget=3, orders=(1,), slots=64, kept=3, accuracies=[[0.5, 0.5]])
    state = start(drafter, [1, 2])
    probs = jnp.asarray([[0.6, 0.3, 0.1]])
    tables = drafter._learn(state.tables, jnp.asarray([[7]]), jnp.asarray([[4, 5, 6]]), probs, jnp.asarray([True]))
    state, draws = state.replace(tables=tables), 20_000
    many = jax.tree.map(lambda x: jnp.broadcast_to(x, (draws, *x.shape[1:])), state)
    draft = drafter.propose(many, jnp.full((draws,), 7), jax.random.split(jax.random.key(0), draws), SAMPLED)
    pairs = np.asarray(draft.block.ids[:, 1:])
    law = {4: 0.6, 5: 0.3, 6: 0.1}
    for a, p in law.items():
        for b, q in law.items():
            share = ((pairs == [a, b]).all(1)).mean()
            want = 0 if a == b else p * q / (1 - p)
            assert abs(share - want) < 4 * (want * (1 - want) / draws) ** 0.5 + 1e-9
    assert sorted(draft.children.ids[0, 0].tolist()) == [4, 5, 6]
    np.testing.assert_allclose(np.exp(draft.children.log_q[0, 0]).sum(), 1, atol=1e-5)
