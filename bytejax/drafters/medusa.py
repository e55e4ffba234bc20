"""EvaByte's own prediction heads as a drafter: a fixed tree of their best guesses (Medusa, arXiv 2401.10774).

All heads are read at the last committed position. A node at depth d carries one of the best bytes of head d, whatever
its parent carries. Acceptance is the loop's own (`decoding.accept.tree`), so that sampled text, too, is the target's.

Letters: B batch, P prediction heads, V vocabulary.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from bytejax.drafters.base import Draft, Drafter
from bytejax.errors import InputError
from bytejax.models.base import Block, Target, newest
from bytejax.models.evabyte import EvaByte

Children = tuple[tuple[int, ...], ...]

TREES: dict[str, Children] = {  # those of the release, by the number of nodes beside the root
    "tree95": (
        (10,),
        (10, 8, 2, 2, 1, 1),
        (10, 4, 2, 1, 0, 0, 0, 0, 0, 0, 2, 1, 1, 0, 0, 0, 0, 0, 1),
        (8, 2, 2, 1, 0, 0, 0, 0, 0, 0, 1),
        (6, 2, 1, 1),
        (4, 2, 1, 1),
        (4, 2, 1),
    ),
    "tree31": ((4,), (3, 2, 1, 1), (3, 2, 1, 1), (2, 1, 1), (2, 1), (2, 1), (2, 1)),
}


class Medusa(Drafter):
    """Drafts the tree `children` from the prediction heads. Made by `create`.

    children: for every depth, how many children each node of the depth before has; the first is the root's, missing
        ones have none. Child r carries the r-th best byte of the depth's head.
    State: [B, depths, ranks] int32, the best bytes of heads 1, 2, ... at the last committed position.
    """

    children: Children = struct.field(pytree_node=False)

    @classmethod
    def create(cls, tree: str | Sequence[Sequence[int]] = "tree95") -> "Medusa":
        """tree: a name from `TREES`, or child counts. Raises InputError for another name or counts that are no tree."""
        if isinstance(tree, str):
            if tree not in TREES:
                raise InputError(f"unknown tree {tree!r}; known: {', '.join(TREES)}, or a list of child counts")
            return cls(TREES[tree])
        children = _checked(tree)
        return cls(children)

    @property
    def block_width(self) -> int:
        return len(nodes(self.children)[0])

    @property
    def proposes_chains(self) -> bool:
        return False

    def check(self, target: Target) -> None:
        if not isinstance(target, EvaByte):
            raise InputError(f"the drafter reads prediction heads, which a {type(target).__name__} has not")
        depths, heads = len(self.children), target.config.pred_heads
        if depths >= heads:
            raise InputError(f"a tree of depth {depths} needs {depths + 1} prediction heads; the target has {heads}")
        if max(map(max, self.children)) > target.vocab:
            raise InputError(f"a node of the tree has more children than the target's {target.vocab} ids")

    def init(self, target, prefilled, ids, lengths):
        return self._best(target, prefilled.hidden[:, -1])

    def propose(self, state, root, keys, warp):
        parents, depths, ranks = nodes(self.children)
        drafts = state[:, np.asarray(depths[1:]) - 1, np.asarray(ranks[1:])]
        block = Block.chain(jnp.concatenate([root[:, None], drafts], axis=1))
        given = jnp.broadcast_to(jnp.asarray(parents, jnp.int32), block.ids.shape)
        return Draft(block.replace(parents=given, static_parents=parents))

    def observe(self, state, target, block, extended, path, accepted):
        hidden = newest(extended.hidden, path, accepted, extended.hidden[:, 0])
        return jnp.where((accepted > 0)[:, None, None], self._best(target, hidden), state)

    def _best(self, target: EvaByte, hidden: jax.Array) -> jax.Array:
        """hidden [B, D] -> [B, depths, ranks]."""
        logits = target.all_logits(hidden)[:, 1 : 1 + len(self.children)]
        return jax.lax.top_k(logits, max(map(max, self.children)))[1]


def nodes(children: Children) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Parents, depths and ranks of the tree's nodes, root first, then depth by depth."""
    parents, depths, ranks = [0], [0], [0]
    level = [0]
    for depth, counts in enumerate(children, start=1):
        below = []
        for parent, count in zip(level, counts, strict=False):
            for rank in range(count):
                below.append(len(parents))
                parents.append(parent)
                depths.append(depth)
                ranks.append(rank)
        level = below
    return tuple(parents), tuple(depths), tuple(ranks)


def _checked(tree: Sequence[Sequence[int]]) -> Children:
    try:
        children = tuple(tuple(counts) for counts in tree)
    except TypeError:
        raise InputError(f"a tree is a list of lists of child counts, got {tree!r}") from None
    above = 1
    for depth, counts in enumerate(children, start=1):
        if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in counts) or sum(counts) == 0:
            raise InputError(f"depth {depth} of the tree has no nodes, or counts that are no whole numbers: {counts}")
        if len(counts) > above:
            raise InputError(f"depth {depth} of the tree has {len(counts)} counts for {above} nodes above")
        above = sum(counts)
    if not children:
        raise InputError("the tree is empty; give at least one depth")
    return children
