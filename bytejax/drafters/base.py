"""What proposes: the contract between a drafter and the decoding loop.

Letters: B batch, N block rows, V vocabulary.
"""

import abc
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from bytejax.models.base import Block, Extended, Target


class Warp(Protocol):
    """How logits become a distribution (temperature, truncation, banned ids); see `decoding.logits.Warp`."""

    greedy: bool

    def log_probs(self, logits: jax.Array) -> jax.Array:
        """Normalised float32 log-probabilities over ids. [..., V] -> [..., V]."""

    def sums(self, log_weights: jax.Array) -> jax.Array:
        """The same for the weights of a mixture, where no id is banned. [..., R] -> [..., R]."""


class Draft(struct.PyTreeNode):
    """A proposed block.

    log_q: [B, M, V] float32, the distribution each of the M drafts was sampled from given the drafts before it, M = N
    where the block has no root, else N - 1; None where drafts are not sampled (greedy decoding, or any deterministic
    drafter).
    """

    block: Block
    log_q: jax.Array | None = None


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
        """Whether its blocks are chains; other trees have an acceptance rule of their own, and are always verified."""
        return True

    def target_adapter(self) -> Any:
        """What every pass of the target is given as `adapter`: the draft stream that this drafter reads, or None."""
        return None

    def check(self, target: Target) -> None:
        """Raises InputError where the drafter cannot serve the target."""

    @abc.abstractmethod
    def init(self, target: Target, prefilled: Extended, ids: jax.Array, lengths: jax.Array) -> Any:
        """State after the prompt. prefilled: features of the last position; ids [B, T] padded, lengths [B]."""

    @abc.abstractmethod
    def propose(self, state: Any, root: jax.Array | None, keys: jax.Array, warp: Warp) -> Draft:
        """A block that starts with root [B]; or with a draft, where root is None (only if `drafts_first`).

        keys [B]: fresh randomness of this cycle.
        """

    @abc.abstractmethod
    def observe(
        self, state: Any, target: Target, block: Block, extended: Extended, path: jax.Array, accepted: jax.Array
    ) -> Any:
        """State after a cycle.

        path [B, N], accepted [B] as in `Target.commit`; every row of the block may be looked at.
        """


class Autoregressive(Drafter):
    """Proposes nothing: decoding one token at a time.

    width: rows of the block; with more than one, the rest is padding, and the target's pass has the shapes that it has
    under a drafter of that width (what bit-exact comparisons need).
    """

    width: int = struct.field(pytree_node=False, default=1)

    @property
    def block_width(self) -> int:
        return self.width

    def init(self, target, prefilled, ids, lengths):
        return ()

    def propose(self, state, root, keys, warp):
        ids = jnp.zeros((root.shape[0], self.width), jnp.int32).at[:, 0].set(root)
        return Draft(Block.chain(ids, draft_len=jnp.zeros_like(root)))

    def observe(self, state, target, block, extended, path, accepted):
        return state
