"""What a benchmark's records come to, by category and on average, and as Markdown."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from bytejax.benchmark import spec_bench
from bytejax.benchmark.records import Record
from bytejax.benchmark.runner import kept

AVERAGE = "average"


@dataclasses.dataclass(frozen=True)
class Summary:
    """A drafter on the questions of one category at one temperature; or, under `AVERAGE`, the mean of its categories.

    accept_length: tokens per target pass, the target's own included, over all questions together.
    kept: entry d - 1 is the share of cycles that kept at least d drafts. saved: the share of autoregression's passes.
    tokens_per_second, autoregression: over the sum of all seconds; of autoregression in the layout that is faster over
        all categories. ratio: their quotient.
    compared, identical: questions whose texts must be those of autoregression, and whose are.
    """

    temperature: float
    drafter: str
    category: str
    questions: int
    accept_length: float | None
    kept: list[float]
    saved: float | None
    tokens_per_second: float | None
    autoregression: float | None
    ratio: float | None
    compared: int
    identical: int


def summaries(records: Sequence[Record], temperatures: Sequence[float], drafters: Sequence[str]) -> list[Summary]:
    """By temperature and category, drafters one below the other; the averages last."""
    found = []
    for temperature in temperatures:
        by_drafter = {
            name: _categories([r for r in records if (r["temperature"], r["drafter"]) == (temperature, name)])
            for name in drafters
        }
        rows = [s for of_drafter in by_drafter.values() for s in of_drafter]
        there = {s.category for s in rows}
        order = [*(c for c in spec_bench.CATEGORIES if c in there), *sorted(there - set(spec_bench.CATEGORIES))]
        found += sorted(rows, key=lambda s: order.index(s.category))
        found += [_average(of_drafter) for of_drafter in by_drafter.values() if of_drafter]
    return found


def markdown(rows: Sequence[Summary]) -> list[str]:
    """A table per temperature: a line per drafter, a column per category, with accept length and ratio of speeds."""
    lines = []
    for temperature, group in itertools.groupby(rows, key=lambda s: s.temperature):
        cells = {(s.drafter, s.category): s for s in group}
        names, categories = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
        lines += [f"Temperature {temperature:g}: accept length, and speed against autoregression.", ""]
        lines += [f"| drafter | {' | '.join(map(_in_cell, categories))} |", "|---" * (len(categories) + 1) + "|"]
        for name in names:
            row = (_cell(cells.get((name, category))) for category in categories)
            lines.append(f"| {_in_cell(name)} | {' | '.join(row)} |")
        lines.append("")
    return lines


def _in_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _cell(s: Summary | None) -> str:
    return "" if s is None else f"{_shown(s.accept_length)} ({_shown(s.ratio)})"


def _shown(x: float | None) -> str:
    return "n/a" if x is None else f"{x:.2f}"


def _categories(records: list[Record]) -> list[Summary]:
    """One drafter at one temperature."""
    if not records:
        return []
    layouts = [name for name in records[0]["autoregression"] if all(name in r["autoregression"] for r in records)]
    fastest = max(layouts, key=lambda name: _baseline(records, name) or 0.0)
    by_category: dict[str, list[Record]] = {}
    for r in records:
        by_category.setdefault(r["category"], []).append(r)
    return [_pooled(category, group, fastest) for category, group in by_category.items()]


def _pooled(category: str, records: list[Record], layout: str) -> Summary:
    total = lambda name: sum(r[name] for r in records)
    tokens, forwards = total("tokens") - total("from_prompts"), total("target_forwards")
    histogram = [
        sum(column) for column in itertools.zip_longest(*(r["accept_histogram"] for r in records), fillvalue=0)
    ]
    speed, slow = _quotient(tokens, total("decode_seconds")), _baseline(records, layout)
    compared = [r["identical"] for r in records if r["identical"] is not None]
    return Summary(
        temperature=records[0]["temperature"],
        drafter=records[0]["drafter"],
        category=category,
        questions=len(records),
        accept_length=_quotient(tokens, forwards),
        kept=kept(histogram),
        saved=_quotient(tokens - forwards, tokens),
        tokens_per_second=speed,
        autoregression=slow,
        ratio=None if speed is None or slow is None else speed / slow,
        compared=len(compared),
        identical=sum(compared),
    )


def _average(rows: Sequence[Summary]) -> Summary:
    def mean(of: Callable[[Summary], float | None]) -> float | None:
        values = [x for x in map(of, rows) if x is not None]
        return sum(values) / len(values) if values else None

    depth = max(len(s.kept) for s in rows)
    return Summary(
        temperature=rows[0].temperature,
        drafter=rows[0].drafter,
        category=AVERAGE,
        questions=sum(s.questions for s in rows),
        accept_length=mean(lambda s: s.accept_length),
        kept=[mean(lambda s, d=d: s.kept[d] if d < len(s.kept) else 0.0) for d in range(depth)],
        saved=mean(lambda s: s.saved),
        tokens_per_second=mean(lambda s: s.tokens_per_second),
        autoregression=mean(lambda s: s.autoregression),
        ratio=mean(lambda s: s.ratio),
        compared=sum(s.compared for s in rows),
        identical=sum(s.identical for s in rows),
    )


def _baseline(records: Sequence[Record], layout: str) -> float | None:
    """Autoregression's tokens per second in one layout."""
    runs: list[dict[str, Any]] = [r["autoregression"][layout] for r in records]
    return _quotient(sum(r["tokens"] for r in runs), sum(r["decode_seconds"] for r in runs))


def _quotient(a: float, b: float) -> float | None:
    return a / b if b else None
