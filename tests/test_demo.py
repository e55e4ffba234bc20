"""The models that ship with the package, end to end."""

import pytest

import bytejax
from bytejax import loading
from bytejax.cli.decode import PROMPT
from bytejax.drafters.base import Autoregressive
from tests.decoding.tiny import near_tie

DRAFTERS = [
    "btree-16",
    "btree-16-lora-1",
    "btree-16-lora-2",
    "btree-8",
    "cp-16",
    "cp-8",
    "ff-16",
    "ff-32",
    "ff-8",
    "hmm-16",
    "hmm-8",
]
LIMIT = 24 * 2**20  # bytes of all files together


@pytest.fixture(scope="module")
def target():
    return bytejax.load_target("demo")


@pytest.fixture(scope="module")
def plain(target):
    """(width) -> greedy autoregression in blocks of that width."""
    known = {}

    def run(width):
        if width not in known:
            drafter = Autoregressive(width=width)
            known[width] = bytejax.generate(target, [PROMPT], drafter=drafter, max_new_tokens=64)
        return known[width]

    return run


def test_the_demo_is_whole_and_small():
    assert loading.demo_drafters() == DRAFTERS and loading.DEFAULT_DRAFTER in DRAFTERS
    assert sum(p.stat().st_size for p in loading.DEMO.rglob("*") if p.is_file()) <= LIMIT


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_writes_the_targets_own_text_in_fewer_passes(target, plain, name):
    drafter = bytejax.load_drafter(name, target)
    expected = plain(drafter.block_width)
    result = bytejax.generate(target, [PROMPT], drafter=drafter, max_new_tokens=64)
    same = result.ids == expected.ids and result.finish_reasons == expected.finish_reasons
    # A draft stream doubles the rows of some products, which may turn the last bits of a logit.
    prompt = target.tokenizer.encode(PROMPT)
    assert same or (drafter.target_adapter() and near_tie(target, prompt, result.ids[0], expected.ids[0]))
    assert len(result.ids[0]) == 64 and result.stats.accept_length > 1.5
    assert expected.stats.accept_length == 1
