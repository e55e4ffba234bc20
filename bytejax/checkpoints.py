"""Reading and writing checkpoints one tensor at a time: safetensors files, and directories of them in shards.

Nothing here holds more than the tensor at hand, and nothing is unpickled.
"""

import abc
import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from bytejax.errors import InputError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth")
CODES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "I16": np.int16,
    "U16": np.uint16,
    "I32": np.int32,
    "U32": np.uint32,
    "I64": np.int64,
    "U64": np.uint64,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}
DTYPES = {code: np.dtype(kind) for code, kind in CODES.items()}
LARGEST_HEADER = 100_000_000  # bytes, as the format says


class Reader(abc.ABC):
    """Tensors by name.

    where: the file or directory, for messages.
    """

    where: str

    @abc.abstractmethod
    def names(self) -> list[str]:
        """All tensors."""

    @abc.abstractmethod
    def shape(self, name: str) -> tuple[int, ...]: ...

    @abc.abstractmethod
    def dtype(self, name: str) -> np.dtype: ...

    @abc.abstractmethod
    def read(self, name: str) -> np.ndarray:
        """One tensor, not to be written to; mapped from its file where it lies there as it is."""

    def file(self, name: str) -> str:
        """The file that holds the tensor, for messages."""
        return self.where


class Tensors(Reader):
    """Tensors in memory."""

    def __init__(self, tensors: Mapping[str, np.ndarray], where: str = "checkpoint"):
        self._tensors, self.where = tensors, where

    def names(self):
        return list(self._tensors)

    def shape(self, name):
        return tuple(self._tensors[name].shape)

    def dtype(self, name):
        return np.dtype(self._tensors[name].dtype)

    def read(self, name):
        return np.asarray(self._tensors[name])


class _Place(NamedTuple):
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


class SafetensorsFile(Reader):
    """One safetensors file.

    Raises InputError where there is none, or it is cut short or damaged, naming the tensor where it is one's fault.
    """

    def __init__(self, path: Path | str):
        self.path, self.where = Path(path), str(path)
        with file_errors(path):
            size = self.path.stat().st_size
            with self.path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if size < 8 or length > min(size - 8, LARGEST_HEADER):
                    raise self._damaged("its header is cut short")
                header = file.read(length)
        try:
            entries = json.loads(header, object_pairs_hook=self._unique)
            self.metadata = entries.pop("__metadata__", {})
        except (ValueError, AttributeError, TypeError, RecursionError) as e:
            if isinstance(e, InputError):
                raise
            raise self._damaged("its header is not JSON") from None
        self._places = {name: self._place(name, entry, 8 + length, size) for name, entry in entries.items()}
        at = 8 + length
        for name, place in sorted(self._places.items(), key=lambda item: item[1].offset):
            if place.offset != at and place.size:
                raise self._damaged(f"{name} begins at byte {place.offset}, what is before it ends at {at}")
            at += place.size
        if at != size:
            raise self._damaged(f"its tensors end at byte {at}, the file at {size}")

    def names(self):
        return list(self._places)

    def shape(self, name):
        return self._places[name].shape

    def dtype(self, name):
        return self._places[name].dtype

    def read(self, name):
        dtype, shape, offset = self._places[name]
        with file_errors(self.path):
            return mapped(self.path, dtype, shape, offset)

    def _place(self, name: str, entry: Any, start: int, size: int) -> _Place:
        try:
            code, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            whole = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
        except (KeyError, TypeError, ValueError):
            raise self._damaged(f"its entry of {name} is malformed") from None
        if not isinstance(code, str) or code not in DTYPES:
            raise InputError(f"{self.path}: {name} has the unknown dtype {code}")
        if not whole or end - begin != math.prod(shape) * DTYPES[code].itemsize:
            raise self._damaged(f"its entry of {name} is malformed")
        if start + end > size:
            raise self._damaged(f"{name} ends at byte {start + end}, the file at {size}")
        return _Place(DTYPES[code], shape, start + begin)

    def _unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise self._damaged(f"it has {twice} twice")
        return dict(pairs)

    def _damaged(self, how: str) -> InputError:
        return InputError(f"{self.path} is not a complete safetensors file ({how})")


class Shards(Reader):
    """The safetensors files that an index lists.

    Raises InputError, naming file and tensor, for an index and files that do not agree.
    """

    def __init__(self, index: Path):
        directory, self.where = index.parent, str(index.parent)
        of_tensor = _weight_map(index)
        self._files: dict[str, SafetensorsFile] = {}
        shards = {file: SafetensorsFile(_shard(directory, file, index)) for file in sorted(set(of_tensor.values()))}
        problems = []
        for file, shard in shards.items():
            for name in shard.names():
                if of_tensor.get(name, file) != file:
                    problems.append(f"{directory / file} also has {name}, which it puts into {of_tensor[name]}")
                elif name not in of_tensor:
                    problems.append(f"{directory / file} has {name}, which it does not list")
                else:
                    self._files[name] = shard
        for name, file in of_tensor.items():
            if name not in self._files:
                problems.append(f"{directory / file} lacks {name}")
        if problems:
            raise InputError(f"{index} does not describe the files beside it: " + "; ".join(problems))

    def names(self):
        return list(self._files)

    def shape(self, name):
        return self._files[name].shape(name)

    def dtype(self, name):
        return self._files[name].dtype(name)

    def read(self, name):
        return self._files[name].read(name)

    def file(self, name):
        return self._files[name].where


def open_directory(directory: Path) -> Reader:
    """The safetensors of a directory: `model.safetensors`, or the shards of its index.

    Raises InputError where there are none; pickled weights are never opened.
    """
    if (directory / WEIGHTS).is_file():
        return SafetensorsFile(directory / WEIGHTS)
    if (directory / INDEX).is_file():
        return Shards(directory / INDEX)
    pickles = sorted(p.name for p in directory.iterdir() if p.suffix in PICKLES)
    if pickles:
        raise pickled(directory / pickles[0], directory)
    raise InputError(f"{directory} holds neither {WEIGHTS} nor {INDEX}")


def pickled(file: Path, source: Path) -> InputError:
    """What to say of pickled weights."""
    return InputError(
        f"{file} is a pickle file, which may run code when it is read; "
        f"convert it first: python -m bytejax.conversion {source} OUT"
    )


class Entry(NamedTuple):
    """A tensor to be written. parts: yields arrays of its dtype that, one after the other, are the tensor."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    parts: Callable[[], Iterable[np.ndarray]]


def write(path: Path, entries: Iterable[Entry], metadata: Mapping[str, str] | None = None) -> None:
    """Writes a safetensors file, one part of a tensor in memory at a time; whole or not at all."""
    code = {dtype: name for name, dtype in DTYPES.items()}
    entries = sorted(entries, key=lambda e: -e.dtype.itemsize)  # so that every tensor is aligned to its items
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for e in entries:
        end = offset + e.dtype.itemsize * int(np.prod(e.shape, dtype=np.int64))
        header[e.name] = {"dtype": code[e.dtype], "shape": list(e.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    part = path.with_name(path.name + ".part")
    with discarded_unless_done(part), part.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for e in entries:
            for x in e.parts():
                file.write(np.ascontiguousarray(x, e.dtype).reshape(-1).view(np.uint8))
        if file.tell() != 8 + len(text) + offset:
            raise ValueError("the parts of the entries are not as large as their shapes say")
    part.replace(path)


@contextlib.contextmanager
def discarded_unless_done(path: Path) -> Iterator[None]:
    """Removes a file where what writes it fails."""
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def file_errors(path: Path | str) -> Iterator[None]:
    """A file that cannot be read as InputError."""
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except OSError as e:
        raise InputError(f"{path}: {e.strerror or e}") from None


def mapped(path: Path, dtype: np.dtype, shape: tuple[int, ...], offset: int) -> np.ndarray:
    """A piece of a file as a read-only array; its pages are given back when it goes."""
    if 0 in shape:
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", offset, shape or (1,)).view(np.ndarray).reshape(shape)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises InputError."""
    with file_errors(path):
        data = path.read_bytes()
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as e:  # not UTF-8, no JSON, a number of thousands of digits, nested too deep
        raise InputError(f"{path} is not JSON ({e})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} is not a JSON object")
    return value


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise InputError(f"{index} has no weight_map of tensors to files")
    return weight_map


def _shard(directory: Path, file: str, index: Path) -> Path:
    if os.path.basename(file) != file or file in ("", ".", "..") or "\0" in file:
        raise InputError(f"{index} lists {file!r}, which is not a file beside it")
    with file_errors(directory / file[:100]):
        if not (directory / file).is_file():
            raise InputError(f"{index} lists {file}, which is not in {directory}")
    return directory / file
