"""Trees from circuit heads: of all beginnings of the window that may follow the root, the most probable ones.

The circuit that a chain is drawn from (`drafters.circuit`) also says which tree of a given size a target distributed
like it would follow furthest. Its shape is new in every cycle: where the circuit is sure the tree is long, where it is
not, wide. What an n-gram lookup finds may come first, and the circuit's prefixes have the rest of the rows.

Letters: B batch, N block rows.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from bytejax.circuits.prefixes import best_prefixes, level_sizes
from bytejax.drafters import combined
from bytejax.drafters.base import Draft, Drafter
from bytejax.drafters.circuit import CircuitDrafter
from bytejax.drafters.ngram import PromptLookup
from bytejax.drafters.text import Text
from bytejax.errors import ROWS, InputError, check_integer
from bytejax.models.base import Block

BEAM = 16


class State(struct.PyTreeNode):
    """head: the state of the drafter of chains. text: for the n-gram lookup, None without one."""

    head: Any
    text: Text | None


class CircuitTree(Drafter):
    """Drafts the most probable prefixes of a circuit, given the root, as a tree. Made by `create`.

    head: the drafter of chains whose circuit it is.
    nodes: of a block, the root included. beam: how many prefixes of a length are followed (`circuits.prefixes`).
    lookup: n-gram hits come first, and the circuit has the rest of the nodes; or None.
    Drafts are not sampled, so that samples are judged by matching the target's own choices.
    """

    head: CircuitDrafter
    nodes: int = struct.field(pytree_node=False)
    beam: int = struct.field(pytree_node=False)
    lookup: PromptLookup | None = None

    @classmethod
    def create(
        cls, head: CircuitDrafter, nodes: int, beam: int | None = None, lookup: str | None = None
    ) -> "CircuitTree":
        """A drafter of trees over the circuit of one of chains, at most `head.draft_tokens` deep.

        beam: None for as many as can matter, but at most 16. lookup: the rule of an n-gram lookup (`ngram.RULES`); its
        hits take at most half of the nodes; None for none. Raises InputError.
        """
        for name, value, least in (("tree", nodes, 2), ("beam", 1 if beam is None else beam, 1)):
            check_integer(name, value, least, ROWS)
        if head.draft_tokens < 1:
            raise InputError("a head with a window of 1 drafts nothing, and so no tree")
        found = None if lookup is None else PromptLookup.create(lookup).within(nodes)
        return cls(head, nodes, min(nodes - 1, BEAM) if beam is None else beam, found)

    @classmethod
    def over(cls, head: CircuitDrafter, tree: int | None, beam: int | None, lookup: str | None = None) -> Drafter:
        """The options of a circuit drafter: `create` with `tree` nodes, or the head itself where it is None."""
        if tree is not None:
            return cls.create(head, tree, beam, lookup)
        for name, value in (("beam", beam), ("lookup", lookup)):
            if value is not None:
                raise InputError(f"{name} is an option of trees; give tree, the number of nodes, as well")
        return head

    @property
    def block_width(self) -> int:
        return self.nodes

    @property
    def proposes_chains(self) -> bool:
        return False

    def check(self, target):
        super().check(target)
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
        return State(self.head.init(target, prompt), None if self.lookup is None else Text.of(prompt, self.nodes))

    def propose(self, state, root, keys, warp):
        places, theta = self.head.block_width, self.head.theta(state.head, root, warp)
        theta = theta._replace(leaves=theta.leaves[:, :places])
        best = functools.partial(best_prefixes, self.head.config.circuit, count=self.nodes, beam=self.beam)
        ids, parents, log_q = jax.vmap(best)(theta, root)
        possible = log_q > -jnp.inf
        if self.lookup is not None:
            chain, hits = self.lookup.find(state.text.then(root))
            found = combined.Candidates(ids[:, 1:], parents[:, 1:] - 1, log_q[:, 1:], places - 1)
            found = combined.best(found, self.nodes - 1, chain, hits)
            front = lambda one, rest: jnp.concatenate([one[:, :1], rest], axis=1)
            ids, parents, possible = map(front, (ids, parents, possible), found)
            places = min(max(places, self.lookup.draft_tokens + 1), self.nodes)
        return Draft(Block.tree(ids, parents, levels=places, valid=possible))

    def observe(self, state, target, outcome):
        text = None if state.text is None else state.text.append(outcome)
        return State(self.head.observe(state.head, target, outcome), text)
