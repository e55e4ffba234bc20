"""Trees from circuit heads: of all beginnings of the window that may follow the root, the most probable ones.

The circuit that a chain is drawn from (`drafters.circuit`) also says which tree of a given size a target distributed
like it would follow furthest. Its shape is new in every cycle: where the circuit is sure the tree is long, where it is
not, wide.

Letters: B batch, N block rows.
"""

import functools

import jax
import jax.numpy as jnp
from flax import struct

from bytejax.circuits.prefixes import best_prefixes, level_sizes
from bytejax.drafters.base import Draft, Drafter
from bytejax.drafters.circuit import CircuitDrafter
from bytejax.errors import InputError
from bytejax.models.base import Block

BEAM = 16


class CircuitTree(Drafter):
    """Drafts the most probable prefixes of a circuit, given the root, as a tree. Made by `create`.

    head: the drafter of chains whose circuit it is. State: the head's.
    nodes: of a block, the root included. beam: how many prefixes of a length are followed (`circuits.prefixes`).
    Drafts are not sampled, so that samples are judged by matching the target's own choices.
    """

    head: CircuitDrafter
    nodes: int = struct.field(pytree_node=False)
    beam: int = struct.field(pytree_node=False)

    @classmethod
    def create(cls, head: CircuitDrafter, nodes: int, beam: int | None = None) -> "CircuitTree":
        """A drafter of trees over the circuit of one of chains, at most `head.draft_tokens` deep.

        beam: None for as many as can matter, but at most 16. Raises InputError.
        """
        for name, value, least in (("tree", nodes, 2), ("beam", 1 if beam is None else beam, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"{name} = {value!r} must be a whole number of at least {least}")
        if head.draft_tokens < 1:
            raise InputError("a head with a window of 1 drafts nothing, and so no tree")
        return cls(head, nodes, min(nodes - 1, BEAM) if beam is None else beam)

    @classmethod
    def over(cls, head: CircuitDrafter, tree: int | None, beam: int | None) -> Drafter:
        """The options of a circuit drafter: `create` with `tree` nodes, or the head itself where it is None."""
        if tree is not None:
            return cls.create(head, tree, beam)
        if beam is not None:
            raise InputError("beam is an option of trees; give tree, the number of nodes, as well")
        return head

    @property
    def block_width(self) -> int:
        return self.nodes

    @property
    def proposes_chains(self) -> bool:
        return False

    def check(self, target):
        self.head.check(target)
        most = sum(level_sizes(self.head.block_width, target.vocab, self.beam))
        if self.nodes > most:
            raise InputError(
                f"tree = {self.nodes}: a beam of {self.beam} over {self.head.draft_tokens} bytes finds at most {most} "
                "nodes, the root included"
            )

    def target_adapter(self):
        return self.head.target_adapter()

    def init(self, target, prompt):
        return self.head.init(target, prompt)

    def propose(self, state, root, keys, warp):
        places, theta = self.head.block_width, self.head.theta(state, root, warp)
        theta = theta._replace(leaves=theta.leaves[:, :places])
        best = functools.partial(best_prefixes, self.head.config.circuit, count=self.nodes, beam=self.beam)
        ids, parents, log_q = jax.vmap(best)(theta, root)
        possible = log_q > -jnp.inf
        block = Block.tree(ids, parents, levels=places)
        return Draft(block.replace(valid=possible, is_draft=block.is_draft & possible))

    def observe(self, state, target, outcome):
        return self.head.observe(state, target, outcome)
