"""Checkpoints from the layout they were released in to ours and back, one tensor in memory at a time."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bytejax import checkpoints, loading, parameters
from bytejax.checkpoints import Entry, Reader
from bytejax.conversion import families
from bytejax.conversion.released import Released
from bytejax.errors import InputError
from bytejax.models.base import Target
from bytejax.parameters import Param, Table


def to_bytejax(released: Released, directory: Path, dtype: np.dtype | None = None) -> None:
    """Writes what `save_target` would write, into a directory that exists. dtype None keeps the checkpoint's."""
    entries = [_ours(n, p, released.reader, dtype) for n, p in parameters.flatten(released.table).items()]
    checkpoints.write(directory / loading.WEIGHTS, entries)
    values = loading.target_values(released.target, directory)
    (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def to_reference(target: Target, table: Table, reader: Reader, directory: Path, dtype: np.dtype | None = None) -> None:
    """Writes a target of ours, its weights unread, as its family releases checkpoints; the directory exists.

    Raises InputError where the family has no such layout, or naming every tensor that does not fit.
    """
    parameters.check(table, reader)
    raw = families.family_of(target).config_of(target)
    entries = [e for n, p in parameters.flatten(table).items() for e in _reference(n, p, reader, dtype)]
    checkpoints.write(directory / checkpoints.WEIGHTS, entries, {"format": "pt"})
    kinds = {e.dtype.name for e in entries}
    kept = kinds.pop() if len(kinds) == 1 else "float32"
    raw |= {"dtype": kept, "torch_dtype": kept}  # the newer and the older name
    target.tokenizer.release(directory)
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")


@contextlib.contextmanager
def written_whole(directory: Path) -> Iterator[Path]:
    """A directory to write into, which becomes `directory` at the end, or disappears where something fails.

    Raises InputError where `directory` has something in it.
    """
    directory = Path(os.path.abspath(directory))
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise InputError(f"{directory} exists and is not an empty directory")
        made = [parent for parent in directory.parents if not parent.exists()]
        directory.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=directory.name + ".", suffix=".part", dir=directory.parent))
        part.chmod(0o777 & ~_umask())
    except OSError as e:
        raise InputError(f"{directory}: {e.strerror or e}") from None
    try:
        yield part
        part.replace(directory)
    except OSError as e:
        raise InputError(f"{directory}: {e.strerror or e}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):  # it holds what was written
                parent.rmdir()


def _umask() -> int:
    """What `mkdtemp` leaves out of account. It can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _ours(name: str, p: Param, reader: Reader, dtype: np.dtype | None) -> Entry:
    kinds = {reader.dtype(source) for source in p.sources()}
    kept = kinds.pop() if len(kinds) == 1 else np.dtype("float32")
    parts = lambda: (parameters.relayout(reader.read(source), p.layout) for source in p.sources())
    return Entry(name, dtype or kept, p.full_shape, parts)


def _reference(name: str, p: Param, reader: Reader, dtype: np.dtype | None) -> list[Entry]:
    layer = lambda i: reader.read(name) if p.layers is None else reader.read(name)[i]
    return [
        Entry(
            source,
            dtype or reader.dtype(name),
            parameters.reference_shape(p),
            lambda i=i: [parameters.reference_axes(layer(i), p)],
        )
        for i, source in enumerate(p.sources())
    ]
