"""EAGLE heads: their loss against sums written out, and a run whose export drafts."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bytejax
from bytejax import InputError, loading, parameters, tokenizers
from bytejax.drafters import eagle_head
from bytejax.drafters.eagle_head import EagleConfig
from bytejax.models import llama
from bytejax.training import config as configs
from bytejax.training import train
from bytejax.training.eagle import unrolled_loss
from bytejax.training.losses import IGNORE
from tests.decoding.tiny import make_target

from .conftest import values

EAGLE = {"heads": 2, "kv_heads": 1, "head_dim": 8, "ffn_width": 24, "rope_theta": 1e4, "norm_eps": 1e-5, "unroll": 3}


def test_the_loss_is_the_sum_over_steps_and_columns():
    target, steps, decay, t = make_target(), 3, 0.7, 9
    numbers = {k: x for k, x in EAGLE.items() if k != "unroll"}
    config = EagleConfig(width=target.width, vocab=target.vocab, taps=(1, 2), **numbers)
    params = parameters.init(eagle_head.table(config), jax.random.key(1))
    ids = jax.random.randint(jax.random.key(2), (2, t), 0, target.vocab)
    labels = jnp.roll(ids, -1, axis=1).at[0, 5].set(IGNORE).at[1, -1].set(IGNORE)
    loss, parts = jax.jit(lambda p: unrolled_loss(p, config, target, ids, labels, steps, decay))(params)

    laws = np.asarray(jax.nn.log_softmax(target.logits(ids)))
    inner = target.tapped_states(ids, config.taps)[1]
    outputs = eagle_head.unrolled(params, config, inner, target.embed(ids), steps)
    own = np.asarray(jax.nn.log_softmax(eagle_head.logits(params, config, jnp.stack(outputs))))
    ce, lengths = [], []
    for i in range(steps):
        inside = [(b, j) for b in range(2) for j in range(t - 1 - i) if (labels[b, j : j + 2 + i] != IGNORE).all()]
        ce.append(np.mean([-(np.exp(laws[b, j + 1 + i]) * own[i, b, j]).sum() for b, j in inside]))
    for b, j in inside:
        same = [laws[b, j + 1 + i].argmax() == own[i, b, j].argmax() for i in range(steps)]
        lengths.append(1 + np.cumprod(same).sum())
    assert 3 < len(inside) < 2 * (t - steps)
    np.testing.assert_allclose(parts["ce"], ce, rtol=1e-4)
    np.testing.assert_allclose(loss, sum(decay**i * x for i, x in enumerate(ce)), rtol=1e-4)
    np.testing.assert_allclose(parts["accept_length"], np.mean(lengths), rtol=1e-5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A random target over bytes."""
    directory = tmp_path_factory.mktemp("target")
    sizes = dict(width=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffn_width=24)
    numbers = dict(vocab=258, rope_theta=1e4, norm_eps=1e-5, tied=False, context=64, qk_norm=False, rope_scaling=None)
    target = llama.create(llama.Config(**sizes, **numbers), jax.random.key(0), tokenizers.DEMO)
    bytejax.save_target(directory, target)
    return directory


def eagle_config(tmp_path, target, **changes):
    fixed = {"task": "eagle", "architecture": None, "mtp": None, "target": target and str(target), "eagle": EAGLE}
    return configs.from_values(values(tmp_path, **(fixed | changes)))


def test_a_run_learns_resumes_and_its_export_drafts(saved, tmp_path):
    c = eagle_config(tmp_path, saved, steps=20, optimizer__learning_rate=1e-2, validation__every_steps=10)
    train.run(c)
    assert train.run(eagle_config(tmp_path, saved, steps=24, optimizer__learning_rate=1e-2)).step == 24
    lines = [json.loads(line) for line in (Path(c.workdir) / "metrics.jsonl").read_text().splitlines()]
    losses = [r["loss/eagle"] for r in lines if r["kind"] == "train"]
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.02
    assert {"eagle/bits_per_byte", "eagle/bits_per_byte_last", "eagle/accept_length"} <= lines[-1].keys()

    target = bytejax.load_target(saved)
    drafter = bytejax.load_drafter(Path(c.workdir) / "export", target, beam=2, depth=3, nodes=6)
    assert drafter.taps == (1, 2)
    options = dict(max_new_tokens=24, temperature=1.0, seed=3)
    plain = bytejax.generate(target, ["line 7", "of the"], **options)
    assert bytejax.generate(target, ["line 7", "of the"], drafter=drafter, **options).ids == plain.ids
    with pytest.raises(InputError, match="does not describe a circuit head"):
        loading.load_start(Path(c.workdir) / "export")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"eagle": None}, "task eagle needs the section eagle"),
        ({"eagle": EAGLE | {"kv_heads": 3}}, "eagle.kv_heads=3 must divide heads=2"),
        ({"eagle": EAGLE | {"unroll": 31}}, "eagle.unroll=31 needs a longer data.sequence_length"),
        ({"eagle": EAGLE | {"decay": 0.0}}, "eagle.decay=0.0 must be above 0"),
        ({"task": "head"}, "needs at least one entry under heads"),
        ({"kl": 0.5}, "task eagle takes none of kl"),
    ],
)
def test_wrong_configs_are_told_in_one_line(tmp_path, changes, said):
    with pytest.raises(InputError) as error:
        eagle_config(tmp_path, "demo", **changes)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_run_without_a_target_says_what_it_needs(tmp_path):
    with pytest.raises(InputError, match="task eagle needs target"):
        eagle_config(tmp_path, None)


def test_layers_that_the_target_has_not(saved, tmp_path):
    with pytest.raises(InputError, match="eagle: the EAGLE head reads layer 3; the target has 2"):
        train.run(eagle_config(tmp_path, saved, eagle=EAGLE | {"taps": [1, 3]}))
    assert not (tmp_path / "work").exists()
