"""Adapters on the last layers: the draft stream cached and whole, beside the target's own, merged and not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bytejax import InputError, parameters
from bytejax.models import lora
from bytejax.models.base import Block
from tests.models import evabyte_cases, test_llama
from tests.models.test_llama import random_ids

WINDOWS = "w16c4_h8"  # an EvaByte with windows of 16
NAMES = (*test_llama.CONFIGS, WINDOWS)


def make(name, dtype=jnp.float32):
    return test_llama.make(name, dtype) if name != WINDOWS else evabyte_cases.load(name).target


def adapters(target, layers, rank=3, scale=0.3):
    params = parameters.init(lora.table(lora.LoraConfig(layers, rank), target), jax.random.key(7))
    return jax.tree.map(lambda x: scale * jax.random.normal(jax.random.key(x.size), x.shape), params)


def unrolled(name, panels):
    return make(name).in_panels(4) if panels else make(name).unrolled()


@pytest.mark.parametrize("name", NAMES)
def test_states_are_those_of_a_target_with_the_adapters_added_to_its_kernels(name):
    target, layers = make(name).unrolled(), 2
    params = adapters(target, layers)
    apart = dict(make(name).params["layers"])
    for kernel, p in params.items():
        delta = jnp.einsum("zdr,zrf->zdf", p["a"], p["b"])
        apart[kernel] = apart[kernel].at[-layers:].add(delta)
    changed = make(name).replace(params=target.params | {"layers": apart})
    ids = random_ids(target, 2, 30)
    for merged in (False, True):
        states = target.states(ids, lora.create(params, target, merged))
        np.testing.assert_allclose(states, changed.states(ids), atol=2e-4)
    assert float(jnp.abs(states - target.states(ids)).max()) > 0.05


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize(
    ("name", "layers", "batch", "panels"),
    [("untied", 1, 3, True), ("one kv head, scaled", 4, 1, False), (WINDOWS, 2, 3, False)],
)
def test_cached_streams_equal_the_whole_sequence(name, layers, batch, panels, merged):
    """Ragged prompts, then chains of which every number of rows is kept, borders crossed; both streams after each."""
    target, width, total = unrolled(name, panels), 4, 60
    adapter = lora.create(adapters(target, layers), target, merged)
    ids = random_ids(target, batch, total)
    want, want_draft = target.states(ids), target.states(ids, adapter)
    lengths = 5 + 3 * jnp.arange(batch)
    cache = target.init_cache(batch, total, width, adapter)
    prefilled, cache = target.prefill(ids[:, :16], lengths, cache, adapter)
    rows = jnp.arange(batch)
    np.testing.assert_allclose(prefilled.hidden[:, 0], want[rows, lengths - 1], atol=2e-4)
    np.testing.assert_allclose(prefilled.taps["draft"][:, 0], want_draft[rows, lengths - 1], atol=2e-4)
    extend = jax.jit(lambda t, b, c, a: t.extend(b, c, a))
    path = jnp.broadcast_to(jnp.arange(width), (batch, width))
    for cycle in range(10):
        positions = cache.lengths[:, None] + jnp.arange(width)
        room = width if target.room(cache) is None else target.room(cache)
        keep = jnp.minimum((rows + cycle) % (width + 1), room)
        good = jnp.arange(width) < jnp.maximum(keep, 1)[:, None]
        block = Block.chain(jnp.where(good, jnp.take_along_axis(ids, positions, 1), 0))
        extended = extend(target, block, cache, adapter)
        for got, whole in ((extended.hidden, want), (extended.taps["draft"], want_draft)):
            np.testing.assert_allclose(got[good], jnp.take_along_axis(whole, positions[..., None], 1)[good], atol=2e-4)
        cache = target.commit(cache, extended.pending, path, keep)


@pytest.mark.parametrize("name", ["untied", WINDOWS])
def test_a_tree_moves_the_draft_streams_rows_too(name):
    target = make(name).unrolled()
    adapter = lora.create(adapters(target, 2), target)
    ids = random_ids(target, 2, 30)
    _, cache = target.prefill(ids[:, :13], jnp.asarray([13, 6]), target.init_cache(2, 40, 4, adapter), adapter)
    start, parents = cache.lengths, jnp.asarray([[0, 0, 0, 2]] * 2)
    place = jnp.asarray([0, 1, 1, 2])  # rows 2 and 3 follow the text, row 1 does not
    tree_ids = jnp.take_along_axis(ids, start[:, None] + place, 1).at[:, 1].add(1) % target.vocab
    ones = jnp.ones((2, 4), bool)
    extended = target.extend(Block(tree_ids, parents, ones, ones), cache, adapter)
    cache = target.commit(cache, extended.pending, jnp.asarray([[0, 2, 3, 0]] * 2), jnp.asarray([3, 3]))
    after = jnp.take_along_axis(ids, cache.lengths[:, None], 1)
    got = target.extend(Block.chain(after), cache, adapter).taps["draft"][:, 0]
    np.testing.assert_allclose(got, target.states(ids, adapter)[jnp.arange(2), cache.lengths], atol=2e-4)


@pytest.mark.parametrize("merged", [False, True])
def test_bfloat16_stays_bfloat16_under_float32_adapters(merged):
    target = make("untied", jnp.bfloat16).unrolled()
    adapter = lora.create(adapters(target, 2), target, merged)
    ids = random_ids(target, 2, 9)
    prefilled, cache = target.prefill(ids, jnp.asarray([9, 4]), target.init_cache(2, 40, 3, adapter), adapter)
    extended = target.extend(Block.chain(ids[:, :3]), cache, adapter)
    for x in (prefilled, extended):
        assert x.hidden.dtype == x.taps["draft"].dtype == jnp.bfloat16
    assert {x.dtype for x in jax.tree.leaves((cache.k, cache.draft_k))} == {jnp.dtype(jnp.bfloat16)}
    whole = target.states(ids, adapter)
    assert whole.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        prefilled.taps["draft"][0, 0].astype(jnp.float32), whole[0, 8].astype(jnp.float32), atol=0.1
    )


def test_untrained_adapters_change_nothing():
    target = make("qk norm, tied").unrolled()
    params = parameters.init(lora.table(lora.LoraConfig(2, 4), target), jax.random.key(0))
    ids = random_ids(target, 1, 20)
    np.testing.assert_array_equal(target.states(ids, lora.create(params, target)), target.states(ids))


def test_what_cannot_be_adapted():
    target = make("qk norm, tied")
    with pytest.raises(InputError, match="last 3 layers: the target has 2"):
        lora.table(lora.LoraConfig(3, 4), target)
    with pytest.raises(InputError, match="rank"):
        lora.LoraConfig(1, 0)
    with pytest.raises(InputError, match="unroll=True"):
        target.states(random_ids(target, 1, 5), lora.create(adapters(target, 1), target))
