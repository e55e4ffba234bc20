"""Prompt lookup decoding (PLD, Saxena 2023): what followed the newest n-gram where it stood before is the draft.

Letters: B batch, S places of the text, G ids of the longest n-gram, K drafts.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from bytejax.drafters.base import Draft, Drafter
from bytejax.drafters.text import Text
from bytejax.errors import ROWS, InputError, check_integer
from bytejax.models.base import Block


@dataclasses.dataclass(frozen=True)
class Rule:
    """Which earlier place counts, and the rule's own numbers.

    newest: the latest of the longest matches instead of the earliest. whole: only matches after which as many ids stand
    as are drafted, and which do not overlap the suffix they match. again: where fewer stand there, they are repeated.
    longest, shortest: ids of an n-gram. draft_tokens: K.
    """

    newest: bool
    whole: bool
    again: bool
    longest: int
    shortest: int
    draft_tokens: int


RULES = {
    "official": Rule(newest=False, whole=True, again=False, longest=3, shortest=1, draft_tokens=10),
    "transformers": Rule(newest=False, whole=False, again=False, longest=2, shortest=1, draft_tokens=10),
    "tokens": Rule(newest=True, whole=False, again=True, longest=4, shortest=1, draft_tokens=10),
    "bytes": Rule(newest=True, whole=False, again=True, longest=12, shortest=4, draft_tokens=16),
}


class PromptLookup(Drafter):
    """Drafts a chain copied from the text. Made by `create`. State: the `Text`.

    Where nothing matches in any row, the cycle is one of width 1.
    """

    rule: Rule = struct.field(pytree_node=False)
    draft_tokens: int = struct.field(pytree_node=False)

    @classmethod
    def create(
        cls,
        rule: str = "tokens",
        longest: int | None = None,
        shortest: int | None = None,
        draft_tokens: int | None = None,
    ) -> "PromptLookup":
        """rule: "official" (the first implementation's), "transformers" (`prompt_lookup_num_tokens` there), "tokens" or
        "bytes" (the newest match of the longest n-gram, what follows it repeated where it is short).

        longest, shortest: ids of an n-gram; draft_tokens: K; None for the rule's own. Raises InputError.
        """
        if not isinstance(rule, str) or rule not in RULES:
            raise InputError(f"unknown rule {rule!r} of prompt lookup; known: {', '.join(RULES)}")
        given = {"longest": longest, "shortest": shortest, "draft_tokens": draft_tokens}
        for name, value in given.items():
            if value is not None:
                check_integer(f"prompt lookup: {name}", value, 1, ROWS)
        chosen = dataclasses.replace(RULES[rule], **{k: v for k, v in given.items() if v is not None})
        if chosen.shortest > chosen.longest:
            raise InputError(f"prompt lookup: shortest = {chosen.shortest} is more than longest = {chosen.longest}")
        return cls(chosen, chosen.draft_tokens)

    def within(self, nodes: int) -> "PromptLookup":
        """The same, with drafts for at most half of a tree of so many nodes, the root included."""
        fewer = max(1, min(self.draft_tokens, (nodes - 1) // 2))
        return PromptLookup(dataclasses.replace(self.rule, draft_tokens=fewer), fewer)

    @property
    def block_width(self) -> int:
        return self.draft_tokens + 1

    def fallback(self) -> Drafter | None:
        return self.replace(draft_tokens=0) if self.draft_tokens else None

    def worth(self, state, root):
        return self.find(state.then(root))[1] > 0

    def init(self, target, prompt):
        return Text.of(prompt, self.rule.draft_tokens + 1)

    def propose(self, state, root, keys, warp):
        if not self.draft_tokens:
            return Draft(Block.chain(root[:, None]))
        drafts, count = self.find(state.then(root))
        return Draft(Block.chain(jnp.concatenate([root[:, None], drafts], axis=1), draft_len=count))

    def observe(self, state, target, outcome):
        return state.append(outcome)

    def find(self, text: Text) -> tuple[jax.Array, jax.Array]:
        """What followed the text's last ids where they stood before: ids [B, K] int32, and how many of them, [B]."""
        rule, n, s = self.rule, text.count[:, None], text.ids.shape[1]
        k, end = rule.draft_tokens, jnp.arange(s)
        size = self._matching(text)
        after = n - 1 - end  # ids that follow an n-gram that ends there
        if rule.whole:
            size = jnp.where(after >= k, jnp.minimum(size, after - 1), 0)
        ok = (size >= rule.shortest) & (after >= 1)
        score = jnp.where(ok, size * s + (end if rule.newest else s - 1 - end), -1)
        best = jnp.argmax(score, axis=1)
        found = jnp.take_along_axis(ok, best[:, None], axis=1)[:, 0]
        stand = jnp.maximum(text.count - 1 - best, 1)[:, None]
        step = jnp.arange(k) % stand if rule.again else jnp.arange(k)
        ids = jnp.take_along_axis(text.ids, jnp.minimum(best[:, None] + 1 + step, s - 1), axis=1)
        return ids, jnp.where(found, k if rule.again else jnp.minimum(k, stand[:, 0]), 0)

    def _matching(self, text: Text) -> jax.Array:
        """How many ids, up to G, that end at each place equal those that end the text. -> [B, S]."""
        run, size = True, 0
        for j, last in enumerate(jnp.unstack(text.last(self.rule.longest), axis=1)):
            ids = jnp.pad(text.ids, ((0, 0), (j, 0)), constant_values=-1)[:, : text.ids.shape[1]]
            run = run & (ids == last[:, None]) & (last >= 0)[:, None]
            size = size + run.astype(jnp.int32)
        return size
