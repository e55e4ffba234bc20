"""A small model as the drafter of a large one (Leviathan et al. 2023; Chen et al. 2023, arXiv 2302.01318).

The model writes K tokens one after the other, with a cache of its own, which stays one position behind the target's. So
a cycle begins with a pass over the newest committed token and the root together: after a fully accepted chain, whose
last draft the model has not processed yet, as after any other. K passes of the small model make K drafts.

Letters: B batch, K drafts, V vocabulary.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from bytejax.drafters.base import Draft, Drafter, Prompt, Warp
from bytejax.errors import InputError
from bytejax.models.base import Block, Extended, Target, newest
from bytejax.models.llama import Llama
from bytejax.tokenizers import Tokenizer


class State(struct.PyTreeNode):
    """cache: the draft model's, without the newest committed token, which is last [B] int32."""

    cache: Any
    last: jax.Array


class Memory(struct.PyTreeNode):
    """cache: the draft model's with drafts that may not stay. places: what it was to hold after 0, 1, ... rows of the
    block, stacked: a cache is rewound by putting its earlier place back (`transformer.Cache.place`).
    """

    cache: Any
    places: dict[str, jax.Array]


class DraftModel(Drafter):
    """Drafts a chain that a smaller model of the same ids writes. Made by `create`.

    model: a Llama, Qwen3 or byte-ified Llama, whose caches can be rewound. Its drafts are arg-maxes in greedy decoding,
    else drawn from its law, warped like the target's.
    """

    model: Llama
    draft_tokens: int = struct.field(pytree_node=False)

    @classmethod
    def create(cls, model: Target, draft_tokens: int = 4) -> "DraftModel":
        """Raises InputError for a model that cannot draft, or a number that is none."""
        if not isinstance(model, Llama):
            raise InputError(
                f"the cache of the draft model, {type(model).__name__}, cannot be rewound; a Llama, Qwen3 or "
                "byte-ified Llama can draft"
            )
        if isinstance(draft_tokens, bool) or not isinstance(draft_tokens, int) or draft_tokens < 1:
            raise InputError(f"draft_tokens = {draft_tokens!r} must be a whole number of at least 1")
        return cls(model, draft_tokens)

    @property
    def block_width(self) -> int:
        return self.draft_tokens + 1

    @property
    def rules(self) -> tuple[str, ...]:
        return ("block", "token", "match")

    def check(self, target: Target) -> None:
        super().check(target)
        ours, theirs = self.model.tokenizer, target.tokenizer
        names = f"{type(ours).__name__} of {self.model.vocab} ids", f"{type(theirs).__name__} of {target.vocab} ids"
        if self.model.vocab < target.vocab:
            raise InputError(f"the draft model ({names[0]}) lacks ids of the target ({names[1]})")
        if (i := _first_difference(ours, theirs, target.vocab)) is not None:
            a, b = ours.to_bytes([i]), theirs.to_bytes([i])
            raise InputError(f"id {i} is {a!r} to the draft model ({names[0]}) and {b!r} to the target ({names[1]})")

    def init(self, target: Target, prompt: Prompt) -> State:
        empty = self.model.init_cache(len(prompt.ids), prompt.capacity, self.block_width)
        before = prompt.lengths - 1
        _, cache = self.model.prefill(prompt.ids, jnp.maximum(before, 1), empty)
        any_before = lambda x, y: jnp.where((before > 0).reshape(-1, *(1,) * (x.ndim - 1)), x, y)
        last = jnp.take_along_axis(prompt.ids, before[:, None], axis=1)[:, 0]
        return State(cache.replace(**jax.tree.map(any_before, cache.place(), empty.place())), last)

    def propose(self, state, root, keys, warp):
        cache, first = state.cache, Block.chain(jnp.stack([state.last, root], axis=1))
        extended = self.model.extend(first, cache)
        behind, cache = (self._kept(cache, first, extended, rows) for rows in (1, 2))
        draft, law = self._choose(extended.hidden[:, 1], keys, 0, warp)

        def write(carry, number):
            cache, before = carry
            block = Block.chain(before[:, None])
            extended = self.model.extend(block, cache)
            cache = self._kept(cache, block, extended, 1)
            draft, law = self._choose(extended.hidden[:, 0], keys, number, warp)
            return (cache, draft), (draft, law, cache.place())

        places = [x.place() for x in (state.cache, behind, cache)]
        (cache, _), later = jax.lax.scan(write, (cache, draft), jnp.arange(1, self.draft_tokens))
        drafts, laws, places = _in_front([draft], later[0]), _in_front([law], later[1]), _in_front(places, later[2])
        block = Block.chain(jnp.concatenate([root[None], drafts]).T)
        return Draft(block, None if warp.greedy else laws.swapaxes(0, 1), memory=Memory(cache, places))

    def _kept(self, cache: Any, block: Block, extended: Extended, rows: int) -> Any:
        """The cache with the first rows of a chain."""
        path = jnp.broadcast_to(jnp.arange(block.width, dtype=jnp.int32), block.ids.shape)
        return self.model.commit(cache, extended.pending, path, jnp.full_like(cache.lengths, rows))

    def _choose(self, hidden: jax.Array, keys: jax.Array, number: jax.Array | int, warp: Warp):
        """The next draft [B] after hidden [B, D] and, where it is sampled, its law [B, V]."""
        law = warp.log_probs(self.model.unembed(hidden))
        if warp.greedy:
            return jnp.argmax(law, -1).astype(jnp.int32), None
        fresh = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
        return jax.vmap(jax.random.categorical)(fresh, law).astype(jnp.int32), law

    def observe(self, state, target, outcome):
        memory, accepted = outcome.draft.memory, outcome.accepted
        reached = lambda x: jnp.take_along_axis(x, accepted.reshape(1, -1, *(1,) * (x.ndim - 2)), axis=0)[0]
        cache = memory.cache.replace(**jax.tree.map(reached, memory.places))
        return State(cache, newest(outcome.draft.block.ids, outcome.path, accepted, state.last))


def _in_front(ones: list[Any], stacked: Any) -> Any:
    """Pytrees, in order, before the stacked ones that a scan returned."""
    return jax.tree.map(lambda *x: jnp.concatenate([jnp.stack(x[:-1]), x[-1]]), *ones, stacked)


@functools.lru_cache(maxsize=8)
def _first_difference(ours: Tokenizer, theirs: Tokenizer, vocab: int) -> int | None:
    """The first id that stands for other bytes."""
    if ours == theirs:
        return None
    return next((i for i in range(vocab) if ours.to_bytes([i]) != theirs.to_bytes([i])), None)
