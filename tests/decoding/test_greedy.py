"""Greedy decoding is the target's own text, whatever the drafter."""

import jax.numpy as jnp
import pytest

import bytejax
from bytejax.decoding import generate as g
from bytejax.decoding import loop
from bytejax.drafters.base import Autoregressive
from tests.decoding.tiny import Oracle, Tree, bordered, make_drafter, make_target, near_tie

PROMPTS = [[1, 2, 3], [4] * 17, list(range(20)), [7]]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", ["ff", "cp", "hmm", "btree"])
def test_equals_autoregression_of_the_same_width_bit_for_bit(name, batch, dtype):
    target = make_target(dtype=dtype)
    drafter = make_drafter(target, name)
    for i in range(0, len(PROMPTS), batch):
        options = dict(max_new_tokens=60)
        drafted = bytejax.generate(target, PROMPTS[i : i + batch], drafter=drafter, **options)
        padded = bytejax.generate(target, PROMPTS[i : i + batch], drafter=Autoregressive(width=5), **options)
        assert drafted.ids == padded.ids
        assert [len(x) for x in drafted.ids] == [60] * batch


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("width", [2, 5])
def test_right_drafts_are_kept_bit_for_bit(width, dtype):
    """Random heads are rarely right. An oracle is, so that every accept length is compared with one byte per pass."""
    target = make_target(dtype=dtype)
    padded = bytejax.generate(target, PROMPTS, drafter=Autoregressive(width=width), max_new_tokens=80)
    oracle = Oracle(truth=jnp.asarray(padded.ids), width=width)
    drafted = bytejax.generate(target, PROMPTS, drafter=oracle, max_new_tokens=80)
    assert drafted.ids == padded.ids
    assert all(n > 0 for n in drafted.stats.accept_histogram[1:])


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("width", [2, 9])
def test_trees_write_the_targets_text(width, static):
    target = make_target()
    plain = bytejax.generate(target, PROMPTS, max_new_tokens=80)
    drafter = Tree(truth=jnp.asarray(plain.ids), width=width, static=static)
    drafted = bytejax.generate(target, PROMPTS, drafter=drafter, max_new_tokens=80)
    assert width == 2 or sum(n > 0 for n in drafted.stats.accept_histogram) >= 4
    for prompt, a, b in zip(PROMPTS, plain.ids, drafted.ids, strict=True):
        assert a == b or near_tie(target, prompt, a, b)
    assert drafted.stats.target_forwards < plain.stats.target_forwards


@pytest.mark.parametrize(("make", "longest"), [(Oracle, 5), (Tree, 4)])  # the tree is three levels deep
def test_drafts_beyond_a_border_are_cut(make, longest):
    target = make_target()
    plain = bytejax.generate(target, PROMPTS, max_new_tokens=80)
    drafter = make(truth=jnp.asarray(plain.ids), width=9)
    drafted = bytejax.generate(bordered(target), PROMPTS, drafter=drafter, max_new_tokens=80)
    assert len(drafted.stats.accept_histogram) == 10 and sum(drafted.stats.accept_histogram[6:]) == 0
    assert drafted.stats.accept_histogram[longest] > 0 and drafted.stats.accept_histogram[1] > 0
    for prompt, a, b in zip(PROMPTS, plain.ids, drafted.ids, strict=True):
        assert a == b or near_tie(target, prompt, a, b)


def test_a_tree_needs_verification():
    drafter = Tree(jnp.zeros((4, 9), jnp.int32), 3)
    with pytest.raises(bytejax.InputError, match="always verified"):
        bytejax.generate(make_target(), PROMPTS, drafter=drafter, max_new_tokens=9, verify=False)


def test_a_bare_prompt_is_refused():
    with pytest.raises(bytejax.InputError, match="brackets"):
        bytejax.generate(make_target(), b"abc")


@pytest.mark.parametrize("bonus", loop.BONUS)
@pytest.mark.parametrize("window", [2, 3, 7])
def test_oracle_drafts_cross_every_accept_length(window, bonus):
    target = make_target()
    plain = bytejax.generate(target, PROMPTS, max_new_tokens=80)
    oracle = Oracle(truth=jnp.asarray(plain.ids), width=window)
    drafted = bytejax.generate(target, PROMPTS, drafter=oracle, max_new_tokens=80, bonus=bonus)
    assert window == 2 or sum(n > 0 for n in drafted.stats.accept_histogram) >= 3
    for prompt, a, b in zip(PROMPTS, plain.ids, drafted.ids, strict=True):
        assert a == b or near_tie(target, prompt, a, b)
    assert drafted.stats.target_forwards < plain.stats.target_forwards


@pytest.mark.parametrize(("right", "length"), [(0, 1.0), (3, 4.0)])
def test_accept_length_counts_kept_tokens_per_target_pass(right, length):
    target = make_target()
    plain = bytejax.generate(target, PROMPTS[:1], max_new_tokens=61)
    oracle = Oracle(truth=jnp.asarray(plain.ids), width=4, right=right)
    drafted = bytejax.generate(target, PROMPTS[:1], drafter=oracle, max_new_tokens=61)
    assert drafted.ids == plain.ids
    assert drafted.stats.accept_length == length
    assert drafted.stats.acceptance_rate == right / 3
    assert drafted.stats.tokens == 61
    assert sum(i * n for i, n in enumerate(drafted.stats.accept_histogram)) == 60
    assert sum(drafted.from_draft[0]) == 60 * right // (right + 1)


@pytest.mark.parametrize("bonus", loop.BONUS)
def test_a_stop_id_inside_a_block_ends_the_row_there(bonus):
    free = bytejax.generate(make_target(), PROMPTS[:2], max_new_tokens=60)
    for position in range(20, 28):  # every place in a block, whatever the accept lengths before it
        stop = free.ids[0][position]
        expected = free.ids[0][: free.ids[0].index(stop) + 1]
        target = make_target(stop=(stop,))
        oracle = Oracle(truth=jnp.asarray(free.ids), width=5)
        result = bytejax.generate(target, PROMPTS[:2], drafter=oracle, max_new_tokens=60, bonus=bonus)
        assert result.ids[0] == expected
        assert result.finish_reasons[0] == "stop"
        if stop not in free.ids[1]:
            assert result.ids[1] == free.ids[1] and result.finish_reasons[1] == "length"


@pytest.mark.parametrize("bonus", loop.BONUS)
def test_rows_have_their_own_limits_and_the_context_ends_them(bonus):
    target = make_target(context=40)
    free = bytejax.generate(target, PROMPTS, max_new_tokens=100)
    assert [len(x) for x in free.ids] == [40 - len(p) for p in PROMPTS]
    oracle = Oracle(truth=jnp.pad(jnp.asarray([x[:20] for x in free.ids]), ((0, 0), (0, 30))), width=6)
    limited = bytejax.generate(target, PROMPTS, drafter=oracle, max_new_tokens=[1, 2, 7, 19], bonus=bonus)
    assert limited.ids == [x[:n] for x, n in zip(free.ids, [1, 2, 7, 19], strict=True)]
    assert limited.finish_reasons == ["length"] * 4


def test_banned_ids_never_appear():
    free = bytejax.generate(make_target(), PROMPTS, max_new_tokens=50)
    common = max(range(23), key=lambda i: sum(row.count(i) for row in free.ids))
    target = make_target(banned=(common,))
    plain = bytejax.generate(target, PROMPTS, max_new_tokens=50)
    drafted = bytejax.generate(target, PROMPTS, max_new_tokens=50, drafter=make_drafter(target, "cp", extra_ids=3))
    assert common not in sum(plain.ids, [])
    assert drafted.ids == plain.ids


@pytest.mark.parametrize("rule", ["sequential", "joint"])
def test_both_greedy_rules_of_a_circuit_are_lossless(rule):
    target = make_target()
    plain = bytejax.generate(target, PROMPTS, max_new_tokens=50, drafter=Autoregressive(width=5))
    drafter = make_drafter(target, "btree", greedy_rule=rule)
    assert bytejax.generate(target, PROMPTS, max_new_tokens=50, drafter=drafter).ids == plain.ids


@pytest.mark.parametrize(("name", "rule"), [("hmm", "sequential"), ("btree", "sequential"), ("cp", "joint")])
def test_fewer_drafts_than_the_window_holds(name, rule):
    target = make_target()
    drafter = make_drafter(target, name, feed_width=8, draft_tokens=2, greedy_rule=rule)
    plain = bytejax.generate(target, PROMPTS, max_new_tokens=50, drafter=Autoregressive(width=3))
    drafted = bytejax.generate(target, PROMPTS, max_new_tokens=50, drafter=drafter)
    assert drafted.ids == plain.ids
    assert len(drafted.stats.accept_histogram) == 4 and drafted.stats.drafted == 2 * drafted.stats.target_forwards


@pytest.mark.parametrize("bonus", ["condition", "carry", "standard"])
@pytest.mark.parametrize(("layers", "merged"), [(1, False), (2, True)])
def test_a_draft_stream_of_its_own_is_lossless(layers, merged, bonus):
    target = make_target()
    plain = bytejax.generate(target, PROMPTS, max_new_tokens=50)
    drafter = make_drafter(target, "btree", lora_layers=layers, merged=merged)
    drafted = bytejax.generate(target, PROMPTS, max_new_tokens=50, drafter=drafter, bonus=bonus)
    for prompt, a, b in zip(PROMPTS, plain.ids, drafted.ids, strict=True):
        assert a == b or near_tie(target, prompt, a, b)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_draft_stream_in_layers_of_its_own_leaves_the_targets_bits_alone(dtype):
    target = make_target(dtype=dtype)
    padded = bytejax.generate(target, PROMPTS, max_new_tokens=50, drafter=Autoregressive(width=5))
    drafter = make_drafter(target, "btree", lora_layers=2, merged=True)
    assert bytejax.generate(target, PROMPTS, max_new_tokens=50, drafter=drafter).ids == padded.ids


def test_merged_adapters_draft_the_same_bytes():
    target = make_target()
    runs = [
        bytejax.generate(
            target, PROMPTS, max_new_tokens=50, drafter=make_drafter(target, "hmm", lora_layers=1, merged=m)
        )
        for m in (False, True)
    ]
    assert runs[0].ids == runs[1].ids and runs[0].stats.accept_histogram == runs[1].stats.accept_histogram


@pytest.mark.parametrize("bonus", ["carry", "standard", "paper"])
@pytest.mark.parametrize(("name", "rule"), [("ff", "sequential"), ("hmm", "sequential"), ("cp", "joint")])
def test_every_policy_for_the_extra_byte_is_lossless(name, rule, bonus):
    target = make_target()
    plain = bytejax.generate(target, PROMPTS, max_new_tokens=50)
    for feed in (None, 8):
        drafter = make_drafter(target, name, greedy_rule=rule, feed_width=feed)
        drafted = bytejax.generate(target, PROMPTS, max_new_tokens=50, drafter=drafter, bonus=bonus)
        for prompt, a, b in zip(PROMPTS, plain.ids, drafted.ids, strict=True):
            assert a == b or near_tie(target, prompt, a, b)
        s = drafted.stats
        assert s.tokens == 200 and sum(i * n for i, n in enumerate(s.accept_histogram)) == 200
        cycles = sum(s.accept_histogram)
        passes = 2 * cycles if bonus == "standard" else cycles + s.tokens - s.accepted
        assert s.drafted == 5 * cycles and passes - 4 <= s.target_forwards <= passes  # none after a row's last byte


def test_a_drafter_that_needs_a_root_cannot_drop_it():
    with pytest.raises(bytejax.InputError, match="bonus 'carry' needs"):
        bytejax.generate(make_target(), PROMPTS, max_new_tokens=9, bonus="carry")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(bonus="keep"), "unknown bonus"),
        (dict(accept="all"), "unknown acceptance rule"),
        (dict(bonus="paper", accept="block"), "token-wise"),
    ],
)
def test_rules_that_do_not_exist_or_go_together(options, message):
    target = make_target()
    with pytest.raises(bytejax.InputError, match=message):
        bytejax.generate(target, PROMPTS, max_new_tokens=9, drafter=make_drafter(target, "cp"), **options)


def test_stacked_and_unrolled_layers_agree():
    unrolled, stacked = make_target(), make_target(unrolled=False)
    drafter = make_drafter(unrolled, "cp")
    a, b = (bytejax.generate(t, PROMPTS, max_new_tokens=40, drafter=drafter).ids for t in (stacked, unrolled))
    assert all(x == y or near_tie(unrolled, p, x, y) for p, x, y in zip(PROMPTS, a, b, strict=True))


def test_kernels_in_panels_give_the_same_text():
    target = make_target()
    a = bytejax.generate(target, PROMPTS, max_new_tokens=40).ids
    b = bytejax.generate(target.in_panels(4), PROMPTS, max_new_tokens=40).ids
    assert all(x == y or near_tie(target, p, x, y) for p, x, y in zip(PROMPTS, a, b, strict=True))


def test_without_verification_every_draft_stays():
    target = make_target()
    result = bytejax.generate(target, PROMPTS, max_new_tokens=51, drafter=make_drafter(target, "hmm"), verify=False)
    assert result.stats.accept_length == 5.0
    assert result.stats.acceptance_rate == 1.0


def test_a_second_call_in_the_same_bucket_compiles_nothing():
    target = make_target()
    drafter = make_drafter(target, "btree")
    bytejax.generate(target, PROMPTS, max_new_tokens=50, drafter=drafter, temperature=0.9, top_p=0.8, seed=1)
    before = g.START.compiled, g.RUN.compiled
    other = [[5, 6], [8] * 25, [0, 0], [1]]
    bytejax.generate(target, other, max_new_tokens=44, drafter=drafter, temperature=0.4, top_p=0.95, seed=7)
    assert (g.START.compiled, g.RUN.compiled) == before
    g_stream = list(bytejax.stream(target, other, max_new_tokens=44, drafter=drafter, temperature=0.4, top_p=0.95))
    assert (g.START.compiled, g.RUN.compiled) == before and len(g_stream) > 3


def test_large_steps_of_the_capacity_make_prompts_share_a_program():
    target = make_target()
    run = lambda prompt, **options: bytejax.generate(target, [prompt], max_new_tokens=10, **options).ids
    run([3] * 20, capacity_step=256)
    before, long = g.RUN.compiled, [1, 2] * 35
    shared = run(long, capacity_step=256)
    assert g.RUN.compiled == before and shared == run(long, capacity_step=64) and g.RUN.compiled == before + 1


def test_a_stream_grows_to_what_generate_gives():
    target = make_target()
    drafter = make_drafter(target, "cp")
    whole = bytejax.generate(target, PROMPTS, max_new_tokens=50, drafter=drafter)
    parts = list(bytejax.stream(target, PROMPTS, cycles=3, max_new_tokens=50, drafter=drafter))
    for before, after in zip(parts, parts[1:], strict=False):
        assert all(b[: len(a)] == a for a, b in zip(before.ids, after.ids, strict=True))
    assert parts[-1].ids == whole.ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(prompts=[[]]), "prompt 0 is empty"),
        (dict(prompts=[]), "no prompts"),
        (dict(prompts=[[1], [99]]), "prompt 1 holds the id 99"),
        (dict(prompts=[[1] * 400]), "context of 400"),
        (dict(max_new_tokens=0), "at least 1"),
        (dict(max_new_tokens=[3, 3]), "2 entries for 1"),
        (dict(temperature=-1.0), "temperature"),
        (dict(temperature=float("nan")), "temperature"),
        (dict(top_p=0.0), "top_p"),
        (dict(top_k=-1), "top_k"),
        (dict(banned_ids=[23]), "banned id 23"),
        (dict(banned_ids=range(23)), "every id is banned"),
    ],
)
def test_bad_input_is_refused_in_one_line(changes, message):
    options = dict(prompts=[[1, 2]], max_new_tokens=5) | changes
    with pytest.raises(bytejax.InputError, match=message) as e:
        bytejax.generate(make_target(), options.pop("prompts"), **options)
    assert "\n" not in str(e.value)


def test_a_head_that_does_not_fit_is_refused():
    target = make_target()
    with pytest.raises(bytejax.InputError, match="width 24, the target has 30"):
        bytejax.generate(make_target(width=30), [[1]], drafter=make_drafter(target, "cp"))
    with pytest.raises(bytejax.InputError, match="fewer than the target's 25"):
        bytejax.generate(make_target(vocab=25), [[1]], drafter=make_drafter(target, "cp"))
