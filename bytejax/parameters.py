"""Everything about a parameter is said once: shape, logical axes, initialiser, name in the reference checkpoint.

A *table* is a nested dict of `Param`. From it come random parameters, abstract shapes, shardings, strict loading from
our own files and from a reference checkpoint, and writing back to either.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bytejax.errors import InputError

Table = Mapping[str, Any]  # nested dict of Param
Params = dict[str, Any]  # the same nesting, of arrays


@dataclasses.dataclass(frozen=True)
class Param:
    """Declaration of one array.

    shape, axes: sizes and logical axis names of one layer's array, one per dimension.
    init: (key, shape, dtype) -> array, as in `jax.nn.initializers`.
    source: name in the reference checkpoint, `{layer}` standing for the index; None where the reference has no such
        tensor.
    layout: from the reference's axes to ours, e.g. "F D -> D F".
    layers: None, or how many layers share the declaration; their arrays are stacked on a leading axis "layers".
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Callable
    source: str | None = None
    layout: str | None = None
    layers: int | None = None

    def __post_init__(self):
        if len(self.shape) != len(self.axes):
            raise ValueError(f"{len(self.shape)} sizes but {len(self.axes)} axis names: {self.shape} {self.axes}")

    @property
    def full_shape(self) -> tuple[int, ...]:
        return self.shape if self.layers is None else (self.layers, *self.shape)

    @property
    def full_axes(self) -> tuple[str, ...]:
        return self.axes if self.layers is None else ("layers", *self.axes)

    def sources(self) -> list[str]:
        """Names of the reference's tensors that make up this array, in stacking order."""
        return [self.source] if self.layers is None else [self.source.format(layer=i) for i in range(self.layers)]


def normal(stddev: float) -> Callable:
    """Initialiser: independent normal entries."""
    return jax.nn.initializers.normal(stddev)


def stacked(table: Table, layers: int) -> dict[str, Any]:
    """The same declarations for a stack of `layers` layers."""
    return _map(lambda p: dataclasses.replace(p, layers=layers), table)


def init(table: Table, key: jax.Array, dtype=jnp.float32) -> Params:
    """Random parameters.

    An array's values depend on the key and its own name only, not on what else the table holds.
    """

    def one(name, p):
        seed = jax.random.fold_in(key, np.uint32(_stable_hash(name)))
        if p.layers is None:
            return p.init(seed, p.shape, dtype)
        return jax.vmap(lambda k: p.init(k, p.shape, dtype))(jax.random.split(seed, p.layers))

    return _unflatten({name: one(name, p) for name, p in flatten(table).items()})


def abstract(table: Table, dtype=jnp.float32) -> Params:
    """`jax.ShapeDtypeStruct` of every array, for compiling without allocating."""
    return _map(lambda p: jax.ShapeDtypeStruct(p.full_shape, dtype), table)


def count(table: Table) -> int:
    """Number of parameters."""
    return sum(math.prod(p.full_shape) for p in flatten(table).values())


def shardings(table: Table, mesh: Mesh, rules: Mapping[str, str | tuple[str, ...] | None]) -> Params:
    """`NamedSharding` of every array. `rules` maps a logical axis to mesh axes; unnamed axes are replicated."""
    return _map(lambda p: NamedSharding(mesh, PartitionSpec(*(rules.get(a) for a in p.full_axes))), table)


def from_reference(table: Table, tensors: Mapping[str, np.ndarray], where: str = "checkpoint") -> Params:
    """Parameters from a reference's state dict.

    Raises InputError naming every missing, unexpected or misshapen tensor, all of them in one line.
    """
    problems, flat, used = [], {}, set()
    for name, p in flatten(table).items():
        if p.source is None:
            raise ValueError(f"parameter {name} has no counterpart in the reference format")
        parts = []
        for source in p.sources():
            used.add(source)
            if source not in tensors:
                problems.append(f"missing {source}")
                continue
            got = _relayout(np.asarray(tensors[source]), p.layout)
            if got is None or got.shape != p.shape:
                problems.append(f"{source} has shape {tensors[source].shape}, expected {_reference_shape(p)}")
            else:
                parts.append(got)
        flat[name] = parts[0] if p.layers is None and parts else parts
    problems += [f"unexpected {t}" for t in sorted(set(tensors) - used)]
    if problems:
        raise InputError(f"{where} does not fit the model: " + "; ".join(problems))
    return _unflatten({name: np.stack(x) if isinstance(x, list) else x for name, x in flat.items()})


def to_reference(table: Table, params: Params) -> dict[str, np.ndarray]:
    """The reference's state dict; inverse of `from_reference`."""
    tensors = {}
    for name, p in flatten(table).items():
        value = np.asarray(flatten(params)[name])
        for source, x in zip(p.sources(), [value] if p.layers is None else value, strict=True):
            tensors[source] = np.ascontiguousarray(_relayout(x, " -> ".join(reversed(p.layout.split("->")))))
    return tensors


def save(path: Path | str, params: Params, metadata: Mapping[str, str] | None = None) -> None:
    """Writes safetensors under dotted names, whole or not at all."""
    path = Path(path)
    part = path.with_name(path.name + ".part")
    arrays = {name: np.ascontiguousarray(x) for name, x in flatten(params).items()}
    safetensors.numpy.save_file(arrays, part, metadata=dict(metadata or {}))
    part.replace(path)


def load(path: Path | str, table: Table, dtype=None) -> Params:
    """Reads what `save` wrote. dtype None keeps the file's.

    Raises InputError for a file that is no safetensors file, is cut short, or does not fit the table (every problem
    named).
    """
    expected = {name: p.full_shape for name, p in flatten(table).items()}
    try:
        with safetensors.safe_open(path, framework="np") as file:
            names = set(file.keys())
            problems = [f"missing {n}" for n in sorted(set(expected) - names)]
            problems += [f"unexpected {n}" for n in sorted(names - set(expected))]
            for name in sorted(names & set(expected)):
                shape = tuple(file.get_slice(name).get_shape())
                if shape != expected[name]:
                    problems.append(f"{name} has shape {shape}, expected {expected[name]}")
            if problems:
                raise InputError(f"{path} does not fit the model: " + "; ".join(problems))
            return _unflatten({n: jnp.asarray(file.get_tensor(n), dtype) for n in expected})
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except OSError as e:
        raise InputError(f"{path}: {e.strerror or e}") from None
    except safetensors.SafetensorError as e:
        raise InputError(f"{path} is not a complete safetensors file ({e})") from None


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dict -> {"a.b.c": leaf}, in order."""
    flat = {}
    for name, x in tree.items():
        flat |= flatten(x, f"{prefix}{name}.") if isinstance(x, Mapping) else {prefix + name: x}
    return flat


def _unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, x in flat.items():
        *parents, last = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = x
    return tree


def _map(f: Callable, table: Table) -> dict[str, Any]:
    return {name: _map(f, x) if isinstance(x, Mapping) else f(x) for name, x in table.items()}


def _relayout(x: np.ndarray, layout: str) -> np.ndarray | None:
    before, after = (re.findall(r"\w+", side) for side in layout.split("->"))
    return x.transpose([before.index(a) for a in after]) if x.ndim == len(before) else None


def _reference_shape(p: Param) -> tuple[int, ...]:
    before, after = (re.findall(r"\w+", side) for side in p.layout.split("->"))
    sizes = dict(zip(after, p.shape, strict=True))
    return tuple(sizes[a] for a in before)


def _stable_hash(name: str) -> int:
    value = 2166136261
    for byte in name.encode():
        value = (value ^ byte) * 16777619 % 2**32
    return value
