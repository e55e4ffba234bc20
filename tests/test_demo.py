"""The models that ship with the package, end to end."""

import pytest

import bytejax
from bytejax import loading
from bytejax.cli.decode import PROMPT
from bytejax.drafters.base import Autoregressive

DRAFTERS = ["btree-8", "cp-8", "ff-8", "hmm-8"]
LIMIT = 12 * 2**20  # bytes of all files together


@pytest.fixture(scope="module")
def target():
    return bytejax.load_target("demo")


@pytest.fixture(scope="module")
def plain(target):
    """Greedy autoregression, in blocks as wide as the drafters'."""
    return bytejax.generate(target, [PROMPT], drafter=Autoregressive(width=8), max_new_tokens=64)


def test_the_demo_is_whole_and_small():
    assert loading.demo_drafters() == DRAFTERS and loading.DEFAULT_DRAFTER in DRAFTERS
    assert sum(p.stat().st_size for p in loading.DEMO.rglob("*") if p.is_file()) <= LIMIT


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_writes_the_targets_own_text_in_fewer_passes(target, plain, name):
    drafter = bytejax.load_drafter(name, target)
    result = bytejax.generate(target, [PROMPT], drafter=drafter, max_new_tokens=64)
    assert result.ids == plain.ids and result.finish_reasons == plain.finish_reasons
    assert len(result.ids[0]) == 64 and result.stats.accept_length > 1.5
    assert plain.stats.accept_length == 1
