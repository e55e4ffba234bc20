"""Inner features that drafters ask for: the same in whole texts, prompts and blocks, and what the layers below make."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bytejax import InputError
from bytejax.models import lora
from bytejax.models.base import Block, Target
from tests.decoding.tiny import make_adapters, make_target
from tests.models import evabyte_cases


def compare(target, ids, taps, lengths, adapter=None, atol=2e-5):
    """Prefills the front of ids [2, T], extends by 4, and compares with whole texts. -> their taps."""
    _, whole = target.tapped_states(ids, taps)
    whole, front = np.asarray(whole), int(lengths.max())
    cache = target.init_cache(2, 64, 4, adapter)
    first, cache = target.prefill(ids[:, :front], lengths, cache, adapter, taps)
    for row, n in enumerate(lengths.tolist()):
        np.testing.assert_allclose(first.taps["inner"][row, :n], whole[row, :n], atol=atol)
    at = np.asarray(lengths)[:, None] + np.arange(4)
    block = Block.chain(jnp.take_along_axis(ids, at, axis=1))
    extended = target.extend(block, cache, adapter, taps)
    np.testing.assert_allclose(extended.taps["inner"], np.take_along_axis(whole, at[..., None], axis=1), atol=atol)
    assert "inner" not in target.extend(block, cache, adapter).taps
    return whole


@pytest.mark.parametrize("held", ["unrolled", "stacked", "panels"])
def test_a_tap_is_what_the_layers_below_it_make(held):
    """Also of layer 0, whose input is the embeddings, and of the last layer's output."""
    target, taps = make_target(layers=4, unrolled=False), (0, 1, 3, 4)
    forms = {"unrolled": target.unrolled, "stacked": target.stacked, "panels": lambda: target.in_panels(4)}
    ids = jax.random.randint(jax.random.key(0), (2, 12), 0, target.vocab)
    whole = compare(forms[held](), ids, taps, jnp.asarray([8, 5]))
    layers = target.unrolled().params["layers"]
    for i, tap in enumerate(taps):
        x = whole[..., i * target.width : (i + 1) * target.width]
        if tap == 0:
            np.testing.assert_array_equal(x, target.embed(ids))
        else:
            shorter = target._with_layers(layers[:tap])
            np.testing.assert_allclose(target._norm(x, target.params["final_norm"]), shorter.states(ids), atol=2e-5)


@pytest.mark.parametrize("merged", [False, True])
def test_beside_a_draft_stream_taps_are_the_targets_own(merged):
    target = make_target(layers=4)
    adapter = lora.create(make_adapters(target, 2), target, merged)
    ids = jax.random.randint(jax.random.key(0), (2, 12), 0, target.vocab)
    compare(target, ids, (1, 2, 3, 4), jnp.asarray([8, 5]), adapter)


def test_taps_of_evabyte_across_windows():
    target = evabyte_cases.load("w16c4_h8").target
    ids = jax.random.randint(jax.random.key(0), (2, 40), 64, 300)
    compare(target, ids, (1, 2), jnp.asarray([33, 20]), atol=1e-4)


def test_a_target_without_layers_says_so():
    with pytest.raises(InputError, match="a Llama has no layers to tap"):
        Target.tapped_states(make_target(), jnp.zeros((1, 3), jnp.int32), (1,))
