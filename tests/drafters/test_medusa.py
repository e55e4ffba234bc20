"""EvaByte's own heads as drafters: against the reference's multibyte decoding, and as the start of circuits."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bytejax
from bytejax import InputError, circuits
from bytejax.circuits import head as circuit_heads
from bytejax.decoding import loop
from bytejax.decoding.logits import make_warp
from bytejax.drafters import heads as own_heads
from bytejax.drafters.medusa import Medusa
from bytejax.tokenizers import EvaByteTokenizer
from bytejax.training import tasks
from tests.decoding import tiny
from tests.models import evabyte_cases
from tests.models.evabyte_cases import FOLDER, padded

REFERENCE = json.loads((FOLDER / "trees.json").read_text())
FOUR_HEADS = REFERENCE["tree_h4"]["child_counts"]


@pytest.fixture(scope="module")
def case():
    return evabyte_cases.load("w16c4_h8")


@pytest.mark.parametrize("name", REFERENCE)
def test_trees_have_the_references_nodes(name):
    drafter = Medusa.create(name if name != "tree_h4" else FOUR_HEADS)
    parents, depths, ranks = drafter.shape.parents, drafter.shape.depths, drafter.shape.ranks
    paths = []
    for node in range(1, len(parents)):
        path = [node]
        while parents[path[0]]:
            path.insert(0, parents[path[0]])
        paths.append([ranks[i] for i in path])
    assert paths == REFERENCE[name]["sorted_paths"]
    assert [len(path) for path in paths] == list(depths[1:])
    assert drafter.block_width == REFERENCE[name]["nodes"] + 1


@pytest.mark.parametrize(
    ("name", "tree", "key"),
    [
        ("w16c4_h8", "tree95", "multibyte"),
        ("w16c4_h8", "tree31", "multibyte31"),
        ("w32c4_h8", "tree95", "multibyte"),
        ("w32c8_h4", FOUR_HEADS, "multibyte"),
    ],
)
def test_every_cycle_is_the_references_step(name, tree, key):
    """The same trees, the same rows accepted, the same bytes; and what head 0 says at each node it can judge."""
    case = evabyte_cases.load(name)
    target, drafter, names = case.target, Medusa.create(tree), case.having(f"{key}.output_ids")
    drafter.check(target)
    rows = [case.prompt(x) for x in names]
    rules = loop.Rules(make_warp(target.vocab, 0.0, 0, 1.0, ()), jnp.zeros((0,), jnp.int32))
    limit = jnp.full((len(rows),), 90)
    lengths, keys = jnp.asarray([len(x) for x in rows]), jax.random.split(jax.random.key(0), len(rows))
    start = jax.jit(loop.start, static_argnames=("capacity", "room"))
    state = start(target, drafter, rules, padded(rows, 112), lengths, limit, keys, capacity=256, room=90)

    @jax.jit
    def step(state):
        block = drafter.propose(state.draft, state.root, state.keys, rules.warp).block
        room = target.room(state.cache)
        logits = target.unembed(target.extend(block.cut(room), state.cache).hidden)
        seen = block.ids, jnp.argmax(logits, -1), jax.nn.logsumexp(logits, -1), room, block.depths()[0]
        return loop.cycle(target, drafter, rules, state), seen

    stored = [{k: case.io.get(f"{x}.{key}.{k}") for k in STEPS} for x in names]
    before = np.ones(len(rows), int)
    for number in range(max(len(s["new_per_step"]) for s in stored)):
        state, (ids, choice, lse, room, depths) = jax.device_get(step(state))
        new, before = state.count - before, state.count
        for row, s in enumerate(stored):
            if number >= len(s["new_per_step"]):
                continue
            columns = min(drafter.shape.depth + 1, room[row])
            within = depths < columns
            if s["tree_tokens"] is not None:
                assert s["positions_considered"][number] == columns
                np.testing.assert_array_equal(ids[row], s["tree_tokens"][number])
                np.testing.assert_array_equal(choice[row][within], s["tree_argmax"][number][within])
            if s["tree_lse"] is not None:
                np.testing.assert_allclose(lse[row][within], s["tree_lse"][number][within], rtol=0, atol=2e-4)
            assert new[row] == s["new_per_step"][number]
    for row, x in enumerate(names):
        want = case.new(x, key)
        assert state.out[row, : len(want)].tolist() == want


STEPS = ("tree_tokens", "tree_argmax", "tree_lse", "new_per_step", "positions_considered")


def test_generation_with_trees_is_the_targets_own_text(case):
    """Also where limits and ends cut the steps, which the reference returns uncut."""
    names, stop = case.having("generate.output_ids"), int(case.io["eos_demo.eos_id"][0])
    prompts, want = [case.prompt(x) for x in names], [case.new(x) for x in names]
    target = case.target.replace(tokenizer=EvaByteTokenizer(stop=(stop,)))
    drafter = bytejax.load_drafter("evabyte", target, tree="tree31")
    result = bytejax.generate(target, prompts, drafter=drafter, max_new_tokens=len(want[0]))
    assert result.ids == [x[: x.index(stop) + 1] if stop in x else x for x in want]
    assert set(result.finish_reasons) == {"stop", "length"} and result.stats.accept_length > 1.5
    row = names.index("multi_window")
    assert prompts[row] + result.ids[row] == case.io["eos_demo.generate.output_ids"].tolist()


def test_sampled_text_of_one_byte_per_depth_keeps_its_law(case):
    """A tree's first bytes, drawn many times, against the target's probabilities."""
    prompt, draws = case.prompt("sub_window"), 256
    drafter = Medusa.create([[4], [2, 1]])
    options = dict(max_new_tokens=2, temperature=0.5, top_k=4)
    result = bytejax.generate(case.target, [prompt] * draws, drafter=drafter, **options)
    warp = make_warp(case.target.vocab, 0.5, 4, 1.0, ())
    first = np.exp(warp.log_probs(case.target.logits(jnp.asarray([prompt]))[0, -1]))
    support = np.flatnonzero(first)
    rows = jnp.asarray([prompt + [int(x)] for x in support])
    joint = {
        (int(x), y): first[x] * p
        for x, law in zip(support, np.exp(warp.log_probs(case.target.logits(rows)[:, -1])), strict=True)
        for y, p in enumerate(law)
        if p > 0
    }
    counts = dict.fromkeys(joint, 0)
    for ids in result.ids:
        counts[tuple(ids)] += 1  # a pair outside the support is a KeyError
    expected = {pair: draws * p for pair, p in joint.items()}
    often = [pair for pair, n in expected.items() if n >= 5]
    chi = sum((counts[p] - expected[p]) ** 2 / expected[p] for p in often)
    assert chi < len(often) + 5 * (2 * len(often)) ** 0.5
    assert any(any(x) for x in result.from_draft)


@pytest.mark.parametrize(
    ("name", "window", "adapter_rank", "feed_width"),
    [("ff", 3, None, None), ("cp", 11, 2, None), ("hmm", 8, None, 8), ("btree", 11, None, None)],
)
def test_heads_are_a_circuit_at_first(case, name, window, adapter_rank, feed_width):
    """Whatever the mixtures, the law of a window is the product of EvaByte's heads; past them the last one stays."""
    target = case.target
    circuit = circuits.make(name, window, 1 if name == "ff" else 3)

    @jax.jit
    def both(target, hidden, x):
        config, params = own_heads.from_heads(target, circuit, jax.random.key(1), adapter_rank, feed_width)
        theta = circuit_heads.theta(params, config, hidden, x[..., 0])
        heads = jax.nn.log_softmax(target.all_logits(hidden))
        place = jnp.minimum(jnp.arange(window), heads.shape[-2] - 1)
        each = jnp.take_along_axis(heads[:, place], x[..., None], axis=-1)[..., 0]
        return circuit.prefix_log_probs(theta, x), jnp.cumsum(each, axis=-1)

    hidden = jnp.asarray(case.io["multi_window.hidden"][:6])
    got, want = both(target, hidden, jax.random.randint(jax.random.key(0), (6, window), 0, target.vocab))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def test_training_of_circuits_starts_from_the_heads(case, tmp_path):
    heads, hidden = tasks.own_heads(tmp_path, case.target), case.io["sub_chunk.hidden"]
    np.testing.assert_allclose(jnp.einsum("td,pvd->tpv", hidden, heads), case.target.all_logits(hidden), atol=1e-4)


def test_heads_as_an_ff_drafter_are_lossless(case):
    names = case.having("generate.output_ids")
    drafter = bytejax.load_drafter("heads", case.target, draft_tokens=5)
    assert drafter.block_width == 6 and drafter.config.circuit == circuits.FF(8)
    result = bytejax.generate(case.target, [*map(case.prompt, names)], drafter=drafter, max_new_tokens=72)
    assert result.ids == [case.new(x) for x in names]
    assert result.stats.accept_length > 1.3


def test_what_does_not_fit_is_refused(case):
    llama = tiny.make_target()
    for source in ("evabyte", "heads"):
        with pytest.raises(InputError, match="prediction heads"):
            bytejax.load_drafter(source, llama)
    with pytest.raises(InputError, match="needs 8 prediction heads; the target has 4"):
        bytejax.load_drafter("evabyte", evabyte_cases.load("w32c8_h4").target)
    with pytest.raises(InputError, match="'width' is unknown; known: tree, accuracies, nodes"):
        bytejax.load_drafter("evabyte", case.target, width=3)
    with pytest.raises(InputError, match="more children"):
        bytejax.load_drafter("evabyte", case.target, tree=[[400]])
    with pytest.raises(InputError, match="trees"):
        bytejax.generate(case.target, [[1]], drafter=Medusa.create("tree31"), max_new_tokens=2, verify=False)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ("tree7", "unknown tree 'tree7'; known: tree95, tree31"),
        ([], "empty"),
        ([[2], [0, 0]], "depth 2 of the tree has no nodes"),
        ([[2], [1, 1, 1]], "3 counts for 2 nodes"),
        ([[1, 1]], "2 counts for 1 nodes"),
        ([[2], [1.5]], "whole numbers"),
        ([3], "list of lists"),
    ],
)
def test_counts_that_are_no_tree(tree, message):
    with pytest.raises(InputError, match=message):
        Medusa.create(tree)
