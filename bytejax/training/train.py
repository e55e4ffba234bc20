"""The training loop: resume, step, validate, checkpoint, export."""

import dataclasses
import json
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from omegaconf import OmegaConf

from bytejax.errors import InputError
from bytejax.training import checkpoints, corpus, data, losses, metrics, optimizer, step, tasks
from bytejax.training import config as configs
from bytejax.training.config import Config


class DivergedError(Exception):
    """A loss or gradient became NaN or infinite. The message says where and what is left."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """finished: whether all steps were made; stopped_by: the signal that ended the run, or 0; step: the last one made;
    validation: the last held-out metrics."""

    finished: bool
    stopped_by: int
    step: int
    validation: dict[str, float]


def run(config: Config) -> Outcome:
    """Trains until `config.steps`, from the newest checkpoint in the work directory where there is one.

    Raises InputError before anything is written, and DivergedError when a step is not finite: that step is dropped, the
    last checkpoint kept. SIGTERM and SIGINT end the run after the current step with a checkpoint.
    """
    texts = load_corpus(config)
    task = tasks.make(config)
    batches = _batches(config, texts)
    o = config.optimizer
    optimizers = {name: optimizer.make(o, config.steps, mask) for name, mask in task.decayed.items()}
    state = step.init(task.init, optimizers, o.ema)
    inputs = texts.info | task.identity
    record = {"config": configs.to_values(config), "inputs": inputs, "dtypes": checkpoints.dtypes(state)}
    workdir = Path(config.workdir)
    if any(p.exists() and not p.is_dir() for p in (workdir, *workdir.parents)):
        raise InputError(f"workdir={workdir} is not a directory and cannot become one; choose another")
    store = checkpoints.Checkpoints(workdir, config.checkpoint.keep)
    try:
        restored = store.restore(state, record)
        if restored is not None:
            state, saved = restored
            batches.set_state(saved["data"])
        _describe(workdir, record)
        with metrics.Log(workdir / "metrics.jsonl", config.steps, int(state.step)) as log, _Stop() as stop:
            loop = _Loop(config, task, texts, optimizers, batches, store, record, log)
            return loop.run(state, stop)
    finally:
        store.close()


def load_corpus(config: Config) -> corpus.Corpus:
    """The corpus that the config names."""
    d = config.data
    return corpus.stdlib() if d.source == "stdlib" else corpus.files(d.files, d.held_out)


def first_batches(config: Config) -> Iterator[data.Batch]:
    """The batches of a run from its beginning."""
    return _batches(config, load_corpus(config))


def _batches(config: Config, texts: corpus.Corpus) -> grain.DatasetIterator:
    return data.batches(texts.train, config.data.sequence_length, config.data.batch, config.seed)


@dataclasses.dataclass
class _Loop:
    """The parts of a run; the state is handed from step to step."""

    config: Config
    task: tasks.Task
    texts: corpus.Corpus
    optimizers: Mapping[str, Any]
    batches: grain.DatasetIterator
    store: checkpoints.Checkpoints
    record: dict[str, Any]
    log: metrics.Log

    def run(self, state: step.State, stop: "_Stop") -> Outcome:
        c = self.config
        train_step = step.make_step(self.task.loss, self.optimizers, c.optimizer.ema, c.data.accumulate)
        rate = optimizer.schedule(c.optimizer, c.steps)
        self._validate_step = jax.jit(self.task.held_out)
        began = written = tick = time.monotonic()
        validation, at, asked, compiled = {}, int(state.step), 0, False
        while at < c.steps and not stop.requested:
            batch = next(self.batches)
            state, out = train_step(state, self.task.frozen, batch)
            out = {k: float(x) for k, x in out.items()}
            if not out.pop("finite"):
                self._diverge(state, out)
            at, asked = at + 1, asked + batch["ids"].size
            if not compiled:
                compiled, tick, asked = True, time.monotonic(), 0
                self.log.say(f"compiled in {tick - began:.1f} s")
            if at % c.log_every == 0 or at == c.steps:
                now = time.monotonic()
                speed = {"bytes_per_second": asked / (now - tick), "seconds": now - began}
                self.log.step({"step": at, "learning_rate": float(rate(at - 1))} | out | speed, self.task.headline)
                tick, asked = now, 0
            if at % c.validation.every_steps == 0 or at == c.steps:
                validation, lowest = self._validate(state, c.validation.batches)
                if lowest:
                    self.task.export(Path(c.workdir) / "best", {name: state.exported[name] for name in lowest})
                if at == c.steps:
                    validation, _ = self._validate(state, None)
                tick, asked = time.monotonic(), 0
            if self._due(at, written):
                self._save(state)
                written = tick = time.monotonic()
                asked = 0
        self._save(state)
        return Outcome(at >= c.steps, stop.requested, at, validation)

    def _due(self, at: int, written: float) -> bool:
        p = self.config.checkpoint
        return time.monotonic() - written > 60 * p.every_minutes or (p.every_steps and at % p.every_steps == 0)

    def _save(self, state: step.State) -> None:
        """A checkpoint, and beside it the exported weights, so that what is there can be decoded with at once."""
        self.store.save(state, self.record | {"data": self.batches.get_state()})
        self.task.export(Path(self.config.workdir) / "export", state.exported)

    def _validate(self, state: step.State, count: int | None) -> tuple[dict[str, float], list[str]]:
        """Metrics on `count` batches, or on all; and the members whose loss on so many is the lowest so far."""
        d = self.config.data
        totals: dict[str, float] = {}
        labels = 0
        for batch in data.validation_batches(self.texts.held_out, d.sequence_length, d.batch, count):
            n = int((batch["labels"] != losses.IGNORE).sum())
            nats, extra = self._validate_step(state.exported, self.task.frozen, batch)
            for k, x in ({f"loss/{k}": x for k, x in nats.items()} | extra).items():
                totals[k] = totals.get(k, 0.0) + float(x) * n
            labels += n
        result = {k: x / labels for k, x in totals.items()} if labels else {}
        return result, self.log.validation({"step": int(state.step)} | result, count) if result else []

    def _diverge(self, state: step.State, out: dict[str, float]) -> None:
        bad = ", ".join(f"{k} {x}" for k, x in out.items() if not np.isfinite(x))
        kept = self.store.latest
        left = "no checkpoint was written yet" if kept is None else f"the checkpoint of step {kept} is kept"
        raise DivergedError(
            f"step {int(state.step) + 1}: {bad}; the step was dropped, {left}; "
            "lower optimizer.learning_rate or raise optimizer.warmup_steps"
        )


class _Stop:
    """Turns SIGTERM and SIGINT into a request to end after the current step; a second one ends at once."""

    def __enter__(self) -> "_Stop":
        self.requested = 0
        mine = threading.current_thread() is threading.main_thread()  # only there may handlers be set
        self._before = {s: signal.signal(s, self._handle) for s in (signal.SIGTERM, signal.SIGINT) if mine}
        return self

    def __exit__(self, *error) -> None:
        for s, handler in self._before.items():
            signal.signal(s, handler)

    def _handle(self, number: int, frame: Any) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = number


def _describe(workdir: Path, record: Mapping[str, Any]) -> None:
    """Leaves beside the metrics what was run, on which bytes, with which versions."""
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(record["config"])))
    versions = {"jax": jax.__version__, "numpy": np.__version__, "device": jax.devices()[0].device_kind}
    (workdir / "run.json").write_text(json.dumps({"inputs": record["inputs"], "versions": versions}, indent=2) + "\n")
