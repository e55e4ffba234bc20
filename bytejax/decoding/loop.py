"""The decoding loop: one `lax.while_loop` that drafts, verifies and commits on device.

Letters: B batch, N block rows, M room for new ids, T prompt length, V vocabulary.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import struct

from bytejax.decoding import accept
from bytejax.decoding.logits import Warp
from bytejax.drafters.base import Drafter
from bytejax.errors import InputError
from bytejax.models.base import Target

RUNNING, STOP, LENGTH = 0, 1, 2
DRAFT, VERIFY = 0, 1  # what a cycle's randomness is for


class Rules(struct.PyTreeNode):
    """What a run obeys, the same for every row.

    warp: the target's distribution. stop: [K] int32, ids that end a row (kept as its last id).
    verify: False accepts every draft unseen (lossy).
    """

    warp: Warp
    stop: jax.Array
    verify: bool = struct.field(pytree_node=False, default=True)


class State(struct.PyTreeNode):
    """Everything that changes from cycle to cycle. Rows advance independently.

    cache, draft: the target's cache and the drafter's state, which hold the same committed positions.
    root: [B] int32, emitted and not yet processed; its position is `cache.lengths`.
    keys: [B], one key per row; a cycle uses it folded with the root's position, so that what a row samples depends on
        nothing but its own key and text.
    out: [B, M + N] int32, new ids; from_draft: the same shape, True where the id was an accepted draft.
    count, limit: [B] int32, ids written and allowed. status: [B] int32, RUNNING, STOP or LENGTH.
    cycles, drafted, accepted: [B] int32, target passes, drafts proposed, drafts kept.
    histogram: [B, N + 1] int32, cycles by the number of ids they added.
    """

    cache: Any
    draft: Any
    root: jax.Array
    keys: jax.Array
    out: jax.Array
    from_draft: jax.Array
    count: jax.Array
    limit: jax.Array
    status: jax.Array
    cycles: jax.Array
    drafted: jax.Array
    accepted: jax.Array
    histogram: jax.Array


def start(
    target: Target,
    drafter: Drafter,
    rules: Rules,
    ids: jax.Array,
    lengths: jax.Array,
    limit: jax.Array,
    keys: jax.Array,
    *,
    capacity: int,
    room: int,
) -> State:
    """Processes the prompts and draws each row's first id.

    ids [B, T] int32 padded on the right, lengths and limit [B] int32 (each >= 1), keys [B].
    capacity: committed positions the cache can hold, at least T and prompt + limit; room: at least every limit.
    """
    b, n = ids.shape[0], drafter.block_width
    extended, cache = target.prefill(ids, lengths, target.init_cache(b, capacity, n))
    cycle_keys = _fold(_fold(keys, lengths - 1), jnp.full((b,), VERIFY))
    logits = target.unembed(extended.hidden[:, -1])
    warp = rules.warp
    if warp.greedy:
        root = jnp.argmax(warp.masked(logits), -1).astype(jnp.int32)
    else:
        root = accept.sample(warp.log_probs(logits), cycle_keys, 1)
    zeros = jnp.zeros((b,), jnp.int32)
    return State(
        cache=cache,
        draft=drafter.init(target, extended, ids, lengths),
        root=root,
        keys=keys,
        out=jnp.zeros((b, room + n), jnp.int32).at[:, 0].set(root),
        from_draft=jnp.zeros((b, room + n), bool),
        count=zeros + 1,
        limit=limit,
        status=jnp.where(jnp.isin(root, rules.stop), STOP, jnp.where(limit <= 1, LENGTH, RUNNING)),
        cycles=zeros,
        drafted=zeros,
        accepted=zeros,
        histogram=jnp.zeros((b, n + 1), jnp.int32),
    )


def run(target: Target, drafter: Drafter, rules: Rules, state: State, max_cycles: jax.Array) -> State:
    """Runs cycles until every row has ended, at most `max_cycles` [] int32 of them."""

    def unfinished(carry):
        cycle, state = carry
        return (cycle < max_cycles) & (state.status == RUNNING).any()

    def body(carry):
        i, state = carry
        return i + 1, cycle(target, drafter, rules, state)

    return jax.lax.while_loop(unfinished, body, (jnp.int32(0), state))[1]


def cycle(target: Target, drafter: Drafter, rules: Rules, state: State) -> State:
    """One cycle: draft, one target pass over the block, accept, commit. Ended rows stay as they are."""
    active = state.status == RUNNING
    keys = _fold(state.keys, state.cache.lengths)
    purpose = lambda p: _fold(keys, jnp.full(active.shape, p))
    draft = drafter.propose(state.draft, state.root, purpose(DRAFT), rules.warp)
    b, n = state.root.shape[0], drafter.block_width
    chex.assert_shape(draft.block.ids, (b, n))
    if draft.log_q is not None:
        chex.assert_shape(draft.log_q, (b, n - 1, rules.warp.banned.shape[0]))
    extended = target.extend(draft.block, state.cache)
    logits = target.unembed(extended.hidden)
    verdict = _judge(draft, logits, rules, purpose(VERIFY))

    new, is_draft = _emitted(draft.block, verdict)
    index = jnp.arange(new.shape[1])
    ends = jnp.isin(new, rules.stop) & (index < verdict.accepted[:, None])
    first_stop = jnp.where(ends.any(-1), jnp.argmax(ends, -1) + 1, new.shape[1] + 1)
    kept = jnp.minimum(jnp.minimum(verdict.accepted, first_stop), state.limit - state.count)
    kept = jnp.where(active, kept, 0)
    count = state.count + kept
    status = jnp.where(kept == first_stop, STOP, jnp.where(count >= state.limit, LENGTH, RUNNING))

    accepted = jnp.where(active, verdict.accepted, 0)
    drafted = jnp.where(active, accept.draft_len(draft.block), 0)
    return state.replace(
        cache=target.commit(state.cache, extended.pending, verdict.path, accepted),
        draft=drafter.observe(state.draft, target, draft.block, extended, verdict.path, accepted),
        root=jnp.where(active, verdict.bonus, state.root),
        out=_write(state.out, new, state.count),
        from_draft=_write(state.from_draft, is_draft, state.count),
        count=count,
        status=jnp.where(active, status, state.status),
        cycles=state.cycles + active,
        drafted=state.drafted + drafted,
        accepted=state.accepted + jnp.where(index < kept[:, None], is_draft, False).sum(-1, dtype=jnp.int32),
        histogram=state.histogram
        + (active[:, None] & (kept[:, None] == jnp.arange(new.shape[1] + 1))).astype(jnp.int32),
    )


def _judge(draft, logits, rules: Rules, keys) -> accept.Verdict:
    if not draft.block.is_chain:
        raise InputError("the acceptance rules judge chains; this drafter proposed another tree")
    if not rules.verify:
        return accept.everything(draft.block, logits, rules.warp, keys)
    if rules.warp.greedy:
        return accept.greedy(draft.block, logits, rules.warp)
    return accept.token_wise(draft.block, draft.log_q, logits, rules.warp, keys)


def _emitted(block, verdict) -> tuple[jax.Array, jax.Array]:
    """Ids a cycle adds, and which of them were drafts: the accepted drafts in order, then the bonus. [B, N] each."""
    shifted = jnp.roll(jnp.take_along_axis(block.ids, verdict.path, axis=1), -1, axis=1)
    is_draft = jnp.arange(block.width) < verdict.accepted[:, None] - 1
    return jnp.where(is_draft, shifted, verdict.bonus[:, None]), is_draft


def _write(buffer: jax.Array, rows: jax.Array, starts: jax.Array) -> jax.Array:
    """Writes rows [B, N] into buffer [B, M] at column starts [B]."""
    return jax.vmap(lambda b, r, s: jax.lax.dynamic_update_slice(b, r, (s,)))(buffer, rows, starts)


def _fold(keys: jax.Array, data: jax.Array) -> jax.Array:
    return jax.vmap(jax.random.fold_in)(keys, data)
