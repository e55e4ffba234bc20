"""Rank accuracies of prediction heads, and the trees made from them."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

import bytejax
from bytejax import InputError
from bytejax.benchmark import ranks
from tests.cli.helpers import is_refused
from tests.decoding.tiny import make_target
from tests.models import evabyte_cases

TOKENS = 40


@pytest.fixture(scope="module")
def measured():
    case = evabyte_cases.load("w32c8_h4")
    prompts = [case.prompt(x) for x in case.having("generate.output_ids")[:2]]
    return case.target, prompts, ranks.accuracies(case.target, prompts, TOKENS, 5)


def test_every_head_is_asked_about_what_the_target_wrote(measured):
    """Counted one position after the other, from whole texts without a cache."""
    target, prompts, (shares, asked) = measured
    right, count = np.zeros((3, 5)), np.zeros(3, int)
    for prompt, new in zip(prompts, bytejax.generate(target, prompts, max_new_tokens=TOKENS).ids, strict=True):
        text = prompt + new
        logits = np.asarray(target.all_logits(target.states(jnp.asarray([text]))))[0]
        for last in range(len(prompt) - 1, len(text)):
            for depth in range(3):
                if last + 2 + depth < len(text):
                    best = np.argsort(-logits[last, depth + 1])[:5].tolist()
                    count[depth] += 1
                    if text[last + 2 + depth] in best:
                        right[depth, best.index(text[last + 2 + depth])] += 1
    assert asked == count.tolist() == [2 * TOKENS - 2, 2 * TOKENS - 4, 2 * TOKENS - 6]
    np.testing.assert_allclose(shares, right / count[:, None])
    assert np.sum(shares) > 0


def test_a_continuation_that_ends_at_once_asks_no_head(measured):
    """Nothing beyond it is looked at: what follows in its place is padding."""
    target, prompts, _ = measured
    first = bytejax.generate(target, prompts[:1], max_new_tokens=1).ids[0][0]
    stops = target.replace(tokenizer=dataclasses.replace(target.tokenizer, stop=(first,)))
    with pytest.raises(InputError, match="too short"):
        ranks.accuracies(stops, prompts[:1], TOKENS, 3)


def test_their_tree_is_lossless(measured):
    target, prompts, (shares, _) = measured
    drafter = bytejax.load_drafter("evabyte", target, accuracies=shares, nodes=8)
    assert drafter.block_width == 8
    for batch in (prompts[:1], prompts):
        plain = bytejax.generate(target, batch, max_new_tokens=TOKENS)
        drafted = bytejax.generate(target, batch, drafter=drafter, max_new_tokens=TOKENS)
        assert drafted.ids == plain.ids and drafted.stats.accepted > 0
    options = dict(max_new_tokens=TOKENS, temperature=1.0, seed=2)
    assert bytejax.generate(target, prompts, drafter=drafter, **options).ids == (
        bytejax.generate(target, prompts, **options).ids
    )


def test_the_command_prints_one_object(measured, tmp_path, capsys):
    target, _, _ = measured
    bytejax.save_target(tmp_path / "target", target, jnp.float32)
    (tmp_path / "prompt").write_bytes(b"abc\xff")
    flags = ["--target", str(tmp_path / "target"), "--prompt-file", str(tmp_path / "prompt")]
    assert ranks.main([*flags, "--tokens", "20", "--ranks", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prompts"] == 1 and found["positions"] == [19, 18, 17]
    assert [len(depth) for depth in found["accuracies"]] == [3, 3, 3]
    bytejax.load_drafter("evabyte", target, accuracies=found["accuracies"], nodes=3)
    is_refused(ranks.main([*flags, "--tokens", "3"]), *capsys.readouterr(), "3 ids are too short to ask all 4 heads")
    missing = ["--target", str(tmp_path / "target"), "--prompt-file", str(tmp_path / "none")]
    is_refused(ranks.main(missing), *capsys.readouterr(), "none")


def test_what_makes_no_tree_is_refused(measured):
    target, _, (shares, _) = measured
    wrong = [
        (dict(accuracies=shares), "accuracies and nodes together"),
        (dict(nodes=4), "accuracies and nodes together"),
        (dict(tree="tree31", accuracies=shares, nodes=4), "by tree alone"),
        (dict(accuracies=[[0.5]] * 9, nodes=9), "needs 9 prediction heads; the target has 4"),
        (dict(accuracies="high", nodes=9), "a list of numbers for every depth"),
    ]
    for options, message in wrong:
        with pytest.raises(InputError, match=message):
            bytejax.load_drafter("evabyte", target, **options)
    with pytest.raises(InputError, match="a Llama without prediction heads"):
        ranks.accuracies(make_target(), [[1]], 4, 2)
