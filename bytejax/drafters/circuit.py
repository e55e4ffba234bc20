"""Circuit heads as drafters: the next n bytes from one hidden state (MtPC, arXiv 2511.11346).

Where the verifier's extra byte is the root of the next block, the circuit, whose parameters come from the last accepted
position, is conditioned on it and drafts bytes 2..N, where N is at most its window n: one target pass per cycle, at
least one byte. Where everything emitted has been processed, it drafts bytes 1..N.

Letters: B batch, N block rows, D model width, V vocabulary.
"""

import jax
import jax.numpy as jnp
from flax import struct

from bytejax.circuits import Theta, draft_head
from bytejax.circuits import head as heads
from bytejax.drafters.base import Draft, Drafter, Warp
from bytejax.errors import InputError
from bytejax.models.base import Block, Extended, Target, newest
from bytejax.models.lora import Adapter
from bytejax.models.transformer import Transformer
from bytejax.parameters import Params

FIRST, LATER = 0, 1  # which drafts a key is for
GREEDY_RULES = ("sequential", "joint")


class CircuitDrafter(Drafter):
    """Drafts from a circuit whose parameters a head computes from the target's hidden state. Made by `create`.

    weights, config: the head's. State: the features [B, D] of the last committed position.
    draft_tokens: bytes per block after the root, at most window - 1; what a head could draft beyond is summed out. A
        block without a root has one draft more, in the root's place.
    greedy_rule: how drafts are chosen in greedy decoding: "sequential" (arg-max of each conditional) or "joint" (the
        reference's exact maximum over bytes and latents together, of the whole window).
    adapter: of the target's last layers, where the head reads a draft stream of its own instead of the target's states.
    """

    weights: draft_head.DraftWeights
    config: heads.HeadConfig = struct.field(pytree_node=False)
    draft_tokens: int = struct.field(pytree_node=False)
    greedy_rule: str = struct.field(pytree_node=False)
    adapter: Adapter | None = None

    @classmethod
    def create(
        cls,
        params: Params,
        config: heads.HeadConfig,
        draft_tokens: int | None = None,
        greedy_rule: str = "sequential",
        adapter: Adapter | None = None,
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
        return cls(draft_head.draft_weights(params, config, places), config, tokens, greedy_rule, adapter)

    @property
    def block_width(self) -> int:
        return self.draft_tokens + 1

    def check(self, target: Target) -> None:
        super().check(target)
        if self.config.width != target.width:
            raise InputError(
                f"the head takes features of width {self.config.width}, the target has {target.width}: it belongs to "
                "another target; a head for this one has to be trained; pld and others need no training"
            )
        if self.adapter is not None:
            if not isinstance(target, Transformer):
                raise InputError(f"a LoRA drafter adapts attention layers, which a {type(target).__name__} has not")
            if not isinstance(target.params["layers"], tuple):
                raise InputError("a LoRA drafter needs the target's layers unrolled: load_target(..., unroll=True)")
        if self.config.vocab < target.vocab:
            raise InputError(f"the head knows {self.config.vocab} ids, fewer than the target's {target.vocab}")

    def target_adapter(self) -> Adapter | None:
        return self.adapter

    @property
    def rules(self) -> tuple[str, ...]:
        return ("block", "token", "match")

    def init(self, target, prompt):
        return self._features(prompt.extended)[:, -1]

    @property
    def drafts_first(self) -> bool:
        return True

    def propose(self, state, root, keys, warp):
        log_q1 = None
        first_is_draft, jointly = root is None, warp.greedy and self.greedy_rule == "joint"
        if first_is_draft:
            law = self.theta(state, jnp.zeros(state.shape[:1], jnp.int32), warp)  # leaf 1 needs no first byte
            if jointly and self.config.feed_width is None:
                return self._rootless(self.config.circuit.mode(law)[:, : self.block_width], None)
            root, log_q1 = self._first(law._replace(leaves=law.leaves[:, :1]), keys, warp)
        theta, circuit, log_q = self.theta(state, root, warp), self.config.circuit, None
        if not warp.greedy:
            theta = theta._replace(leaves=theta.leaves[:, : self.block_width])
            keys = jax.vmap(jax.random.fold_in, (0, None))(keys, LATER)
            drafts, log_q = jax.vmap(circuit.sample_with_conditionals)(theta, keys, root)
            log_q = log_q.at[:, 0].set(log_q1) if first_is_draft else log_q[:, 1:]
        elif jointly:
            drafts = circuit.mode(circuit.condition(theta, root))[:, : self.block_width]
        else:
            drafts = circuit.greedy(theta, first=root)
        return self._rootless(drafts, log_q) if first_is_draft else Draft(Block.chain(drafts), log_q)

    def _features(self, extended: Extended) -> jax.Array:
        return extended.hidden if self.adapter is None else extended.taps["draft"]

    def _first(self, theta: Theta, keys, warp) -> tuple[jax.Array, jax.Array | None]:
        """Byte 1 and, where it is sampled, its law. -> [B], [B, V] or None."""
        if warp.greedy:
            return self.config.circuit.greedy(theta)[:, 0], None
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys, FIRST)
        drafts, log_q = jax.vmap(self.config.circuit.sample_with_conditionals)(theta, keys)
        return drafts[:, 0], log_q[:, 0]

    def theta(self, state: jax.Array, first: jax.Array, warp: Warp) -> Theta:
        """The circuit's warped parameters after the features `state` [B, D], to be conditioned on `first` [B]."""
        sums, leaves = draft_head.draft_logits(self.weights, self.config, state, first)
        return Theta(warp.sums(sums), warp.log_probs(leaves))

    def _rootless(self, drafts, log_q) -> Draft:
        block = Block.chain(drafts)
        return Draft(block.replace(is_draft=jnp.ones_like(block.is_draft)), log_q)

    def observe(self, state, target, outcome):
        return newest(self._features(outcome.extended), outcome.path, outcome.accepted, state)
