"""EvaByte's own prediction heads as a drafter: a fixed tree of their best guesses (Medusa, arXiv 2401.10774).

All heads are read at the last committed position. A node at depth d carries one of the best bytes of head d, whatever
its parent carries. Acceptance is the loop's own (`decoding.trees`), so that sampled text, too, is the target's.

Letters: B batch, P prediction heads, V vocabulary.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from bytejax.drafters import shapes
from bytejax.drafters.base import Draft, Drafter
from bytejax.drafters.shapes import Shape
from bytejax.errors import InputError
from bytejax.models.base import Block, Target, newest
from bytejax.models.evabyte import EvaByte

Branching = tuple[tuple[int, ...], ...]

TREES: dict[str, Branching] = {  # those of the release, by the number of nodes beside the root
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
    """Drafts a tree from the prediction heads. Made by `create`.

    shape: the tree; a node at depth d of rank r carries the r-th best byte of head d.
    State: [B, depths, ranks] int32, the best bytes of heads 1, 2, ... at the last committed position.
    """

    shape: Shape = struct.field(pytree_node=False)

    @classmethod
    def create(
        cls,
        tree: str | Sequence[Sequence[int]] | None = None,
        accuracies: Sequence[Sequence[float]] | None = None,
        nodes: int | None = None,
    ) -> "Medusa":
        """tree: a name from `TREES`, by default "tree95", or child counts (`shapes.from_children`).

        accuracies, nodes: instead of a tree, how often the guess of each rank is right at each depth, as
            `bytejax.benchmark.ranks` measures it, and how many nodes the tree may have (`shapes.likeliest`).
        Raises InputError for another name, or for counts or accuracies that make no tree.
        """
        if (accuracies is None) != (nodes is None) or not (tree is None or nodes is None):
            raise InputError("a tree is given by tree alone, or by accuracies and nodes together")
        if nodes is not None:
            return cls(shapes.likeliest(accuracies, nodes))
        tree = "tree95" if tree is None else tree
        if isinstance(tree, str):
            if tree not in TREES:
                raise InputError(f"unknown tree {tree!r}; known: {', '.join(TREES)}, or a list of child counts")
            tree = TREES[tree]
        return cls(shapes.from_children(tree))

    @property
    def block_width(self) -> int:
        return self.shape.nodes

    @property
    def proposes_chains(self) -> bool:
        return False

    def check(self, target: Target) -> None:
        super().check(target)
        if not isinstance(target, EvaByte):
            raise InputError(f"the drafter reads prediction heads, which a {type(target).__name__} has not")
        depths, heads = self.shape.depth, target.config.pred_heads
        if depths >= heads:
            raise InputError(f"a tree of depth {depths} needs {depths + 1} prediction heads; the target has {heads}")
        if self.shape.most_children > target.vocab:
            raise InputError(f"a node of the tree has more children than the target's {target.vocab} ids")

    def init(self, target, prompt):
        return self._best(target, prompt.extended.hidden[:, -1])

    def propose(self, state, root, keys, warp):
        shape = self.shape
        drafts = state[:, np.asarray(shape.depths[1:]) - 1, np.asarray(shape.ranks[1:])]
        return Draft(Block.tree(jnp.concatenate([root[:, None], drafts], axis=1), shape.parents))

    def observe(self, state, target, outcome):
        hidden, accepted = outcome.extended.hidden, outcome.accepted
        hidden = newest(hidden, outcome.path, accepted, hidden[:, 0])
        return jnp.where((accepted > 0)[:, None, None], self._best(target, hidden), state)

    def _best(self, target: EvaByte, hidden: jax.Array) -> jax.Array:
        """hidden [B, D] -> [B, depths, ranks]."""
        logits = target.all_logits(hidden)[:, 1 : 1 + self.shape.depth]
        return jax.lax.top_k(logits, self.shape.most_children)[1]
