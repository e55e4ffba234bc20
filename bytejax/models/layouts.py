"""The memory layouts of a target whose layers repeat: stacked, one by one, or with kernels in panels."""

import abc
from typing import ClassVar, Self

import jax
import jax.numpy as jnp

from bytejax.models import layers as L  # noqa: N812
from bytejax.models.base import Target
from bytejax.parameters import Table

PANEL = 64  # outputs in one panel of a kernel, measured on CPUs with AVX-512


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

    def unrolled(self) -> Self:
        """The same model for decoding on CPU: its layers a tuple, kernels that share an input joined in one.

        Decoding is faster, compilation longer.
        """
        layers = self.params["layers"]
        if isinstance(layers, tuple):
            return self._with_layers(tuple(self._map_kernels(L.without_panels, layer) for layer in layers))
        return self._with_layers(tuple(map(self._join, L.unstack(layers))))

    def in_panels(self, columns: int = PANEL) -> Self:
        """The same model with its layers unrolled and their kernels in panels of so many outputs (`layers.in_panels`).

        On CPU a single token costs what it does without, a block of a few rows less.
        """
        panels = lambda x: L.in_panels(x, columns)
        layers = self.unrolled().params["layers"]
        return self._with_layers(tuple(self._map_kernels(panels, layer) for layer in layers))

    def stacked(self) -> Self:
        """The same model with its layers stacked, as they are saved and trained."""
        layers = self.params["layers"]
        if not isinstance(layers, tuple):
            return self
        return self._with_layers(jax.tree.map(lambda *x: jnp.stack(x), *map(self.layer, range(len(layers)))))

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

    def layouts(self) -> dict[str, Self]:
        layers = self.params["layers"]
        if isinstance(layers, dict):
            return {"stacked": self}
        if not any(layers[0][name].ndim == 3 for name in self._kernels(layers[0])):
            return {"[in, out]": self}
        return {"panels": self, "[in, out]": self.unrolled()}

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
