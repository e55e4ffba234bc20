"""The text so far, on device, for drafters that look into it. Letters: B batch, S places."""

import jax
import jax.numpy as jnp
from flax import struct

from bytejax.drafters.base import Outcome, Prompt


class Text(struct.PyTreeNode):
    """ids: [B, S] int32, those of the committed positions, then leftovers; count: [B] int32, how many are committed."""

    ids: jax.Array
    count: jax.Array

    @classmethod
    def of(cls, prompt: Prompt, spare: int) -> "Text":
        """The prompt, with room for every text that the cache can hold and `spare` places after it."""
        ids = jnp.pad(prompt.ids, ((0, 0), (0, prompt.capacity + spare - prompt.ids.shape[1])))
        return cls(ids, prompt.lengths.astype(jnp.int32))

    def append(self, outcome: Outcome) -> "Text":
        """With what a cycle has committed; its block has at most `spare` rows that may be emitted."""
        return Text(_put(self.ids, outcome.ids, self.count), self.count + outcome.accepted)

    def then(self, root: jax.Array) -> "Text":
        """With the root [B], which is not committed yet, after it."""
        return Text(_put(self.ids, root[:, None], self.count), self.count + 1)

    def last(self, n: int) -> jax.Array:
        """The newest n ids, newest first, -1 before the start. -> [B, n]."""
        place = self.count[:, None] - 1 - jnp.arange(n)
        return jnp.where(place >= 0, jnp.take_along_axis(self.ids, jnp.maximum(place, 0), axis=1), -1)


def _put(ids, rows, starts):
    return jax.vmap(lambda a, b, at: jax.lax.dynamic_update_slice(a, b, (at,)))(ids, rows, starts)
