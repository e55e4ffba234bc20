"""HMM: a chain of latents, one per position."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from bytejax.circuits.base import Circuit, Reduce, Walk, pick, posterior, transition


@dataclasses.dataclass(frozen=True)
class HMM(Circuit):
    """Inhomogeneous hidden Markov model (MtPC, Eq. HMM).

    q(x) = sum_z w[z_1] phi_{1,z_1}(x_1) prod_{i<n} A_i[z_i, z_{i+1}] phi_{i+1,z_{i+1}}(x_{i+1})

    sums [..., 1 + (n-1) r, r]: row 0 the law of z_1, then transition i = 1..n-1, one row per value of z_i.
    """

    name: ClassVar[str] = "hmm"
    window: int
    rank: int

    @property
    def blocks(self) -> int:
        return self.window

    def blocks_above(self, places: int) -> tuple[int, ...]:
        return tuple(range(places))

    def begin(self, sums: jax.Array) -> Walk:
        return Walk(sums[..., 0, :])

    def advance(self, sums: jax.Array, walk: Walk, i: int, scores: jax.Array) -> Walk:
        return Walk(transition(posterior(walk.prior, scores), self._block(sums, i + 1)))

    def _upward(self, sums: jax.Array, scores: jax.Array, reduce: Reduce) -> jax.Array:
        message = scores[..., -1, :]
        for i in reversed(range(1, self.window)):
            message = scores[..., i - 1, :] + reduce(i, self._block(sums, i) + message[..., None, :])
        return reduce(0, self._block(sums, 0) + message[..., None, :])[..., 0]

    def _leaf_latents(self, choice: jax.Array) -> jax.Array:
        latents = [choice[..., :1]]
        for i in range(1, self.window):
            latents.append(pick(choice, self.block_rows(i).start + latents[-1]))
        return jnp.concatenate(latents, -1)

    def _condition_sums(self, sums: jax.Array, scores: jax.Array) -> jax.Array:
        return sums.at[..., 0, :].set(posterior(sums[..., 0, :], scores))
