"""Runs for `decode.py`: batches put together, drafting timed against autoregression, and the report of both."""

import dataclasses
import functools
import os
import platform
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import bytejax
from bytejax.decoding.generate import Generation, Result, Stats, generate, row_keys
from bytejax.decoding.logits import make_warp
from bytejax.decoding.loop import noise
from bytejax.drafters.base import Autoregressive, Drafter
from bytejax.models.base import Target


@dataclasses.dataclass(frozen=True)
class Job:
    """What to run.

    target: as it was loaded. batches: lists of prompts (as ids). options: the other arguments of `generate`.
    """

    target: Target
    drafter: Drafter
    batches: list[list[list[int]]]
    options: dict[str, Any]

    @functools.cached_property
    def laid_out(self) -> Target:
        """The target in the layout that suits the drafter's blocks, in which it runs."""
        return self.target.for_blocks(self.drafter.block_width)

    @property
    def greedy(self) -> bool:
        return self.options["temperature"] == 0

    @property
    def has_a_twin(self) -> bool:
        """Whether autoregression in blocks of the drafter's width makes passes of the very same shapes, so that chains
        equal it bit for bit.

        Not so where bytes are processed alone or cycles have several widths, where a draft stream doubles the rows of
        the target's products, or where rows of a tree lie in other slots of the cache.
        """
        adapter = self.drafter.target_adapter()
        same_passes = self.options.get("bonus", "condition") == "condition" and (adapter is None or adapter.merged)
        return same_passes and self.drafter.proposes_chains and self.drafter.fallback() is None

    def autoregressive(self, width: int = 1) -> "Job":
        """The same prompts without a drafter, in blocks of `width` rows."""
        options = {k: v for k, v in self.options.items() if k not in ("accept", "bonus")}
        return dataclasses.replace(self, drafter=Autoregressive(width=width), options=options)

    def run(self) -> Result:
        """All batches, one after the other, as one result."""
        return merge([generate(self.laid_out, b, drafter=self.drafter, **self.options) for b in self.batches])

    def warm_up(self) -> float:
        """Compiles everything `run` needs and runs it once, for one cycle. -> seconds of compilation."""
        seconds = 0.0
        for batch in self.batches:
            generation = Generation(self.laid_out, batch, drafter=self.drafter, **self.options)
            generation.advance(1)
            seconds += generation.result().stats.compile_seconds
        return seconds


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Drafting and autoregression on the same prompts.

    drafted, baseline: the run with the median speed of each; the baseline is the fastest of the target's `layouts`.
    layout: which one it is. layouts: bytes per second of each, the one that was loaded first.
    drafted_compile, baseline_compile: seconds.
    identical: greedy only, else None: whether the ids are those of autoregression with the layout that was loaded.
    differences: one entry per prompt where they are not. identical_at_same_width: asked only then, of a job that
        `has_a_twin`: whether they are those of autoregression in blocks of the drafter's width, so that every
        difference is one of rounding.
    """

    drafted: Result
    baseline: Result
    layout: str
    layouts: dict[str, float]
    drafted_compile: float
    baseline_compile: float
    identical: bool | None
    differences: list[dict[str, Any]]
    identical_at_same_width: bool | None


def compare(job: Job, repeats: int) -> Comparison:
    """Times the job against one token at a time: everything compiled first, then `repeats` runs of each, in turns."""
    alone = job.autoregressive()
    own, *_ = names = job.target.layout_names
    drafted_in = job.target.layout_for(job.drafter.block_width)
    layouts = {name: job.laid_out if name == drafted_in else job.target.in_layout(name) for name in names}
    sides = {"drafted": job} | {name: dataclasses.replace(alone, target=t) for name, t in layouts.items()}
    compiling = {name: side.warm_up() for name, side in sides.items()}
    runs: dict[str, list[Result]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            runs[name].append(side.run())
    medians = {name: median(results) for name, results in runs.items()}
    drafted = medians.pop("drafted")
    speeds = {name: result.stats.tokens_per_second for name, result in medians.items()}
    layout = max(speeds, key=speeds.get)

    identical, differences, same_width = None, [], None
    if job.greedy:
        expected = runs[own][0].ids
        identical = drafted.ids == expected
        differences = first_differences(job, drafted.ids, expected)
    if identical is False and job.has_a_twin:
        same_width = job.autoregressive(job.drafter.block_width).run().ids == drafted.ids
    return Comparison(
        drafted=drafted,
        baseline=medians[layout],
        layout=layout,
        layouts=speeds,
        drafted_compile=compiling["drafted"],
        baseline_compile=compiling[layout],
        identical=identical,
        differences=differences,
        identical_at_same_width=same_width,
    )


def merge(results: Sequence[Result]) -> Result:
    """Results of several batches as one; counts and times add up."""
    stats = [r.stats for r in results]

    def total(name):
        return sum(getattr(s, name) for s in stats)

    def rows(name):
        return [row for r in results for row in getattr(r, name)]

    forwards, seconds, texts = total("target_forwards"), total("decode_seconds"), rows("texts")
    after_first = total("tokens") - total("from_prompts")
    drafted, accepted = total("drafted"), total("accepted")
    return Result(
        ids=rows("ids"),
        texts=texts,
        finish_reasons=rows("finish_reasons"),
        from_draft=rows("from_draft"),
        forwards=rows("forwards"),
        stats=Stats(
            tokens=total("tokens"),
            from_prompts=total("from_prompts"),
            target_forwards=forwards,
            accept_length=after_first / forwards if forwards else 0.0,
            accept_histogram=np.sum([s.accept_histogram for s in stats], axis=0).tolist(),
            drafted=drafted,
            accepted=accepted,
            acceptance_rate=accepted / drafted if drafted else 0.0,
            prefill_seconds=total("prefill_seconds"),
            decode_seconds=seconds,
            compile_seconds=total("compile_seconds"),
            tokens_per_second=after_first / seconds if seconds else 0.0,
        ),
    )


def report(first: Result | None, comparison: Comparison | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Everything `decode.py` has to say, as JSON values. Figures are the comparison's if there is one, else `first`'s.

    first: a run made before, or instead of, the comparison; it may have compiled what the comparison then used.
    """
    result = comparison.drafted if comparison else first
    compiling = [first.stats.compile_seconds] if first else []
    baseline = None
    if comparison:
        compiling.append(comparison.drafted_compile)
        baseline = dataclasses.asdict(comparison.baseline.stats)
        baseline |= {"compile_seconds": comparison.baseline_compile, "layout": comparison.layout}
        baseline |= {"layouts": comparison.layouts}
    speed, slow = result.stats.tokens_per_second, baseline["tokens_per_second"] if baseline else None
    return {
        "identical": comparison.identical if comparison else None,
        "ratio": speed / slow if slow else None,
        "baseline_tokens_per_second": slow,
        **dataclasses.asdict(result.stats),
        "compile_seconds": sum(compiling),
        "distinct_8grams": distinct(result.ids, 8),
        "finish_reasons": result.finish_reasons,
        "lossless": settings["verify"] == "on" and (settings["bonus"] != "paper" or settings["temperature"] == 0),
        "differences": comparison.differences if comparison else [],
        "identical_at_same_width": comparison.identical_at_same_width if comparison else None,
        "baseline": baseline,
        "settings": settings,
        "text": result.texts[0] if len(result.texts) == 1 else result.texts,
    }


def environment() -> dict[str, Any]:
    """Versions and hardware: what a figure depends on beside the settings."""
    device = jax.devices()[0]
    return {
        "versions": {
            "bytejax": bytejax.__version__,
            "jax": jax.__version__,
            "python": platform.python_version(),
        },
        "device": f"{device.platform}: {device.device_kind}",
        "cores": os.cpu_count(),
    }


def distinct(rows: Sequence[Sequence[int]], n: int) -> float | None:
    """Distinct n-grams over all n-grams of the rows: near 0 for a loop. None where no row is n long."""
    grams = [tuple(row[i : i + n]) for row in rows for i in range(len(row) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None


def first_differences(job: Job, got: list[list[int]], expected: list[list[int]]) -> list[dict[str, Any]]:
    """Where each row first differs, and how far apart the two likeliest choices are there.

    In logits; in sampling, in what a draw is the arg-max of: log-probabilities with the noise of that position.
    """
    target, options, found = job.target, job.options, []
    banned = {*target.tokenizer.banned, *(target.tokenizer.stop if options["ignore_stop"] else ())}
    warp = make_warp(target.vocab, options["temperature"], options.get("top_k", 0), options.get("top_p", 1.0), banned)
    keys = jnp.concatenate([row_keys(options.get("seed", 0), batch) for batch in job.batches])
    prompts = [prompt for batch in job.batches for prompt in batch]
    for number, (prompt, a, b) in enumerate(zip(prompts, got, expected, strict=True)):
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
            text = prompt + a[:at]
            scores = target.unembed(target.states(jnp.asarray([text]))[0, -1])
            if warp.greedy:
                scores = warp.masked(scores)
            else:
                last = jnp.asarray([len(text) - 1])
                scores = warp.log_probs(scores) + noise(keys[number][None], last, 1, target.vocab)[0, 0]
            second, first = np.sort(np.asarray(scores))[-2:]
            found.append({"prompt": number, "position": at, "gap": float(first - second)})
    return found


def median(results: Sequence[Result]) -> Result:
    """The run with the median speed, the slower one of two."""
    return sorted(results, key=lambda r: r.stats.tokens_per_second)[(len(results) - 1) // 2]
