"""CP: one latent for the whole window."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from bytejax.circuits.base import Circuit, Reduce, Walk, posterior


@dataclasses.dataclass(frozen=True)
class CP(Circuit):
    """Mixture of r factorised distributions: q(x) = sum_z w_z prod_i phi_{i,z}(x_i) (MtPC, Eq. CP).

    sums [..., 1, r]: the mixture weights.
    """

    name: ClassVar[str] = "cp"
    window: int
    rank: int

    @property
    def blocks(self) -> int:
        return 1

    def begin(self, sums: jax.Array) -> Walk:
        return Walk(sums[..., 0, :])

    def advance(self, sums: jax.Array, walk: Walk, i: int, scores: jax.Array) -> Walk:
        return Walk(posterior(walk.prior, scores))

    def _upward(self, sums: jax.Array, scores: jax.Array, reduce: Reduce) -> jax.Array:
        return reduce(0, sums + jnp.sum(scores, -2, keepdims=True))[..., 0]

    def _leaf_latents(self, choice: jax.Array) -> jax.Array:
        return jnp.broadcast_to(choice, (*choice.shape[:-1], self.window))

    def _condition_sums(self, sums: jax.Array, scores: jax.Array) -> jax.Array:
        return posterior(sums, scores[..., None, :])
