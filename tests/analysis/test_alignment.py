"""Mask rows beside true tokens: by hand, and as a command."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from bytejax.analysis import alignment as module
from bytejax.analysis.alignment import Alignment, alignment, by_layer
from bytejax.errors import InputError
from tests.cli.helpers import is_refused, tiny
from tests.decoding.tiny import make_target

PROMPT, ANSWER = [3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5]


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture(scope="module")
def found(target):
    return alignment(target, PROMPT, ANSWER)


def test_the_input_layer_compares_the_prompts_mean_embedding_with_the_tokens(target, found):
    mean = target.embed(jnp.asarray(PROMPT)).mean(0)
    tokens = target.embed(jnp.asarray(ANSWER[:-1]))
    want = tokens @ mean / jnp.linalg.norm(tokens, axis=-1) / jnp.linalg.norm(mean)
    assert found.cosines.shape == (target.config.layers + 1, 5) and found.accepted.shape == (5,)
    np.testing.assert_allclose(found.cosines[0], want, atol=1e-6)
    assert np.abs(found.cosines).max() <= 1 + 1e-6 and np.ptp(found.cosines[1:]) > 0.1


def test_a_row_is_what_a_whole_text_that_ends_in_it_would_have(target, found):
    """The masked text as a sequence of its own: the layers after the input, and what is accepted."""
    mean = target.embed(jnp.asarray(PROMPT)).mean(0)
    with_mask = target.replace(params=target.params | {"embedding": target.params["embedding"].at[22].set(mean)})
    at = len(PROMPT) + np.arange(5)
    text = jnp.asarray([PROMPT + ANSWER[:-1]])
    masked = jnp.tile(text, (5, 1)).at[np.arange(5), at].set(22)
    its = with_mask.residuals(masked)[:, np.arange(5), at]
    np.testing.assert_allclose(found.cosines, module.cosine(target.residuals(text)[:, 0, at], its), atol=1e-5)
    guesses = with_mask.logits(masked)[np.arange(5), at].argmax(-1)
    np.testing.assert_array_equal(found.accepted, guesses == jnp.asarray(ANSWER[1:]))


def test_acceptance_is_whether_the_arg_max_is_the_true_next_token(target, found):
    mean = target.embed(jnp.asarray(PROMPT)).mean(0)
    stream = target.residuals(jnp.asarray([PROMPT + [0]]), mean[None, None], jnp.asarray([[len(PROMPT)]]))
    guess = int(target.unembed(target._norm(stream[-1, 0, -1], target.params["final_norm"])).argmax())
    assert alignment(target, PROMPT, [0, guess]).accepted.tolist() == [True]
    assert alignment(target, PROMPT, [0, (guess + 1) % target.vocab]).accepted.tolist() == [False]


def test_a_mask_that_equals_the_token_is_aligned_in_every_layer(target):
    """A prompt of one id repeated: its mean embedding is that id's."""
    found = alignment(target, [7, 7, 7], [7, 2])
    np.testing.assert_allclose(found.cosines, 1, atol=1e-5)


def test_means_are_over_the_rows_of_each_kind():
    parts = [
        Alignment(np.array([[1.0, 0.5], [0.2, 0.4]]), np.array([True, False])),
        Alignment(np.array([[0.0], [0.6]]), np.array([True])),
    ]
    first, second = by_layer(parts)
    assert first == {"layer": 0, "accepted": 0.5, "rejected": 0.5, "accepted_rows": 2, "rejected_rows": 1}
    assert second["accepted"] == pytest.approx(0.4) and second["rejected"] == pytest.approx(0.4)
    (none, _) = by_layer(parts[1:])
    assert none["rejected"] is None and none["rejected_rows"] == 0


def test_an_answer_of_one_id_has_nothing_to_compare(target):
    with pytest.raises(InputError, match="at least two ids"):
        alignment(target, PROMPT, [1])


def test_the_command_prints_a_line_per_layer(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(module.loading, "load_target", lambda *_: tiny())
    rows = [{"question_id": i, "category": "qa", "turns": [f"def f{i}"]} for i in range(3)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--questions", str(tmp_path / "q.jsonl"), "--per-category", "2", "--tokens", "6"]
    assert module.main(flags) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["layer"] for line in lines] == [0, 1]
    assert {line["accepted_rows"] + line["rejected_rows"] for line in lines} == {10}  # 2 answers of 6, less the last
    flags[1] = str(tmp_path / "no.jsonl")
    is_refused(module.main(flags), *capsys.readouterr(), "no.jsonl: no such file")


def test_other_targets_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(module.loading, "load_target", lambda *_: object())
    (tmp_path / "q.jsonl").write_text(json.dumps({"question_id": 1, "category": "qa", "turns": ["a"]}) + "\n")
    flags = ["--target", "eva", "--questions", str(tmp_path / "q.jsonl")]
    is_refused(module.main(flags), *capsys.readouterr(), "target 'eva'", "Llama")
