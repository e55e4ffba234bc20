"""The EvaByte target: the reference's numbers, cached against whole, blocks, trees, borders, layouts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bytejax
from bytejax import InputError
from bytejax.drafters.base import Autoregressive
from bytejax.models import evabyte
from bytejax.models.base import Block
from tests.decoding.tiny import Oracle, Tree, near_tie
from tests.models import evabyte_cases
from tests.models.evabyte_cases import NAMES, PROMPTS, padded

LONG = 112  # a length that holds every prompt of the fixtures


@pytest.fixture(scope="module", params=NAMES)
def case(request):
    return evabyte_cases.load(request.param)


@pytest.fixture(scope="module")
def small():
    return evabyte_cases.load("w16c4_h8")


@functools.partial(jax.jit, static_argnums=(2, 3))
def prefill(target, ids, capacity, block_width, lengths):
    return target.prefill(ids, lengths, target.init_cache(len(ids), capacity, block_width))


extend = jax.jit(lambda target, block, cache: target.extend(block, cache))
commit = jax.jit(lambda target, cache, pending, path, accepted: target.commit(cache, pending, path, accepted))
whole = jax.jit(lambda target, ids: target.states(ids))


@jax.jit
def outputs(target, hidden):
    """Everything that the fixtures hold about final states: head 0, all heads, their log-sums and arg-maxes."""
    logits = target.all_logits(hidden)
    return {
        "hidden": hidden,
        "logits0": target.unembed(hidden),
        "logits": logits,
        "lse": jax.nn.logsumexp(logits, -1),
        "argmax": jnp.argmax(logits, -1),
    }


def of_reference(found, io, name):
    """Compares `outputs` of one row with the fixture's tensors under that name."""
    stored, shape = lambda key: io[f"{name}.{key}"], io[f"{name}.hidden"].shape[:1]
    close = lambda a, b, atol: np.testing.assert_allclose(a, b.reshape(a.shape), rtol=0, atol=atol)
    found = {key: x[: shape[0]] for key, x in found.items()}
    close(found["hidden"], stored("hidden"), 1e-4)
    close(found["logits0"][stored("logits0_pos")], stored("logits0"), 1e-4)
    np.testing.assert_array_equal(found["argmax"], stored("argmax").reshape(found["argmax"].shape))
    if f"{name}.lse" in io:
        close(found["lse"], stored("lse"), 2e-4)
    if f"{name}.lse0" in io:
        close(found["lse"][:, 0], stored("lse0"), 2e-4)
    if f"{name}.logits_pos" in io:
        close(found["logits"][stored("logits_pos")], stored("logits"), 2e-4)
    if f"{name}.logits_last" in io:
        close(found["logits"][-1], stored("logits_last"), 2e-4)


def of_row(found, row):
    return {key: np.asarray(x[row]) for key, x in found.items()}


def test_whole_sequences_equal_the_reference(case):
    """Short prompts in one window, as in training; and all of them, padded, in many."""
    window, pair = case.target.config.window, case.io["batch2.input_ids"].tolist()
    short = [name for name in PROMPTS if len(case.prompt(name)) <= window]
    for names, length, more in ((short, window, []), (PROMPTS, LONG, pair)):
        hidden = whole(case.target, padded([*map(case.prompt, names), *more], length))
        found = jax.device_get(outputs(case.target, hidden))
        for row, name in enumerate(names):
            of_reference(of_row(found, row), case.io, name)
    hidden = found["hidden"][-2:, len(pair[0]) - 1]
    np.testing.assert_allclose(hidden, case.io["batch2.hidden_last"], rtol=0, atol=1e-4)


def test_inside_the_layers(case):
    target, io = case.target, case.io
    ids, c = jnp.asarray(io["multi_window.input_ids"]), case.target.config
    complete = ids.shape[1] // c.chunk * c.chunk

    @jax.jit
    def inside(target):
        first = target.layer(0)
        _, k, v = target._qkv(first, target.embed(ids), jnp.arange(ids.shape[1])[None])
        sums = evabyte.summarise(first, c.chunk, k[:, :complete], v[:, :complete])
        upto = lambda n: target._with_layers(jax.tree.map(lambda x: x[:n], target.params["layers"]))
        return [upto(n).residual(ids)[0] for n in range(c.layers)], [x[0].swapaxes(0, 1) for x in sums]

    streams, sums = inside(target)
    for stream, stored in zip(streams, io["multi_window.layer_hidden"], strict=True):
        np.testing.assert_allclose(stream[-len(stored) :], stored, rtol=0, atol=1e-4)
    for x, name in zip(sums, ("chunk_k", "chunk_v"), strict=True):
        np.testing.assert_allclose(x, io[f"multi_window.layer0.{name}"], rtol=0, atol=1e-5)


def test_ragged_prompts_then_bytes_one_by_one_equal_the_reference(case):
    """Every prompt ends elsewhere in its window, or at its end; then all go on, two of them with stored numbers."""
    target, io = case.target, case.io
    rows = [case.prompt(name) for name in PROMPTS]
    extended, cache = prefill(target, padded(rows, LONG), 256, 1, lengths=jnp.asarray([len(x) for x in rows]))
    for name, states in zip(PROMPTS, np.asarray(extended.hidden[:, 0]), strict=True):
        np.testing.assert_allclose(states, io[f"{name}.hidden"][-1], rtol=0, atol=1e-4)

    names = case.having("decode.feed")
    longest = io[f"{names[0]}.decode.feed"]
    feed = np.stack([io.get(f"{name}.decode.feed", longest) for name in PROMPTS], axis=1)

    @jax.jit
    def decode(target, cache, feed):
        def step(cache, ids):
            extended = target.extend(Block.chain(ids[:, None]), cache)
            ones = jnp.ones_like(ids)
            return target.commit(cache, extended.pending, 0 * ones[:, None], ones), extended.hidden[:, 0]

        return jax.lax.scan(step, cache, feed)[1]

    found = jax.device_get(outputs(target, decode(target, cache, jnp.asarray(feed)).swapaxes(0, 1)))
    assert len(feed) == 3 * target.config.window + 3 and len(names) == 2
    for name in names:
        of_reference(of_row(found, PROMPTS.index(name)), io, f"{name}.decode")


def test_greedy_text_equals_the_reference(case):
    names = case.having("generate.output_ids")
    prompts, want = [case.prompt(name) for name in names], [case.new(name) for name in names]
    assert bytejax.generate(case.target, prompts, max_new_tokens=len(want[0])).ids == want


@pytest.mark.parametrize("name", ["w16c4_h8", "w32c8_h4"])
def test_bfloat16_is_as_close_as_the_references(name):
    case = evabyte_cases.load(name)
    half = case.target.replace(params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), case.target.params))
    hidden = whole(half, jnp.asarray(case.io["multi_window.input_ids"]))[0]
    assert hidden.dtype == jnp.bfloat16 and half.unembed(hidden).dtype == jnp.float32
    exact = case.io["multi_window.hidden"]
    error = lambda x: float(np.sqrt(np.mean((np.asarray(x, np.float32) - exact) ** 2)))
    assert 0 < error(hidden) < 1.5 * error(case.io["multi_window.bf16.hidden"])


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("layout", ["stacked", "unrolled"])
def test_blocks_of_which_any_number_of_rows_is_kept(small, batch, layout):
    """Every offset in a window meets every number of kept rows that fits, with rows in different phases."""
    target = getattr(small.target, layout)()
    width, cycles, length = 4, 150, 400
    window = target.config.window
    ids = jax.random.randint(jax.random.key(1), (batch, length), 0, target.vocab)
    lengths = jnp.asarray([16, 5, 40])[:batch]
    noise = jax.random.randint(jax.random.key(2), (cycles, batch), 0, width + 1)
    path = jnp.broadcast_to(jnp.arange(width), (batch, width))

    @jax.jit
    def run(target, cache):
        def step(cache, noise):
            room = target.room(cache)
            keep = jnp.minimum(noise, room)
            positions = cache.lengths[:, None] + jnp.arange(width)
            good = jnp.arange(width) < jnp.maximum(keep, 1)[:, None]
            right = jnp.take_along_axis(ids, positions, axis=1)
            block = Block.chain(jnp.where(good, right, (right + 1) % target.vocab)).cut(room)
            extended = target.extend(block, cache)
            return target.commit(cache, extended.pending, path, keep), (positions, good, keep, extended.hidden)

        return jax.lax.scan(step, cache, noise)

    _, cache = prefill(target, ids[:, :LONG], length, width, lengths=lengths)
    end, (positions, good, keep, hidden) = run(target, cache)
    np.testing.assert_array_equal(end.lengths, lengths + keep.sum(0))
    want = whole(target, ids)
    for row in range(batch):
        at, used = positions[:, row], good[:, row]
        np.testing.assert_allclose(hidden[:, row][used], want[row, at[used]], rtol=0, atol=1e-4)
        last = positions[:, row, 0] + keep[:, row] - 1
        assert (last % window == window - 1).sum() >= 10
    offsets = set(zip((positions[..., 0] % window).ravel().tolist(), keep.ravel().tolist(), strict=True))
    fits = {(p, k) for p in range(window) for k in range(min(width, window - p) + 1)}
    assert offsets <= fits and len(offsets) > 0.6 * len(fits)
    assert {p for p, _ in offsets} == set(range(window))


def test_extend_and_a_commit_of_nothing_leave_the_cache_as_it_was(small):
    target = small.target
    ids = jnp.asarray([small.prompt("multi_window")])
    _, cache = prefill(target, ids, 128, 6, lengths=jnp.asarray([47]))
    block = Block.chain(ids[:, 47:53])
    first = extend(target, block, cache)
    rejected = commit(target, cache, first.pending, jnp.arange(6)[None], jnp.zeros((1,), jnp.int32))
    np.testing.assert_array_equal(rejected.lengths, cache.lengths)
    np.testing.assert_array_equal(extend(target, block, cache).hidden, first.hidden)
    np.testing.assert_array_equal(extend(target, block, rejected).hidden, first.hidden)


def test_a_window_is_summarised_where_it_ends_only(small):
    """One row of the batch completes its window, the others do not: their summaries stay as they were."""
    target, c, lengths = small.target, small.target.config, np.asarray([30, 29, 35])
    ids = jax.random.randint(jax.random.key(3), (3, LONG), 0, target.vocab)
    prompts = jnp.where(np.arange(LONG) < lengths[:, None], ids, 0)  # what padding leaves behind is not right by chance
    _, cache = prefill(target, prompts, 128, 4, lengths=jnp.asarray(lengths))
    block = Block.chain(jnp.take_along_axis(ids, lengths[:, None] + np.arange(4), axis=1))
    path = jnp.arange(4)[None].repeat(3, 0)
    after = commit(target, cache, extend(target, block, cache).pending, path, jnp.asarray([2, 2, 1]))
    _, want = prefill(target, ids, 128, 4, lengths=jnp.asarray([32, 31, 36]))
    assert after.lengths.tolist() == want.lengths.tolist()
    keys = lambda cache: np.asarray(cache.k).reshape(c.layers, c.heads, 3, c.head_dim, -1)[..., : cache.summaries]
    changed = (keys(cache) != keys(after)).any((0, 1, 3))
    assert np.flatnonzero(changed[0])[-1] == 2 * c.chunks - 1 and not changed[0, : c.chunks].any()
    assert not changed[1:].any()
    np.testing.assert_allclose(
        keys(after)[:, :, 0, :, : 2 * c.chunks], keys(want)[:, :, 0, :, : 2 * c.chunks], atol=1e-5
    )


@pytest.mark.parametrize("static", [True, False])
def test_a_tree_is_its_paths_and_keeps_the_accepted_one(small, static):
    """A tree just before a border: its nodes within the window are right, and the kept path completes the window."""
    target = small.target
    ids = jax.random.randint(jax.random.key(4), (2, 40), 0, target.vocab)
    lengths = jnp.asarray([29, 13])  # both have room for three more
    _, cache = prefill(target, ids, 64, 7, lengths=lengths)
    parents = (0, 0, 0, 1, 2, 4, 5)
    tree = Block(
        ids=jax.random.randint(jax.random.key(5), (2, 7), 0, target.vocab),
        parents=jnp.asarray([parents] * 2),
        valid=jnp.ones((2, 7), bool),
        is_draft=jnp.ones((2, 7), bool),
        static_parents=parents if static else None,
    )
    block = tree.cut(target.room(cache))
    assert block.valid.tolist() == [[True] * 5 + [False] * 2] * 2
    extended = extend(target, block, cache)
    path = jnp.asarray([[0, 2, 4, 0, 0, 0, 0], [0, 1, 3, 0, 0, 0, 0]])
    cache = commit(target, cache, extended.pending, path, jnp.asarray([3, 3]))
    assert cache.lengths.tolist() == [32, 16]
    after = extend(target, Block.chain(jnp.full((2, 3), 7)), cache)
    for row in range(2):
        prompt = ids[row, : lengths[row]].tolist()
        for nodes in ([0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4]):
            text = prompt + [int(tree.ids[row, i]) for i in nodes]
            want = whole(target, padded([text], 48))[0, len(text) - 1]
            np.testing.assert_allclose(extended.hidden[row, nodes[-1]], want, rtol=0, atol=1e-4)
        text = prompt + [int(tree.ids[row, i]) for i in path[row, :3]] + [7] * 3
        want = whole(target, padded([text], 48))[0, len(text) - 3 : len(text)]
        np.testing.assert_allclose(after.hidden[row], want, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("batch", "dtype"), [(1, jnp.float32), (3, jnp.bfloat16)])
def test_chains_equal_autoregression_of_the_same_width_bit_for_bit(small, batch, dtype):
    target = small.target.replace(params=jax.tree.map(lambda x: x.astype(dtype), small.target.params)).unrolled()
    prompts = [small.prompt(name) for name in ("one_window", "sub_chunk", "multi_window")][:batch]
    padding = bytejax.generate(target, prompts, drafter=Autoregressive(width=5), max_new_tokens=100)
    oracle = Oracle(truth=jnp.asarray(padding.ids), width=5)
    drafted = bytejax.generate(target, prompts, drafter=oracle, max_new_tokens=100)
    assert drafted.ids == padding.ids
    assert all(n > 0 for n in drafted.stats.accept_histogram[1:])


@pytest.mark.parametrize(
    ("batch", "make", "bonus"),
    [
        (3, Oracle, "condition"),
        (3, Oracle, "carry"),
        (1, Tree, "condition"),
        (3, Tree, "condition"),
    ],
)
def test_drafts_of_any_quality_write_the_targets_text(small, batch, make, bonus):
    target = small.target
    prompts = [small.prompt(name) for name in ("sub_window", "chunk_multiple", "two_windows")][:batch]
    plain = bytejax.generate(target, prompts, max_new_tokens=100)
    drafter = make(truth=jnp.asarray(plain.ids), width=9)
    drafted = bytejax.generate(target, prompts, drafter=drafter, max_new_tokens=100, bonus=bonus)
    assert sum(n > 0 for n in drafted.stats.accept_histogram) >= 4
    for prompt, a, b in zip(prompts, plain.ids, drafted.ids, strict=True):
        assert a == b or near_tie(target, prompt, a, b)
    assert drafted.stats.target_forwards < plain.stats.target_forwards


def test_queries_of_a_window_may_come_in_parts(small, monkeypatch):
    monkeypatch.setattr(evabyte, "QUERIES", 6)  # four at a time: the largest divisor of the window
    name = "multi_window"
    hidden = jax.jit(lambda target, ids: target.states(ids))(small.target, jnp.asarray([small.prompt(name)]))
    np.testing.assert_allclose(hidden[0], small.io[f"{name}.hidden"], rtol=0, atol=1e-4)


def test_layouts_do_not_change_the_states(small):
    target, ids = small.target, jnp.asarray(small.io["batch2.input_ids"])
    panels = target.in_panels(2)
    assert list(panels.layouts()) == ["panels", "[in, out]"] and list(target.layouts()) == ["stacked"]
    assert set(panels.params["layers"][0]) == {"attention_norm", "mlp_norm", "qkv", "gate_up", "o", "down", "mu", "phi"}
    assert panels.params["layers"][0]["qkv"].ndim == 3 and panels.params["layers"][0]["mu"].ndim == 5
    for layout in (panels, panels.unrolled(), panels.stacked()):
        np.testing.assert_allclose(whole(layout, ids), whole(target, ids), rtol=0, atol=2e-5)
    jax.tree.map(np.testing.assert_array_equal, panels.stacked().params, target.params)


def test_gradients_flow_through_both_forms(small):
    """The one-window form and the many-window form are one function, also backwards."""
    target, window = small.target, small.target.config.window
    ids = jnp.asarray([small.prompt("multi_window")])
    loss = lambda params, ids, weight: jnp.sum(target.replace(params=params).states(ids)[0] * weight)
    grad = jax.jit(jax.grad(loss))
    weight = jax.random.normal(jax.random.key(0), (ids.shape[1], target.width))
    early = jnp.arange(ids.shape[1])[:, None] < window
    one, many = grad(target.params, ids[:, :window], weight[:window]), grad(target.params, ids, weight * early)
    for a, b in zip(*map(jax.tree.leaves, (one, many)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(1, float(jnp.abs(a).max())))
    late = grad(target.params, ids, weight * ~early)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(late))
    for name in ("mu", "phi"):  # only later windows see summaries
        assert float(jnp.abs(late["layers"][name]).max()) > 1e-3 and not many["layers"][name].any()


def test_positions_are_divided_by_the_rope_scale(small):
    target = small.target
    config = dataclasses.replace(target.config, rope_scale=2.0)
    x = jax.random.normal(jax.random.key(0), (1, 9, target.width))
    scaled = target.replace(config=config)._qkv(target.layer(0), x, jnp.arange(0, 18, 2)[None])
    plain = target._qkv(target.layer(0), x, jnp.arange(9)[None])
    for a, b in zip(scaled, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def test_saved_targets_come_back(small, tmp_path):
    bytejax.save_target(tmp_path, small.target.unrolled(), dtype=jnp.float32)
    back = bytejax.load_target(tmp_path, unroll=False)
    assert back.config == small.target.config and back.tokenizer == small.target.tokenizer
    jax.tree.map(np.testing.assert_array_equal, back.params, small.target.params)
    on_cpu = bytejax.load_target(tmp_path)
    assert isinstance(on_cpu.params["layers"], tuple)


def test_random_parameters_have_the_same_shapes(small):
    made = jax.eval_shape(
        lambda key: evabyte.create(small.target.config, key, small.target.tokenizer), jax.random.key(0)
    )
    shapes = lambda target: jax.tree.map(lambda x: (x.shape, x.dtype), target.params)
    assert shapes(made) == shapes(small.target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [(dict(chunk=5), "window = 16 is not a multiple"), (dict(heads=5), "width = 32"), (dict(layers=0), "at least 1")],
)
def test_impossible_numbers_are_refused(small, changes, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(small.target.config, **changes)
