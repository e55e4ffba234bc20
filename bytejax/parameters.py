"""Everything about a parameter is said once: shape, logical axes, initialiser, name in the reference checkpoint.

A *table* is a nested dict of `Param`. From it come random parameters, abstract shapes, shardings, strict loading from
our own files and from a reference checkpoint, and writing back to either.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bytejax import checkpoints
from bytejax.checkpoints import Reader
from bytejax.errors import InputError

SMALL = 2**24  # items of a layer that are read together
FLOATS = ("float32", "bfloat16", "float16", "float64")  # dtypes that weights may be stored in
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
    return _map(sharding_by(mesh, rules), table)


def check(table: Table, reader: Reader, reference: bool = False, ignored: Sequence[str] = ()) -> None:
    """Raises InputError naming every tensor that is missing, unexpected, misshapen or not of floats, in one line.

    reference: whether the checkpoint has the reference's names and axes, or ours. ignored: regular expressions of names
    that need not be expected.
    """
    expected = {}
    for name, p in flatten(table).items():
        if reference and (p.layers or 0) > len(reader.names()):
            raise InputError(f"{reader.where} has {len(reader.names())} tensors, too few for {p.layers} layers")
        if reference and p.source is None:
            raise ValueError(f"parameter {name} has no counterpart in the reference format")
        sources = dict.fromkeys(p.sources(), reference_shape(p)) if reference else {name: p.full_shape}
        expected |= sources
    names = set(reader.names())
    problems = [f"missing {n}" for n in sorted(set(expected) - names)]
    extra = sorted(n for n in names - set(expected) if not any(re.fullmatch(i, n) for i in ignored))
    problems += [f"unexpected {n}" + _in_file(reader, n) for n in extra]
    for name, shape in expected.items():
        if name not in names:
            continue
        if (got := reader.shape(name)) != shape:
            problems.append(f"{name}{_in_file(reader, name)} has shape {got}, expected {shape}")
        if (kind := reader.dtype(name).name) not in FLOATS:
            problems.append(f"{name}{_in_file(reader, name)} has dtype {kind}, expected one of {', '.join(FLOATS)}")
    if problems:
        raise InputError(f"{reader.where} does not fit the model: " + "; ".join(problems))


def read(
    table: Table,
    reader: Reader,
    dtype=None,
    reference: bool = False,
    ignored: Sequence[str] = (),
    layer_form: Callable[[Params], Params] | None = None,
    outer_form: Callable[[Params], Params] | None = None,
    sharding: Callable[[Param], NamedSharding] | None = None,
) -> Params:
    """Parameters from a checkpoint, each tensor straight into its destination.

    Beside what is already loaded, memory holds one tensor, or one layer where layers are given a form of their own.

    dtype: of the parameters; None keeps the checkpoint's. reference, ignored: see `check`, which is made first.
    layer_form: from one layer's parameters, as the table has them, to what takes their place; "layers" is then a tuple.
    outer_form: the same for every parameter beside the layers alone, {name: array}; only without a sharding.
    sharding: where arrays go, e.g. `sharding_by(mesh, rules)`; every process reads its own part only.
    """
    check(table, reader, reference, ignored)
    source = _Source(reader, reference, None if dtype is None else jnp.dtype(dtype), sharding)
    stack = table.get("layers") if layer_form else None
    whole = flatten({name: x for name, x in table.items() if stack is None or name != "layers"})
    largest_first = sorted(whole, key=lambda name: -math.prod(whole[name].shape))  # while there is most room
    params = _unflatten({name: source.array(name, whole[name], outer_form) for name in largest_first})
    if stack is None:
        return params
    flat = flatten(stack)
    count = next(iter(flat.values())).layers
    return params | {"layers": tuple(source.layer(flat, i, layer_form) for i in range(count))}


def sharding_by(mesh: Mesh, rules: Mapping[str, str | tuple[str, ...] | None]) -> Callable[[Param], NamedSharding]:
    """The sharding of a parameter, as in `shardings`."""
    return lambda p: NamedSharding(mesh, PartitionSpec(*(rules.get(a) for a in p.full_axes)))


def from_reference(table: Table, tensors: Mapping[str, np.ndarray], where: str = "checkpoint") -> Params:
    """Parameters from a reference's state dict, in its dtypes.

    Raises InputError naming every missing, unexpected or misshapen tensor, all of them in one line.
    """
    return read(table, checkpoints.Tensors(tensors, where), reference=True)


def to_reference(table: Table, params: Params) -> dict[str, np.ndarray]:
    """The reference's state dict; inverse of `from_reference`."""
    tensors = {}
    for name, p in flatten(table).items():
        value = np.asarray(flatten(params)[name])
        for source, x in zip(p.sources(), [value] if p.layers is None else value, strict=True):
            tensors[source] = np.ascontiguousarray(reference_axes(x, p))
    return tensors


def save(path: Path | str, params: Params, metadata: Mapping[str, str] | None = None) -> None:
    """Writes safetensors under dotted names, whole or not at all."""
    arrays = {name: np.asarray(x) for name, x in flatten(params).items()}
    entries = [checkpoints.Entry(name, x.dtype, x.shape, lambda x=x: [x]) for name, x in arrays.items()]
    with checkpoints.file_errors(path):
        checkpoints.write(Path(path), entries, metadata)


def load(path: Path | str, table: Table, dtype=None) -> Params:
    """Reads what `save` wrote. dtype None keeps the file's.

    Raises InputError for a file that is no safetensors file, is cut short, or does not fit the table (every problem
    named).
    """
    return read(table, checkpoints.SafetensorsFile(path), dtype)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dict -> {"a.b.c": leaf}, in order."""
    flat = {}
    for name, x in tree.items():
        flat |= flatten(x, f"{prefix}{name}.") if isinstance(x, Mapping) else {prefix + name: x}
    return flat


@dataclasses.dataclass(frozen=True)
class _Source:
    """A checkpoint with what becomes of its tensors; see `read`."""

    reader: Reader
    reference: bool
    dtype: Any
    sharding: Callable[[Param], NamedSharding] | None

    def array(self, name: str, p: Param, form: Callable[[Params], Params] | None = None) -> jax.Array:
        """A parameter as the table has it, or in a form of its own."""
        if self.sharding is not None:
            return self._sharded(name, p, self.sharding(p))
        if p.layers is None:
            return flatten(self._arranged({name: p}, None, form=form))[name]
        stack = None
        for i in range(p.layers):
            x = self._arranged({name: p}, i)[name]
            stack = jnp.zeros(p.full_shape, x.dtype) if stack is None else stack
            stack = jax.block_until_ready(_set_row(stack, x, i))
        return stack

    def layer(self, declared: Mapping[str, Param], index: int, form: Callable[[Params], Params]) -> Params:
        """One layer's parameters in the form that the target holds."""
        if self.sharding is None:
            return self._arranged(declared, index, "layers.", form)
        arrays = {}
        for name, p in declared.items():
            sharding = self.sharding(dataclasses.replace(p, layers=None))
            arrays[name] = self._sharded("layers." + name, p, sharding, index)
        return jax.block_until_ready(_formed(arrays, form))

    def _arranged(self, declared, layer, prefix="", form=None):
        layouts = tuple((name, p.layout if self.reference else None) for name, p in declared.items())
        if form is None:
            return jax.block_until_ready(_arranged(self._put(declared, layer, prefix), layouts, self.dtype))
        shapes = tuple((name, p.shape) for name, p in declared.items())
        pieces, structure = _parts(form, shapes)
        leaves = {}
        for group, needed in pieces:
            raw = self._put({name: declared[name] for name in sorted(needed)}, layer, prefix)
            made = _formed_part(raw, layouts, self.dtype, form, shapes, group)
            leaves |= zip(group, jax.block_until_ready(made), strict=True)
        return jax.tree.unflatten(structure, [leaves[i] for i in range(len(leaves))])

    def _put(self, declared, layer, prefix):
        """Tensors as they were read. Waiting for each keeps what is read ahead from piling up."""
        put = lambda name, p: jax.block_until_ready(jax.device_put(self._raw(prefix + name, p, layer)))
        return {name: put(name, p) for name, p in declared.items()}

    def _raw(self, name: str, p: Param, layer: int | None) -> np.ndarray:
        if self.reference:
            return self.reader.read(p.source if layer is None else p.source.format(layer=layer))
        return self.reader.read(name) if layer is None else self.reader.read(name)[layer]

    def _sharded(self, name: str, p: Param, sharding: NamedSharding, layer: int | None = None) -> jax.Array:
        """The array, or one layer's; a shard is copied out of the mapped tensors it lies in."""

        def part(layer, index):
            x = self._raw(name, p, layer)
            return (relayout(x, p.layout) if self.reference else x)[index]

        def shard(index):
            if p.layers is None or layer is not None:
                x = part(layer, index)
            else:
                x = np.stack([part(i, index[1:]) for i in range(*index[0].indices(p.layers))])
            return np.array(x, self.dtype or x.dtype, order="C")

        return jax.make_array_from_callback(p.full_shape if layer is None else p.shape, sharding, shard)


@functools.partial(jax.jit, static_argnames=("layouts", "dtype"))
def _arranged(raw, layouts, dtype):
    """Tensors as they were read, with our axes. A copy in any case: they may be views of their file."""
    moved = {name: raw[name] if layout is None else relayout(raw[name], layout) for name, layout in layouts}
    return {name: jnp.array(x, dtype or x.dtype, copy=True) for name, x in moved.items()}


@functools.partial(jax.jit, static_argnames=("layouts", "dtype", "form", "shapes", "leaves"))
def _formed_part(raw, layouts, dtype, form, shapes, leaves):
    """Some leaves of a layer in its form, for which the tensors in `raw` suffice."""
    arrays = _arranged(raw, tuple(x for x in layouts if x[0] in raw), dtype)
    others = {name: jnp.zeros(shape, dtype) for name, shape in shapes if name not in raw}
    formed = jax.tree.leaves(form(_unflatten(arrays | others)))
    return [formed[i] for i in leaves]


@functools.lru_cache
def _parts(form: Callable[[Params], Params], shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> tuple[list, Any]:
    """How a layer is put into its form piece by piece: (leaves, names of the inputs they need) of each piece, and the
    structure that the leaves make.

    A piece is one leaf, or several that are small.
    """
    named = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes}
    traced, formed = jax.make_jaxpr(lambda flat: form(_unflatten(flat)), return_shape=True)(named)
    needs = {var: {name} for var, name in zip(traced.jaxpr.invars, sorted(named), strict=True)}
    of = lambda variables: set().union(*(needs.get(v, ()) for v in variables if not hasattr(v, "val")))
    for equation in traced.jaxpr.eqns:
        needs |= dict.fromkeys(equation.outvars, of(equation.invars))
    small, pieces = ([], set()), []
    for i, var in enumerate(traced.jaxpr.outvars):
        if math.prod(var.aval.shape) > SMALL:
            pieces.append(((i,), of([var])))
        else:
            small[0].append(i)
            small[1].update(of([var]))
    pieces += [(tuple(small[0]), small[1])] if small[0] else []
    return pieces, jax.tree.structure(formed)


@functools.partial(jax.jit, static_argnames="form")
def _formed(arrays, form):
    return form(_unflatten(arrays))


@functools.partial(jax.jit, donate_argnums=0)
def _set_row(stack, x, index):
    return jax.lax.dynamic_update_index_in_dim(stack, x, index, 0)


def _in_file(reader: Reader, name: str) -> str:
    return "" if reader.file(name) == reader.where else f" in {reader.file(name)}"


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


def relayout(x: np.ndarray, layout: str) -> np.ndarray | None:
    """An array with its axes as `layout` says, e.g. "F D -> D F"; None where it has another number of axes."""
    before, after = (re.findall(r"\w+", side) for side in layout.split("->"))
    return x.transpose([before.index(a) for a in after]) if x.ndim == len(before) else None


def reference_axes(x: np.ndarray, p: Param) -> np.ndarray:
    """One layer's array with its axes as the reference has them."""
    return relayout(x, " -> ".join(reversed(p.layout.split("->"))))


def reference_shape(p: Param) -> tuple[int, ...]:
    """Shape of one of the reference's tensors."""
    before, after = (re.findall(r"\w+", side) for side in p.layout.split("->"))
    sizes = dict(zip(after, p.shape, strict=True))
    return tuple(sizes[a] for a in before)


def _stable_hash(name: str) -> int:
    value = 2166136261
    for byte in name.encode():
        value = (value ^ byte) * 16777619 % 2**32
    return value
