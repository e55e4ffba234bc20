"""What proposes: the contract between a drafter and the decoding loop.

Letters: B batch, N block rows, V vocabulary.
"""

import abc
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from bytejax.errors import InputError, check_integer
from bytejax.models.base import Block, Extended, Target


class Warp(Protocol):
    """How logits become a distribution (temperature, truncation, banned ids); see `decoding.logits.Warp`."""

    greedy: bool

    def masked(self, logits: jax.Array) -> jax.Array:
        """Logits with banned ids at -inf, without ids beyond the target's. [..., V'] -> [..., V]."""

    def log_probs(self, logits: jax.Array) -> jax.Array:
        """Normalised float32 log-probabilities over ids. [..., V] -> [..., V]."""

    def sums(self, log_weights: jax.Array) -> jax.Array:
        """The same for the weights of a mixture, where no id is banned. [..., R] -> [..., R]."""


class Children(struct.PyTreeNode):
    """The law from which the children of every node were drawn, without replacement, in the order of their rows.

    ids: [B, N, M] int32, what could be drawn; log_q: [B, N, M] float32, normalised, -inf where there is less to draw.
    """

    ids: jax.Array
    log_q: jax.Array


class Draft(struct.PyTreeNode):
    """A proposed block.

    log_q: [B, M, V] float32, the distribution each of the M drafts of a chain was sampled from given the drafts before
        it, M = N where the block has no root, else N - 1. children: the same for a tree. Both None where drafts are not
        sampled (greedy decoding, or any deterministic drafter), or from an unknown law.
    memory: whatever `observe` wants to know of the proposing.
    """

    block: Block
    log_q: jax.Array | None = None
    children: Children | None = None
    memory: Any = None


class Prompt(struct.PyTreeNode):
    """What a drafter starts from.

    ids: [B, T] int32, padded on the right. lengths: [B] int32. extended: features of the last position, the tap
        "inner" of all. cache: the target's, with the prompts committed. warp: the target's distribution. capacity: how
        many positions a text can have.
    """

    ids: jax.Array
    lengths: jax.Array
    extended: Extended
    cache: Any
    warp: Warp
    capacity: int = struct.field(pytree_node=False)


class Outcome(struct.PyTreeNode):
    """What a pass over a block has shown.

    draft: as it was verified. extended: the features of every row. laws: [B, nodes, V] float32, what the target says
        after every row that may be emitted: log-probabilities, or logits in greedy decoding. warp: what made them.
    path: [B, nodes] int32, accepted: [B] int32, as in `Target.commit`.
    """

    draft: Draft
    extended: Extended
    laws: jax.Array
    warp: Warp
    path: jax.Array
    accepted: jax.Array

    @property
    def ids(self) -> jax.Array:
        """[B, nodes] int32: the path's ids, of which the first `accepted` were committed."""
        return jnp.take_along_axis(self.draft.block.ids, self.path, axis=1)


class Drafter(struct.PyTreeNode, abc.ABC):
    """Proposes blocks. Its state is a pytree of fixed shapes that may depend on committed bytes, on the root, and on
    randomness that verification never uses again: that is all losslessness asks of it.
    """

    @property
    @abc.abstractmethod
    def block_width(self) -> int:
        """Rows of a block, root included."""

    @property
    def drafts_first(self) -> bool:
        """Whether it can propose a block without a root."""
        return False

    @property
    def proposes_chains(self) -> bool:
        """Whether its blocks are chains. Other trees are always verified, and only where blocks have a root."""
        return True

    @property
    def rules(self) -> tuple[str, ...]:
        """Names of the acceptance rules that its samples may be judged by, the default first (`decoding.accept`)."""
        return ("match",)

    def fallback(self) -> "Drafter | None":
        """A narrower drafter over the same states, for cycles in which no row's draft is `worth` a block; or None."""
        return None

    def worth(self, state: Any, root: jax.Array) -> jax.Array:
        """Whether each row's draft is worth a block, [B] bool; it may depend on what a draft may depend on."""
        return jnp.ones_like(root, bool)

    def target_adapter(self) -> Any:
        """What every pass of the target is given as `adapter`: the draft stream that this drafter reads, or None."""
        return None

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose inputs it reads, in the tap "inner" of every pass (`Target.extend`)."""
        return ()

    def check(self, target: Target) -> None:
        """Raises InputError where the drafter cannot serve the target; here, where that does not take its blocks."""
        if not (self.proposes_chains or target.takes_trees):
            raise InputError(f"the drafter proposes trees, and a {type(target).__name__} takes only chains")

    @abc.abstractmethod
    def init(self, target: Target, prompt: Prompt) -> Any:
        """State after the prompt."""

    @abc.abstractmethod
    def propose(self, state: Any, root: jax.Array | None, keys: jax.Array, warp: Warp) -> Draft:
        """A block that starts with root [B]; or with a draft, where root is None (only if `drafts_first`).

        keys [B]: fresh randomness of this cycle.
        """

    @abc.abstractmethod
    def observe(self, state: Any, target: Target, outcome: Outcome) -> Any:
        """State after a cycle; every row of the block may be looked at."""


class Autoregressive(Drafter):
    """Proposes nothing: decoding one token at a time.

    width: rows of the block; with more than one, the rest is padding, and the target's pass has the shapes that it has
    under a drafter of that width (what bit-exact comparisons need).
    """

    width: int = struct.field(pytree_node=False, default=1)

    @classmethod
    def create(cls, width: int = 1) -> "Autoregressive":
        """Raises InputError for a width below 1."""
        check_integer("width", width, 1)
        return cls(width)

    @property
    def block_width(self) -> int:
        return self.width

    def init(self, target, prompt):
        return ()

    def propose(self, state, root, keys, warp):
        ids = jnp.zeros((root.shape[0], self.width), jnp.int32).at[:, 0].set(root)
        return Draft(Block.chain(ids, draft_len=jnp.zeros_like(root)))

    def observe(self, state, target, outcome):
        return state
