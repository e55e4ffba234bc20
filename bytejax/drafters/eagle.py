"""EAGLE-3 as a drafter: a small layer writes on from the target's features, and the likeliest texts make a tree.

The head is that of EAGLE-3 (arXiv 2503.01840, `eagle_head`), the tree that of EAGLE-2 (arXiv 2406.16858): level by
level the `beam` likeliest nodes are expanded, each by its `beam` likeliest ids, and of everything seen the likeliest
nodes are proposed. A path's probability only falls as it gets longer, so a node's parent is among them.

Letters: B batch, N block rows, M positions that a cycle can add, W beam, C candidates, S slots, D model width,
V vocabulary.
"""

import jax
import jax.numpy as jnp
from flax import struct

from bytejax.drafters import eagle_head
from bytejax.drafters.base import Draft, Drafter
from bytejax.drafters.eagle_head import EagleConfig
from bytejax.errors import InputError, check_integer
from bytejax.models import layers as L  # noqa: N812
from bytejax.models.base import Block, Target
from bytejax.parameters import Params

WAITING = ("features", "ids", "begin", "count")  # fields of a state that follow what was accepted


class State(struct.PyTreeNode):
    """What is known of the committed text.

    k, v: the layer's keys and values (`layers.kv_layout`), column j in slot j; the last slots are scratch for drafts.
    features: [B, M, D], of the newest positions, whose columns wait for the id after the last of them, the root.
    ids: [B, M] int32, at those positions. begin, count: [B] int32, the first of them, and how many there are.
    """

    k: jax.Array
    v: jax.Array
    features: jax.Array
    ids: jax.Array
    begin: jax.Array
    count: jax.Array


class Grown(struct.PyTreeNode):
    """The candidates, level by level, and what was computed for them.

    scores: [B, C] float32, log-probabilities of whole paths; ids: [B, C]; parents: [B, C] int32, among the candidates,
        -1 for the root. Level 1 has W of them, every other one W * W.
    outputs: [B, 1 + (depth - 1) * W, D], the layer's for the root and every expanded node.
    k, v: the cache, with the columns that had waited.
    """

    scores: jax.Array
    ids: jax.Array
    parents: jax.Array
    outputs: jax.Array
    k: jax.Array
    v: jax.Array


class Eagle(Drafter):
    """Drafts a tree that depends on the text. Made by `create`.

    params: of the head (`eagle_head.table`). embedding: [V, D], the target's. beam, depth, nodes: see `create`.
    """

    params: Params
    embedding: jax.Array
    config: EagleConfig = struct.field(pytree_node=False)
    beam: int = struct.field(pytree_node=False)
    depth: int = struct.field(pytree_node=False)
    nodes: int = struct.field(pytree_node=False)

    @classmethod
    def create(
        cls, params: Params, config: EagleConfig, target: Target, beam: int = 8, depth: int = 8, nodes: int = 32
    ) -> "Eagle":
        """A drafter for the target that the head belongs to.

        beam: nodes expanded per level, and children tried of each. depth: levels of drafts, of which the first comes
        from the root's pass of the layer and each further one from a pass over `beam` rows. nodes: rows of a block, the
        root among them. Raises InputError for sizes that make no tree.
        """
        config.check(target)
        for name, value, least in (("beam", beam, 1), ("depth", depth, 1), ("nodes", nodes, 2)):
            check_integer(f"EAGLE: {name}", value, least)
        if beam > config.vocab:
            raise InputError(f"EAGLE: beam = {beam} is more than the target's {config.vocab} ids")
        if nodes - 1 > (most := beam + (depth - 1) * beam**2):
            raise InputError(f"EAGLE: beam {beam} and depth {depth} try {most} drafts, too few for {nodes} nodes")
        return cls(params, target.embedding_table(), config, beam, depth, nodes)

    @property
    def block_width(self) -> int:
        return self.nodes

    @property
    def proposes_chains(self) -> bool:
        return False

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    def check(self, target: Target) -> None:
        super().check(target)
        self.config.check(target)

    def init(self, target, prompt):
        """Keys and values of all columns whose next id is known; attention is not needed for them."""
        (b, t), c = prompt.ids.shape, self.config
        at = jnp.arange(t)[None]
        g = eagle_head.features(self.params, prompt.extended.taps["inner"])
        following = jnp.pad(prompt.ids[:, 1:], ((0, 0), (0, 1)))
        rows = L.kv_layout(*eagle_head.keys_values(self.params, c, self._inputs(following, g), at))
        slots = prompt.capacity + self._longest + self._scratch
        empty = ((c.head_dim, slots), (slots, c.head_dim))
        empty = (jnp.zeros((*L.kv_front(c.kv_heads, b), *shape), self.embedding.dtype) for shape in empty)
        put = lambda slots, rows: jax.lax.dynamic_update_slice(slots, rows.astype(slots.dtype), (0,) * slots.ndim)
        k, v = map(put, empty, rows)
        last = (prompt.lengths - 1).astype(jnp.int32)
        waiting = lambda rows: jnp.take_along_axis(rows, last.reshape(b, 1, *(1,) * (rows.ndim - 2)), axis=1)
        wide = lambda row: jnp.repeat(waiting(row), self._longest, axis=1)
        return State(k, v, wide(g), wide(prompt.ids), last, jnp.ones_like(last))

    def propose(self, state, root, keys, warp):
        grown = self.grow(state, root, warp)
        chosen = jnp.sort(jax.lax.top_k(grown.scores, self.nodes - 1)[1], axis=1)  # levels, and so parents, come first
        of = lambda x: jnp.take_along_axis(x, chosen, axis=1)
        parents = jnp.sum(chosen[:, None] <= of(grown.parents)[..., None], axis=-1, dtype=jnp.int32)
        ids = jnp.concatenate([root[:, None], of(grown.ids)], axis=1)
        parents = jnp.pad(parents, ((0, 0), (1, 0)))
        return Draft(Block.tree(ids, parents, levels=self.depth + 1), memory=(grown.k, grown.v))

    def observe(self, state, target, outcome):
        k, v = outcome.draft.memory
        path, accepted = outcome.path[:, : self._longest], outcome.accepted
        path = jnp.pad(path, ((0, 0), (0, self._longest - path.shape[1])))
        inner = jnp.take_along_axis(outcome.extended.taps["inner"], path[..., None], axis=1)
        ids = jnp.take_along_axis(outcome.draft.block.ids, path, axis=1)
        moved = state.replace(
            features=eagle_head.features(self.params, inner),
            ids=ids,
            begin=state.begin + state.count,
            count=accepted.astype(jnp.int32),
        )
        stays = accepted == 0  # a row that has ended: the columns are then written again, where they are
        choose = lambda new, old: jnp.where(stays.reshape(-1, *(1,) * (old.ndim - 1)), old, new)
        fields = {name: choose(getattr(moved, name), getattr(state, name)) for name in WAITING}
        return state.replace(k=k, v=v, **fields)

    def grow(self, state: State, root: jax.Array, warp) -> Grown:
        """One pass of the layer for the root [B], then one over `beam` rows per further level."""
        g, k, v, length = self._catch_up(state, root)
        b, w = len(root), self.beam
        best, ids = jax.lax.top_k(self._law(g, warp)[:, 0], w)
        first = jnp.full((b, w), -1, jnp.int32)
        if self.depth == 1:
            return Grown(best, ids, first, g, k, v)

        def deeper(carry, level):
            """Expands the beam: its nodes' ids, the features of their parents, and which scratch slots each sees."""
            k, v, scores, ids, at, g, seen = carry
            own = jnp.arange(self._scratch) == level * w + jnp.arange(w)[:, None]
            seen = seen | own
            g, k, v = self._pass(ids, g, k, v, length, level, seen)
            tried, children = jax.lax.top_k(self._law(g, warp), w)
            tried, children = (scores[..., None] + tried).reshape(b, -1), children.reshape(b, -1)
            parents = jnp.repeat(at, w, axis=1)
            scores, chosen = jax.lax.top_k(tried, w)
            of = lambda x: jnp.take_along_axis(x, (chosen // w).reshape(b, w, *(1,) * (x.ndim - 2)), axis=1)
            beam = (scores, jnp.take_along_axis(children, chosen, axis=1), w + level * w**2 + chosen, of(g), of(seen))
            return (k, v, *beam), (tried, children, parents, g)

        nothing = jnp.zeros((b, w, self._scratch), bool)
        at = jnp.broadcast_to(jnp.arange(w, dtype=jnp.int32), (b, w))
        begin = (k, v, best, ids, at, jnp.repeat(g, w, axis=1), nothing)
        (k, v, *_), levels = jax.lax.scan(deeper, begin, jnp.arange(self.depth - 1, dtype=jnp.int32))
        joined = lambda x, rest: jnp.concatenate([x, jnp.moveaxis(rest, 0, 1).reshape(b, -1, *rest.shape[3:])], axis=1)
        return Grown(*map(joined, (best, ids, first, g), levels), k, v)

    def _catch_up(self, state: State, root: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Writes the waiting columns, now that the last one's next id, the root, is known.

        -> the layer's output for that one [B, 1, D], k, v, and the number of columns [B]. Only it needs attention.
        """
        p, c, last = self.params, self.config, (state.count - 1)[:, None]
        following = jnp.where(jnp.arange(self._longest) == last, root[:, None], jnp.roll(state.ids, -1, axis=1))
        h = self._inputs(following, state.features)
        positions = state.begin[:, None] + jnp.arange(self._longest)
        k_rows, v_rows = L.kv_layout(*eagle_head.keys_values(p, c, h, positions))
        k = L.write_rows(state.k, k_rows, state.begin, axis=-1)
        v = L.write_rows(state.v, v_rows, state.begin, axis=-2)
        row = lambda x: jnp.take_along_axis(x, last[..., None], axis=1)
        length = state.begin + state.count
        q = eagle_head.queries(p, c, row(h), length[:, None] - 1)
        mixed = L.attend(q, k, v, jnp.arange(v.shape[-2]) < length[:, None, None])
        return eagle_head.after_attention(p, c, row(state.features), mixed), k, v, length

    def _pass(self, ids, g, k, v, length, level, seen):
        """The layer on the beam's rows at one level: their outputs [B, W, D], k, v. seen [B, W, scratch] bool."""
        p, c, base = self.params, self.config, v.shape[-2] - self._scratch
        h, positions = self._inputs(ids, g), (length + level)[:, None]
        k_rows, v_rows = L.kv_layout(*eagle_head.keys_values(p, c, h, positions))
        start = base + level * self.beam
        k = jax.lax.dynamic_update_slice_in_dim(k, k_rows.astype(k.dtype), start, -1)
        v = jax.lax.dynamic_update_slice_in_dim(v, v_rows.astype(v.dtype), start, -2)
        committed = jnp.broadcast_to(jnp.arange(base) < length[:, None, None], (*ids.shape, base))
        mask = jnp.concatenate([committed, seen], axis=-1)
        mixed = L.attend(eagle_head.queries(p, c, h, positions), k, v, mask)
        return eagle_head.after_attention(p, c, g, mixed), k, v

    def _inputs(self, ids: jax.Array, g: jax.Array) -> jax.Array:
        return eagle_head.inputs(self.params, self.config, jnp.take(self.embedding, ids, axis=0), g)

    def _law(self, g: jax.Array, warp) -> jax.Array:
        return warp.log_probs(eagle_head.logits(self.params, self.config, g))

    @property
    def _longest(self) -> int:
        """Most rows of a path."""
        return self.depth + 1

    @property
    def _scratch(self) -> int:
        """Slots for the rows of the expanded nodes."""
        return (self.depth - 1) * self.beam
