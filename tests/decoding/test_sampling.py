"""Sampled output has exactly the target's distribution.

Every output of length 4 over 3 ids against its exact probability.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import bytejax
from bytejax.decoding import accept, loop
from bytejax.decoding import generate as generate_module
from bytejax.drafters.stand import Stand
from tests.decoding.tiny import Oracle, Tree, bordered, make_drafter, make_target

PROMPT, LENGTH, DRAWS, BATCH = [1, 0, 2, 2], 4, 100_000, 25_000
NAMES = ("ff", "cp", "hmm", "btree")
FED = ("btree fed", "hmm fed 2")  # heads that see the root byte, the second drafting fewer bytes than its window
LORA = ("cp lora", "btree lora")  # heads on a draft stream of their own
CERTAIN = "certain"  # a drafter that does not sample
TREE = "tree"  # the same, proposing trees
BORDERED = "cp bordered"  # a target that cuts blocks
STAND = ("stand", "stand bordered")  # children drawn without replacement from tables that the text fills
SETTINGS = {"plain": dict(temperature=1.0), "warped": dict(temperature=0.7, top_p=0.9)}
KINDS = (*NAMES, *FED, *LORA)
ALL = [(name, rule, bonus) for name in KINDS for rule in accept.RULES for bonus in ("condition", "carry", "standard")]
SHORT = [(name, "block", "condition") for name in (*NAMES, *FED, "btree lora", BORDERED)]
SHORT += [(name, "match", "condition") for name in (CERTAIN, TREE, "cp")] + [(CERTAIN, "match", "carry")]
SHORT += [("cp", "token", "condition"), ("btree fed", "token", "carry"), ("btree", "block", "standard")]
SHORT += [("hmm fed 2", "block", "carry"), ("cp lora", "block", "carry")]
SHORT += [(name, "recursive", "condition") for name in STAND]
EVERYTHING = [(*case, setting) for case in dict.fromkeys([*ALL, *SHORT]) for setting in SETTINGS]
EVERY_TIME = [(*case, list(SETTINGS)[i % 2]) for i, case in enumerate(SHORT)]  # each in one setting, by turns
LEVEL = 0.001 / (len({*ALL, *SHORT}) + 1) / len(SETTINGS)


def make_pair(name):
    numbers = {"width": 12, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 4, "ffn_width": 16}
    target = make_target(vocab=3, sharpness=0.6, context=64, **numbers)
    if name == CERTAIN:
        return target, Oracle(truth=jnp.tile(jnp.asarray([[0, 1, 2, 1, 1, 0]]), (BATCH, 1)), width=3)
    if name == TREE:
        return target, Tree(truth=jnp.tile(jnp.asarray([[0, 1, 2, 1, 1, 0]]), (BATCH, 1)), width=6)
    if name in STAND:
        shares = [[0.6, 0.3, 0.1], [0.5, 0.3], [0.4]]
        drafter = Stand.create(budget=7, orders=[2, 1], slots=8, kept=3, accuracies=shares)
        return (bordered(target) if name.endswith("bordered") else target), drafter
    if name == BORDERED:
        return bordered(target), make_drafter(target, "cp", window=4, rank=2, scale=40.0)
    circuit, *rest = name.split()
    if rest == ["lora"]:
        return target, make_drafter(target, circuit, window=4, rank=2, scale=40.0, lora_layers=1)
    feed, tokens = (5 if rest else None), (int(rest[1]) if rest[1:] else None)
    numbers = dict(window=4, rank=2, extra_ids=1, scale=40.0, feed_width=feed)
    return target, make_drafter(target, circuit, draft_tokens=tokens, **numbers)


def exact_law(target, temperature, top_p=1.0):
    """Probability of each output, from the target's whole-sequence logits and a textbook nucleus. -> [3] * LENGTH."""
    outputs = np.array(list(itertools.product(range(3), repeat=LENGTH)))
    ids = np.concatenate([np.tile(PROMPT, (len(outputs), 1)), outputs], axis=1)
    logits = np.asarray(target.logits(ids))[:, len(PROMPT) - 1 : -1].astype(np.float64) / temperature
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    order = np.argsort(-p, -1)
    in_order = np.take_along_axis(p, order, -1)
    kept = np.cumsum(in_order, -1) - in_order < top_p
    p *= np.take_along_axis(kept, np.argsort(order, -1), -1)
    p /= p.sum(-1, keepdims=True)
    return np.take_along_axis(p, outputs[..., None], -1)[..., 0].prod(1)


def draw(target, drafter, **settings):
    counts = np.zeros(3**LENGTH, int)
    for seed in range(DRAWS // BATCH):
        rows = bytejax.generate(
            target, [PROMPT] * BATCH, drafter=drafter, max_new_tokens=LENGTH, seed=seed, **settings
        ).ids
        counts += np.bincount(np.array(rows) @ 3 ** np.arange(LENGTH - 1, -1, -1), minlength=3**LENGTH)
    return counts


def p_value(counts, law):
    """Chi-square against an exact law.

    Cells that expect fewer than 5 are pooled. 0 where something impossible was drawn.
    """
    expected = law * counts.sum()
    if counts[expected == 0].any():
        return 0.0
    small = expected < 5
    cells = [np.append(x[~small], x[small].sum()) for x in (counts, expected)]
    observed, expected = (x[cells[1] > 0] for x in cells)
    return stats.chisquare(observed, expected).pvalue


@pytest.mark.parametrize(("name", "accept", "bonus", "setting"), EVERY_TIME)
def test_samples_have_the_targets_law(name, accept, bonus, setting):
    target, drafter = make_pair(name)
    law = exact_law(target, **SETTINGS[setting])
    assert abs(law.sum() - 1) < 1e-9
    assert setting == "plain" or (law == 0).any()
    assert p_value(draw(target, drafter, accept=accept, bonus=bonus, **SETTINGS[setting]), law) > LEVEL


@pytest.mark.slow
@pytest.mark.parametrize(("name", "accept", "bonus", "setting"), sorted({*EVERYTHING} - {*EVERY_TIME}))
def test_samples_have_the_targets_law_in_every_combination(name, accept, bonus, setting):
    target, drafter = make_pair(name)
    counts = draw(target, drafter, accept=accept, bonus=bonus, **SETTINGS[setting])
    assert p_value(counts, exact_law(target, **SETTINGS[setting])) > LEVEL


@pytest.mark.parametrize("setting", SETTINGS)
def test_autoregressive_samples_have_the_targets_law(setting):
    target, _ = make_pair("ff")
    counts = draw(target, None, **SETTINGS[setting])
    assert p_value(counts, exact_law(target, **SETTINGS[setting])) > LEVEL


@pytest.mark.parametrize("rule", accept.RULES)
def test_drawing_from_p_after_a_rejection_is_noticed(monkeypatch, rule):
    right = accept.RULES[rule]

    def wrong(chain, keys):
        verdict = right(chain, keys)
        return verdict.replace(law=accept.row(chain.log_p, verdict.kept))

    monkeypatch.setitem(accept.RULES, rule, wrong)
    # A new function: JAX would find the old one's trace, with the right rule in it.
    fresh = generate_module.Program(lambda *args: loop.run(*args), donate=(3,))
    monkeypatch.setattr(generate_module, "RUN", fresh)
    target, drafter = make_pair("cp")
    assert p_value(draw(target, drafter, temperature=1.0, accept=rule), exact_law(target, 1.0)) < 1e-6


def test_the_published_cycle_is_noticed():
    target, drafter = make_pair("cp")
    assert p_value(draw(target, drafter, temperature=1.0, bonus="paper"), exact_law(target, 1.0)) < 1e-6


@pytest.mark.parametrize(
    ("name", "rule", "bonus"),
    [(name, "sequential", "condition") for name in NAMES]
    + [("cp", "joint", "condition"), ("hmm", "sequential", "carry"), ("btree", "sequential", "standard")],
)
def test_a_row_samples_the_same_alone_and_in_a_ragged_batch(name, rule, bonus):
    target = make_target(stop=(5,))
    drafter = make_drafter(target, name, draft_tokens=3, greedy_rule=rule)
    prompts = [[1, 2, 3], [4] * 17, list(range(20)), [7]]
    options = dict(drafter=drafter, max_new_tokens=40, temperature=0.9, top_p=0.95, seed=11, bonus=bonus)
    together = bytejax.generate(target, prompts, **options)
    for i, prompt in enumerate(prompts):
        alone = bytejax.generate(target, [prompt], **options)
        assert alone.ids[0] == together.ids[i]
        assert alone.finish_reasons[0] == together.finish_reasons[i]


def test_repetitions_of_a_prompt_draw_from_different_streams():
    target = make_target()
    rows = bytejax.generate(target, [[1, 2]] * 4, max_new_tokens=30, temperature=1.0).ids
    assert len({tuple(r) for r in rows}) == 4


def chain_of(p, q, rows, length, count=None, seed=5):
    """Chains with drafts drawn from the same q at every place, and the same p. Both [V]."""
    tiled = lambda x, n: jnp.tile(jnp.log(jnp.asarray(x)), (rows, n, 1))
    drafts = jax.random.categorical(jax.random.key(seed), tiled(q, length))
    counts = jnp.full((rows,), length if count is None else count, jnp.int32)
    return accept.Chain(drafts.astype(jnp.int32), counts, tiled(p, length + 1), tiled(q, length))


@pytest.mark.parametrize("rule", accept.RULES)
@pytest.mark.parametrize("count", [0, 1])
def test_a_cut_draft_is_followed_by_the_targets_own_law(rule, count):
    """Where the draft was cut there was no rejection: the next byte comes from p, not from the excess of p over q."""
    p, rows = [0.5, 0.3, 0.2], 60_000
    verdict = accept.RULES[rule](
        chain_of(p, [0.1, 0.8, 0.1], rows, 2, count), jax.random.split(jax.random.key(0), rows)
    )
    at_cut = np.asarray(verdict.kept) == count
    assert (np.asarray(verdict.kept) <= count).all() and at_cut.mean() > 0.3
    np.testing.assert_allclose(jax.nn.softmax(verdict.law[at_cut]), np.tile(p, (at_cut.sum(), 1)), atol=1e-6)


@pytest.mark.parametrize(("rule", "mean"), [("token", 10 / 9), ("block", 11 / 9)])
def test_the_drafts_that_each_rule_keeps_of_two(rule, mean):
    """The example of the paper on block verification (arXiv 2403.10444): its expectations for both rules."""
    rows = 200_000
    chain = chain_of([1 / 3, 2 / 3], [2 / 3, 1 / 3], rows, 2)
    kept = np.asarray(accept.RULES[rule](chain, jax.random.split(jax.random.key(1), rows)).kept)
    assert abs(kept.mean() - mean) < 4 * kept.std() / rows**0.5


@pytest.mark.parametrize("rule", accept.RULES)
def test_a_draft_that_the_target_rules_out_is_never_kept(rule):
    chain = chain_of([0.5, 0.5, 0.0], [0.2, 0.2, 0.6], 5000, 3)
    verdict = accept.RULES[rule](chain, jax.random.split(jax.random.key(2), 5000))
    for drafts, kept in zip(np.asarray(chain.drafts), np.asarray(verdict.kept)):
        assert 2 not in drafts[:kept]
    assert not np.isnan(verdict.law).any() and (np.asarray(jax.nn.softmax(verdict.law))[:, 2] == 0).all()
