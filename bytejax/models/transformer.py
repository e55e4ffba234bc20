"""Stacks of attention layers that one stream passes, or two: the target's own and a drafter's (`models.lora`).

Letters: B batch, T time, N block rows, S cache slots, D model width, K kv heads, G heads per kv head, H head size.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from bytejax.errors import InputError
from bytejax.models import layers as L  # noqa: N812
from bytejax.models.base import Block, Extended
from bytejax.models.layouts import Layered
from bytejax.models.lora import Adapter

Slots = tuple[Any, Any, Any, Any]  # k, v, draft_k, draft_v, as in `Cache`


class Cache(struct.PyTreeNode):
    """Keys and values of the committed positions; which position has which slot is the target's affair.

    k: [layers, (K*B,) H, S], v: [layers, (K*B,) S, H] (see `layers.kv_layout`), or tuples of arrays without the leading
        axis where the target's layers are unrolled. Unused slots hold leftovers that no mask lets through.
    draft_k, draft_v: tuples of the same arrays for the draft stream's own layers, empty without one.
    lengths: [B] int32.
    """

    k: Any
    v: Any
    draft_k: Any
    draft_v: Any
    lengths: jax.Array

    @property
    def slots(self) -> int:
        return jax.tree.leaves(self.v)[0].shape[-2]

    def place(self) -> dict[str, jax.Array]:
        """Where the texts end: the fields beside the slots.

        With an earlier place put back (`replace`) a cache is again what it was then, if no slot has had two positions.
        """
        return {"lengths": self.lengths}


class Pending(struct.PyTreeNode):
    """The cache's slots with the block's rows written after the committed ones, row i in the i-th slot after them.

    They are written before attention, not after acceptance, so that a position's key lies in the same column whatever
    row of a chain it came from: sums then run in the same order, and a chain equals autoregression bit for bit.
    """

    k: Any
    v: Any
    draft_k: Any
    draft_v: Any
    chain: bool = struct.field(pytree_node=False)

    def kept(self, starts: jax.Array, path: jax.Array) -> Slots:
        """The slots with the rows of `path` [B, N] at the block's front, which is at `starts` [B]."""
        if self.chain:
            return self.k, self.v, self.draft_k, self.draft_v
        draft = (self.draft_k, self.draft_v)
        moved = L.keep_path(*draft, starts, path) if self.draft_k else draft
        return *L.keep_path(self.k, self.v, starts, path), *moved


class Transformer(Layered):
    """A target of attention layers with a feed-forward part each."""

    takes_trees = True

    @abc.abstractmethod
    def _qkv(self, p: dict, x: jax.Array, positions: jax.Array, adapters: dict | None, first: int) -> tuple:
        """Of one layer: q [B, T, K*G, H]; k, v [B, T, K, H]. adapters, first: see `layers.dense_with`."""

    @abc.abstractmethod
    def _norm(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        """The norm before every part of a layer and after the last one."""

    def embed(self, ids):
        table = self.params["embedding"]
        if table.ndim == 2:
            return jnp.take(table, ids, axis=0)
        columns = table.shape[-1]
        return table.at[ids // columns, :, ids % columns].get(mode="fill")

    def _inputs(self, ids: jax.Array, block: Block | None = None, cache: Any = None) -> jax.Array:
        """What the first layer reads: of texts from their start, or of a block's ids after those of the cache."""
        return self.embed(ids)

    def _block_inputs(self, block: Block, cache: Any) -> jax.Array:
        x = self._inputs(block.ids, block, cache)
        if block.embeds is None:
            return x
        return jnp.where(block.embeds_mask[..., None], block.embeds.astype(x.dtype), x)

    def _after_attention(self, p, x, mixed, adapters=None, first=0):
        x = x + L.dense_with(mixed, p["o"], adapters and adapters["o"], first)
        return x + L.swiglu(p, self._norm(x, p["mlp_norm"]), adapters, first)

    def _empty(self, k: tuple[int, ...], v: tuple[int, ...], adapter: Adapter | None) -> Slots:
        """Slots of zeros, given the shapes of one layer's."""
        drafting, dtype = 0 if adapter is None else len(adapter.layers), self.params["embedding"].dtype
        each = lambda shape: tuple(jnp.zeros(shape, dtype) for _ in range(drafting))
        return self._empty_slots(k), self._empty_slots(v), each(k), each(v)

    def _split(self, adapter: Adapter | None) -> tuple[Any, tuple]:
        """The layers that both streams pass, and those that each passes in its own way, with the adapter's."""
        layers = self.params["layers"]
        if adapter is None:
            return layers, ()
        if not isinstance(layers, tuple):
            raise InputError("an adapter needs the target's layers unrolled: load_target(..., unroll=True)")
        shared = len(layers) - len(adapter.layers)
        return layers[:shared], tuple(zip(layers[shared:], adapter.layers, strict=True))

    @abc.abstractmethod
    def _whole(self, ids: jax.Array, adapter: Adapter | None = None, taps: tuple[int, ...] = ()) -> tuple:
        """`_run_whole` of texts [B, T] from their start."""

    def states(self, ids, adapter=None):
        return self._norm(self._whole(ids, adapter)[0], self.params["final_norm"])

    def tapped_states(self, ids, taps):
        x, inner = self._whole(ids, taps=taps)
        return self._norm(x, self.params["final_norm"]), _side_by_side(inner, taps)

    def _run_whole(
        self,
        x: jax.Array,
        positions: jax.Array,
        attend: Callable,
        adapter: Adapter | None,
        taps: tuple[int, ...] = (),
    ) -> tuple[jax.Array, dict[int, jax.Array]]:
        """All layers over whole sequences.

        attend: (layer's parameters, q, k, v) -> [B, T, K*G*H]. taps: as in `layers.run_layers`, without an adapter.
        -> the residual stream [B, T, D], of the draft stream with an adapter; the tapped streams by layer.
        """

        def step(x, p, adapters=None):
            mixed = attend(p, *self._qkv(p, x, positions, adapters, 0))
            return self._after_attention(p, x, mixed, adapters), None

        shared, own = self._split(adapter)
        x, _, inner = L.run_layers(shared, step, x, taps=taps)
        for p, adapters in own:
            x, _ = step(x, adapters) if adapter.merged else step(x, p, adapters)
        return x, inner

    def _residuals(self, x: jax.Array, positions: jax.Array, attend: Callable) -> jax.Array:
        """As `_run_whole`, the stream before the first layer and after every one: [layers + 1, B, T, D]."""
        every = tuple(range(self.config.layers + 1))
        _, streams = self._run_whole(x, positions, attend, None, taps=every)
        return jnp.stack([streams[i] for i in every])

    def _run(
        self,
        x: jax.Array,
        positions: jax.Array,
        attend: Callable,
        cache: Cache,
        adapter: Adapter | None,
        taps: tuple[int, ...],
    ) -> tuple[list[jax.Array], Slots, dict[int, jax.Array]]:
        """All layers over new positions [B or 1, T] of x [B, T, D].

        attend: (layer's parameters, q, k, v, k slots, v slots) -> (mixed, (k slots, v slots)), for one stream.
        -> the streams' last states, the target's and, with an adapter, the draft's; the cache's slots; what the layers
        `taps` of the target's own stream read, by layer.
        """
        b = x.shape[0]
        shared, own = self._split(adapter)

        def step(x, p, *slots, adapters=None):
            """One layer; x holds one stream or, on the batch axis, two, each with its own two slots."""
            streams = len(slots) // 2
            places = positions if len(positions) == 1 else jnp.tile(positions, (streams, 1))
            parts = zip(*(jnp.split(rows, streams) for rows in self._qkv(p, x, places, adapters, b)), strict=True)
            done = [attend(p, *part, *slots[2 * i : 2 * i + 2]) for i, part in enumerate(parts)]
            mixed = jnp.concatenate([m for m, _ in done]) if streams > 1 else done[0][0]
            return self._after_attention(p, x, mixed, adapters, b), sum((s for _, s in done), ())

        if not own:
            x, slots, inner = L.run_layers(shared, step, x, cache.k, cache.v, taps=taps)
            return [x], (*(zip(*slots, strict=True) if isinstance(shared, tuple) else slots), (), ()), inner
        n = len(shared)
        x, below, inner = L.run_layers(shared, step, x, cache.k[:n], cache.v[:n], taps=taps)
        draft, upper = x, []
        for (p, a), *slots in zip(own, cache.k[n:], cache.v[n:], cache.draft_k, cache.draft_v, strict=True):
            if adapter.merged:
                x, mine = step(x, p, *slots[:2])
                draft, its = step(draft, a, *slots[2:])
                upper.append(mine + its)
            else:
                both, new = step(jnp.concatenate([x, draft]), p, *slots, adapters=a)
                x, draft = jnp.split(both, 2)
                upper.append(new)
            inner |= {tap: x for tap in taps if tap == n + len(upper)}
        k, v, draft_k, draft_v = zip(*upper, strict=True)
        slots = (tuple(s[0] for s in below) + k, tuple(s[1] for s in below) + v, draft_k, draft_v)
        return [x, draft], slots, inner

    def _extended(
        self, streams: Sequence[jax.Array], pending: Any, inner: dict[int, jax.Array], taps: tuple[int, ...]
    ) -> Extended:
        hidden, *draft = (self._norm(x, self.params["final_norm"]) for x in streams)
        found = {"draft": draft[0]} if draft else {}
        return Extended(hidden, found | ({"inner": _side_by_side(inner, taps)} if taps else {}), pending)


def _side_by_side(inner: dict[int, jax.Array], taps: tuple[int, ...]) -> jax.Array:
    return jnp.concatenate([inner[tap] for tap in taps], axis=-1)
