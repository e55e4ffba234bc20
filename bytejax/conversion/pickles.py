"""Pickled PyTorch weights, for the conversion command only: tensors and nothing else (`weights_only`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from bytejax.checkpoints import PICKLES, Reader, Tensors, read_json
from bytejax.errors import InputError

OLDEST = (2, 6)  # version of PyTorch: before, `weights_only` had a hole
INDEX = "pytorch_model.bin.index.json"


def is_pickled(path: Path) -> bool:
    """Whether a file, or a directory that has nothing better, holds pickled weights."""
    try:
        if path.is_dir():
            return not any(path.glob("*.safetensors")) and any(p.suffix in PICKLES for p in path.iterdir())
    except OSError:  # a name too long, a directory that may not be read
        return False
    return path.suffix in PICKLES


def open_pickles(path: Path) -> Reader:
    """The tensors of a file, or of the only one or the indexed ones of a directory; mapped, not copied.

    Raises InputError where torch is missing, or a file holds anything but tensors.
    """
    if not path.is_dir():
        return _Tensors(_load(path), str(path))
    if (path / INDEX).is_file():
        weight_map = read_json(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise InputError(f"{path / INDEX} has no weight_map of tensors to files")
        files = [path / Path(name).name for name in sorted(set(weight_map.values()))]
    else:
        files = sorted(p for p in path.iterdir() if p.suffix in PICKLES)
        if len(files) > 1:
            raise InputError(f"{path} holds several pickle files, {', '.join(p.name for p in files)}; name one of them")
    tensors = {}
    for file in files:
        more = _load(file)
        twice = sorted(set(tensors) & set(more))
        if twice:
            raise InputError(f"{file} also has {twice[0]}, which another file of {path} has")
        tensors |= more
    return _Tensors(tensors, str(path))


class _Tensors(Tensors):
    """PyTorch tensors as arrays, when they are read."""

    def dtype(self, name):
        return np.dtype(getattr(ml_dtypes, self._kind(name), None) or self._kind(name))

    def read(self, name):
        return as_numpy(self._tensors[name])

    def _kind(self, name: str) -> str:
        return str(self._tensors[name].dtype).removeprefix("torch.")


def load(path: Path) -> Any:
    """What a pickle file holds: tensors, containers and plain values, or InputError."""
    torch = _torch(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except Exception as e:  # an unpickling error, a broken archive, an old format that cannot be mapped
        reason = str(e).split(". ")[0][:160]
        raise InputError(f"{path} does not hold tensors alone, or is damaged ({reason})") from None


def as_numpy(tensor: Any) -> np.ndarray:
    """A PyTorch tensor as an array that shares its memory; NumPy does not know bfloat16 to PyTorch."""
    kind = str(tensor.dtype).removeprefix("torch.")
    if kind != "bfloat16":
        return tensor.detach().numpy()
    return tensor.detach().contiguous().view(_torch().int16).numpy().view(ml_dtypes.bfloat16)


def _load(path: Path) -> dict:
    torch, state = _torch(path), load(path)
    plain = lambda x: isinstance(x, torch.Tensor) and x.layout == torch.strided and x.device.type == "cpu"
    if not isinstance(state, Mapping) or not all(isinstance(n, str) and plain(x) for n, x in state.items()):
        raise InputError(f"{path} does not hold a state dict: dense tensors by name")
    if quantised := [name for name, x in state.items() if x.is_quantized]:
        raise InputError(f"{path}: {quantised[0]} is quantised, which is not supported")
    return dict(state)


def _torch(path: Path | None = None):
    try:
        import torch
    except ImportError:
        raise InputError(f"{path}: reading pickled weights needs PyTorch: pip install torch") from None
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST:
        raise InputError(f"{path}: PyTorch {torch.__version__} may run code when it reads pickles; 2.6 does not")
    return torch
