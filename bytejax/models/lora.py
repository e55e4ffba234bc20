"""Low-rank adapters (LoRA, arXiv 2106.09685) on the last layers of a target: the draft stream of a circuit head (MtPC).

The target's own stream passes through the same layers without them. Both streams share the layers below.

Letters: D model width, F an output width, R adapter rank, Z adapted layers.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from bytejax import parameters
from bytejax.errors import InputError
from bytejax.models import layers as L  # noqa: N812
from bytejax.models.layouts import Layered
from bytejax.parameters import Param, Params, Table

JOINED = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """layers: how many, counted from the last one; rank: of each adapter. Their scale is 1, as in released models."""

    layers: int
    rank: int

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"LoRA: {name} must be a positive integer, got {value!r}")


class Adapter(struct.PyTreeNode):
    """Adapters of a draft stream, arranged for decoding. Made by `create`.

    layers: one dict per adapted layer, in order. Beside the target's kernels: {"qkv", "o", "gate_up", "down"} ->
        {"a" [D, R'], "b" [R', F]}, the adapters of joined kernels side by side. Merged: kernels of their own, as an
        unrolled target's.
    """

    layers: tuple[dict[str, Any], ...]
    merged: bool = struct.field(pytree_node=False)


def table(config: LoraConfig, target: Layered) -> Table:
    """Declarations: for every linear map "a" [Z, D, R], random, and "b" [Z, R, F], zero: at first nothing changes."""
    if config.layers > target.config.layers:
        raise InputError(f"LoRA on the last {config.layers} layers: the target has {target.config.layers}")
    layer = target.layer_table()
    adapters = {}
    for name in (name for names in JOINED.values() for name in names):
        (d, f), (into, out) = layer[name].shape, layer[name].axes
        a = Param((d, config.rank), (into, "adapter"), parameters.normal(d**-0.5))
        b = Param((config.rank, f), ("adapter", out), jax.nn.initializers.zeros)
        adapters[name] = {"a": a, "b": b}
    return parameters.stacked(adapters, config.layers)


def create(params: Params, target: Layered, merged: bool = False) -> Adapter:
    """The adapters `params` (see `table`) beside `target`, whose last layers they belong to; differentiable in both.

    merged: draft layers with kernels of their own, W + a b. They are read beside the target's in every pass, which
    costs memory traffic; not merged, both streams share one product with W. Its twice as many rows may change the last
    bits of the target's own stream too.
    """
    count, dtype = jax.tree.leaves(params)[0].shape[0], target.params["embedding"].dtype
    apart = L.unstack(jax.tree.map(jnp.asarray, params))
    if merged:
        base = target.unrolled().params["layers"][-count:]
        return Adapter(tuple(map(_merged, base, apart)), True)
    joined = tuple({name: _side_by_side([p[n] for n in names]) for name, names in JOINED.items()} for p in apart)
    return Adapter(jax.tree.map(lambda x: x.astype(dtype), joined), False)


def _side_by_side(adapters: list[Params]) -> Params:
    blocks = jax.scipy.linalg.block_diag(*(x["b"] for x in adapters))
    return {"a": jnp.concatenate([x["a"] for x in adapters], axis=-1), "b": blocks}


def _merged(layer: dict, adapters: Params) -> dict:
    def kernel(name, names):
        delta = jnp.concatenate([adapters[n]["a"] @ adapters[n]["b"] for n in names], axis=-1)
        return (layer[name] + delta).astype(layer[name].dtype)

    return layer | {name: kernel(name, names) for name, names in JOINED.items()}
