"""Directories of targets and drafters, and what is refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bytejax
from bytejax import InputError, loading
from bytejax.decoding.generate import generate
from bytejax.drafters.circuit import CircuitDrafter
from bytejax.models import lora
from bytejax.models.llama import RopeScaling
from tests.decoding.tiny import make_adapters, make_drafter, make_head, make_target


@pytest.fixture
def saved(tmp_path):
    target = make_target(unrolled=False)
    params, config = make_head(target, "btree")
    bytejax.save_target(tmp_path / "target", target.unrolled(), jnp.float32)
    bytejax.save_head(tmp_path / "drafter", config, params, jnp.float32)
    return tmp_path, target.unrolled(), make_drafter(target, "btree")


def test_what_is_saved_decodes_as_before(saved):
    path, target, drafter = saved
    loaded = bytejax.load_target(path / "target")
    loaded_drafter = bytejax.load_drafter(path / "drafter", loaded)
    assert loaded.config == target.config and loaded.tokenizer == target.tokenizer
    want = generate(target, [[1, 2, 3]], drafter=drafter, max_new_tokens=30)
    got = generate(loaded, [[1, 2, 3]], drafter=loaded_drafter, max_new_tokens=30)
    assert got.ids == want.ids and got.stats.accept_histogram == want.stats.accept_histogram


def test_every_number_of_a_config_survives_its_file(tmp_path):
    target = make_target(unrolled=False, qk_norm=True, rope_scaling=RopeScaling(7.5, 1.25, 3.5, 60))
    bytejax.save_target(tmp_path, target, jnp.float32)
    loaded = bytejax.load_target(tmp_path, unroll=False)
    assert loaded.config == target.config and hash(loaded.config) == hash(target.config)
    np.testing.assert_array_equal(loaded.logits([[1, 2, 3]]), target.logits([[1, 2, 3]]))


def test_an_unrolled_target_is_saved_as_the_stack_it_came_from(saved):
    target = make_target(unrolled=False)
    want, _ = jax.tree.flatten(target.params)
    for other in (target.unrolled(), target.in_panels(4), bytejax.load_target(saved[0] / "target")):
        got, _ = jax.tree.flatten(other.stacked().params)
        assert len(got) == len(want) and all((a == b).all() for a, b in zip(got, want, strict=True))


def test_dtype_is_the_targets(saved):
    target = bytejax.load_target(saved[0] / "target", dtype="bfloat16")
    drafter = bytejax.load_drafter(saved[0] / "drafter", target)
    assert target.params["embedding"].dtype == drafter.weights.early.dtype == jnp.bfloat16


def test_options_reach_the_drafter(saved):
    target = bytejax.load_target(saved[0] / "target")
    assert bytejax.load_drafter(saved[0] / "drafter", target, greedy_rule="joint").greedy_rule == "joint"
    assert bytejax.load_drafter("none", target).block_width == 1
    with pytest.raises(bytejax.InputError, match="'temperature' is unknown; known: draft_tokens, greedy_rule"):
        bytejax.load_drafter(saved[0] / "drafter", target, temperature=1)
    with pytest.raises(bytejax.InputError, match="unknown greedy rule 'best'"):
        bytejax.load_drafter(saved[0] / "drafter", target, greedy_rule="best")
    assert bytejax.load_drafter(saved[0] / "drafter", target, draft_tokens=2).block_width == 3
    with pytest.raises(bytejax.InputError, match="draft_tokens = 5: a head with a window of 5 drafts 1 to 4"):
        bytejax.load_drafter(saved[0] / "drafter", target, draft_tokens=5)


@pytest.mark.parametrize("source", ["nothing", "", "target", "."])
def test_an_unknown_drafter_is_refused_with_what_is_known(saved, source):
    target = bytejax.load_target(saved[0] / "target")
    with pytest.raises(bytejax.InputError, match=r"none, .*|is not of format|holds no config"):
        bytejax.load_drafter(source, target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(format="other"), "is not of format 'bytejax-target'"),
        (dict(family="gpt"), "does not describe a target"),
        (dict(config={"width": 3}), "does not describe a target"),
        (dict(tokenizer={}), "does not describe a target"),
    ],
)
def test_a_config_that_describes_no_target_is_refused(saved, change, message):
    path = saved[0] / "target" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(bytejax.InputError, match=message) as e:
        bytejax.load_target(saved[0] / "target")
    assert "\n" not in str(e.value)


def test_other_bad_sources_are_refused(saved):
    path = saved[0] / "target"
    with pytest.raises(bytejax.InputError, match="neither 'demo' nor a directory"):
        bytejax.load_target("no-such-target")
    with pytest.raises(bytejax.InputError, match="unknown dtype 'int8'"):
        bytejax.load_target(path, dtype="int8")
    (path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(bytejax.InputError, match="is not JSON"):
        bytejax.load_target(path)
    (path / "config.json").unlink()
    with pytest.raises(bytejax.InputError, match=r"holds no config\.json"):
        bytejax.load_target(path)


def test_weights_on_disk_are_bfloat16_unless_told_otherwise(tmp_path):
    target = make_target(unrolled=False)
    bytejax.save_target(tmp_path, target)
    exact = np.asarray(target.params["embedding"])
    loaded = np.asarray(bytejax.load_target(tmp_path).params["embedding"])
    np.testing.assert_allclose(loaded, exact, rtol=2**-8)
    assert not np.array_equal(loaded, exact)


def test_a_lora_drafter_is_written_and_read(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "DEMO", tmp_path)
    target = make_target(unrolled=False)
    bytejax.save_target(tmp_path / "target", target, jnp.float32)
    loaded = bytejax.load_target(tmp_path / "target")
    adapters, (params, config) = make_adapters(target, 2), make_head(target, "cp")
    loading.save_lora(tmp_path / "whole", target, adapters, (config, params), jnp.float32)
    loading.save_head(tmp_path / "base", config, params, jnp.float32)
    loading.save_lora(tmp_path / "light", target, adapters, "base", jnp.float32)
    want = CircuitDrafter.create(params, config, adapter=lora.create(adapters, loaded))
    want = generate(loaded, [[1, 2, 3]], drafter=want, max_new_tokens=30)
    for name in ("whole", "light"):
        for merged in (False, True):
            drafter = bytejax.load_drafter(tmp_path / name, loaded, merged=merged)
            got = generate(loaded, [[1, 2, 3]], drafter=drafter, max_new_tokens=30)
            assert got.ids == want.ids and got.stats.accept_histogram == want.stats.accept_histogram
    assert [loading.needs_unrolled(x) for x in (tmp_path / "light", "light", "base", "none")] == [
        True,
        True,
        False,
        False,
    ]
    with pytest.raises(InputError, match="LoRA drafter"):
        loading.load_start("light")
    loading.save_head(tmp_path / "base", config, jax.tree.map(lambda x: x + 1, params), jnp.float32)
    with pytest.raises(InputError, match="as another version shipped it"):
        bytejax.load_drafter(tmp_path / "light", loaded)
    (tmp_path / "base" / "config.json").unlink()
    with pytest.raises(InputError, match="does not ship"):
        bytejax.load_drafter(tmp_path / "light", loaded)


def test_lora_drafters_that_do_not_fit(tmp_path):
    target = make_target(unrolled=False)
    adapters, (params, config) = make_adapters(target, 2), make_head(target, "cp")
    loading.save_lora(tmp_path / "lora", target, adapters, (config, params), jnp.float32)
    loading.save_head(tmp_path / "plain", config, params, jnp.float32)
    cases = [
        ("lora", make_target(seed=3), {}, "another target"),
        ("lora", make_target(layers=1), {}, "the target has 1"),
        ("lora", target, {}, "unroll=True"),
        ("plain", make_target(), {"draft": 3}, "unknown"),
        ("plain", make_target(), {"merged": True}, "no adapters to merge"),
    ]
    for name, other, options, message in cases:
        with pytest.raises(InputError, match=message):
            bytejax.load_drafter(tmp_path / name, other, **options)


def test_a_targets_fingerprint_does_not_depend_on_how_it_is_held(tmp_path):
    target = make_target(unrolled=False, dtype=jnp.bfloat16)
    bytejax.save_target(tmp_path / "target", target)
    prints = {
        loading.fingerprint(bytejax.load_target(tmp_path / "target", d, u)) for d in loading.DTYPES for u in (0, 1)
    }
    assert prints == {loading.fingerprint(target)} != {loading.fingerprint(make_target(seed=1))}
