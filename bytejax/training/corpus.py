"""Bytes to train on: the running interpreter's own standard library, or files of the user's.

A corpus is two streams of ids, for training and held out: bos + bytes + eos of every document, one after the other.
"""

import dataclasses
import glob
import hashlib
import platform
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from bytejax.errors import InputError
from bytejax.tokenizers import DEMO

BOS, (EOS,) = DEMO.bos, DEMO.stop

# Directories without sources written to be read: tests, other people's packages, and `encodings`, whose files are
# almost all generated character tables. `config-*` and `_sysconfigdata*` hold one machine's build settings.
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "encodings", "__pycache__"}
_LEFT_OUT_PREFIXES = ("config-", "_sysconfigdata")

# Never trained on: about 3% of the bytes, of several kinds (text, parsing, numbers, network, concurrency, tools, GUI).
# None has a near copy among the others. Modules that another interpreter lacks are simply absent there.
HELD_OUT = (
    "asyncio/queues.py",
    "bisect.py",
    "calendar.py",
    "concurrent/futures/thread.py",
    "csv.py",
    "email/policy.py",
    "fractions.py",
    "heapq.py",
    "html/parser.py",
    "idlelib/undo.py",
    "json/decoder.py",
    "multiprocessing/queues.py",
    "sched.py",
    "shlex.py",
    "tabnanny.py",
    "textwrap.py",
    "urllib/robotparser.py",
    "uuid.py",
    "zipapp.py",
)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """train, held_out: [length] uint16 ids. names: the documents of each. info: versions, sizes and content hashes."""

    train: np.ndarray
    held_out: np.ndarray
    train_names: tuple[str, ...]
    held_out_names: tuple[str, ...]
    info: dict[str, str | int]


def stdlib() -> Corpus:
    """The standard library's Python sources, found through `sysconfig`, in sorted order."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py") if _is_source(p.relative_to(root)))
    if not names:
        raise InputError(
            f"{root} has no .py sources; use an interpreter with its standard library or data.source=files"
        )
    held_out = [n for n in HELD_OUT if n in set(names)]
    info = {"source": "stdlib", "python": platform.python_version()}
    return _corpus(root, [n for n in names if n not in HELD_OUT], held_out, info)


def files(patterns: Sequence[str], held_out: Sequence[str]) -> Corpus:
    """Files matching the globs, as raw bytes. A file matched by `held_out` is left out of training."""
    chosen = {pattern: _matches(pattern) for pattern in (*patterns, *held_out)}
    away = sorted({n for p in held_out for n in chosen[p]})
    names = sorted({n for p in patterns for n in chosen[p]} - set(away))
    if not names:
        raise InputError(f"data.files: every file of {list(patterns)} is held out; leave some to train on")
    return _corpus(Path(), names, away, {"source": "files"})


def _is_source(relative: Path) -> bool:
    return not any(part in _LEFT_OUT or part.startswith(_LEFT_OUT_PREFIXES) for part in relative.parts)


def _matches(pattern: str) -> list[str]:
    names = [n for n in glob.glob(pattern, recursive=True) if Path(n).is_file()]
    if not names:
        raise InputError(f"data.files or data.held_out: {pattern} matches no file")
    return names


def _corpus(root: Path, train: Sequence[str], held_out: Sequence[str], info: dict[str, str | int]) -> Corpus:
    streams = [_stream(root, names) for names in (train, held_out)]
    for kind, names, stream in zip(("train", "held_out"), (train, held_out), streams):
        info |= {f"{kind}_documents": len(names), f"{kind}_bytes": int((stream < BOS).sum())}
        info |= {f"{kind}_sha256": hashlib.sha256(stream.astype("<u2").tobytes()).hexdigest()}
    return Corpus(*streams, tuple(train), tuple(held_out), info)


def _stream(root: Path, names: Iterable[str]) -> np.ndarray:
    parts = []
    for name in names:
        try:
            content = np.frombuffer((root / name).read_bytes(), np.uint8).astype(np.uint16)
        except OSError as e:
            raise InputError(f"{root / name}: {e.strerror}") from None
        parts += [np.array([BOS], np.uint16), content, np.array([EOS], np.uint16)]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint16)
