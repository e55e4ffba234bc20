"""What decoding needs from a target model: blocks, caches, and the six operations every target has.

Letters: B batch, T time, N block rows, D model width, V vocabulary.
"""

import abc
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from bytejax.errors import InputError
from bytejax.tokenizers import Tokenizer


class Block(struct.PyTreeNode):
    """The provisional rows of one cycle.

    Row 0 is the root: emitted, not yet processed; or the first draft, where everything emitted has been processed (see
    `decoding.loop.BONUS`). Every other row continues the text that ends in its parent row, which
    comes before it. A row's depth gives its position: `cache.lengths + depth`.

    ids: [B, N] int32.
    parents: [B, N] int32; the root is its own parent.
    valid: [B, N] bool, False for rows that are there only to fill the block; a valid row has a valid parent.
    is_draft: [B, N] bool; False for the root and for rows that are processed but never emitted (masks, windows).
    embeds, embeds_mask: [B, N, D] and [B, N] bool, or None: rows whose input is an embedding instead of an id.
    static_parents: parents where they are the same in every row and known when compiling, else None. Masks and depths
        are then constants, and a chain is committed without moving anything.
    nodes: how many rows, from the front, may be emitted (the root counts); those after them are probes, which are
        processed for what their states tell a drafter. None: all.
    levels: at most so many nodes, the root included, lie on one path. None: as many as there are nodes.
    """

    ids: jax.Array
    parents: jax.Array
    valid: jax.Array
    is_draft: jax.Array
    embeds: jax.Array | None = None
    embeds_mask: jax.Array | None = None
    static_parents: tuple[int, ...] | None = struct.field(pytree_node=False, default=None)
    nodes: int | None = struct.field(pytree_node=False, default=None)
    levels: int | None = struct.field(pytree_node=False, default=None)

    @classmethod
    def chain(cls, ids: jax.Array, draft_len: jax.Array | None = None) -> "Block":
        """Root and drafts in a line.

        ids [B, N]; draft_len [B] int32: how many of the N - 1 drafts count (default all).
        """
        b, n = ids.shape
        parents = chain_parents(n)
        rows = np.arange(n)
        valid = jnp.ones((b, n), bool) if draft_len is None else rows <= draft_len[:, None]
        return cls(
            ids=ids,
            parents=jnp.broadcast_to(jnp.asarray(parents, jnp.int32), (b, n)),
            valid=valid,
            is_draft=valid & (rows > 0),
            static_parents=parents,
        )

    @classmethod
    def tree(
        cls,
        ids: jax.Array,
        parents: tuple[int, ...] | jax.Array,
        nodes: int | None = None,
        valid: jax.Array | None = None,
        **fields,
    ) -> "Block":
        """Root and drafts in a tree; rows from `nodes` on are probes.

        ids [B, N]; parents: the same for all rows and known when compiling, or an array [B, N]; valid [B, N] bool, None
        for all; fields: others.
        """
        static = parents if isinstance(parents, tuple) else None
        row = jnp.arange(ids.shape[1])
        draft = (row > 0) & (row < (ids.shape[1] if nodes is None else nodes))
        valid = jnp.ones(ids.shape, bool) if valid is None else valid
        return cls(
            ids=ids,
            parents=jnp.broadcast_to(jnp.asarray(parents, jnp.int32), ids.shape),
            valid=valid,
            is_draft=valid & draft,
            static_parents=static,
            nodes=nodes,
            **fields,
        )

    @property
    def width(self) -> int:
        return self.ids.shape[1]

    @property
    def front(self) -> "Block":
        """The rows that may be emitted, as a block of their own."""
        n = self.width if self.nodes is None else self.nodes
        cut = lambda x: None if x is None else x[:, :n]
        fields = ("ids", "parents", "valid", "is_draft", "embeds", "embeds_mask")
        static = None if self.static_parents is None else self.static_parents[:n]
        changed = {name: cut(getattr(self, name)) for name in fields}
        return self.replace(**changed, static_parents=static, nodes=None, levels=self.max_levels)

    @property
    def max_levels(self) -> int:
        """At most so many nodes lie on one path."""
        n = self.width if self.nodes is None else self.nodes
        if self.static_parents is not None:
            return int(_static_ancestors(self.static_parents[:n]).sum(-1).max())
        return n if self.levels is None else self.levels

    def cut(self, room: jax.Array) -> "Block":
        """The block without rows at depths from `room` [B] on: they are processed, but count for nothing."""
        kept = self.depths() < room[:, None]
        return self.replace(valid=self.valid & kept, is_draft=self.is_draft & kept)

    @property
    def is_chain(self) -> bool:
        return self.static_parents == chain_parents(self.width)

    def ancestors(self) -> jax.Array:
        """[B or 1, N, N] bool: column is the row itself or one of its ancestors."""
        if self.static_parents is not None:
            return jnp.asarray(_static_ancestors(self.static_parents))[None]
        eye = jnp.eye(self.width, dtype=bool)
        reach = eye | jax.nn.one_hot(self.parents, self.width, dtype=bool)
        for _ in range(max(self.width - 1, 1).bit_length()):
            reach = jnp.einsum("Bij,Bjk->Bik", reach, reach, preferred_element_type=jnp.float32) > 0
        return reach

    def depths(self) -> jax.Array:
        """[B or 1, N] int32: number of proper ancestors."""
        if self.static_parents is not None:
            return jnp.asarray(_static_ancestors(self.static_parents).sum(-1) - 1, jnp.int32)[None]
        return self.ancestors().sum(-1, dtype=jnp.int32) - 1


def newest(rows: jax.Array, path: jax.Array, accepted: jax.Array, before: jax.Array) -> jax.Array:
    """The last accepted row of every row of the batch; `before` [B, ...] where none was.

    rows [B, N, ...], of a block; path [B, nodes] and accepted [B] as in `Target.commit` -> [B, ...].
    """
    spread = lambda x: x.reshape(-1, *(1,) * (before.ndim - 1))
    last = jnp.take_along_axis(path, jnp.maximum(accepted - 1, 0)[:, None], axis=1)
    row = jnp.take_along_axis(rows, last.reshape(-1, *(1,) * (rows.ndim - 1)), axis=1)[:, 0]
    return jnp.where(spread(accepted > 0), row, before)


class Extended(struct.PyTreeNode):
    """What a pass over a block returns.

    hidden: [B, N, D], after the final norm: what `unembed` takes.
    taps: inner features by name, each [B, N, ...], that drafters may ask for: "draft" with an adapter, "inner" with
        taps (see `Target.extend`); of prompts "inner" has all positions, [B, T, ...].
    pending: what `commit` needs to keep an accepted path; its type is the target's own.
    """

    hidden: jax.Array
    taps: dict[str, jax.Array]
    pending: Any


class Target(struct.PyTreeNode, abc.ABC):
    """A language model that can be decoded in blocks. All methods are pure; `params` is a nested dict of arrays.

    Every cache is a pytree of fixed shapes with a field `lengths` [B] int32: the committed positions of each row.
    extras: further fields, saved in files of their own: the name, and a class with `save(path)` and `load(path)`.
    takes_trees: whether a block may be any tree, and have rows that are embeddings; else only a chain of ids.
    """

    extras: ClassVar[dict[str, Any]] = {}
    takes_trees: ClassVar[bool] = False

    params: Any
    config: Any = struct.field(pytree_node=False)
    tokenizer: Tokenizer = struct.field(pytree_node=False)

    @property
    @abc.abstractmethod
    def vocab(self) -> int:
        """Number of ids."""

    @property
    @abc.abstractmethod
    def width(self) -> int:
        """Size of the hidden state."""

    @property
    @abc.abstractmethod
    def context(self) -> int:
        """Largest number of positions, prompt and new bytes together."""

    @abc.abstractmethod
    def init_cache(self, batch: int, capacity: int, block_width: int, adapter: Any = None) -> Any:
        """An empty cache for `capacity` committed positions per row and blocks of up to `block_width` rows.

        adapter: the one that every pass will be given, or None.
        """

    @abc.abstractmethod
    def prefill(
        self, ids: jax.Array, lengths: jax.Array, cache: Any, adapter: Any = None, taps: tuple[int, ...] = ()
    ) -> tuple[Extended, Any]:
        """Processes whole prompts. ids [B, T] int32, padded on the right; lengths [B] int32, each >= 1; cache empty.

        Returns the features of each row's last position (N = 1, nothing pending; the tap "inner" of all positions) and
        the cache with the prompt committed.
        """

    @abc.abstractmethod
    def extend(self, block: Block, cache: Any, adapter: Any = None, taps: tuple[int, ...] = ()) -> Extended:
        """One pass over a block. The cache, as a value, is unchanged: `commit` decides what stays.

        adapter: what makes a second, *draft* stream of the target's last layers (see `models.lora`), with caches of its
        own; its last states are the tap "draft". The target's own stream is as without, up to rounding. None for no
        such stream.
        taps: layers of the target's own stream whose inputs, side by side, are the tap "inner", [B, N, len(taps) * D];
        the number of layers stands for what the last one hands to the final norm. Known when compiling; no tap costs
        nothing.
        """

    @abc.abstractmethod
    def commit(self, cache: Any, pending: Any, path: jax.Array, accepted: jax.Array) -> Any:
        """Keeps the first `accepted` [B] rows of `path` [B, nodes] (indices of block rows, root first) and forgets
        the rest.

        accepted 0 leaves a row of the batch as it was.
        """

    def room(self, cache: Any) -> jax.Array | None:
        """How many positions the next block may add to each row, [B] int32, each >= 1; None where nothing bounds it.

        A pass over a longer block is right up to there. The loop cuts drafts beyond; they are not rejected.
        """
        return None

    @abc.abstractmethod
    def embed(self, ids: jax.Array) -> jax.Array:
        """Input embeddings. ids [...] int32 -> [..., D]."""

    @abc.abstractmethod
    def unembed(self, hidden: jax.Array) -> jax.Array:
        """Logits. hidden [..., D] -> [..., V] float32."""

    @abc.abstractmethod
    def states(self, ids: jax.Array, adapter: Any = None) -> jax.Array:
        """Final hidden states of whole sequences, of the draft stream with an adapter. ids [B, T] int32 -> [B, T, D].

        No cache; differentiable.
        """

    def tapped_states(self, ids: jax.Array, taps: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        """`states` and, side by side, what the layers `taps` read (see `extend`). -> [B, T, D], [B, T, len(taps) * D].

        Raises InputError where the target has no such layers.
        """
        raise InputError(f"a {type(self).__name__} has no layers to tap")

    @property
    def layout_names(self) -> tuple[str, ...]:
        """Memory layouts of the same model that are worth timing one token at a time, its own first."""
        return ("own",)

    def layout_for(self, rows: int) -> str:
        """Which of them suits passes over blocks of so many rows."""
        return self.layout_names[0]

    def in_layout(self, name: str) -> "Target":
        """The same model in one of its layouts; in its own it is itself."""
        return self

    def layouts(self) -> dict[str, "Target"]:
        """The same model in all of its layouts, by name."""
        return {name: self.in_layout(name) for name in self.layout_names}

    def for_blocks(self, rows: int) -> "Target":
        """The same model in the layout that suits blocks of so many rows (`Drafter.block_width`)."""
        return self.in_layout(self.layout_for(rows))

    def logits(self, ids: jax.Array) -> jax.Array:
        """Next-byte logits at every position of whole sequences. ids [B, T] int32 -> [B, T, V] float32."""
        return self.unembed(self.states(jnp.asarray(ids, jnp.int32)))


def chain_parents(n: int) -> tuple[int, ...]:
    """0, 0, 1, 2, ...: each row follows the one before it."""
    return tuple(max(i - 1, 0) for i in range(n))


def _static_ancestors(parents: tuple[int, ...]) -> np.ndarray:
    reach = np.eye(len(parents), dtype=bool)
    for row, parent in enumerate(parents):
        reach[row] |= reach[parent]
    return reach
