"""BTree: latents in a balanced binary tree over the positions."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from bytejax.circuits.base import Circuit, Reduce, Walk, log_sum_exp, pick, posterior, transition

Region = tuple[int, int]  # positions [start, stop)


def halves(region: Region) -> tuple[Region, Region]:
    """Where a region is split: the left half gets round(size / 2) positions, a tie going to the even size."""
    start, stop = region
    middle = start + round((stop - start) / 2)
    return (start, middle), (middle, stop)


def is_leaf(region: Region) -> bool:
    return region[1] - region[0] == 1


@functools.cache
def inner_levels(window: int) -> tuple[tuple[Region, ...], ...]:
    """The regions of more than one position, level by level from the root, each level from left to right."""
    level, levels = [(0, window)], []
    while level := [region for region in level if not is_leaf(region)]:
        levels.append(tuple(level))
        level = [half for region in level for half in halves(region)]
    return tuple(levels)


@functools.cache
def block_of(window: int) -> dict[Region, int]:
    """Index of each inner region's block of sums: breadth first, the root's is 0."""
    return {region: k for k, region in enumerate(region for level in inner_levels(window) for region in level)}


def _around(window: int, leaf: int) -> list[Region]:
    """The inner regions that hold a leaf, from the root down."""
    return [region for level in inner_levels(window) for region in level if region[0] <= leaf < region[1]]


@dataclasses.dataclass(frozen=True)
class BTree(Circuit):
    """Latent tree: c_R[y] = sum_z B_R[y, z] c_left[z] c_right[z], y the latent of the region above (MtPC, Eq. BTree).

    A region of one position is a leaf and is indexed by its parent's latent, so the two bytes of a region of two share
    one latent.

    sums [..., 1 + max(n-2, 0) r, r]: row 0 the root mixture, then the other inner regions breadth first (depth, start),
    one row per value of the parent's latent.
    """

    name: ClassVar[str] = "btree"
    window: int
    rank: int

    @property
    def blocks(self) -> int:
        return max(self.window - 1, 1)

    def blocks_above(self, places: int) -> tuple[int, ...]:
        return tuple(k for (start, _), k in block_of(self.window).items() if start < places) or (0,)

    def blocks_of(self, shorter: Circuit) -> dict[int, int]:
        own = block_of(self.window)
        return {k: own[region] for region, k in block_of(shorter.window).items() if region in own}

    def begin(self, sums: jax.Array) -> Walk:
        return self._enter(sums, (0, self.window), sums[..., 0, :], ())

    def advance(self, sums: jax.Array, walk: Walk, i: int, scores: jax.Array) -> Walk:
        """`walk.held` has, for every inner region around leaf i, from the root down, the law of its latent while the
        leaf lies in its left half, and what the left half says about its latent after that.
        """
        regions, above = _around(self.window, i), list(walk.held)
        seen = jnp.where((scores > -jnp.inf).any(-1, keepdims=True), scores, 0)  # an impossible byte says nothing
        while True:
            region, kept = regions.pop(), above.pop()
            left, right = halves(region)
            if i < left[1]:
                return self._enter(sums, right, posterior(kept, seen), (*above, seen))
            rows = self._block(sums, block_of(self.window)[region])
            seen = log_sum_exp(rows + (kept + seen)[..., None, :])

    def _enter(self, sums: jax.Array, region: Region, above: jax.Array, held: tuple[jax.Array, ...]) -> Walk:
        """Down to a region's first leaf, given the law of the latent above the region; of the root's, its own."""
        while not is_leaf(region):
            k = block_of(self.window)[region]
            above = transition(above, self._block(sums, k)) if k else above
            held, region = (*held, above), halves(region)[0]
        return Walk(above, held)

    def _upward(self, sums: jax.Array, scores: jax.Array, reduce: Reduce) -> jax.Array:
        def visit(region):
            if is_leaf(region):
                return scores[..., region[0], :]
            left, right = (visit(half) for half in halves(region))
            return close(block_of(self.window)[region], left + right)

        def close(k, below):
            return reduce(k, self._block(sums, k) + below[..., None, :])

        root = visit((0, self.window))
        return (close(0, root) if self.window == 1 else root)[..., 0]

    def _leaf_latents(self, choice: jax.Array) -> jax.Array:
        if self.window == 1:
            return choice
        parent_slot, parent_block = self._wiring()
        latents = [choice[..., :1]]
        for slots, level in zip(parent_slot, inner_levels(self.window)[1:]):
            first = self.block_rows(block_of(self.window)[level[0]]).start
            rows = first + np.arange(len(level)) * self.rank + latents[-1][..., slots]
            latents.append(pick(choice, rows))
        return jnp.concatenate(latents, -1)[..., parent_block]

    def _wiring(self) -> tuple[list[np.ndarray], np.ndarray]:
        """Per level below the root each region's parent within the level above; each leaf's parent among all blocks."""
        parent = {half: region for region in block_of(self.window) for half in halves(region)}
        levels = inner_levels(self.window)
        slots = [
            np.array([above.index(parent[region]) for region in level]) for above, level in zip(levels, levels[1:])
        ]
        return slots, np.array([block_of(self.window)[parent[i, i + 1]] for i in range(self.window)])

    def _condition_sums(self, sums: jax.Array, scores: jax.Array) -> jax.Array:
        # Only the regions above the first leaf change; message is what the region below says about its parent's latent.
        message = scores
        for k in reversed(self.blocks_above(1)):
            rows = self._block(sums, k)
            sums = sums.at[..., self.block_rows(k), :].set(posterior(rows, message[..., None, :]))
            message = log_sum_exp(rows + message[..., None, :])
        return sums
