"""What commands share: exit statuses, numbers in flags, and a cache of compiled programs between runs."""

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from bytejax.cli.render import printable
from bytejax.errors import InputError

INPUT_ERROR, INTERRUPTED = 2, 130


class Parser(argparse.ArgumentParser):
    """Reports wrong flags as `InputError`, in the form of every other wrong input."""

    def error(self, message: str):
        raise InputError(f"{message} (see {self.prog} --help)")


def run(command: Callable[[], int]) -> int:
    """The command's exit status: 2 after wrong input, told in one line; 130, quietly, when interrupted or cut off."""
    try:
        status = command()
        sys.stdout.flush()
        return status
    except InputError as e:
        print("error: " + printable(" ".join(str(e).split())), file=sys.stderr)
        return INPUT_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has gone. The interpreter flushes once more when it ends: let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INTERRUPTED


def leave(status: int) -> None:
    """Ends the process; after an interruption at once, since XLA's threads may not survive the interpreter's end."""
    if status == INTERRUPTED:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(status)
    raise SystemExit(status)


def number(kind: Callable[[str], float], least: float, most: float = math.inf, also: float | None = None) -> Callable:
    """An argparse type: a finite int or float from `least` to `most`, or exactly `also`."""
    bounds = f"at least {least}" if most == math.inf else f"from {least} to {most}"
    wanted = f"{'an integer' if kind is int else 'a number'} {bounds}" + ("" if also is None else f", or {also}")

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except (ValueError, OverflowError):
            raise argparse.ArgumentTypeError(f"expected {wanted}, got {text!r}") from None
        if not (least <= value <= most or value == also) or value in (math.inf, -math.inf):
            raise argparse.ArgumentTypeError(f"expected {wanted}, got {text}")
        return value

    return parse


def option(text: str, where: str = "--option") -> tuple[str, Any]:
    """A drafter's option, KEY=VALUE; a value that is no JSON is a string. where: what the message begins with."""
    name, _, value = text.partition("=")
    if not (name and value):
        raise InputError(f"{where} {text!r} is not of the form KEY=VALUE")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


def use_compilation_cache() -> None:
    """Keeps compiled programs in the user's cache directory, unless JAX was already told where to keep them."""
    if jax.config.jax_compilation_cache_dir is not None or (directory := _cache_directory()) is None:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def _cache_directory() -> Path | None:
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the specification has relative ones ignored
        return Path(base, "bytejax", "xla")
    try:
        return Path.home() / ".cache" / "bytejax" / "xla"
    except RuntimeError:  # there is no home
        return None
