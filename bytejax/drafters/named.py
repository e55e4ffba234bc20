"""Drafters that need no files, by name; and how options are given to what makes a drafter."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from bytejax.drafters import heads
from bytejax.drafters.base import Autoregressive, Drafter
from bytejax.drafters.lookahead import Lookahead
from bytejax.drafters.medusa import Medusa
from bytejax.drafters.ngram import PromptLookup
from bytejax.drafters.probe import Probe, with_lookup
from bytejax.drafters.stand import Stand
from bytejax.errors import InputError
from bytejax.models.base import Target


@dataclasses.dataclass(frozen=True)
class Recipe:
    """make: (target if `for_target`, options) -> drafter. of_bytes: options that are others where ids are bytes."""

    make: Callable[..., Drafter]
    for_target: bool = False
    of_bytes: Mapping[str, Any] = dataclasses.field(default_factory=dict)


NAMED = {
    "none": Recipe(Autoregressive.create),
    "pld": Recipe(PromptLookup.create, of_bytes={"rule": "bytes"}),
    "esp": Recipe(Probe.create, of_bytes={"prune": False}),
    "pld+esp": Recipe(with_lookup, of_bytes={"rule": "bytes", "prune": False}),
    "lade": Recipe(Lookahead.create, for_target=True),
    "stand": Recipe(Stand.create, of_bytes={"orders": (8, 6, 5, 4)}),
    "evabyte": Recipe(Medusa.create),
    "heads": Recipe(heads.drafter, for_target=True),
}


def make(name: str, target: Target, options: Mapping[str, Any]) -> Drafter:
    """One of `NAMED` for a target. Raises InputError for options it does not have, or that make none."""
    recipe = NAMED[name]
    given = recipe.of_bytes if target.tokenizer.unit == "bytes" else {}
    return create(recipe.make, (target,) if recipe.for_target else (), {**given, **options})


def create(make: Callable[..., Drafter], arguments: tuple, options: Mapping[str, Any]) -> Drafter:
    """`make(*arguments, **options)`. Raises InputError where it has no such option."""
    known = list(inspect.signature(make).parameters)[len(arguments) :]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise InputError(f"drafter option {unknown[0]!r} is unknown; known: {', '.join(known) or 'none'}")
    return make(*arguments, **options)
