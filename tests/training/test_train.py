"""Whole runs: learning, exact resume, stopping, what is refused, what is written."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from omegaconf import OmegaConf

from bytejax import loading, parameters
from bytejax.cli import train as cli
from bytejax.errors import InputError
from bytejax.models import llama
from bytejax.training import checkpoints, config, optimizer, step, tasks, train

from .conftest import values

ROOT = Path(__file__).parents[2]


def newest(workdir):
    """The arrays of a work directory's newest checkpoint and its record."""
    store = checkpoints.Checkpoints(Path(workdir), keep=2)
    items = ocp.args.Composite(state=ocp.args.StandardRestore(), record=ocp.args.JsonRestore())
    got = store._manager.restore(store.latest, args=items)
    store.close()
    return got.state, got.record


def same(a, b):
    a, b = jax.tree.leaves_with_path(a), jax.tree.leaves_with_path(b)
    assert [k for k, _ in a] == [k for k, _ in b]
    for (key, x), (_, y) in zip(a, b, strict=True):
        assert x.dtype == y.dtype, key
        np.testing.assert_array_equal(x, y, err_msg=str(key))


def records(workdir, kind):
    lines = (Path(workdir) / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["kind"] == kind]


def head_config(tmp_path, target, **changes):
    heads = {
        "ff-3": {"circuit": "ff", "window": 3, "rank": 1, "adapter_rank": None},
        "hmm-3": {"circuit": "hmm", "window": 3, "rank": 2, "adapter_rank": 2},
    }
    fixed = {"task": "head", "architecture": None, "mtp": None, "target": str(target), "heads": heads, "gamma": 0.9}
    return config.from_values(values(tmp_path, **(fixed | changes)))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A target run long enough to learn the toy corpus."""
    directory = tmp_path_factory.mktemp("trained")
    c = config.from_values(values(directory, steps=60, optimizer__learning_rate=2e-2, validation__every_steps=30))
    return c, train.run(c)


def test_a_target_learns(trained):
    c, outcome = trained
    assert outcome.finished and outcome.step == 60
    curve = [r["bits_per_byte"] for r in records(c.workdir, "validation")]
    assert curve[-1] < 3.5 < 7.0 < records(c.workdir, "train")[0]["bits_per_byte"]
    assert curve[-1] < curve[0] and curve[-1] == outcome.validation["bits_per_byte"]
    assert records(c.workdir, "train")[-1]["mtp/bits_per_byte"] < 6.0


def test_metrics_say_what_the_run_did(trained):
    c, _ = trained
    lines = records(c.workdir, "train")
    assert [r["step"] for r in lines] == list(range(2, 61, 2))
    assert {"learning_rate", "grad_norm/target", "loss/target", "bytes_per_second", "seconds"} <= lines[0].keys()
    assert lines[0]["learning_rate"] == pytest.approx(1.5e-2)  # the second of two steps of warm-up
    run = json.loads((Path(c.workdir) / "run.json").read_text())
    assert len(run["inputs"]["train_sha256"]) == 64 and run["versions"]["jax"] == jax.__version__


def test_the_export_is_the_moving_average_in_bfloat16(trained):
    c, _ = trained
    state, _ = newest(c.workdir)
    target = loading.load_target(Path(c.workdir) / "export")
    average = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state["average"]["target"])
    same(parameters.load(Path(c.workdir) / "export" / loading.WEIGHTS, llama.table(target.config)), average["model"])
    assert target.config.context == c.data.sequence_length
    head, params = loading.load_head(Path(c.workdir) / "export" / "mtp")
    assert head.circuit.window == 3
    same(params, tasks.cast(average["mtp"], jnp.float32))


def test_heads_learn_on_the_frozen_target_and_start_from_its_own(trained, tmp_path):
    c, outcome = trained
    mine = head_config(tmp_path, Path(c.workdir) / "export", steps=40, optimizer__learning_rate=2e-2)
    first = records_of(mine)
    assert first["ff-3/bits_per_byte"] == pytest.approx(first["hmm-3/bits_per_byte"], abs=1e-3)
    assert first["ff-3/bits_per_byte"] < outcome.validation["mtp/bits_per_byte"] + 0.3
    train.run(mine)
    last = records(mine.workdir, "validation")[-1]
    assert all(last[f"{name}/bits_per_byte"] < first[f"{name}/bits_per_byte"] - 0.05 for name in mine.heads)
    head, _ = loading.load_head(Path(mine.workdir) / "export" / "hmm-3")
    assert (head.circuit.window, head.circuit.rank, head.adapter_rank) == (3, 2, 2)


def test_adapters_learn_under_a_head_that_stays(trained, tmp_path):
    target = Path(trained[0].workdir) / "export"
    first = head_config(tmp_path / "first", target, steps=10, optimizer__learning_rate=2e-2)
    train.run(first)
    start = str(Path(first.workdir) / "export" / "hmm-3")
    base = {
        "circuit": "hmm",
        "window": 3,
        "rank": 2,
        "adapter_rank": 2,
        "start": start,
        "lora_layers": 1,
        "lora_rank": 2,
    }
    second = head_config(
        tmp_path / "second",
        target,
        steps=25,
        optimizer__learning_rate=2e-2,
        heads={"light": base | {"freeze_head": True}, "whole": base},
    )
    before = records_of(second)
    assert before["light/bits_per_byte"] == before["whole/bits_per_byte"]
    train.run(second)
    early, *_, last = records(second.workdir, "validation")
    assert all(last[f"{name}/bits_per_byte"] < early[f"{name}/bits_per_byte"] - 0.05 for name in second.heads)
    export = Path(second.workdir) / "export"
    for name in ("light", "whole"):  # the start does not ship, so that both hold a head
        drafter = loading.load_drafter(export / name, loading.load_target(target))
        assert len(drafter.adapter.layers) == 1
        same = [
            np.array_equal(a, b)
            for a, b in zip(*(jax.tree.leaves(loading.load_head(x)[1]) for x in (start, export / name)), strict=True)
        ]
        assert all(same) if name == "light" else not any(same)


def test_parts_of_a_batch_give_the_step_of_the_whole(trained, tmp_path):
    target = Path(trained[0].workdir) / "export"
    one, two = (
        head_config(tmp_path / str(n), target, steps=3, data__batch=4, data__accumulate=n, kl=0.3) for n in (1, 2)
    )
    for c in (one, two):
        train.run(c)
    a, b = (newest(c.workdir)[0]["params"] for c in (one, two))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), a, b)


def test_distillation_and_sampled_windows_learn_and_are_reported(trained, tmp_path):
    target = Path(trained[0].workdir) / "export"
    c = head_config(tmp_path, target, steps=40, optimizer__learning_rate=2e-2, kl=0.5, windows=8)
    train.run(c)
    early, *_, last = records(c.workdir, "validation")
    for name in c.heads:
        assert last[f"{name}/bits_per_byte"] < early[f"{name}/bits_per_byte"] - 0.03
        assert 0 < last[f"{name}/kl_bits"] < early[f"{name}/kl_bits"]
        assert all(1 <= last[f"{name}/accept_length_{kind}"] <= 3 for kind in ("greedy", "sampling"))
        assert last[f"{name}/accept_length_sampling"] > 1.3


def test_the_best_weights_are_kept_also_across_a_restart(tmp_path, tiny):
    """A rate that ruins what was learned: the best validation is an early one."""
    c = tiny(steps=24, validation__every_steps=2, optimizer__schedule="constant", optimizer__ema=None)
    ruined = dataclasses.replace(c, optimizer=dataclasses.replace(c.optimizer, learning_rate=3.0, warmup_steps=20))
    train.run(dataclasses.replace(ruined, steps=16))
    best = lambda: (Path(c.workdir) / "best" / "model.safetensors").read_bytes()
    kept = best()
    partial = [r for r in records(c.workdir, "validation") if r["batches"] is not None]
    assert partial[-1]["loss/target"] > min(r["loss/target"] for r in partial)
    assert kept != (Path(c.workdir) / "export" / "model.safetensors").read_bytes()
    train.run(ruined)
    assert best() == kept
    assert list((Path(c.workdir) / "tensorboard").glob("events*"))


def records_of(c):
    """Metrics of the first batch before any update."""
    task, batches = tasks.make(c), train.first_batches(c)
    return {k: float(x) for k, x in task.loss(task.init, task.frozen, next(batches))[1].items()}


def test_heads_do_not_depend_on_their_neighbours(trained, tmp_path):
    target = Path(trained[0].workdir) / "export"
    both = head_config(tmp_path / "both", target, steps=3)
    alone = dataclasses.replace(both, workdir=str(tmp_path / "alone"), heads={"hmm-3": both.heads["hmm-3"]})
    for c in (both, alone):
        train.run(c)
    together, single = (newest(c.workdir)[0]["params"]["hmm-3"] for c in (both, alone))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), together, single)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_resumed_run_is_bit_equal(tmp_path, name):
    whole = config.from_values(values(tmp_path / "whole", steps=20, optimizer__warmup_steps=3) | {"mtp": None})
    whole = dataclasses.replace(whole, optimizer=dataclasses.replace(whole.optimizer, name=name))
    parts = dataclasses.replace(whole, workdir=str(tmp_path / "parts"))
    train.run(whole)
    interrupted_after(parts, 10)
    assert newest(parts.workdir)[0]["step"] == 10
    train.run(parts)
    (a, record_a), (b, record_b) = newest(whole.workdir), newest(parts.workdir)
    assert a["step"] == 20 and record_a["data"] == record_b["data"]
    same(a, b)
    curves = [[(r["step"], r["bits_per_byte"]) for r in records(c.workdir, "train")] for c in (whole, parts)]
    assert curves[0] == curves[1]


def interrupted_after(c, steps):
    """Runs `steps` steps and then behaves as after SIGTERM."""
    log_step = train.metrics.Log.step

    def stop_there(self, metrics, headline):
        log_step(self, metrics, headline)
        if metrics["step"] == steps:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.metrics.Log, "step", stop_there)
        outcome = train.run(c)
    assert (outcome.finished, outcome.stopped_by, outcome.step) == (False, signal.SIGTERM, steps)


@pytest.mark.slow
def test_a_killed_process_resumes_bit_equal(tmp_path):
    tree = values(tmp_path / "runs", steps=20, checkpoint={"every_steps": 10, "keep": 2})
    OmegaConf.save(OmegaConf.create(tree), tmp_path / "run.yaml")
    command = [sys.executable, str(ROOT / "train.py"), str(tmp_path / "run.yaml")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    subprocess.run([*command, f"workdir={whole}"], env=environment, check=True)
    process = subprocess.Popen([*command, f"workdir={parts}", "validation.every_steps=1"], env=environment)
    while not (parts / "checkpoints" / "10").exists():
        time.sleep(0.02)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    subprocess.run([*command, f"workdir={parts}"], env=environment, check=True)
    same(newest(whole)[0], newest(parts)[0])


def test_a_checkpoint_of_another_run_is_refused(tiny, tmp_path):
    train.run(tiny(steps=2, mtp=None))
    with pytest.raises(InputError, match="another run .optimizer.learning_rate: 0.003 -> 0.1.; use another workdir"):
        train.run(tiny(steps=2, mtp=None, optimizer__learning_rate=0.1))
    (tmp_path / "more.txt").write_bytes(b"more")
    with pytest.raises(InputError, match="train_sha256"):
        train.run(tiny(steps=2, mtp=None))


def test_a_damaged_checkpoint_is_told(tiny):
    c = tiny(steps=2, mtp=None)
    train.run(c)
    for path in (Path(c.workdir) / "checkpoints" / "2").rglob("metadata"):
        path.write_bytes(b"{")
    with pytest.raises(InputError, match="checkpoints/2 is not readable"):
        train.run(c)


def test_a_diverging_run_stops_and_keeps_the_last_good_checkpoint(tiny, capsys):
    c = tiny(steps=20, mtp=None, checkpoint__every_steps=4, optimizer__warmup_steps=0)
    make = tasks.make

    def poisoned(c):
        task = make(c)

        def loss(params, frozen, batch):
            nats, extra = task.loss(params, frozen, batch)
            moved = jnp.abs(params["target"]["model"]["head"] - start).max()
            return {k: jnp.where(moved > 0.0135, jnp.nan, x) for k, x in nats.items()}, extra

        start = jnp.copy(task.init["target"]["model"]["head"])  # 0.003 per step: reached between steps 4 and 8
        return dataclasses.replace(task, loss=loss)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "make", poisoned)
        with pytest.raises(train.DivergedError, match=r"step \d+: loss/target nan.* the checkpoint of step 4 is kept"):
            train.run(c)
    state, _ = newest(c.workdir)
    assert state["step"] == 4
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


def test_command_line_exit_codes(tmp_path, monkeypatch, capsys):
    OmegaConf.save(OmegaConf.create(values(tmp_path / "d", steps=2, mtp=None)), tmp_path / "run.yaml")
    monkeypatch.chdir(tmp_path)
    path = str(tmp_path / "run.yaml")
    before = sorted(p for p in tmp_path.rglob("*"))
    (tmp_path / "plain").write_text("x")
    wrong = [
        [],
        ["none.yaml"],
        [path, "stps=1"],
        [path, "data.batch=100000"],
        [path, "data.files.0=b"],
        [path, f"workdir={tmp_path / 'plain'}"],
    ]
    wrong += [
        [
            path,
            "task=head",
            "architecture=null",
            "target=nowhere",
            "heads={a:{circuit:ff,window:2,rank:1,adapter_rank:null}}",
        ]
    ]
    for arguments in wrong:
        assert cli.main(arguments) == 2, arguments
        said = capsys.readouterr().err
        assert said.startswith("error: ") and said.count("\n") == 1
    (tmp_path / "plain").unlink()
    assert sorted(p for p in tmp_path.rglob("*")) == before
    assert cli.main([path]) == 0
    monkeypatch.setattr(train, "run", lambda c: (_ for _ in ()).throw(train.DivergedError("step 3: nan")))
    assert cli.main([path]) == 1
    monkeypatch.setattr(train, "run", lambda c: train.Outcome(False, signal.SIGTERM, 1, {}))
    assert cli.main([path]) == 143


def test_heads_do_not_train_on_longer_sequences_than_their_target_knows():
    heads = {"a": {"circuit": "ff", "window": 2, "rank": 1, "adapter_rank": None}}
    data = {"source": "stdlib", "sequence_length": 4096, "batch": 1}
    rate = {"learning_rate": 0.1, "warmup_steps": 1, "schedule": "constant"}
    asked = config.from_values(
        {"task": "head", "workdir": "w", "steps": 1, "target": "demo", "heads": heads}
        | {"data": data, "optimizer": rate, "validation": {"every_steps": 1, "batches": 1}}
    )
    with pytest.raises(InputError, match=r"data\.sequence_length=4096 is more than the target's context of 768"):
        tasks.make(asked)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_only_matrices_decay(name):
    rate = config.Optimizer(name=name, learning_rate=0.01, warmup_steps=0, schedule="constant", weight_decay=0.5)
    params = {
        "layers": {"q": jnp.ones((2, 4, 4)), "norm": jnp.ones((2, 4))},
        "head": jnp.ones((5, 4)),
        "n": jnp.ones(4),
    }
    decayed = {"layers": {"q": True, "norm": False}, "head": True, "n": False}
    rule = optimizer.make(rate, 10, decayed)
    updates, _ = rule.update(jax.tree.map(jnp.zeros_like, params), rule.init(params), params)
    expected = jax.tree.map(lambda decays: -0.005 if decays else 0.0, decayed)
    jax.tree.map(lambda u, e: np.testing.assert_allclose(u, e, rtol=1e-5), updates, expected)


def test_one_step_gives_the_recorded_numbers(tiny):
    """Change these numbers only together with a reason why the step should be another."""
    c = tiny(optimizer__weight_decay=0.0)
    task = tasks.make(c)
    optimizers = {n: optimizer.make(c.optimizer, c.steps, mask) for n, mask in task.decayed.items()}
    state = step.init(task.init, optimizers, c.optimizer.ema)
    before = np.array(task.init["target"]["model"]["head"])
    state, out = step.make_step(task.loss, optimizers, c.optimizer.ema)(state, (), next(train.first_batches(c)))
    got = [float(out[k]) for k in ("loss/target", "bits_per_byte", "mtp/bits_per_byte", "grad_norm/target")]
    np.testing.assert_allclose(got, RECORDED, rtol=2e-4)
    moved = state.params["target"]["model"]["head"] - before
    assert jnp.abs(moved).max() == pytest.approx(1.5e-3, rel=0.05)  # AdamW's first step is the learning rate


RECORDED = [8.806146, 8.697976, 8.013214, 22.68641]
