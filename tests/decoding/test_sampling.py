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
from tests.decoding.tiny import Oracle, make_drafter, make_target

PROMPT, LENGTH, DRAWS, BATCH = [1, 0, 2, 2], 4, 120_000, 30_000
NAMES = ("ff", "cp", "hmm", "btree")
FED = ("btree fed", "hmm fed 2")  # heads that see the root byte, the second drafting fewer bytes than its window
CERTAIN = "certain"  # a drafter that does not sample
SETTINGS = {"plain": dict(temperature=1.0), "warped": dict(temperature=0.7, top_p=0.9)}
TESTS = (len(NAMES) + len(FED) + 2) * len(SETTINGS)
LEVEL = 0.001 / TESTS


def make_pair(name):
    numbers = {"width": 12, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 4, "ffn_width": 16}
    target = make_target(vocab=3, sharpness=0.6, context=64, **numbers)
    if name == CERTAIN:
        return target, Oracle(truth=jnp.tile(jnp.asarray([[0, 1, 2, 1, 1, 0]]), (BATCH, 1)), width=3)
    circuit, *rest = name.split()
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


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", (*NAMES, *FED, CERTAIN))
def test_samples_have_the_targets_law(name, setting):
    target, drafter = make_pair(name)
    law = exact_law(target, **SETTINGS[setting])
    assert abs(law.sum() - 1) < 1e-9
    assert setting == "plain" or (law == 0).any()
    assert p_value(draw(target, drafter, **SETTINGS[setting]), law) > LEVEL


@pytest.mark.parametrize("setting", SETTINGS)
def test_autoregressive_samples_have_the_targets_law(setting):
    target, _ = make_pair("ff")
    counts = draw(target, None, **SETTINGS[setting])
    assert p_value(counts, exact_law(target, **SETTINGS[setting])) > LEVEL


def test_drawing_from_p_after_a_rejection_is_noticed(monkeypatch):
    def wrong(block, log_q, logits, warp, keys):
        verdict = accept.token_wise(block, log_q, logits, warp, keys)
        log_p = warp.log_probs(accept._row(logits, verdict.accepted - 1))
        return verdict.replace(bonus=accept.sample(log_p, keys, 1))

    monkeypatch.setattr(
        loop, "_judge", lambda d, logits, rules, keys: wrong(d.block, d.log_q, logits, rules.warp, keys)
    )
    # A new function: JAX would find the old one's trace, with the right rule in it.
    fresh = generate_module.Program(lambda *args: loop.run(*args), donate=(3,))
    monkeypatch.setattr(generate_module, "RUN", fresh)
    target, drafter = make_pair("cp")
    assert p_value(draw(target, drafter, temperature=1.0), exact_law(target, 1.0)) < 1e-6


@pytest.mark.parametrize(("name", "rule"), [(name, "sequential") for name in NAMES] + [("cp", "joint")])
def test_a_row_samples_the_same_alone_and_in_a_ragged_batch(name, rule):
    target = make_target(stop=(5,))
    drafter = make_drafter(target, name, draft_tokens=3, greedy_rule=rule)
    prompts = [[1, 2, 3], [4] * 17, list(range(20)), [7]]
    options = dict(drafter=drafter, max_new_tokens=40, temperature=0.9, top_p=0.95, seed=11)
    together = bytejax.generate(target, prompts, **options)
    for i, prompt in enumerate(prompts):
        alone = bytejax.generate(target, [prompt], **options)
        assert alone.ids[0] == together.ids[i]
        assert alone.finish_reasons[0] == together.finish_reasons[i]


def test_repetitions_of_a_prompt_draw_from_different_streams():
    target = make_target()
    rows = bytejax.generate(target, [[1, 2]] * 4, max_new_tokens=30, temperature=1.0).ids
    assert len({tuple(r) for r in rows}) == 4


def test_a_cut_draft_is_followed_by_the_targets_own_law():
    """Where the draft was cut there was no rejection: the next byte comes from p, not from the excess of p over q."""
    from bytejax.decoding.logits import make_warp
    from bytejax.models.base import Block

    warp = make_warp(3, 1.0, 0, 1.0)
    rows = 60_000
    p = jnp.log(jnp.asarray([0.5, 0.3, 0.2]))
    q = jnp.log(jnp.asarray([0.1, 0.8, 0.1]))
    keys = jax.random.split(jax.random.key(0), rows)
    block = Block.chain(jnp.ones((rows, 3), jnp.int32), draft_len=jnp.zeros((rows,), jnp.int32))
    verdict = accept.token_wise(block, jnp.tile(q, (rows, 2, 1)), jnp.tile(p, (rows, 3, 1)), warp, keys)
    assert (verdict.accepted == 1).all()
    counts = np.bincount(np.asarray(verdict.bonus), minlength=3)
    assert stats.chisquare(counts, rows * np.exp(np.asarray(p, np.float64))).pvalue > 1e-4
