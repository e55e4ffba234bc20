"""Byte-ified Llama: against tokenkit's own values, cached against whole, drafts of every kind, its lookup."""

import json
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import bytejax
from bytejax import InputError
from bytejax.models import byte_llama, llama
from bytejax.models import layers as L  # noqa: N812
from bytejax.models.base import Block
from tests.decoding.tiny import Bordered, Oracle, Tree, make_drafter, near_tie
from tests.models.byte_llama_cases import CASES, EXPANDING, FIXTURES, load, padded, prompts

WORD = b"The users said: superuser\n\n\nif x:\n                  return    yyyyyyyyyyyyyyyyyyyyyy; other worlds "


def text(target, *shape, seed=0):
    """Random ids in which runs and words are often whole, so that long keys match."""
    rng, ids = random.Random(seed), []
    pieces = [target.tokenizer.encode(w + b" ")[1:] for w in WORD.split(b" ")] + [[260, 261, 257, 264], [255, 0], [32]]
    while len(ids) < np.prod(shape):
        ids += rng.choice(pieces)
    return jnp.asarray(ids[: np.prod(shape)], jnp.int32).reshape(shape)


def by_hand(entries, special, longest, ids):
    """The rule itself, id by id."""
    symbols, expanded = [i + 1 for i in ids], []
    for t in range(len(ids)):
        window = symbols[max(0, t + 1 - longest) : t + 1][::-1]
        lengths = [1] if window[0] in special else range(len(window), 0, -1)
        keys = (",".join(map(str, window[:n])) for n in lengths)
        expanded.append(next((entries[key] - 1 for key in keys if key in entries), 0))
    return expanded


EXPAND = jax.jit(lambda lookup, ids: byte_llama.expand(lookup, byte_llama._windows(ids)))
STATES = jax.jit(lambda target, ids: target.states(ids))
PREFILL = jax.jit(lambda target, ids, n, cache: target.prefill(ids, n, cache))
EXTEND = jax.jit(lambda target, block, cache: target.extend(block, cache))
COMMIT = jax.jit(lambda target, cache, pending, path, accepted: target.commit(cache, pending, path, accepted))


def expanded(lookup, ids):
    """Expanded ids of a text; padded, so that few lengths are compiled."""
    ids = jnp.asarray([int(i) for i in ids], jnp.int32)
    return EXPAND(lookup, jnp.pad(ids, (0, -len(ids) % 256))[None])[0, : len(ids)].tolist()


# --- against the reference ---


@pytest.mark.parametrize("name", EXPANDING)
def test_expanded_ids_are_the_references(name):
    target = load(name)
    for case in prompts(name):
        want = [*case["expanded_ids"], *case["gen_expanded_ids"]]
        assert expanded(target.lookup, [*case["input_ids"], *case["gen_ids"]]) == want


@pytest.mark.parametrize("name", CASES)
def test_hidden_states_and_logits_are_the_references(name):
    target, cases = load(name), prompts(name)
    ids, lengths = padded([case["input_ids"] for case in cases])
    hidden = STATES(target, ids)
    logits = target.unembed(hidden)
    for row, case in enumerate(cases):
        np.testing.assert_allclose(hidden[row, : lengths[row]], case["last_hidden"], atol=1e-4)
        np.testing.assert_allclose(logits[row, : lengths[row]], case["logits"], atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_logits_of_one_id_at_a_time_are_the_references(name):
    target, cases = load(name), [case for case in prompts(name) if "cached_logits" in case]
    ids, lengths = padded([case["input_ids"] for case in cases])
    first, cache = PREFILL(target, ids[:, :1], jnp.ones_like(lengths), target.init_cache(len(cases), 64, 1))

    @jax.jit
    def step(target, cache, new):
        extended = target.extend(Block.chain(new), cache)
        path, one = jnp.zeros_like(new), jnp.ones(len(new), jnp.int32)
        return target.unembed(extended.hidden)[:, 0], target.commit(cache, extended.pending, path, one)

    logits = [target.unembed(first.hidden)[:, 0]]
    for t in range(1, ids.shape[1]):
        row, cache = step(target, cache, ids[:, t : t + 1])
        logits.append(row)
    for row, case in enumerate(cases):
        np.testing.assert_allclose(jnp.stack(logits, 1)[row, : lengths[row]], case["cached_logits"], atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_greedy_text_is_the_references(name):
    target, cases = load(name), prompts(name)
    result = bytejax.generate(target, [case["input_ids"].tolist() for case in cases], max_new_tokens=24)
    assert result.ids == [case["gen_ids"].tolist() for case in cases]


@pytest.mark.parametrize("name", CASES)
def test_rotary_frequencies_are_the_references(name):
    c = load(name).config
    want = safetensors.numpy.load_file(FIXTURES / name / "io.safetensors")["rope.inv_freq"]
    np.testing.assert_allclose(L.rotary_frequencies(c.head_dim, c.rope_theta, c.rope_scaling), want, rtol=5e-7)


def test_rotary_positions_of_the_released_size_are_the_references():
    table = safetensors.numpy.load_file(FIXTURES / "rope_3b" / "rope.safetensors")
    scaling = llama.RopeScaling(32.0, 1.0, 4.0, 8192)
    got = L.rotary_frequencies(128, 5e5, scaling)
    np.testing.assert_allclose(got, table["inv_freq"], rtol=5e-7)
    ratios = got / L.rotary_frequencies(128, 5e5)
    np.testing.assert_allclose(ratios[[0, 28, 29, 34, 35, 63]], [1, 1, 0.809758, 0.103448, 1 / 32, 1 / 32], rtol=1e-5)
    ones = jnp.concatenate([jnp.ones(64), jnp.zeros(64)])
    turned = L.rotary(jnp.broadcast_to(ones, (1, 8, 1, 128)), table["positions"][None], 5e5, scaling)[0, :, 0]
    for part, want in ((turned[:, :64], table["cos"]), (turned[:, 64:], table["sin"])):
        # An angle is as exact as its frequency, in float32.
        room = 1e-6 + table["positions"][:, None] * table["inv_freq"] * 5e-7
        assert (np.abs(part - want[:, :64]) < room).all()


# --- the lookup ---


@pytest.mark.parametrize("case", json.loads((FIXTURES / "expand_edge" / "expand_edge.json").read_text())["cases"])
def test_odd_dictionaries_follow_the_references_rule(case):
    (entries, special), longest = case["expand_input_ids_dict"], case["expand_input_ids_maxlen"]
    lookup = byte_llama.build_lookup(entries, special, longest)
    for ids, want in zip(case["input_ids"], case["expanded_ids"], strict=True):
        assert expanded(lookup, ids) == want == by_hand(entries, special, longest, ids)


@pytest.mark.parametrize("seed", range(6))
def test_random_dictionaries_follow_the_rule_and_are_written_back(seed):
    rng = random.Random(seed)
    symbols, longest = [1, 2, 3, 265, 256][: 2 + seed % 4], rng.choice([1, 3, 16])
    key = lambda: ",".join(str(rng.choice(symbols)) for _ in range(rng.choice([1, 2, 3, 4, 15, 16, 17])))
    entries = {"": -1} | {key(): rng.randint(1, 9) for _ in range(80)} | {"256": 4}
    special = [256] if seed % 2 else []
    lookup = byte_llama.build_lookup(entries, special, longest)
    written = byte_llama.entries_of(lookup)
    again = byte_llama.build_lookup(written, [], 16)
    assert 0 < len(written) <= len(entries)
    ids = [rng.choice(symbols) - 1 for _ in range(500)]
    for other in ([0] * 40, [1, 0] * 20, ids):
        want = by_hand(entries, special, longest, other)
        assert expanded(lookup, other) == expanded(again, other) == want


def test_a_dictionary_of_the_released_size_is_built_in_seconds_and_answers_by_the_rule():
    rng = np.random.default_rng(0)
    counts = [265, 4344, 15503, 18633, 17153, 19283, 15028, 10683, 9553, 5696, 4390, 2523, 1823, 780, 762, 1316]
    entries = {str(s): s for s in range(1, 266)}
    for length, count in enumerate(counts, 1):
        likely = np.repeat(rng.integers(1, 257, 20), 20)
        keys = rng.choice(np.concatenate([likely, np.arange(1, 257)]), (count, length))
        entries |= {",".join(map(str, k)): 1 + i for i, k in enumerate(keys.tolist())}
    special = [256, 257, 258, 259, 260]
    lookup = byte_llama.build_lookup(entries, special, 16)
    assert len(entries) > 120_000 and lookup.boundaries.shape[0] > 200_000
    whole = rng.permutation(list(entries))[:120].tolist()
    ids = [int(s) - 1 for k in whole for s in reversed(k.split(","))]
    want = by_hand(entries, special, 16, ids)
    assert expanded(lookup, ids) == want and len(set(want)) > 100


@pytest.mark.parametrize(
    ("entries", "special", "longest", "message"),
    [
        ({"1": 1}, [], 17, "over 17 ids"),
        ({"1": 1, "2,3": 4}, [2], 16, "special symbol 2"),
        ({"1": 1, "a": 4}, [], 16, "other than integers"),
        ({"1": "x"}, [], 16, "other than integers"),
        ({"0": 1}, [], 16, "symbols 1 to 510"),
        ({"511": 1}, [], 16, "symbols 1 to 510"),
        ({"1": 0}, [], 16, "positive values"),
    ],
)
def test_dictionaries_that_mean_nothing_are_refused(entries, special, longest, message):
    with pytest.raises(InputError, match=message):
        byte_llama.build_lookup(entries, special, longest)


# --- blocks ---


@pytest.mark.parametrize("batch", [1, 3])
def test_cached_blocks_equal_the_whole_sequence(batch):
    """Ragged prompts, then chains of which any number of rows is kept; rows that do not count hold other ids."""
    target, width, total = load("a_untied_expand").unrolled(), 5, 70
    ids = text(target, batch, total)
    whole = STATES(target, ids)
    lengths = jnp.asarray([9, 1, 20])[:batch]
    prefilled, cache = PREFILL(target, ids[:, :20], lengths, target.init_cache(batch, total, width))
    np.testing.assert_allclose(prefilled.hidden[:, 0], whole[jnp.arange(batch), lengths - 1], atol=1e-4)
    path = jnp.broadcast_to(jnp.arange(width), (batch, width))
    for cycle in range(12):
        positions = cache.lengths[:, None] + jnp.arange(width)
        keep = (3 * jnp.arange(batch) + 2 * cycle) % (width + 1)
        good = jnp.arange(width) < jnp.maximum(keep, 1)[:, None]
        true = jnp.take_along_axis(ids, positions, 1)
        block = Block.chain(jnp.where(good, true, (true + 7) % 265), jnp.maximum(keep, 1) - 1)
        extended = EXTEND(target, block, cache)
        want = jnp.take_along_axis(whole, positions[..., None], 1)
        np.testing.assert_allclose(extended.hidden[good], want[good], atol=1e-4)
        assert not np.allclose(extended.hidden[~good], want[~good], atol=1e-2) or good.all()
        cache = COMMIT(target, cache, extended.pending, path, keep)
    assert int(cache.lengths.min()) > 20


@pytest.mark.parametrize("static", [True, False])
def test_a_trees_nodes_look_back_along_their_ancestors(static):
    target = load("c_qknorm_expand")
    parents = [(0, 0, 0, 1, 3, 4, 2), (0, 0, 1, 1, 2, 2, 5)]
    parents = parents[:1] * 2 if static else parents
    ids, lengths = text(target, 2, 12), jnp.asarray([12, 3])
    _, cache = PREFILL(target, ids, lengths, target.init_cache(2, 40, 7))
    tree = Block.chain(text(target, 2, 7, seed=3)).replace(
        parents=jnp.asarray(parents), static_parents=parents[0] if static else None
    )
    extended = EXTEND(target, tree, cache)
    after, given, drafts, ends = [[115, 114], [32, 32]], ids.tolist(), tree.ids.tolist(), lengths.tolist()
    texts, nodes = [], []
    for row in range(2):
        for node in range(7):
            path = [node]
            while path[0]:
                path.insert(0, parents[row][path[0]])
            nodes.append(path)
            texts.append([*given[row][: ends[row]], *(drafts[row][i] for i in path), *after[row]])
    whole, ends = padded(texts)
    whole = STATES(target, whole)
    for i, path in enumerate(nodes):
        np.testing.assert_allclose(extended.hidden[i // 7, path[-1]], whole[i, ends[i] - 3], atol=1e-4)
    kept = [nodes[5], nodes[7 + 3]]
    path, counts = padded(kept)
    cache = COMMIT(target, cache, extended.pending, jnp.pad(path % 7, ((0, 0), (0, 7 - path.shape[1]))), counts)
    got = EXTEND(target, Block.chain(jnp.asarray(after)), cache).hidden
    for row, i in enumerate((5, 7 + 3)):
        np.testing.assert_allclose(got[row], whole[i, ends[i] - 2 : ends[i]], atol=1e-4)


@pytest.mark.parametrize("static", [True, False])
def test_no_key_reaches_past_a_row_given_as_an_embedding(static):
    ids, parents = jnp.asarray([[10, 11, 12, 13]]), (0, 0, 1, 1)
    block = Block.chain(ids).replace(
        parents=jnp.asarray([parents]),
        static_parents=parents if static else None,
        embeds=jnp.zeros((1, 4, 2)),
        embeds_mask=jnp.asarray([[False, True, False, False]]),
    )
    windows = byte_llama._block_windows(block, jnp.asarray([[*range(100, 116)]]))
    assert windows[0, 0, :3].tolist() == [11, 100, 101] and windows[0, 0, -1] == 114
    assert windows[0, 2, :5].tolist() == [13, 0, 11, 100, 101] and windows[0, 3, :4].tolist() == [14, 0, 11, 100]


# --- decoding ---


@pytest.fixture(scope="module")
def plain():
    """A target, prompts of several lengths, and their text by one id per pass."""
    target = load("a_untied_expand").unrolled()
    given = [text(target, n, seed=n).tolist() for n in (5, 17, 30)]
    return target, given, bytejax.generate(target, given, max_new_tokens=60).ids


@pytest.mark.parametrize(
    ("make", "options", "batch"),
    [
        (Oracle, {}, 1),
        (Oracle, {}, 3),
        (Tree, {"static": True}, 3),
        (Tree, {"static": False}, 1),
        (Tree, {"static": False}, 3),
    ],
)
def test_drafts_of_any_kind_leave_the_text_as_it_is(plain, make, options, batch):
    target, given, want = plain
    for i in range(0, 3, batch) if make is Oracle else [0]:
        drafter = make(truth=jnp.asarray(want[i : i + batch]), width=7, **options)
        got = bytejax.generate(target, given[i : i + batch], drafter=drafter, max_new_tokens=60)
        assert sum(n > 0 for n in got.stats.accept_histogram) >= 4
        for p, a, b in zip(given[i : i + batch], want[i : i + batch], got.ids, strict=True):
            assert a == b or near_tie(target, p, a, b)


@pytest.mark.parametrize("bonus", ["carry", "standard"])
def test_blocks_without_a_root_and_extra_passes_leave_it_too(plain, bonus):
    target, given, want = plain
    drafter = Oracle(truth=jnp.asarray(want), width=4)
    got = bytejax.generate(target, given, drafter=drafter, max_new_tokens=60, bonus=bonus)
    assert sum(n > 0 for n in got.stats.accept_histogram) >= 3
    assert all(a == b or near_tie(target, p, a, b) for p, a, b in zip(given, want, got.ids, strict=True))


class BorderedByteLlama(byte_llama.ByteLlama):
    room = Bordered.room


def test_drafts_cut_at_a_border_are_forgotten(plain):
    target, given, want = plain
    cut = BorderedByteLlama(target.params, target.config, target.tokenizer, target.lookup)
    got = bytejax.generate(cut, given, drafter=Oracle(jnp.asarray(want), 7), max_new_tokens=60)
    assert sum(got.stats.accept_histogram[6:]) == 0 < got.stats.accept_histogram[5]
    assert all(a == b or near_tie(target, p, a, b) for p, a, b in zip(given, want, got.ids, strict=True))


@pytest.mark.parametrize("lora_layers", [0, 1])
def test_a_head_of_268_rows_serves_a_target_of_265_ids(plain, lora_layers):
    target, given, want = plain
    drafter = make_drafter(target, "cp", extra_ids=3, lora_layers=lora_layers)
    assert drafter.config.vocab == 268
    got = bytejax.generate(target, given, drafter=drafter, max_new_tokens=60)
    assert all(a == b or near_tie(target, p, a, b) for p, a, b in zip(given, want, got.ids, strict=True))
    if lora_layers:
        return
    sampled = bytejax.generate(target, given, drafter=drafter, max_new_tokens=60, temperature=2.0)
    assert max(map(max, sampled.ids)) < 265


def test_what_is_saved_decodes_as_before(plain, tmp_path):
    target, given, want = plain
    bytejax.save_target(tmp_path, target, jnp.float32)
    loaded = bytejax.load_target(tmp_path, unroll=False)
    assert type(loaded) is byte_llama.ByteLlama
    assert loaded.config == target.config and loaded.tokenizer == target.tokenizer
    jax.tree.map(np.testing.assert_array_equal, loaded.lookup, target.lookup)
    got = bytejax.generate(bytejax.load_target(tmp_path), given, max_new_tokens=60).ids
    assert all(a == b or near_tie(target, p, a, b) for p, a, b in zip(given, want, got, strict=True))
    path = tmp_path / "lookup.safetensors"
    whole = path.read_bytes()
    for broken, message in ((whole[:-4], "not a complete"), (None, "lookup"), (b"", "not a complete")):
        path.unlink() if broken is None else path.write_bytes(broken)
        with pytest.raises(InputError, match=message):
            bytejax.load_target(tmp_path)
    safetensors.numpy.save_file({"answers": np.zeros(3, np.int32)}, path)
    with pytest.raises(InputError, match="does not hold a dictionary"):
        bytejax.load_target(tmp_path)
