"""The one error that means "the input is wrong", as opposed to "the program is wrong"."""

import contextlib
import numbers
from collections.abc import Iterator
from typing import Any

ROWS = 4096  # at most so many rows of a block, places of a window, ids of an n-gram


class InputError(ValueError):
    """Bad input from the user: one line that says what is wrong, where, and what would work.

    The command line prints it without a traceback and exits with status 2.
    """


@contextlib.contextmanager
def input_errors_of(where: str) -> Iterator[None]:
    """Puts `where`, a key or a path, before the message of every InputError that passes."""
    try:
        yield
    except InputError as e:
        raise InputError(f"{where}: {e}") from None


def check_integer(what: str, value: Any, least: int, most: int | None = None) -> None:
    """Raises InputError, naming `what`, where a value is no integer from `least` to `most` (None for any)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise InputError(f"{what} must be an integer of at least {least}, got {value!r}")
    if most is not None and value > most:
        raise InputError(f"{what} must be at most {most}, got {value:.3g}")


def check_flag(what: str, value: Any) -> None:
    """Raises InputError, naming `what`, where a value is neither True nor False."""
    if not isinstance(value, bool):
        raise InputError(f"{what} must be true or false, got {value!r}")


def check_integers(what: str, values: Any, least: int, most: int | None = None) -> None:
    """Raises InputError, naming `what`, where values are no list of such integers (`check_integer`), one or more."""
    if not isinstance(values, list | tuple) or not values:
        raise InputError(f"{what} must be a list of integers of at least {least}, got {values!r}")
    for value in values:
        check_integer(f"each of {what}", value, least, most)
