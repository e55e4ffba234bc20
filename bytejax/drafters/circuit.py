"""Circuit heads as drafters: the next n bytes from one hidden state (MtPC, arXiv 2511.11346).

The verifier's extra byte is kept and processed as the root of the next block: the circuit, whose parameters come from
the last accepted position, is conditioned on it and drafts bytes 2..n. One target pass per cycle, at least one byte.

Letters: B batch, N block rows = window n, D model width, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from bytejax.circuits import Theta
from bytejax.circuits import head as heads
from bytejax.drafters.base import Draft, Drafter
from bytejax.errors import InputError
from bytejax.models.base import Block, Target

GREEDY_RULES = ("sequential", "joint")


class CircuitDrafter(Drafter):
    """Drafts from a circuit whose parameters a head computes from the target's hidden state.

    params, config: the head's. State: the features [B, D] of the last committed position.
    greedy_rule: how drafts are chosen in greedy decoding: "sequential" (arg-max of each conditional) or "joint" (the
        reference's exact maximum over bytes and latents together).
    """

    params: Any
    config: heads.HeadConfig = struct.field(pytree_node=False)
    greedy_rule: str = struct.field(pytree_node=False, default="sequential")

    @property
    def block_width(self) -> int:
        return self.config.circuit.window

    def check(self, target: Target) -> None:
        if self.greedy_rule not in GREEDY_RULES:
            raise InputError(f"unknown greedy rule {self.greedy_rule!r}; known: {', '.join(GREEDY_RULES)}")
        if self.config.width != target.width:
            raise InputError(f"the head takes features of width {self.config.width}, the target has {target.width}")
        if self.config.vocab < target.vocab:
            raise InputError(f"the head knows {self.config.vocab} ids, fewer than the target's {target.vocab}")

    def init(self, target, prefilled, ids, lengths):
        return prefilled.hidden[:, -1]

    def propose(self, state, root, keys, warp):
        circuit = self.config.circuit
        sums, leaves = heads.logits(self.params, self.config, state, root)
        theta = circuit.condition(Theta(warp.sums(sums), warp.log_probs(leaves)), root)
        if warp.greedy:
            drafts, log_q = (circuit.greedy if self.greedy_rule == "sequential" else circuit.mode)(theta), None
        else:
            drafts, log_q = jax.vmap(circuit.sample_with_conditionals)(theta, keys)
            log_q = log_q[:, 1:]
        ids = jnp.concatenate([root[:, None], drafts[:, 1:].astype(jnp.int32)], axis=1)
        return Draft(Block.chain(ids), log_q)

    def observe(self, state, target, block, extended, path, accepted):
        row = jnp.take_along_axis(path, jnp.maximum(accepted - 1, 0)[:, None], axis=1)
        newest = jnp.take_along_axis(extended.hidden, row[..., None], axis=1)[:, 0]
        return jnp.where((accepted > 0)[:, None], newest, state)
