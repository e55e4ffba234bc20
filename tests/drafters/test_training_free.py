"""Drafters without training leave the text as it is, greedy and sampled with the same seed, on every kind of target."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bytejax
from bytejax import InputError
from bytejax.decoding.logits import make_warp
from bytejax.drafters import probe
from bytejax.drafters.base import Prompt
from bytejax.drafters.circuit_tree import CircuitTree
from bytejax.drafters.ngram import PromptLookup
from bytejax.drafters.probe import Probe
from bytejax.models import llama
from bytejax.models.base import Block
from tests.decoding.tiny import Bordered, make_drafter, make_target, near_tie
from tests.models import byte_llama_cases, evabyte_cases

DRAFTERS = {
    "pld": ("pld", dict(longest=3, shortest=1, draft_tokens=5)),
    "official": ("pld", dict(rule="official", draft_tokens=4)),
    "esp": ("esp", dict(budget=10, least=0.2)),
    "esp static": ("esp", dict(budget=12, masks=2, widths=[2, 1], prune=True)),
    "esp dynamic": ("esp", dict(budget=18, masks=2, rate=0.0)),
    "pld+esp": ("pld+esp", dict(budget=16, shortest=1)),
    "lade": ("lade", dict(window=4, ngram=3, guesses=2)),
    "lade bigrams": ("lade", dict(window=2, ngram=2, guesses=2, from_prompt=True)),
    "stand": ("stand", dict(budget=10, slots=64, orders=[3, 2, 1])),
}
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [4] * 17, [7]]
NEW = 60
GREEDY = make_warp(23, 0.0, 0, 1.0)


@functools.cache
def target_of(name):
    if name == "byte_llama":
        return byte_llama_cases.load(byte_llama_cases.EXPANDING[0])
    if name == "evabyte":
        return evabyte_cases.load("w16c4_h8").target
    return make_target(sharpness=6.0, qk_norm=name == "qwen3")


@functools.cache
def plain(name, batch, temperature):
    target = target_of(name)
    return bytejax.generate(target, PROMPTS[:batch], max_new_tokens=NEW, temperature=temperature, seed=3)


def check(name, kind, batch, temperature):
    target, (source, options) = target_of(name), DRAFTERS[kind]
    drafter = bytejax.load_drafter(source, target, **options)
    settings = dict(max_new_tokens=NEW, temperature=temperature, seed=3)
    drafted = bytejax.generate(target, PROMPTS[:batch], drafter=drafter, **settings, accept="match")
    own = plain(name, batch, temperature)
    for prompt, a, b in zip(PROMPTS, own.ids, drafted.ids):
        assert a == b or (temperature == 0 and near_tie(target, prompt, a, b))
    return drafted.stats


@pytest.mark.parametrize("kind", DRAFTERS)
def test_rows_that_end_early_leave_the_others_alone(kind):
    """At their limits, one of them after a single id, and at a stop id."""
    own, limits = plain("llama", 3, 1.0).ids, [NEW, 1, 22]
    target, (source, options) = make_target(sharpness=6.0, stop=(own[0][NEW // 2],)), DRAFTERS[kind]
    settings = dict(max_new_tokens=limits, temperature=1.0, seed=3)
    alone = bytejax.generate(target, PROMPTS, **settings)
    drafted = bytejax.generate(
        target, PROMPTS, drafter=bytejax.load_drafter(source, target, **options), **settings, accept="match"
    )
    assert drafted.ids == alone.ids and drafted.finish_reasons == alone.finish_reasons
    assert drafted.finish_reasons[0] == "stop" and len(drafted.ids[1]) == 1


@pytest.mark.parametrize("kind", DRAFTERS)
def test_greedy_and_sampled_text_is_the_targets(kind):
    greedy, sampled = check("llama", kind, 3, 0.0), check("llama", kind, 3, 1.0)
    assert greedy.accept_length > 1.1 and greedy.accepted > 20 and sampled.accepted > 5
    assert sum(n > 0 for n in greedy.accept_histogram) >= 2


@pytest.mark.parametrize(
    ("name", "kind"),
    [("byte_llama", "esp dynamic"), ("evabyte", "pld+esp"), ("evabyte", "lade"), ("qwen3", "stand")],
)
def test_other_targets(name, kind):
    assert check(name, kind, 1, 0.0).accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "byte_llama", "evabyte"])
def test_every_drafter_on_every_target(name, kind, batch):
    check(name, kind, batch, 0.0)
    check(name, kind, batch, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_hundred_prompts_sample_what_autoregression_samples(kind):
    target, (source, options) = target_of("llama"), DRAFTERS[kind]
    ids = jax.random.randint(jax.random.key(5), (100, 9), 0, target.vocab).tolist()
    settings = dict(max_new_tokens=24, temperature=0.9, top_p=0.95, seed=1)
    drafter = bytejax.load_drafter(source, target, **options)
    for i in range(0, 100, 20):
        own = bytejax.generate(target, ids[i : i + 20], **settings)
        assert bytejax.generate(target, ids[i : i + 20], drafter=drafter, accept="match", **settings).ids == own.ids


class ChainsOnly(llama.Llama):
    takes_trees = False


@pytest.mark.parametrize("source", ["esp", "pld+esp", "lade", "stand"])
def test_trees_need_a_target_that_takes_them(source):
    target = make_target()
    chains = ChainsOnly(target.params, target.config, target.tokenizer)
    with pytest.raises(InputError, match="proposes trees, and a ChainsOnly takes only chains"):
        bytejax.load_drafter(source, chains)
    with pytest.raises(InputError, match="takes only chains"):
        CircuitTree.create(make_drafter(target, "btree"), 6).check(chains)
    bytejax.load_drafter("pld", chains)


@pytest.mark.parametrize("kind", ["esp static", "esp dynamic", "lade"])
def test_nodes_do_not_see_the_probes(kind):
    """The same block without its probes, to the last digits."""
    target, (source, options) = target_of("llama"), DRAFTERS[kind]
    drafter = bytejax.load_drafter(source, target, **options)
    ids, lengths = jnp.asarray([PROMPTS[0], PROMPTS[0][::-1]]), jnp.asarray([8, 5])
    cache = target.init_cache(2, 64, drafter.block_width)
    extended, cache = target.prefill(ids, lengths, cache)
    state = drafter.init(target, Prompt(ids, lengths, extended, cache, GREEDY, 64))
    block = drafter.propose(state, jnp.asarray([3, 1]), None, GREEDY).block
    assert 1 < block.nodes < block.width and not block.is_draft[:, block.nodes :].any()
    np.testing.assert_allclose(
        target.extend(block, cache).hidden[:, : block.nodes], target.extend(block.front, cache).hidden, atol=2e-6
    )


def test_a_narrower_cycle_runs_where_no_draft_is_worth_a_block():
    """Without a match, or without a likely candidate: the wide cycle would draft what never comes."""
    target = target_of("llama")
    seen = bytejax.generate(target, [[1, 2, 3, 4, 5, 6]], drafter=WrongWhereWide.create(longest=9, shortest=9), **EIGHT)
    assert seen.stats.drafted == 0 and seen.stats.target_forwards == 7 and seen.ids == plain_of(target, 8)
    wide = bytejax.generate(target, [[1, 2, 1, 2]], drafter=WrongWhereWide.create(), **EIGHT)
    assert wide.stats.drafted > 0  # where there is a match, this one does draft
    never = bytejax.load_drafter("esp", target, budget=10, least=1.0)
    seen = bytejax.generate(target, [[1, 2, 3, 4, 5, 6]], drafter=never, max_new_tokens=8)
    assert seen.stats.drafted == 0 and seen.ids == plain_of(target, 8)


EIGHT = dict(max_new_tokens=8)


class WrongWhereWide(PromptLookup):
    """Says that it drafts all of its width, match or not."""

    def propose(self, state, root, keys, warp):
        draft = super().propose(state, root, keys, warp)
        return draft.replace(block=Block.chain(draft.block.ids))


def test_whether_a_draft_is_worth_a_block_is_asked_of_what_is_drafted():
    """The best candidate repeats the root and is passed over; the next one is unlikely."""
    drafter = Probe.create(10, least=0.3)
    ids, log_probs = jnp.asarray([[[7, 1, 2, 3, 4]]] * 2), jnp.log(jnp.asarray([[[0.9, 0.05, 0.02, 0.01, 0.01]]] * 2))
    state = probe.State(jnp.zeros((2, 4)), ids, log_probs, None)
    assert drafter.worth(state, jnp.asarray([7, 9])).tolist() == [False, True]


def test_masks_do_not_guess_banned_ids():
    ids = jnp.asarray([PROMPTS[0]])
    target, drafter = target_of("llama"), bytejax.load_drafter("esp", target_of("llama"), budget=10)
    extended, cache = target.prefill(ids, jnp.asarray([8]), target.init_cache(1, 64, 10))
    guesses = lambda warp: drafter.init(target, Prompt(ids, jnp.asarray([8]), extended, cache, warp, 64)).ids[0, 0]
    best = int(guesses(GREEDY)[0])
    assert best not in guesses(make_warp(23, 0.0, 0, 1.0, [best])).tolist()


def plain_of(target, count):
    return bytejax.generate(target, [[1, 2, 3, 4, 5, 6]], max_new_tokens=count).ids


def test_blocks_are_cut_where_a_target_has_a_border():
    target = target_of("llama")
    cut = Bordered(params=target.params, config=target.config, tokenizer=target.tokenizer)
    drafter = bytejax.load_drafter("pld", target, longest=3, shortest=1, draft_tokens=8)
    drafted = bytejax.generate(cut, PROMPTS, drafter=drafter, max_new_tokens=NEW)
    assert drafted.ids == plain("llama", 3, 0.0).ids and sum(drafted.stats.accept_histogram[6:]) == 0


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("pld", dict(rule="best"), "unknown rule 'best'"),
        ("pld", dict(draft_tokens=0), "draft_tokens must be an integer of at least 1, got 0"),
        ("pld", dict(longest=2, shortest=3), "shortest = 3 is more than longest = 2"),
        ("esp", dict(budget=3), "budget = 3 holds no draft; with masks = 1 it is at least 4"),
        ("esp", dict(budget=5, masks=2), "at least 6"),
        ("esp", dict(lookup="bytes"), "option 'lookup' is unknown"),
        ("esp", dict(budget=12, masks=2, widths=[2, 2]), "5 nodes of 2 levels; a budget of 12 with 2 masks has 4"),
        ("esp", dict(budget=12, masks=1, widths=[4, 1]), "of at most 1"),
        ("esp", dict(rate=2), "rate must lie between 0 and 1"),
        ("esp", dict(start="zero"), "unknown start 'zero'"),
        ("esp", dict(budget=90), "wider than the target's 23 ids"),
        ("lade", dict(ngram=1), "ngram must be an integer of at least 2"),
        ("stand", dict(budget=1), "budget must be an integer of at least 2"),
        ("stand", dict(orders=[0]), "each of stand: orders must be an integer of at least 1, got 0"),
        ("stand", dict(orders=[17]), "orders are lengths from 1 to 16"),
        ("stand", dict(orders=4), "orders must be a list of integers"),
        ("stand", dict(from_prompt="False"), "from_prompt must be true or false, got 'False'"),
        ("lade", dict(from_prompt=1), "from_prompt must be true or false"),
        ("esp", dict(prune="True"), "prune must be true or false"),
        ("esp", dict(widths=14), "widths must be a list of integers"),
        ("none", dict(width=0), "width must be an integer of at least 1"),
        ("pld", dict(rule=[1]), "unknown rule"),
        ("pld", dict(draft_tokens=10**20), "draft_tokens must be at most 4096, got 1e.20"),
        ("esp", dict(widths=[10**9]), "widths must be at most 30"),
        ("stand", dict(budget=10**8), "budget must be at most 4096"),
        ("stand", dict(slots=10**12), "slots must be at most"),
        ("stand", dict(accuracies=[[10**400]]), "accuracies are a list of numbers"),
        ("lade", dict(window=4000, ngram=9), "more than 4096"),
        ("lade", dict(target=3), "option 'target' is unknown"),
        ("model", dict(source=5), "source must name a target, got 5"),
        ("stand", dict(kept=2, budget=20), "a slot keeps 2 ids"),
        ("stand", dict(depth=2), "option 'depth' is unknown"),
    ],
)
def test_what_makes_no_drafter(source, options, message):
    with pytest.raises(InputError, match=message):
        bytejax.load_drafter(source, target_of("llama"), **options)


def test_a_block_and_its_front():
    block = Block.tree(jnp.zeros((2, 5), jnp.int32), (0, 0, 1, 0, 3), nodes=3)
    assert (block.width, block.front.width, block.max_levels, block.front.max_levels) == (5, 3, 3, 3)
    assert block.is_draft[0].tolist() == [False, True, True, False, False]
    dynamic = Block.tree(block.ids, jnp.asarray([[0, 0, 1, 0, 3]] * 2), nodes=4, levels=2)
    assert dynamic.max_levels == 2 and dynamic.front.static_parents is None
