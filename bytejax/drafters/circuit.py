"""Circuit heads as drafters: the next n bytes from one hidden state (MtPC, arXiv 2511.11346).

The verifier's extra byte is kept and processed as the root of the next block: the circuit, whose parameters come from
the last accepted position, is conditioned on it and drafts bytes 2..N, where N is at most its window n. One target pass
per cycle, at least one byte.

Letters: B batch, N block rows, D model width, V vocabulary.
"""

import jax
import jax.numpy as jnp
from flax import struct

from bytejax.circuits import Theta, draft_head
from bytejax.circuits import head as heads
from bytejax.drafters.base import Draft, Drafter
from bytejax.errors import InputError
from bytejax.models.base import Block, Target
from bytejax.parameters import Params

GREEDY_RULES = ("sequential", "joint")


class CircuitDrafter(Drafter):
    """Drafts from a circuit whose parameters a head computes from the target's hidden state. Made by `create`.

    weights, config: the head's. State: the features [B, D] of the last committed position.
    draft_tokens: bytes per block after the root, at most window - 1; what a head could draft beyond is summed out.
    greedy_rule: how drafts are chosen in greedy decoding: "sequential" (arg-max of each conditional) or "joint" (the
        reference's exact maximum over bytes and latents together, of the whole window).
    """

    weights: draft_head.DraftWeights
    config: heads.HeadConfig = struct.field(pytree_node=False)
    draft_tokens: int = struct.field(pytree_node=False)
    greedy_rule: str = struct.field(pytree_node=False)

    @classmethod
    def create(
        cls, params: Params, config: heads.HeadConfig, draft_tokens: int | None = None, greedy_rule: str = "sequential"
    ) -> "CircuitDrafter":
        """A drafter from a head's parameters. draft_tokens: None for window - 1. Raises InputError."""
        window = config.circuit.window
        tokens = window - 1 if draft_tokens is None else draft_tokens
        if isinstance(tokens, bool) or not isinstance(tokens, int) or not min(1, window - 1) <= tokens < window:
            known = f"1 to {window - 1}" if window > 1 else "0"
            raise InputError(f"draft_tokens = {tokens}: a head with a window of {window} drafts {known}")
        if greedy_rule not in GREEDY_RULES:
            raise InputError(f"unknown greedy rule {greedy_rule!r}; known: {', '.join(GREEDY_RULES)}")
        places = window if greedy_rule == "joint" else tokens + 1
        return cls(draft_head.draft_weights(params, config, places), config, tokens, greedy_rule)

    @property
    def block_width(self) -> int:
        return self.draft_tokens + 1

    def check(self, target: Target) -> None:
        if self.config.width != target.width:
            raise InputError(f"the head takes features of width {self.config.width}, the target has {target.width}")
        if self.config.vocab < target.vocab:
            raise InputError(f"the head knows {self.config.vocab} ids, fewer than the target's {target.vocab}")

    def init(self, target, prefilled, ids, lengths):
        return prefilled.hidden[:, -1]

    def propose(self, state, root, keys, warp):
        circuit = self.config.circuit
        sums, leaves = draft_head.draft_logits(self.weights, self.config, state, root)
        theta, log_q = Theta(warp.sums(sums), warp.log_probs(leaves)), None
        if not warp.greedy:
            theta = theta._replace(leaves=theta.leaves[:, : self.block_width])
            drafts, log_q = jax.vmap(circuit.sample_with_conditionals)(theta, keys, root)
            log_q = log_q[:, 1:]
        elif self.greedy_rule == "sequential":
            drafts = circuit.greedy(theta, first=root)
        else:
            drafts = circuit.mode(circuit.condition(theta, root))[:, : self.block_width]
        return Draft(Block.chain(drafts), log_q)  # place 1 is the root

    def observe(self, state, target, block, extended, path, accepted):
        row = jnp.take_along_axis(path, jnp.maximum(accepted - 1, 0)[:, None], axis=1)
        newest = jnp.take_along_axis(extended.hidden, row[..., None], axis=1)[:, 0]
        return jnp.where((accepted > 0)[:, None], newest, state)
