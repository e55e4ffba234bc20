"""Embedding-space probing (ESP, arXiv 2603.17942): a frozen target drafts for itself, without any training.

Behind every node of a block stand k *masks*, rows that carry one embedding in place of an id. What the target says
after the masks of the last accepted node are guesses at the ids after next, and make the next block's tree.

Letters: B batch, N nodes, K masks, M candidates per mask, D model width, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from bytejax.drafters import combined, shapes
from bytejax.drafters.base import Draft, Drafter, Prompt, Warp
from bytejax.drafters.ngram import PromptLookup
from bytejax.drafters.shapes import Shape
from bytejax.drafters.text import Text
from bytejax.errors import ROWS, InputError, check_flag, check_integer, check_integers
from bytejax.models.base import Block, Target, newest

STARTS = ("mean", "last", "gaussian", "mu+5", "mu+10")
LAST = 8  # prompt embeddings that "last" averages


class State(struct.PyTreeNode):
    """embedding: [B, D], that of the masks. ids [B, K, M] int32, log_probs [B, K, M]: each mask's best candidates.

    text: for the n-gram lookup, None without one.
    """

    embedding: jax.Array
    ids: jax.Array
    log_probs: jax.Array
    text: Text | None


class Probe(Drafter):
    """Drafts a tree of `nodes` nodes from the masks' candidates. Made by `create`.

    masks: K. shape: a static tree in which each depth hangs from the likeliest candidate of the one before; None for
        the dynamic one, the nodes of the largest cumulative probability (Algorithm 1).
    rate: how far the masks' embedding follows each new id's (Eq. 5). prune: a candidate that repeats the id before it
        is passed over. start: the embedding's first value.
    lookup: n-gram hits come first, and the masks' candidates have the rest of the nodes; only with a dynamic tree.
    least: where no row has a hit or a first candidate of this probability, the cycle drafts nothing; the root keeps its
        masks.
    """

    nodes: int = struct.field(pytree_node=False)
    masks: int = struct.field(pytree_node=False)
    shape: Shape | None = struct.field(pytree_node=False)
    rate: float = struct.field(pytree_node=False)
    prune: bool = struct.field(pytree_node=False)
    start: str = struct.field(pytree_node=False)
    least: float = struct.field(pytree_node=False)
    lookup: PromptLookup | None = None
    candidates: int = struct.field(pytree_node=False, default=0)  # M

    @classmethod
    def create(
        cls,
        budget: int = 30,
        masks: int = 1,
        widths: list[int] | None = None,
        rate: float = 0.1,
        prune: bool = True,
        start: str = "mean",
        least: float = 0.0,
    ) -> "Probe":
        """budget: rows of a block, masks included: (masks + 1) times the nodes. widths: nodes at each depth, 1 + their
        sum times (masks + 1) must be the budget; None for the dynamic tree. Raises InputError.
        """
        for name, value in (("budget", budget), ("masks", masks)):
            check_integer(f"esp: {name}", value, 1, ROWS)
        check_flag("esp: prune", prune)
        nodes = budget // (masks + 1)
        if nodes < 2:
            raise InputError(
                f"esp: budget = {budget} holds no draft; with masks = {masks} it is at least {2 * (masks + 1)}"
            )
        for name, value in (("rate", rate), ("least", least)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise InputError(f"esp: {name} must lie between 0 and 1, got {value!r}")
        if start not in STARTS:
            raise InputError(f"esp: unknown start {start!r}; known: {', '.join(STARTS)}")
        shape = None
        if widths is not None:
            check_integers("esp: widths", widths, 1, budget)
            shape = shapes.spine(widths)
            if shape.nodes != nodes or shape.depth > masks:
                raise InputError(
                    f"esp: widths {list(widths)} make {shape.nodes} nodes of {shape.depth} levels; a budget of "
                    f"{budget} with {masks} masks has {nodes} of at most {masks}"
                )
        return cls(nodes, masks, shape, float(rate), prune, start, float(least), candidates=nodes - 1)

    @property
    def block_width(self) -> int:
        return self.nodes * (1 + self.masks)

    @property
    def proposes_chains(self) -> bool:
        return False

    @property
    def longest(self) -> int:
        """Drafts on the longest path."""
        chain = 0 if self.lookup is None else self.lookup.draft_tokens
        return min(max(self.masks, chain), self.nodes - 1)

    def check(self, target: Target) -> None:
        super().check(target)
        if self.candidates + self.prune > target.vocab:
            raise InputError(f"esp: a tree of {self.nodes} nodes is wider than the target's {target.vocab} ids")

    def fallback(self) -> Drafter | None:
        return self.replace(nodes=1, shape=None) if self.nodes > 1 and self.least > 0 else None

    def worth(self, state, root):
        good = self._pruned(state, root)[1][:, 0, 0] >= jnp.log(self.least)
        return good if self.lookup is None else good | self.lookup.worth(state.text, root)

    def init(self, target, prompt):
        embedding = self._first_embedding(target, prompt)
        b, k = len(prompt.ids), self.masks
        block = Block.chain(jnp.zeros((b, k), jnp.int32))
        shown = jnp.broadcast_to(embedding[:, None], (b, k, embedding.shape[-1]))
        block = block.replace(is_draft=jnp.zeros_like(block.is_draft), embeds=shown, embeds_mask=jnp.ones((b, k), bool))
        hidden = target.extend(block, prompt.cache).hidden
        text = None if self.lookup is None else Text.of(prompt, self.nodes)
        return State(embedding, *self._candidates(target, hidden, prompt.warp), text)

    def propose(self, state, root, keys, warp):
        ids, parents, there = self._tree(state, root)
        b, n, k = len(root), self.nodes, self.masks
        owners = np.concatenate([np.arange(n)[:, None], n + np.arange(n * k).reshape(n, k)[:, :-1]], axis=1).reshape(-1)
        if isinstance(parents, tuple):
            parents = parents + tuple(owners.tolist())
        else:
            parents = jnp.concatenate([parents, jnp.broadcast_to(jnp.asarray(owners, jnp.int32), (b, n * k))], axis=1)
        shown = jnp.broadcast_to(state.embedding[:, None], (b, n * (1 + k), state.embedding.shape[-1]))
        block = Block.tree(
            jnp.pad(ids, ((0, 0), (0, n * k))),
            parents,
            nodes=n,
            valid=None if there is None else jnp.concatenate([there, jnp.repeat(there, k, axis=1)], axis=1),
            levels=self.longest + 1 if n > 1 else 1,
            embeds=shown,
            embeds_mask=jnp.broadcast_to(jnp.arange(n * (1 + k)) >= n, (b, n * (1 + k))),
        )
        return Draft(block)

    def observe(self, state, target, outcome):
        """The head is applied to the masks of the last accepted node alone."""
        k, rows, accepted = self.masks, outcome.extended.hidden, outcome.accepted
        masks = rows[:, self.nodes :].reshape(len(rows), self.nodes, k, -1)
        hidden = newest(masks, outcome.path, accepted, masks[:, 0])
        some, found = (accepted > 0)[:, None, None], self._candidates(target, hidden, outcome.warp)
        ids, log_probs = (
            jnp.where(some, new, old) for new, old in zip(found, (state.ids, state.log_probs), strict=True)
        )
        text = None if state.text is None else state.text.append(outcome)
        return State(self._followed(state.embedding, target, outcome), ids, log_probs, text)

    def _candidates(self, target: Target, hidden: jax.Array, warp: Warp) -> tuple[jax.Array, jax.Array]:
        """Best ids of each mask and their log-probabilities. hidden [B, K, D] -> [B, K, M] each."""
        logits = warp.masked(target.unembed(hidden))
        best, ids = jax.lax.top_k(logits, self.candidates + self.prune)
        return ids, best - jax.nn.logsumexp(logits, axis=-1, keepdims=True)

    def _followed(self, embedding, target, outcome):
        """Each committed id pulls the embedding towards its own, in order."""
        if self.rate == 0:
            return embedding
        n = min(self.longest + 1, outcome.ids.shape[1])
        place, count = jnp.arange(n), outcome.accepted[:, None]
        weights = jnp.where(place < count, self.rate * (1 - self.rate) ** (count - 1 - place), 0)
        new = jnp.einsum("bn,bnd->bd", weights, target.embed(outcome.ids[:, :n]).astype(jnp.float32))
        return ((1 - self.rate) ** count * embedding + new).astype(embedding.dtype)

    def _first_embedding(self, target: Target, prompt: Prompt) -> jax.Array:
        if self.start in ("mean", "last"):
            place, count = jnp.arange(prompt.ids.shape[1]), prompt.lengths[:, None]
            counted = (place < count) & ((place >= count - LAST) | (self.start == "mean"))
            total = jnp.einsum("bt,btd->bd", counted, target.embed(prompt.ids), preferred_element_type=jnp.float32)
            embedding = total / counted.sum(-1, keepdims=True)
        else:
            table = target.embed(jnp.arange(target.vocab)).astype(jnp.float32)
            spread, mean = table.std(0), table.mean(0)
            if self.start == "gaussian":
                draw = mean + spread * jax.random.normal(jax.random.key(0), spread.shape)
            else:
                draw = mean + float(self.start.removeprefix("mu+")) * spread
            embedding = jnp.broadcast_to(draw, (len(prompt.ids), len(draw)))
        return embedding.astype(target.embed(prompt.ids[:, :1]).dtype)

    def _tree(self, state: State, root: jax.Array) -> tuple[jax.Array, tuple[int, ...] | jax.Array, jax.Array | None]:
        """Ids [B, N] of the nodes, their parents, and which of them are there, [B, N] bool; None for all."""
        if self.nodes == 1:
            return root[:, None], (0,), None
        ids, log_probs = self._pruned(state, root)
        if self.shape is not None:
            depths, ranks = np.asarray(self.shape.depths[1:]) - 1, np.asarray(self.shape.ranks[1:])
            return jnp.concatenate([root[:, None], ids[:, depths, ranks]], axis=1), self.shape.parents, None
        if self.masks == 1 and self.lookup is None:
            return jnp.concatenate([root[:, None], ids[:, 0]], axis=1), (0,) * self.nodes, None
        found = self._likeliest(ids, log_probs, root, state)
        front = lambda x, value: jnp.pad(x, ((0, 0), (1, 0)), constant_values=value)
        return front(found.ids, 0).at[:, 0].set(root), front(found.parents, 0), front(found.valid, True)

    def _pruned(self, state: State, root: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The candidates [B, K, N - 1] from the best down, without those that repeat the id before them."""
        if not self.prune:
            return state.ids, state.log_probs
        kept_ids, kept = [], []
        for ids, log_probs in zip(jnp.unstack(state.ids, axis=1), jnp.unstack(state.log_probs, axis=1), strict=True):
            order = jnp.argsort(ids == root[:, None], axis=1, stable=True)[:, : self.candidates]
            kept_ids.append(jnp.take_along_axis(ids, order, axis=1))
            kept.append(jnp.take_along_axis(log_probs, order, axis=1))
            root = kept_ids[-1][:, 0]
        return jnp.stack(kept_ids, 1), jnp.stack(kept, 1)

    def _likeliest(self, ids, log_probs, root, state) -> combined.Nodes:
        """Algorithm 1: the nodes with the largest product of probabilities along their path, after n-gram hits.

        A depth's candidates hang from the best one of the depth before, so that a node's product is never above its
        parent's, and any number of the best ones is a tree.
        """
        b, k, m = ids.shape
        above = jnp.cumsum(log_probs[:, :, 0], axis=1) - log_probs[:, :, 0]
        scores = (log_probs + above[:, :, None]).reshape(b, k * m)
        parents = np.repeat(np.arange(k) * m - m, m)
        parents = jnp.asarray(np.where(parents < 0, -1, parents), jnp.int32)[None]
        candidates = combined.Candidates(ids.reshape(b, k * m), parents, scores, k)
        chain, hits = jnp.zeros((b, 0), jnp.int32), jnp.zeros((b,), jnp.int32)
        if self.lookup is not None:
            chain, hits = self.lookup.find(state.text.then(root))
        return combined.best(candidates, m, chain, hits)


def with_lookup(
    budget: int = 30,
    masks: int = 1,
    rate: float = 0.1,
    prune: bool = True,
    start: str = "mean",
    least: float = 0.0,
    rule: str = "tokens",
    longest: int | None = None,
    shortest: int | None = None,
    draft_tokens: int | None = None,
) -> Probe:
    """N-gram hits first, and the rest of one tree from the masks. Options as in `Probe.create` and
    `PromptLookup.create`; hits take at most half of the nodes unless draft_tokens says how many.
    """
    lookup = PromptLookup.create(rule, longest, shortest, draft_tokens)
    alone = Probe.create(budget, masks, None, rate, prune, start, least)
    return alone.replace(lookup=lookup if draft_tokens is not None else lookup.within(alone.nodes))
