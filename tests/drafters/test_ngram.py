"""Prompt lookup against the implementations whose rules it has, and against a loop over the text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from bytejax.drafters.ngram import PromptLookup
from bytejax.drafters.text import Text


def official(ids, longest, k):
    """The first implementation's rule, written as a loop: the earliest whole continuation of the longest n-gram."""
    n = len(ids)
    for g in range(longest, 0, -1):
        for start in range(n - g + 1):
            end = start + g
            if ids[start:end] == ids[n - g :] and end + k <= n and end < n - g:
                return ids[end : end + k]
    return []


def transformers_rule(ids, longest, k):
    generator = PromptLookupCandidateGenerator(num_output_tokens=k, max_matching_ngram_size=longest, max_length=10**6)
    found = generator.get_candidates(torch.tensor([ids]))[0]
    return found[0, len(ids) :].tolist()


def newest(ids, longest, shortest, k):
    n = len(ids)
    for g in range(min(longest, n - 1), shortest - 1, -1):
        for end in range(n - 1, g - 1, -1):
            if ids[end - g : end] == ids[n - g :]:
                after = ids[end:]
                return [after[j % len(after)] for j in range(k)]
    return []


def texts(seed, count=60, places=48):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, rng.choice([2, 4, 30]), rng.integers(2, places)).tolist() for _ in range(count)]


@pytest.mark.parametrize(
    ("rule", "want"),
    [
        ("official", lambda ids: official(ids, 3, 4)),
        ("transformers", lambda ids: transformers_rule(ids, 3, 4)),
        ("tokens", lambda ids: newest(ids, 3, 2, 4)),
    ],
)
def test_drafts_are_the_rules(rule, want):
    shortest = 2 if rule == "tokens" else 1
    drafter = PromptLookup.create(rule, longest=3, shortest=shortest, draft_tokens=4)
    rows = texts(1)
    padded = jnp.asarray([row + [9] * (64 - len(row)) for row in rows])  # leftovers must not count
    ids, count = jax.jit(drafter.find)(Text(padded, jnp.asarray([len(row) for row in rows])))
    found = [x[:n].tolist() for x, n in zip(np.asarray(ids), np.asarray(count))]
    assert found == [want(row) for row in rows]
    assert sum(map(bool, found)) > 10 and not all(found)


def test_the_root_counts_as_the_texts_end():
    drafter = PromptLookup.create("tokens", draft_tokens=3)
    text = Text(jnp.asarray([[5, 6, 7, 8, 1, 5, 0, 0, 0, 0, 0]]), jnp.asarray([6]))
    draft = drafter.propose(text, jnp.asarray([6]), None, None)
    assert draft.block.ids.tolist() == [[6, 7, 8, 1]] and draft.block.is_draft[0].tolist() == [False, True, True, True]
    assert drafter.worth(text, jnp.asarray([6])).all() and not drafter.worth(text, jnp.asarray([9])).any()
    assert not drafter.propose(text, jnp.asarray([9]), None, None).block.is_draft.any()
    assert drafter.fallback().block_width == 1 and drafter.fallback().fallback() is None
