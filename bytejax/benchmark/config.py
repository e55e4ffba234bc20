"""What a run of Spec-Bench is made of, read from YAML with `key=value` overrides."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf

from bytejax import configs
from bytejax.errors import InputError
from bytejax.loading import DTYPES

SOURCE, RULE = "drafter", "accept"  # keys of a drafter's entry that are no options of its own


@dataclasses.dataclass(frozen=True)
class Config:
    """One benchmark.

    target: as `load_target` takes it. questions: a question.jsonl of Spec-Bench. out: the file of results.
    drafters: by the name they have in the results, each with `drafter`, as `load_drafter` takes it, perhaps `accept`,
        its acceptance rule, and its own options.
    categories: null for all that the questions have. per_category: the first questions of each; null for all.
    max_new_tokens: of every answer. ignore_stop: answers run to their limit.
    repeats: runs of each side per answer, of whose times the median counts.
    capacity_step: see `generate`; with a large one fewer programs are compiled.
    """

    target: str = MISSING
    questions: str = MISSING
    out: str = MISSING
    drafters: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    categories: list[str] | None = None
    per_category: int | None = None
    max_new_tokens: int = MISSING
    temperatures: list[float] = MISSING
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    dtype: str = "float32"
    ignore_stop: bool = False
    repeats: int = 1
    capacity_step: int = 512


def load(path: Path | str, overrides: Sequence[str] = (), given: Mapping[str, Any] | None = None) -> Config:
    """given: values of keys, over those of file and overrides.

    Raises InputError for anything that cannot be run, naming file and key.
    """
    values = OmegaConf.merge(configs.read(path, overrides), dict(given or {}))
    config = configs.structured(Config, values, str(path))
    problem = next((message for bad, message in _checks(config) if bad), None)
    if problem:
        raise InputError(f"{path}: {problem}")
    return config


def _checks(c: Config) -> list[tuple[bool, str]]:
    positive = {"max_new_tokens": c.max_new_tokens, "repeats": c.repeats, "capacity_step": c.capacity_step}
    positive |= {} if c.per_category is None else {"per_category": c.per_category}
    checks = [(x < 1, f"{key}={x} must be at least 1") for key, x in positive.items()]
    checks += [(not c.drafters, "drafters is empty; it needs at least one entry, name: {drafter: SOURCE}")]
    for name, entry in c.drafters.items():
        checks += [(not isinstance(entry.get(SOURCE), str), f"drafters.{name} needs drafter, what to load")]
    checks += [(not c.temperatures, "temperatures is empty; 0 is greedy decoding")]
    checks += [(len(set(c.temperatures)) < len(c.temperatures), "temperatures has one of them twice")]
    cold = [t for t in c.temperatures if not (t == 0 or 1e-3 <= t < float("inf"))]
    checks += [(bool(cold), f"temperatures: {cold} must each be 0 or at least 0.001")]
    checks += [(not 1e-6 <= c.top_p <= 1, f"top_p={c.top_p} must be above 0 and at most 1")]
    checks += [(not 0 <= c.top_k < 2**31, f"top_k={c.top_k} must not be negative, and below 2**31")]
    checks += [(c.capacity_step > 2**20, f"capacity_step={c.capacity_step} must be at most 2**20")]
    checks += [(not 0 <= c.seed < 2**32, f"seed={c.seed} must be between 0 and 2**32 - 1")]
    checks += [(c.dtype not in DTYPES, f"dtype={c.dtype} is unknown; known: {', '.join(DTYPES)}")]
    return checks
