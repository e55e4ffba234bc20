"""Spec-Bench: drafters and autoregression take turns on every answer; one record per question and drafter.

The answer that a second turn follows is the one of autoregression, so that all sides have the same prompts.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from bytejax import loading
from bytejax.benchmark import measure, spec_bench
from bytejax.benchmark.config import RULE, SOURCE, Config
from bytejax.benchmark.records import FORMAT, Key, Record
from bytejax.benchmark.spec_bench import Question
from bytejax.decoding import generate
from bytejax.decoding.generate import Generation, Result, checked_rule
from bytejax.drafters.base import Autoregressive, Drafter
from bytejax.errors import InputError, input_errors_of
from bytejax.models.base import Target

PROGRAMS = 200  # at most so many are kept: each of them has memory of its own


@dataclasses.dataclass(frozen=True)
class Bench:
    """Everything loaded and checked.

    layouts: the target as autoregression is timed with it, and as drafters run on it. drafters: by name. rules,
        files: the acceptance rule of each, and the hash of its files.
    questions: those that fit the target's context. left_out: how many did not.
    """

    config: Config
    target: Target
    layouts: dict[str, Target]
    drafters: dict[str, Drafter]
    rules: dict[str, str]
    files: dict[str, str | None]
    questions: list[Question]
    left_out: int

    @classmethod
    def load(cls, config: Config, where: str) -> "Bench":
        """where: the config's name in errors. Raises InputError."""
        asked = _chosen(config, where)
        sources = [entry[SOURCE] for entry in config.drafters.values()]
        unroll = True if any(map(loading.needs_unrolled, sources)) else None
        target = loading.load_target(config.target, config.dtype, unroll)
        layouts, drafters, rules, files = target.layouts(), {}, {}, {}
        for name, entry in config.drafters.items():
            options = {k: v for k, v in entry.items() if k not in (SOURCE, RULE)}
            with input_errors_of(f"{where}: drafters.{name}"):
                if name in layouts:
                    raise InputError("this is what the target calls a layout of its own; give it another name")
                drafters[name] = loading.load_drafter(entry[SOURCE], target, **options)
                rules[name] = checked_rule(entry.get(RULE), "condition", drafters[name])
                files[name] = loading.drafter_digest(entry[SOURCE], options)
        fits = lambda q: _fits(spec_bench.prompt(target.tokenizer, q.turns[:1], ()), target, config)
        questions = [q for q in asked if fits(q)]
        if not questions:
            raise InputError(
                f"{config.questions}: no question leaves room for max_new_tokens={config.max_new_tokens} "
                f"in the target's context of {target.context}"
            )
        return cls(config, target, layouts, drafters, rules, files, questions, len(asked) - len(questions))

    def header(self) -> Record:
        """What every record depends on, and with what names it was asked for."""
        c, environment = self.config, measure.environment()
        names = ("max_new_tokens", "ignore_stop", "top_p", "top_k", "seed", "dtype", "repeats", "capacity_step")
        settings = {name: getattr(c, name) for name in names}
        settings |= {"chat": self.target.tokenizer.has_template, "unit": self.target.tokenizer.unit}
        settings |= {
            "target_sha256": loading.files_digest(loading.target_path(c.target)),
            "questions_sha256": hashlib.sha256(Path(c.questions).read_bytes()).hexdigest(),
            "bytejax": environment["versions"]["bytejax"],
            "jax": environment["versions"]["jax"],
            "device": environment["device"],
            "cores": environment["cores"],
        }
        return {"format": FORMAT, "target": c.target, "questions": c.questions, "settings": settings}

    def made_of(self, name: str) -> Record:
        """What a drafter's results depend on beside the header: its entry, and the hash of its files if any."""
        return {"settings": self.config.drafters[name], "files_sha256": self.files[name]}

    def keys(self) -> list[Key]:
        """What there is to measure."""
        ids = [q.id for q in self.questions]
        return list(itertools.product(self.config.temperatures, ids, self.drafters))


def run(bench: Bench, done: Collection[Key]) -> Iterator[list[Record]]:
    """Measures what is not done yet; the records of one question at one temperature at a time."""
    cleared = built = 0
    for temperature in bench.config.temperatures:
        for question in bench.questions:
            names = [name for name in bench.drafters if (temperature, question.id, name) not in done]
            if names:
                yield ask(bench, question, temperature, names)
            built = generate.START.compiled + generate.RUN.compiled
            if built - cleared > PROGRAMS or question is bench.questions[-1]:
                generate.START.clear()
                generate.RUN.clear()
                cleared = built


def ask(bench: Bench, question: Question, temperature: float, names: list[str]) -> list[Record]:
    """The records of the named drafters, measured beside autoregression."""
    own, *_ = bench.layouts
    turns: dict[str, list[Result]] = {side: [] for side in (*bench.layouts, *names)}
    differences: dict[str, list[Record]] = {name: [] for name in names}
    lengths: list[int] = []
    for number in range(len(question.turns)):
        answers = [r.texts[0] for r in turns[own]]
        ids = spec_bench.prompt(bench.target.tokenizer, question.turns[: number + 1], answers)
        if not _fits(ids, bench.target, bench.config):
            break
        lengths.append(len(ids))
        jobs = {side: _job(bench, side, ids, temperature) for side in turns}
        for side, result in _in_turns(jobs, bench.config.repeats).items():
            turns[side].append(result)
        for name in names:
            if _writes_the_same(bench, name, temperature):
                found = measure.first_differences(jobs[name], turns[name][-1].ids, turns[own][-1].ids)
                differences[name] += [{"turn": number, "position": d["position"], "gap": d["gap"]} for d in found]
    baseline = {layout: _speed(measure.merge(turns[layout])) for layout in bench.layouts}
    asked = {"temperature": temperature, "question_id": question.id, "category": question.category}
    return [
        {
            **asked,
            "drafter": name,
            **bench.made_of(name),
            "rule": bench.rules[name],
            "prompt_ids": lengths,
            **_figures(measure.merge(turns[name]), baseline),
            "identical": not differences[name] if _writes_the_same(bench, name, temperature) else None,
            "differences": differences[name],
        }
        for name in names
    ]


def _figures(result: Result, baseline: dict[str, Any]) -> Record:
    """The counts and times of all turns of a question, as JSON values."""
    stats = result.stats
    fastest = max(baseline, key=lambda layout: baseline[layout]["tokens_per_second"])
    slow = baseline[fastest]["tokens_per_second"]
    histogram = stats.accept_histogram
    while histogram and histogram[-1] == 0:
        histogram = histogram[:-1]
    return {
        **dataclasses.asdict(stats),
        "accept_histogram": histogram,
        "kept": kept(histogram),
        "forwards_saved": stats.tokens - stats.from_prompts - stats.target_forwards,
        "finish_reasons": result.finish_reasons,
        "autoregression": baseline,
        "layout": fastest,
        "ratio": stats.tokens_per_second / slow if slow else None,
    }


def kept(histogram: list[int]) -> list[float]:
    """Entry d - 1: the share of cycles that kept at least d drafts, given how many added 0, 1, 2, ... tokens.

    A cycle that is cut short by the end of a text counts as it was cut.
    """
    return [sum(histogram[d + 1 :]) / max(sum(histogram), 1) for d in range(1, len(histogram) - 1)]


def _speed(result: Result) -> dict[str, float]:
    s = result.stats
    times = {"decode_seconds": s.decode_seconds, "prefill_seconds": s.prefill_seconds}
    return {"tokens": s.tokens - s.from_prompts, **times, "tokens_per_second": s.tokens_per_second}


def _writes_the_same(bench: Bench, name: str, temperature: float) -> bool:
    """Whether the drafter's text is that of autoregression token for token: the noise of draws is then the same too."""
    return temperature == 0 or bench.rules[name] == "match"


def _job(bench: Bench, side: str, ids: list[int], temperature: float) -> measure.Job:
    """side: a drafter's name, or a layout's for autoregression."""
    c = bench.config
    names = ("max_new_tokens", "top_p", "top_k", "seed", "ignore_stop", "capacity_step")
    options = {name: getattr(c, name) for name in names} | {"temperature": temperature}
    if side in bench.layouts:
        return measure.Job(bench.layouts[side], Autoregressive(), [[ids]], options)
    drafter = bench.drafters[side]
    target = bench.layouts[bench.target.layout_for(drafter.block_width)]
    return measure.Job(target, drafter, [[ids]], options | {"accept": bench.rules[side]})


def _in_turns(jobs: dict[str, measure.Job], repeats: int) -> dict[str, Result]:
    """The median of `repeats` runs of each, one prompt per job; of compilation all seconds."""
    runs: dict[str, list[Result]] = {side: [] for side in jobs}
    compiling = dict.fromkeys(jobs, 0.0)
    for _ in range(repeats):
        for side, job in jobs.items():
            result, seconds = _timed(job)
            runs[side].append(result)
            compiling[side] += seconds
    medians = {side: measure.median(results) for side, results in runs.items()}
    return {
        side: dataclasses.replace(r, stats=dataclasses.replace(r.stats, compile_seconds=compiling[side]))
        for side, r in medians.items()
    }


def _timed(job: measure.Job) -> tuple[Result, float]:
    """A run with programs that have run before, and the seconds it took to compile them.

    The first cycle tells whether they have; where not, the run begins anew. Prompts are costly, so no run is made only
    to be thrown away.
    """
    compiling = 0.0
    while True:
        generation = Generation(job.target, job.batches[0], drafter=job.drafter, **job.options)
        generation.advance(1)
        seconds = generation.result().stats.compile_seconds
        if seconds == 0:
            generation.advance()
            return generation.result(), compiling
        compiling += seconds


def _fits(ids: list[int], target: Target, config: Config) -> bool:
    return len(ids) + config.max_new_tokens <= target.context


def _chosen(config: Config, where: str) -> list[Question]:
    questions = spec_bench.read(Path(config.questions))
    there = {q.category for q in questions}
    known = [*(c for c in spec_bench.CATEGORIES if c in there), *sorted(there - set(spec_bench.CATEGORIES))]
    for category in config.categories or ():
        if category not in there:
            raise InputError(f"{where}: {config.questions} has no category {category!r}; it has {', '.join(known)}")
    return spec_bench.first(questions, config.per_category, config.categories or known)
