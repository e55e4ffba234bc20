"""STAND (arXiv 2506.04708): n-gram tables of the target's own probabilities, and trees drawn from them.

For every n-gram of several orders a table on device keeps the likeliest next ids and what the target gave them when it
last saw that n-gram. A node's children are its longest known suffix's ids, in sampling drawn without replacement by the
Gumbel trick; recursive rejection then judges them in that order.

Letters: B batch, N nodes, O orders, H slots, M ids per slot, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from bytejax.drafters import shapes
from bytejax.drafters.base import Children, Draft, Drafter, Warp
from bytejax.drafters.shapes import Shape
from bytejax.drafters.text import Text
from bytejax.errors import ROWS, InputError, check_flag, check_integer, check_integers
from bytejax.models.base import Block, Target

# What trees are made from unless told better: a next rank is right a fifth as often, few chains are longer than 12.
ACCURACIES = tuple(tuple(0.62 * 0.97**d * 0.22**r for r in range(6)) for d in range(12))
MULTIPLIERS = np.random.default_rng(0).integers(1, 2**31, 16).astype(np.uint32) * 2 + 1


class Tables(struct.PyTreeNode):
    """check: [B, O, H] uint32, which n-gram a slot belongs to, 0 for none; a new one takes the slot of another.

    ids [B, O, H, M] int32 and probs [B, O, H, M] float32, 0 where there is no id. seen: [B, O, H] int32.
    """

    check: jax.Array
    ids: jax.Array
    probs: jax.Array
    seen: jax.Array


class State(struct.PyTreeNode):
    text: Text
    tables: Tables


class Stand(Drafter):
    """Drafts trees of a static shape. Made by `create`. Every row of a batch has tables of its own."""

    shape: Shape = struct.field(pytree_node=False)
    orders: tuple[int, ...] = struct.field(pytree_node=False)
    slots: int = struct.field(pytree_node=False)
    kept: int = struct.field(pytree_node=False)
    from_prompt: bool = struct.field(pytree_node=False)

    @classmethod
    def create(
        cls,
        budget: int = 30,
        orders: tuple[int, ...] | list[int] = (4, 3, 2, 1),
        slots: int = 4096,
        kept: int = 10,
        from_prompt: bool = True,
        accuracies: list[list[float]] | None = None,
    ) -> "Stand":
        """budget: rows of a block. orders: lengths of n-grams, the longest first. slots, kept: H, M. from_prompt: the
        tables start with the prompt's ids, each as certain as can be. accuracies: what the tree is made from
        (`shapes.likeliest`). Raises InputError.
        """
        for name, value, least, most in (
            ("budget", budget, 2, ROWS),
            ("slots", slots, 1, 2**24),
            ("kept", kept, 1, ROWS),
        ):
            check_integer(f"stand: {name}", value, least, most)
        check_flag("stand: from_prompt", from_prompt)
        check_integers("stand: orders", orders, 1)
        if max(orders) > (longest := len(MULTIPLIERS)):
            raise InputError(f"stand: orders are lengths from 1 to {longest}, got {orders!r}")
        shape = shapes.likeliest(ACCURACIES if accuracies is None else accuracies, budget)
        if shape.most_children > kept:
            raise InputError(f"stand: a node of the tree has {shape.most_children} children, a slot keeps {kept} ids")
        return cls(shape, tuple(sorted(set(orders), reverse=True)), slots, kept, from_prompt)

    @property
    def block_width(self) -> int:
        return self.shape.nodes

    @property
    def proposes_chains(self) -> bool:
        return False

    @property
    def rules(self) -> tuple[str, ...]:
        return ("recursive", "match")

    def check(self, target: Target) -> None:
        super().check(target)
        if self.kept > target.vocab:
            raise InputError(f"stand: kept = {self.kept} is more than the target's {target.vocab} ids")

    def init(self, target, prompt):
        b, o = len(prompt.ids), len(self.orders)
        tables = Tables(
            jnp.zeros((b, o, self.slots), jnp.uint32),
            jnp.zeros((b, o, self.slots, self.kept), jnp.int32),
            jnp.zeros((b, o, self.slots, self.kept), jnp.float32),
            jnp.zeros((b, o, self.slots), jnp.int32),
        )
        text = Text.of(prompt, self.block_width + 1)
        if self.from_prompt:
            certain = jnp.zeros((b, self.kept)).at[:, 0].set(1.0)

            def add(i, tables):
                before = text.replace(count=jnp.full((b,), i, jnp.int32)).last(self.orders[0])
                ids = jnp.zeros((b, self.kept), jnp.int32).at[:, 0].set(text.ids[:, i])
                return self._learn(tables, before, ids, certain, i < prompt.lengths)

            tables = jax.lax.fori_loop(1, prompt.ids.shape[1], add, tables)
        return State(text, tables)

    def propose(self, state, root, keys, warp):
        shape, b, m = self.shape, len(root), self.kept
        context = jnp.zeros((b, shape.nodes, self.orders[0]), jnp.int32)
        context = context.at[:, 0].set(state.text.then(root).last(self.orders[0]))
        ids, valid = root[:, None], jnp.ones((b, 1), bool)
        laws = Children(jnp.zeros((b, shape.nodes, m), jnp.int32), jnp.full((b, shape.nodes, m), -jnp.inf))
        depths, ranks, parents = (np.asarray(x) for x in (shape.depths, shape.ranks, shape.parents))
        for depth in range(shape.depth):
            rows = np.flatnonzero(depths == depth)
            known, log_probs = jax.vmap(self._look_up, (None, 1), 1)(state.tables, context[:, rows])
            order = jnp.argsort(-self._perturbed(log_probs, keys, depth, warp), axis=-1)
            known, log_probs = (jnp.take_along_axis(x, order, axis=-1) for x in (known, log_probs))
            laws = Children(laws.ids.at[:, rows].set(known), laws.log_q.at[:, rows].set(log_probs))
            below = np.flatnonzero(depths == depth + 1)
            at = np.searchsorted(rows, parents[below]), ranks[below]
            ids = jnp.concatenate([ids, known[:, *at]], axis=1)
            valid = jnp.concatenate([valid, valid[:, parents[below]] & jnp.isfinite(log_probs[:, *at])], axis=1)
            grown = jnp.concatenate([known[:, *at][..., None], context[:, parents[below], :-1]], axis=-1)
            context = context.at[:, below].set(grown)
        return Draft(Block.tree(ids, shape.parents, valid=valid), children=laws)

    def observe(self, state, target, outcome):
        """Learns from the committed rows, one after the other, and only as many as there are."""
        laws, text = outcome.laws, state.text

        def add(i, carry):
            tables, text = carry
            row = jax.lax.dynamic_index_in_dim(outcome.path, i, axis=1, keepdims=False)
            law = jnp.take_along_axis(laws, row[:, None, None], axis=1)[:, 0]
            best, ids = jax.lax.top_k(law, self.kept)
            probs = jnp.exp(best - jax.nn.logsumexp(law, axis=-1, keepdims=True))
            now = i < outcome.accepted
            id_here = jax.lax.dynamic_index_in_dim(outcome.ids, i, axis=1, keepdims=False)
            text = jax.tree.map(
                lambda a, b: jnp.where(now.reshape(-1, *(1,) * (a.ndim - 1)), a, b), text.then(id_here), text
            )
            return self._learn(tables, text.last(self.orders[0]), ids, probs, now), text

        tables, text = jax.lax.fori_loop(0, outcome.accepted.max(), add, (state.tables, text))
        return State(text, tables)

    def _perturbed(self, log_probs: jax.Array, keys: jax.Array, depth: int, warp: Warp) -> jax.Array:
        """What children are ordered by: in sampling, Gumbel noise makes it a draw without replacement."""
        if warp.greedy:
            return log_probs
        noise = lambda key: jax.random.gumbel(jax.random.fold_in(key, depth), log_probs.shape[1:])
        return log_probs + jax.vmap(noise)(keys)

    def _hashes(self, context: jax.Array) -> jax.Array:
        """Of the newest n ids for every order n, 0 if shorter. context [B, n], newest first -> [B, O]."""
        mixed = (context.astype(jnp.uint32) + 1) * MULTIPLIERS[: context.shape[1]]
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(2654435761)
        sums = jnp.cumsum(mixed ^ (mixed >> 13), axis=1)
        ends = np.asarray(self.orders) - 1
        there = context[:, ends] >= 0
        return jnp.where(there, jnp.maximum(sums[:, ends], 1), 0)

    def _look_up(self, tables: Tables, context: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Ids and log-probabilities [B, M] after the longest known suffix of a context, normalised; -inf for none."""
        hashes = self._hashes(context)
        batch, order = jnp.arange(len(hashes))[:, None], jnp.arange(len(self.orders))
        slot = (hashes % self.slots).astype(jnp.int32)
        hit = (tables.check[batch, order, slot] == hashes) & (hashes > 0)
        longest = jnp.argmax(hit, axis=1)
        at = batch[:, 0], longest, jnp.take_along_axis(slot, longest[:, None], axis=1)[:, 0]
        probs = jnp.where(hit.any(-1)[:, None], tables.probs[at], 0)
        total = probs.sum(-1, keepdims=True)
        return tables.ids[at], jnp.log(probs / jnp.where(total > 0, total, 1))

    def _learn(self, tables: Tables, context, ids, probs, where) -> Tables:
        """Takes in what follows a context [B, n]: ids and probs [B, M]. The c-th time counts 1 / c."""
        hashes = self._hashes(context)
        batch, order = jnp.arange(len(hashes))[:, None], jnp.arange(len(self.orders))
        slot = (hashes % self.slots).astype(jnp.int32)
        known = (tables.check[batch, order, slot] == hashes)[..., None]
        seen = jnp.where(known[..., 0], tables.seen[batch, order, slot], 0)
        share = (1 / (1 + seen))[..., None]
        old_ids, old = tables.ids[batch, order, slot], jnp.where(known, tables.probs[batch, order, slot], 0)
        equal = (old_ids[..., :, None] == ids[:, None, None, :]) & (old > 0)[..., None]
        kept = (1 - share) * old + share * jnp.where(equal, probs[:, None, None, :], 0).sum(-1)
        kept = jnp.where(old > 0, kept, 0)
        added = jnp.where(equal.any(-2), 0, share * probs[:, None])
        both = jnp.concatenate([kept, added], axis=-1)
        both_ids = jnp.concatenate([old_ids, jnp.broadcast_to(ids[:, None], old_ids.shape)], axis=-1)
        best, index = jax.lax.top_k(both, self.kept)
        slot = jnp.where(where[:, None] & (hashes > 0), slot, self.slots)  # out of bounds: dropped
        put = lambda table, new: table.at[batch, order, slot].set(new, mode="drop")
        return Tables(
            put(tables.check, hashes),
            put(tables.ids, jnp.take_along_axis(both_ids, index, axis=-1)),
            put(tables.probs, best),
            put(tables.seen, seen + 1),
        )
