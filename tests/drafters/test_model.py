"""A small model as drafter: what it drafts in every cycle, and the target's own text and law."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bytejax
from bytejax import InputError
from bytejax.decoding import loop
from bytejax.decoding.logits import make_warp
from bytejax.drafters.model import DraftModel
from tests.decoding.test_sampling import LEVEL, SETTINGS, draw, exact_law, make_pair, p_value
from tests.decoding.tiny import make_target, near_tie
from tests.models import byte_llama_cases, evabyte_cases

PROMPTS = [[1, 2, 3], [4] * 17, [7]]


def shaken(target, scale, seed=3):
    """A target somewhat like another one."""
    noise = lambda x: scale * jnp.std(x) * jax.random.normal(jax.random.key(seed), x.shape)
    return target.replace(params=jax.tree.map(lambda x: x + noise(x), target.params))


@pytest.fixture(scope="module")
def pair():
    target = make_target()
    return target, DraftModel.create(shaken(target, 0.15), 3)


@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_text_is_the_targets(pair, batch):
    target, drafter = pair
    plain = bytejax.generate(target, PROMPTS[:batch], max_new_tokens=60)
    drafted = bytejax.generate(target, PROMPTS[:batch], drafter=drafter, max_new_tokens=60)
    for prompt, a, b in zip(PROMPTS, plain.ids, drafted.ids):
        assert a == b or near_tie(target, prompt, a, b)
    assert batch == 1 or all(n > 0 for n in drafted.stats.accept_histogram[1:])


def test_matched_samples_are_those_of_autoregression(pair):
    target, drafter = pair
    options = dict(max_new_tokens=60, temperature=1.0, seed=5)
    plain = bytejax.generate(target, PROMPTS, **options)
    drafted = bytejax.generate(target, PROMPTS, drafter=drafter, accept="match", **options)
    assert drafted.ids == plain.ids and drafted.stats.accepted > 0


@pytest.mark.parametrize(
    ("rule", "setting"), [("block", "warped"), pytest.param("token", "plain", marks=pytest.mark.slow)]
)
def test_samples_have_the_targets_law(rule, setting):
    target, _ = make_pair("ff")
    drafter = DraftModel.create(shaken(target, 0.5), 2)
    counts = draw(target, drafter, accept=rule, **SETTINGS[setting])
    assert p_value(counts, exact_law(target, **SETTINGS[setting])) > LEVEL


def test_a_model_that_is_the_target_is_always_right():
    target = make_target()
    result = bytejax.generate(target, PROMPTS, drafter=DraftModel.create(target, 4), max_new_tokens=61, temperature=0.8)
    assert result.stats.acceptance_rate == 1 and result.stats.accept_length == 5


@pytest.mark.parametrize("kind", ["stacked", "one draft", "byte-llama"])
def test_every_cycle_drafts_what_the_model_would_write(kind):
    """Whatever was accepted before: its logits after the text and the drafts so far, without a cache."""
    if kind == "byte-llama":
        model = byte_llama_cases.load("a_untied_expand")
        prompts = [[*b"Hello hello"], [*b"the"], [*b"x"]]
    else:
        model, prompts = make_target(unrolled=False), [[1, 2, 3], [4] * 6, [7]]
    target, drafter = shaken(model, 0.1), DraftModel.create(model, 1 if kind == "one draft" else 3)
    rules = loop.Rules(make_warp(target.vocab, 0.0, 0, 1.0), jnp.zeros((0,), jnp.int32))
    ids, lengths = np.zeros((3, 16), int), [len(x) for x in prompts]
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    start = jax.jit(loop.start, static_argnames=("capacity", "room"))
    begin = jnp.asarray(ids), jnp.asarray(lengths), jnp.full((3,), 30), jax.random.split(jax.random.key(0), 3)
    state = start(target, drafter, rules, *begin, capacity=64, room=30)

    @jax.jit
    def step(state):
        block = drafter.propose(state.draft, state.root, state.keys, rules.warp).block
        return loop.cycle(target, drafter, rules, state), block.ids

    logits, kept = jax.jit(model.logits), set()
    for _ in range(8):
        texts = [p + row[:n].tolist() for p, row, n in zip(prompts, np.asarray(state.out), state.count, strict=True)]
        before, (state, drafts) = state.count, step(state)
        kept |= set((state.count - before).tolist())
        whole = np.zeros((3, 64), int)
        for row, text, block in zip(whole, texts, np.asarray(drafts), strict=True):
            assert text[-1] == block[0]
            row[: len(text) + len(block) - 1] = text + block[1:].tolist()
        laws = np.asarray(logits(jnp.asarray(whole)))
        for law, text, block in zip(laws, texts, np.asarray(drafts), strict=True):
            for i, draft in enumerate(block[1:], start=len(text) - 1):
                assert law[i, draft] > law[i].max() - 1e-4
    assert {1, drafter.block_width} <= kept


def test_options(tmp_path):
    target = make_target()
    bytejax.save_target(tmp_path / "small", shaken(make_target(unrolled=False), 0.1), jnp.float32)
    drafter = bytejax.load_drafter("model", target, source=tmp_path / "small", draft_tokens=2)
    assert drafter.block_width == 3 and drafter.rules[0] == "block"
    result = bytejax.generate(target, PROMPTS[:1], drafter=drafter, max_new_tokens=20)
    assert result.ids == bytejax.generate(target, PROMPTS[:1], max_new_tokens=20).ids
    wrong = [
        ({}, "'model' needs the option source"),
        (dict(source="nothing"), "target 'nothing' is neither"),
        (dict(source=tmp_path / "small", draft_tokens=0), "draft_tokens = 0 must be a whole number"),
        (dict(source=tmp_path / "small", tree=3), "'tree' is unknown; known: source, draft_tokens"),
    ]
    for options, message in wrong:
        with pytest.raises(InputError, match=message) as e:
            bytejax.load_drafter("model", target, **options)
        assert "\n" not in str(e.value)


def test_models_that_do_not_fit():
    target = make_target()
    with pytest.raises(InputError, match="the draft model, EvaByte, cannot be rewound"):
        DraftModel.create(evabyte_cases.load("w32c8_h4").target)
    with pytest.raises(InputError, match=r"\(ByteTokenizer of 20 ids\) lacks ids of the target \(.* of 23 ids\)"):
        DraftModel.create(make_target(vocab=20)).check(target)
    DraftModel.create(make_target(vocab=30)).check(target)
    other = target.replace(tokenizer=dataclasses.replace(target.tokenizer, offset=2))
    with pytest.raises(InputError, match=r"id 0 is b'' to the draft model \(.*23 ids\) and b'\\x00' to the target"):
        DraftModel.create(other).check(target)
    with pytest.raises(InputError, match="draft_tokens = True"):
        DraftModel.create(target, True)
