"""The memory layouts of a target whose layers repeat: stacked, one by one, or with kernels in panels."""

import abc
import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from bytejax.models import layers as L  # noqa: N812
from bytejax.models.base import Target
from bytejax.parameters import Params, Table

PANEL = 64  # outputs in one panel of a kernel, measured on CPUs with AVX-512
FEW = 8  # rows of a pass that are cheaper with panels than without
FEW_SMALL = 16  # the same where kernels stay in a core's second cache
SMALL = 2**21  # bytes of such a kernel
PANELS, WHOLE, STACKED = "panels", "[in, out]", "stacked"


class Layered(Target):
    """A target with `params["layers"]`: a dict of arrays stacked on axis 0, or a tuple of one dict per layer.

    JOINED: kernels of one input that lie side by side, under one name, where the layers are held one by one.
    """

    JOINED: ClassVar[dict[str, tuple[str, ...]]] = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}

    @property
    def vocab(self) -> int:
        return self.config.vocab

    @property
    def width(self) -> int:
        return self.config.width

    @property
    def context(self) -> int:
        return self.config.context

    @abc.abstractmethod
    def layer_table(self) -> Table:
        """Declarations of one layer's parameters."""

    @property
    def unembedding(self) -> str | None:
        """Name of the parameter that unembeds and may be in panels: a kernel [D, V], or "embedding"."""
        return None

    def embedding_table(self) -> jax.Array:
        """The embeddings of all ids, [V, D], however they are held."""
        table = self.params["embedding"]
        return table if table.ndim == 2 else L.without_panels(table).T

    def unrolled(self) -> Self:
        """The same model for decoding on CPU: its layers a tuple, kernels that share an input joined in one.

        Decoding is faster, compilation longer.
        """
        layers = self.params["layers"]
        if isinstance(layers, tuple):
            whole = tuple(self._map_kernels(L.without_panels, layer) for layer in layers)
            return self._with_layers(whole).unembedding_in_panels(None)
        return self._with_layers(tuple(map(self._join, L.unstack(layers))))

    def in_panels(self, columns: int = PANEL) -> Self:
        """The same model with its layers unrolled and its kernels in panels of so many outputs (`layers.in_panels`).

        On CPU a single token costs what it does without, a block of a few rows less, one of many rows more
        (`layout_for`).
        """
        panels, whole = lambda x: L.in_panels(x, columns), self.unrolled()
        layers = tuple(self._map_kernels(panels, layer) for layer in whole.params["layers"])
        return whole._with_layers(layers).unembedding_in_panels(columns)

    def unembedding_in_panels(self, columns: int | None) -> Self:
        """The same model with its unembedding in panels of so many ids; whole where None, or where V is no multiple.

        Embeddings that unembed too are then read out of the panels, so that there is still one copy of them.
        """
        name = self.unembedding
        if (held := self.params.get(name)) is None or held.ndim == (2 if columns is None else 3):
            return self
        turned = (lambda x: x.T) if name == "embedding" else (lambda x: x)
        new = turned(L.without_panels(held)) if columns is None else L.in_panels(turned(held), columns)
        return self if columns is not None and new.ndim == 2 else self.replace(params=self.params | {name: new})

    def stacked(self) -> Self:
        """The same model with its layers stacked, as they are saved and trained."""
        layers = self.params["layers"]
        if not isinstance(layers, tuple):
            return self
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *map(self.layer, range(len(layers))))
        return self._with_layers(stacked).unembedding_in_panels(None)

    def layer(self, index: int) -> dict[str, jax.Array]:
        """One layer's parameters, with the names and shapes of its table, however they are held."""
        layers, table = self.params["layers"], self.layer_table()
        if not isinstance(layers, tuple):
            return {name: x[index] for name, x in layers.items()}
        layer = self._map_kernels(L.without_panels, layers[index])
        for joined, names in self.JOINED.items():
            ends = [sum(table[name].shape[-1] for name in names[: i + 1]) for i in range(len(names) - 1)]
            layer |= dict(zip(names, jnp.split(layer[joined], ends, axis=-1), strict=True))
        return {name: layer[name] for name in table}

    @property
    def layout_names(self) -> tuple[str, ...]:
        layers = self.params["layers"]
        if isinstance(layers, dict):
            return (STACKED,)
        return (PANELS, WHOLE) if any(layers[0][name].ndim == 3 for name in self._kernels(layers[0])) else (WHOLE,)

    def layout_for(self, rows: int) -> str:
        layers = self.params["layers"]
        if len(self.layout_names) == 1:
            return self.layout_names[0]
        largest = max(layers[0][name].nbytes for name in self._kernels(layers[0]))
        return PANELS if rows <= (FEW_SMALL if largest <= SMALL else FEW) else WHOLE

    def in_layout(self, name: str) -> Self:
        return self if name == self.layout_names[0] else self.unrolled()

    def _empty_slots(self, shape: tuple[int, ...]):
        """Zeros of one layer's shape for every layer, held as the layers are."""
        layers, dtype = self.config.layers, self.params["embedding"].dtype
        if isinstance(self.params["layers"], tuple):
            return tuple(jnp.zeros(shape, dtype) for _ in range(layers))
        return jnp.zeros((layers, *shape), dtype)

    def _kernels(self, layer: dict) -> list[str]:
        parts = {name for names in self.JOINED.values() for name in names}
        table = self.layer_table()
        return [name for name in layer if name in self.JOINED or name not in parts and len(table[name].shape) == 2]

    def _map_kernels(self, function, layer: dict) -> dict:
        return layer | {name: function(layer[name]) for name in self._kernels(layer)}

    def _join(self, layer: dict) -> dict:
        parts = {name for names in self.JOINED.values() for name in names}
        kept = {name: x for name, x in layer.items() if name not in parts}
        return kept | {to: jnp.concatenate([layer[n] for n in names], axis=-1) for to, names in self.JOINED.items()}

    def _with_layers(self, layers) -> Self:
        return self.replace(params=self.params | {"layers": layers})


@dataclasses.dataclass(frozen=True)
class LayerForm:
    """From one layer's parameters to how an unrolled target of that kind holds them, for `parameters.read`."""

    kind: type[Layered]
    config: Any
    panels: bool

    def __call__(self, layer: Params) -> Params:
        target = _with_params(self.kind, self.config, {"layers": jax.tree.map(lambda x: x[None], layer)})
        return (target.in_panels() if self.panels else target.unrolled()).params["layers"][0]


@dataclasses.dataclass(frozen=True)
class OuterForm:
    """The same for the parameters beside the layers, each for itself, where kernels lie in panels."""

    kind: type[Layered]
    config: Any

    def __call__(self, params: Params) -> Params:
        return _with_params(self.kind, self.config, params).unembedding_in_panels(PANEL).params


def _with_params(kind: type[Layered], config: Any, params: Params) -> Layered:
    """A target of some parameters alone, for its layouts."""
    others = {field.name: None for field in dataclasses.fields(kind)}
    return kind(**others | {"params": params, "config": config})
