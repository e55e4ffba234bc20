"""Layers shared by the target models.

Letters: B batch, T time, N block rows, S cache slots, D model width, K kv heads, G heads per kv head, H head size,
F feed-forward width.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bytejax.errors import InputError


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, statistics in float32. x [..., D], scale [D]."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
    return (normed * scale.astype(jnp.float32)).astype(x.dtype)


def dense(x: jax.Array, kernel: jax.Array, transposed: bool = False, dtype: Any = None) -> jax.Array:
    """x [..., D] times a kernel stored [D, F], [F, D] where `transposed`, or in panels (`in_panels`).

    -> [..., F] in `dtype`, or x's.
    """
    if kernel.ndim == 3:
        rows = jnp.broadcast_to(x.reshape(-1, x.shape[-1]), (len(kernel), x.size // x.shape[-1], x.shape[-1]))
        y = jax.lax.dot_general(rows, kernel, (((2,), (1,)), ((0,), (0,))), preferred_element_type=dtype)
        return y.swapaxes(0, 1).reshape(*x.shape[:-1], -1)
    axes = ((x.ndim - 1,), (1 if transposed else 0,)), ((), ())
    return jax.lax.dot_general(x, kernel, axes, preferred_element_type=dtype)


def dense_with(x: jax.Array, kernel: jax.Array, adapter: dict | None, first: int = 0) -> jax.Array:
    """`dense`, with the low-rank adapter {"a", "b"} added for the batch rows from `first` on. x [B, T, D]."""
    y = dense(x, kernel)
    if adapter is None:
        return y
    changed = y[first:] + (x[first:] @ adapter["a"]) @ adapter["b"]
    return changed if first == 0 else jnp.concatenate([y[:first], changed])


def in_panels(kernel: jax.Array, columns: int) -> jax.Array:
    """A kernel [D, F] as panels [F / columns, D, columns], each contiguous; unchanged where F is no multiple.

    XLA's CPU products with a few rows pack the kernel in every call. One panel stays in a core's first cache meanwhile.
    """
    d, f = kernel.shape
    return kernel if f % columns else jnp.asarray(kernel.reshape(d, -1, columns).swapaxes(0, 1))


def without_panels(kernel: jax.Array) -> jax.Array:
    """Inverse of `in_panels`."""
    return kernel if kernel.ndim < 3 else jnp.asarray(kernel.swapaxes(0, 1).reshape(kernel.shape[1], -1))


def swiglu(params: dict, x: jax.Array, adapters: dict | None = None, first: int = 0) -> jax.Array:
    """Gated feed-forward layer without norm or residual, kernels `gate` and `up` apart or as `gate_up`.

    adapters, first: see `dense_with`; only with `gate_up`. x [B, T, D] -> [B, T, D].
    """
    of = lambda name: None if adapters is None else adapters[name]
    if "gate_up" in params:
        gate, up = jnp.split(dense_with(x, params["gate_up"], of("gate_up"), first), 2, axis=-1)
    else:
        gate, up = dense(x, params["gate"]), dense(x, params["up"])
    return dense_with(jax.nn.silu(gate) * up, params["down"], of("down"), first)


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's longer rotary wavelengths (rope type "llama3"), which stretch the context by `factor`.

    Wavelengths above original_context / low_freq_factor are stretched, those below original_context / high_freq_factor
    kept, and frequencies between blended. original_context: positions the model was trained for before.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def __post_init__(self):
        if min(self.factor, self.low_freq_factor, self.original_context) <= 0:
            raise InputError(f"every number of a rope scaling must be positive: {self}")
        if self.high_freq_factor <= self.low_freq_factor:
            raise InputError(f"a rope scaling needs high_freq_factor above low_freq_factor: {self}")


def rotary_frequencies(size: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Angle per position of each pair of a head of `size`, [size / 2] float32, rounded once at the end."""
    half = size // 2
    frequencies = theta ** (-np.arange(half) / half)
    if scaling is not None:
        s, turns = scaling, scaling.original_context * frequencies / (2 * np.pi)
        kept = np.clip((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0, 1)
        frequencies = kept * frequencies + (1 - kept) * frequencies / s.factor
    return frequencies.astype(np.float32)


def rotary(x: jax.Array, positions: jax.Array, theta: float, scaling: RopeScaling | None = None) -> jax.Array:
    """Rotary position embedding, halves rotated against each other.

    Angles in float32. x [B, T, heads, H], positions [B or 1, T].
    """
    half = x.shape[-1] // 2
    frequencies = rotary_frequencies(x.shape[-1], theta, scaling)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Grouped-query attention, softmax and its sum in float32.

    q [B, T, K*G, H]; k ([K*B,] H, S) and v ([K*B,] S, H) as `kv_layout` makes them; mask [B or 1, T, S] bool, True
    where a query sees a slot. -> [B, T, K*G*H].
    """
    b, t, heads, h = q.shape
    k, v = (a.reshape(-1, *a.shape[-2:]) for a in (k, v))
    x, s = v.shape[:2]
    groups = heads * b // x
    q = q.reshape(b, t, -1, groups, h).transpose(2, 0, 3, 1, 4).reshape(x, groups * t, h)
    scores = jnp.einsum("XQH,XHS->XQS", q * (h**-0.5), k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[None, :, None], scores.reshape(-1, b, groups, t, s), -jnp.inf)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    weighted = weights.reshape(x, groups * t, s).astype(v.dtype)
    mixed = jnp.einsum("XQS,XSH->XQH", weighted, v, preferred_element_type=jnp.float32)
    mixed = mixed.reshape(-1, b, groups, t, h) / weights.sum(-1, keepdims=True)
    return mixed.transpose(1, 3, 0, 2, 4).reshape(b, t, heads * h).astype(v.dtype)


def attend_in_chunks(q: jax.Array, k: jax.Array, v: jax.Array, mask: Callable, chunk: int = 512) -> jax.Array:
    """`attend` for long sequences: queries in chunks, so that scores take chunk x S memory.

    mask: (query indices [T']) -> [B or 1, T', S] bool.
    """
    b, t, heads, h = q.shape
    if t <= 2 * chunk:
        return attend(q, k, v, mask(jnp.arange(t)))
    q = jnp.pad(q, ((0, 0), (0, -t % chunk), (0, 0), (0, 0)))  # what the padding attends to is cut off again
    starts = jnp.arange(0, t, chunk)

    def one(start):
        part = jax.lax.dynamic_slice_in_dim(q, start, chunk, axis=1)
        return attend(part, k, v, mask(start + jnp.arange(chunk)))

    return jax.lax.map(one, starts).transpose(1, 0, 2, 3).reshape(b, -1, heads * h)[:, :t]


def kv_layout(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values [B, T, K, H] as caches hold them: k [K*B, H, T], v [K*B, T, H]; [H, T], [T, H] where K*B is 1.

    Keys have their slots last: on CPU the product with a few queries is then 2.5 times as fast. Heads and batch share
    an axis (heads first, so that it shards over heads): with two, or with one of size 1, XLA reshapes what was just
    written, and copies it.
    """
    b, t, heads, h = k.shape
    front = kv_front(heads, b)
    return k.transpose(2, 0, 3, 1).reshape(*front, h, t), v.transpose(2, 0, 1, 3).reshape(*front, t, h)


def kv_front(heads: int, batch: int) -> tuple[int, ...]:
    """Leading axes of a cache: (K*B,), or none where that is 1."""
    return () if heads * batch == 1 else (heads * batch,)


def write_rows(slots: jax.Array, rows: jax.Array, starts: jax.Array, axis: int) -> jax.Array:
    """Writes rows into a cache from slot starts [B] on, for each row of the batch; in place where XLA may.

    slots ([K*B,] ..., S, ...), rows ([K*B,] ..., N, ...) with S and N on `axis`, which is negative.
    """
    rows, b = rows.astype(slots.dtype), starts.shape[0]
    if b == 1:
        return jax.lax.dynamic_update_slice_in_dim(slots, rows, starts[0], axis)
    split = lambda x: x.reshape(-1, b, *x.shape[1:])
    slots, rows, shape = split(slots), split(rows), slots.shape
    if b > 8:
        put = lambda s, r, start: jax.lax.dynamic_update_slice_in_dim(s, r, start, axis)
        return jax.vmap(put, in_axes=(1, 1, 0), out_axes=1)(slots, rows, starts).reshape(shape)
    for i in range(b):  # a few slices in place are cheaper than the scatter that vmap makes of them
        at = [0, i] + [starts[i] if d == axis else 0 for d in range(-2, 0)]
        slots = jax.lax.dynamic_update_slice(slots, rows[:, i : i + 1], at)
    return slots.reshape(shape)


def read_rows(slots: jax.Array, index: jax.Array, axis: int) -> jax.Array:
    """The rows index [B, N] of a cache, for each row of the batch; slots and axis as in `write_rows`.

    Beyond the last slot it is the last one: a row that has ended may stand there.
    """
    index = jnp.tile(index, (slots.shape[0] // index.shape[0], 1)) if slots.ndim == 3 else index[0]
    return jnp.take_along_axis(slots, jnp.expand_dims(index, -3 - axis), axis, mode="clip")


def over_layers(function: Callable, *caches: Any) -> Any:
    """`function` of every layer's slots: caches are arrays stacked on axis 0, or tuples with one per layer.

    Arguments may be nested; so may be what the function returns, whose leaves are then held in the same form.
    """
    if isinstance(caches[0], tuple):
        return tuple(zip(*(function(*layer) for layer in zip(*caches, strict=True)), strict=True))
    return jax.vmap(function)(*caches)


def keep_path(k: Any, v: Any, starts: jax.Array, path: jax.Array) -> tuple[Any, Any]:
    """Moves the rows of a path [B, nodes] to the front of the block that begins at slots `starts` [B], in every layer.

    k, v: as caches hold them, stacked or one by one.
    """

    def keep(slots, axis):
        return write_rows(slots, read_rows(slots, starts[:, None] + path, axis), starts, axis)

    return over_layers(lambda k, v: (keep(k, -1), keep(v, -2)), k, v)


def block_mask(slots: int, lengths: jax.Array, block: Any) -> jax.Array:
    """Which slots each block row sees: the committed ones, its ancestors and itself; block row i lies in slot lengths
    + i.

    lengths [B] -> [B, N, S] bool.
    """
    relative = jnp.arange(slots) - lengths[:, None]
    if block.is_chain:
        return relative[:, None, :] <= jnp.arange(block.width)[:, None]
    inside = (relative >= 0) & (relative < block.width)
    tree = jnp.broadcast_to(block.ancestors(), (lengths.shape[0], block.width, block.width))
    column = jnp.clip(relative, 0, block.width - 1)[:, None, :]
    seen = jnp.take_along_axis(tree, jnp.broadcast_to(column, (*tree.shape[:2], slots)), axis=2)
    return (relative < 0)[:, None, :] | (inside[:, None, :] & seen)


def run_layers(
    layers: Any, step: Callable, carry: Any, *per_layer: Any, taps: tuple[int, ...] = ()
) -> tuple[Any, Any, dict[int, Any]]:
    """Runs `step(carry, layer params, *per-layer values) -> (carry, out)` over a stack.

    layers: a dict of arrays stacked on axis 0 (run with `lax.scan`), or a tuple of dicts, one per layer (unrolled: on
    CPU a scan would copy every layer's weights out of the stack in each cycle). per_layer and the outputs have the same
    form, stacked or tuples. taps: layers whose incoming carry, one array, is wanted too; as many as there are layers
    stands for what the last one hands on.
    -> the last carry, the outputs, and the carries that were asked for, by layer.
    """
    if isinstance(layers, tuple):
        carries, outs = [carry], []
        for layer in zip(layers, *per_layer, strict=True):
            carry, out = step(carry, *layer)
            carries.append(carry)
            outs.append(out)
        return carry, tuple(outs), {tap: carries[tap] for tap in taps if tap < len(carries)}
    if not taps:
        return *jax.lax.scan(lambda c, xs: step(c, *xs), carry, (layers, *per_layer)), {}
    count, spare = jax.tree.leaves(layers)[0].shape[0], len(taps)
    places = jnp.asarray([taps.index(i) if i in taps else spare for i in range(count)])

    def tapped(state, xs):
        (x, kept), (place, *xs) = state, xs
        kept = jax.lax.dynamic_update_index_in_dim(kept, x, place, 0)  # in place, unlike all carries as an output
        x, out = step(x, *xs)
        return (x, kept), out

    kept = jnp.zeros((spare + 1, *carry.shape), carry.dtype)
    (carry, kept), outs = jax.lax.scan(tapped, (carry, kept), (places, layers, *per_layer))
    return carry, outs, {tap: carry if tap == count else kept[i] for i, tap in enumerate(taps)}


def unstack(layers: dict) -> tuple:
    """Stacked layer parameters as a tuple of one dict per layer."""
    count = jax.tree.leaves(layers)[0].shape[0]
    return tuple(jax.tree.map(lambda x, i=i: x[i], layers) for i in range(count))
