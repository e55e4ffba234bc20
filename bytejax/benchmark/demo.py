"""Measures the shipped demo on held-out modules of the standard library: `python -m bytejax.benchmark.demo KIND`.

bits: bits per byte of the target on the held-out modules.
identity: greedy ids of every variant against autoregression of the same block width, and of width 1.
acceptance: accept length, with a paired 95% interval of its distance from the first variant's; a1 of each head.
speed: bytes per second of each variant against autoregression in the same run, both alone.
cycles: time of a cycle beside the same cycle with constant drafts (`benchmark.replayed`), all variants in turns.
table: latency, accept length and speed of all variants and of autoregression in turns, as Markdown.

A variant is a drafter's name or directory, perhaps with settings: hmm-16, btree-8:bonus=carry,accept=token,
cp-8:draft_tokens=3, runs/demo_eagle/export:beam=8,depth=8,nodes=32.
Everything but the table is one JSON object per line.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bytejax import loading
from bytejax.benchmark import measure
from bytejax.benchmark.replayed import Replayed
from bytejax.circuits import head as heads
from bytejax.cli import common
from bytejax.decoding.generate import Generation, Result, generate
from bytejax.drafters.base import Autoregressive, Drafter
from bytejax.drafters.circuit import CircuitDrafter
from bytejax.models import lora
from bytejax.models.base import Target
from bytejax.training import corpus, data
from bytejax.training.losses import next_byte_loss

PROMPT_BYTES = 128
RESAMPLES = 10_000
PORTION = 100  # prompts at once: the laws of more would not fit into memory
WARM, TIMED = 4, 32  # cycles
OF_RUN = ("accept", "bonus")  # settings of a run; the others are the drafter's


@dataclasses.dataclass(frozen=True)
class Variant:
    """A drafter with its settings, and those of the run. spec: how it was asked for."""

    spec: str
    name: str
    drafter: dict[str, Any]
    run: dict[str, str]

    @classmethod
    def parse(cls, spec: str) -> "Variant":
        """From NAME or NAME:key=value,... Raises InputError."""
        name, _, rest = spec.partition(":")
        settings = dict(common.option(item, f"variant {spec!r}:") for item in filter(None, rest.split(",")))
        run = {k: v for k, v in settings.items() if k in OF_RUN}
        return cls(spec, name, {k: v for k, v in settings.items() if k not in OF_RUN}, run)

    def load(self, target: Target) -> Drafter:
        return loading.load_drafter(self.name, target, **self.drafter)


def held_out_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Pieces of held-out modules, each after a start id: `count` lists of 1 + PROMPT_BYTES ids."""
    ids = corpus.stdlib().held_out
    text = ids[ids < corpus.BOS].astype(int)
    starts = np.random.default_rng(seed).integers(0, len(text) - PROMPT_BYTES, count)
    return [[corpus.BOS, *text[s : s + PROMPT_BYTES].tolist()] for s in starts]


def bits(target: Target, variants: list[Variant], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Over all held-out bytes, as the last validation of a training run has them (`training.data`)."""
    losses = jax.jit(lambda ids, labels: next_byte_loss(target.states(ids), labels, target.unembed)[1])
    batches = data.validation_batches(corpus.stdlib().held_out, target.context, batch=4, count=None)
    totals = [jax.device_get(losses(b["ids"], b["labels"])) for b in batches]
    count = sum(int(t["count"]) for t in totals)
    nats = sum(float(t["ce"]) * int(t["count"]) for t in totals)
    yield {"bits_per_byte": nats / count / np.log(2), "labels": count}


def identity(target: Target, variants: list[Variant], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Per variant: how many rows differ from each kind of autoregression, and the top-2 gap of the second kind's."""
    prompts = held_out_prompts(args.prompts)
    batches = [prompts[i : i + args.batch] for i in range(0, len(prompts), args.batch)]
    options = {"max_new_tokens": args.max_new_tokens, "temperature": 0.0, "ignore_stop": True}
    alone = measure.Job(target, Autoregressive(), batches, options)
    plain = alone.run().ids
    for v in variants:
        job = measure.Job(target, v.load(target), batches, options | v.run)
        drafted, differ = job.run(), None
        if job.has_a_twin:
            padded = job.autoregressive(job.drafter.block_width).run().ids
            differ = sum(a != b for a, b in zip(drafted.ids, padded, strict=True))
        ties = measure.first_differences(job, drafted.ids, plain)
        yield {
            "variant": v.spec,
            "rows": len(prompts),
            "differ_at_same_width": differ,
            "differ_from_width_1": len(ties),
            "largest_gap": max((t["gap"] for t in ties), default=0.0),
            "accept_length": drafted.stats.accept_length,
        }


def acceptance(target: Target, variants: list[Variant], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Per variant: accept length; how far each prompt's lies from the first variant's on the same prompt."""
    prompts, first = held_out_prompts(args.prompts), None
    portions = [prompts[i : i + PORTION] for i in range(0, len(prompts), PORTION)]
    options = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "ignore_stop": True}
    for v in variants:
        drafter = v.load(target)
        model = target.for_blocks(drafter.block_width)
        runs = [
            generate(model, portion, drafter=drafter, seed=i * PORTION, **options, **v.run)
            for i, portion in enumerate(portions)
        ]
        result = measure.merge(runs)
        free = result.stats.from_prompts // len(prompts)
        lengths = np.array([len(row) - free for row in result.ids]) / np.maximum(result.forwards, 1)
        first = lengths if first is None else first
        yield {
            "variant": v.spec,
            "temperature": args.temperature,
            "accept_length": result.stats.accept_length,
            "beyond_first": interval(lengths - first),
            "histogram": result.stats.accept_histogram,
            "distinct_8grams": measure.distinct(result.ids, 8),
            "a1": first_acceptance(target, v.name, prompts[:PORTION]),
        }


def interval(differences: np.ndarray) -> list[float]:
    """Mean of paired differences and its 95% bootstrap interval over the pairs: [mean, low, high]."""
    picks = np.random.default_rng(0).integers(0, len(differences), (RESAMPLES, len(differences)))
    low, high = np.quantile(differences[picks].mean(1), [0.025, 0.975])
    return [float(differences.mean()), float(low), float(high)]


def first_acceptance(target: Target, name: str, prompts: list[list[int]]) -> float | None:
    """a1: how probable it is that a first byte drawn from the circuit, before conditioning, passes verification.

    At temperature 1, whatever the run's; None for a drafter that is no circuit.
    The mean of sum_x min(p(x), q_1(x)) over the positions of the prompts (Leviathan et al. 2023, Eq. 3).
    """
    directory, ids = loading.drafter_directory(name), jnp.asarray(prompts)
    if directory is None or loading.drafter_kind(directory) != "circuit":
        return None
    p = jax.nn.softmax(target.unembed(target.states(ids)))
    config, params = loading.load_head(directory)
    adapters = loading.load_adapters(directory, target)
    hidden = target.states(ids, None if adapters is None else lora.create(adapters, target))
    theta = heads.theta(params, config, hidden)
    q = jnp.exp(config.circuit.conditional(theta, jnp.zeros((*hidden.shape[:2], 0), jnp.int32)))
    return float(jnp.minimum(p, q[..., : p.shape[-1]]).sum(-1).mean())


def speed(target: Target, variants: list[Variant], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Per variant: medians of runs in turns with every layout of the single-token baseline, batch 1."""
    for v in variants:
        job = _job(target, v, args)
        result = measure.compare(job, args.repeats)
        yield {
            "variant": v.spec,
            "block_rows": job.drafter.block_width,
            "temperature": args.temperature,
            "ratio": result.drafted.stats.tokens_per_second / result.baseline.stats.tokens_per_second,
            "bytes_per_second": result.drafted.stats.tokens_per_second,
            "baseline_bytes_per_second": result.baseline.stats.tokens_per_second,
            "baseline_layout": result.layout,
            "layouts": result.layouts,
            "accept_length": result.drafted.stats.accept_length,
            "distinct_8grams": measure.distinct(result.drafted.ids, 8),
            "identical": result.identical,
        }


def cycles(target: Target, variants: list[Variant], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Per variant: milliseconds of a cycle, and of the same cycle with constant drafts; medians of pairs in turns."""
    prompts = held_out_prompts(args.prompts)
    options = {"max_new_tokens": 10_000, "temperature": args.temperature, "ignore_stop": True}
    start = lambda prompt, drafter, run: Generation(
        targets[target.layout_for(drafter.block_width)], [prompt], drafter=drafter, **options, **run
    )
    drafters = [v.load(target) for v in variants]
    targets = {name: target.in_layout(name) for name in {target.layout_for(d.block_width) for d in drafters}}
    sides = []
    for v, drafter in zip(variants, drafters, strict=True):
        sides += [(drafter, v.run), (Replayed.of(drafter, start(prompts[0], drafter, v.run)), v.run)]

    def timed(prompt, drafter, run):
        generation = start(prompt, drafter, run)
        generation.advance(WARM)
        before = time.perf_counter()
        generation.advance(TIMED)
        return 1e3 * (time.perf_counter() - before) / TIMED

    times: list[list[float]] = [[] for _ in sides]
    for repeat in range(-1, args.repeats):
        for prompt in prompts:
            for record, side in zip(times, sides, strict=True):
                ms = timed(prompt, *side)
                if repeat >= 0:  # the first round compiles
                    record.append(ms)
    for i, v in enumerate(variants):
        own, constant, first = (np.array(times[k]) for k in (2 * i, 2 * i + 1, 0))
        yield {
            "variant": v.spec,
            "temperature": args.temperature,
            "ms": float(np.median(own)),
            "constant_ms": float(np.median(constant)),
            "over_constant": float(np.median(own / constant)),
            "over_first": float(np.median(own / first)),
        }


def table(target: Target, variants: list[Variant], args: argparse.Namespace) -> Iterator[str]:
    """The layout of MtPC's Tables 8, 9 and 11: one row per variant, the baseline first."""
    jobs = [_job(target, v, args) for v in variants]
    alone = jobs[0].autoregressive()
    layouts = [dataclasses.replace(alone, target=t) for t in target.layouts().values()]
    jobs = layouts + jobs
    for job in jobs:
        job.warm_up()
    runs: list[list[Result]] = [[] for _ in jobs]
    for _ in range(args.repeats):
        for job, results in zip(jobs, runs, strict=True):
            results.append(job.run())
    medians = [measure.median(r).stats for r in runs]
    baseline = max(medians[: len(layouts)], key=lambda s: s.tokens_per_second)
    jobs, medians = [alone, *jobs[len(layouts) :]], [baseline, *medians[len(layouts) :]]
    yield "| circuit | n | r | LoRA layers | bonus | ms per pass | bytes per pass | bytes/s | speed-up |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for job, s in zip(jobs, medians, strict=True):
        ms = 1e3 * s.decode_seconds / s.target_forwards
        figures = f"{ms:.2f} | {s.accept_length:.2f} | {s.tokens_per_second:.0f}"
        ratio = s.tokens_per_second / medians[0].tokens_per_second
        yield f"| {_described(job)} | {figures} | {ratio:.2f} |"


def _described(job: measure.Job) -> str:
    if isinstance(job.drafter, Autoregressive):
        return "none | 1 | | |"
    if not isinstance(job.drafter, CircuitDrafter):
        return f"{type(job.drafter).__name__.lower()} | {job.drafter.block_width} | | | condition"
    circuit, adapter = job.drafter.config.circuit, job.drafter.adapter
    layers = 0 if adapter is None else len(adapter.layers)
    return f"{circuit.name} | {circuit.window} | {circuit.rank} | {layers} | {job.options.get('bonus', 'condition')}"


def _job(target: Target, variant: Variant, args: argparse.Namespace) -> measure.Job:
    options = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "ignore_stop": True}
    batches = [[p] for p in held_out_prompts(args.prompts)]
    return measure.Job(target, variant.load(target), batches, options | variant.run)


KINDS = {"bits": bits, "identity": identity, "acceptance": acceptance, "speed": speed, "cycles": cycles, "table": table}


def main(argv: list[str] | None = None) -> int:
    """Entry point of `python -m bytejax.benchmark.demo`."""
    parser = common.Parser(
        prog="python -m bytejax.benchmark.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--drafters", nargs="+", default=loading.demo_drafters(), help="variants; default: the demo's")
    parser.add_argument("--prompts", type=common.number(int, 1), default=20)
    parser.add_argument("--max-new-tokens", type=common.number(int, 1), default=256)
    parser.add_argument("--temperature", type=common.number(float, 0), default=0.0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=common.number(int, 1), default=10, help="prompts at once, for identity")
    parser.add_argument("--repeats", type=common.number(int, 1), default=3, help="runs of each side, in turns")
    args = parser.parse_args(argv)
    variants = [Variant.parse(spec) for spec in args.drafters]
    unroll = True if any(loading.needs_unrolled(v.name) for v in variants) else None
    for row in KINDS[args.kind](loading.load_target("demo", args.dtype, unroll), variants, args):
        print(row if isinstance(row, str) else json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(common.run(main))
