"""The decoding loop: one `lax.while_loop` that drafts, verifies and commits on device.

Letters: B batch, N block rows, M room for new ids, T prompt length, V vocabulary.
"""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import struct

from bytejax.decoding import accept, trees
from bytejax.decoding.logits import Warp
from bytejax.drafters.base import Draft, Drafter, Outcome, Prompt
from bytejax.models.base import Block, Target

RUNNING, STOP, LENGTH = 0, 1, 2
DRAFT, VERIFY = 0, 1  # what a cycle's randomness is for

BONUS = {
    "condition": "emitted, and processed as the root of the next block, whose drafts are conditioned on it: one pass",
    "carry": "emitted, with a pass of its own, where no draft was kept, else dropped; after a rejection the next cycle "
    "starts from the law it came from",
    "standard": "emitted, with a pass of its own",
    "paper": "as in carry, but a rejection is forgotten (MtPC, Algorithm 2): samples are NOT the target's, LOSSY",
}


class Rules(struct.PyTreeNode):
    """What a run obeys, the same for every row.

    warp: the target's distribution. stop: [K] int32, ids that end a row (kept as its last id).
    accept: name of the acceptance rule for samples, one of the drafter's `rules` (see `accept.NAMES`). bonus: what
        becomes of the target's extra byte, see `BONUS`. verify: False accepts every draft unseen (lossy).
    """

    warp: Warp
    stop: jax.Array
    accept: str = struct.field(pytree_node=False, default="block")
    bonus: str = struct.field(pytree_node=False, default="condition")
    verify: bool = struct.field(pytree_node=False, default=True)


class State(struct.PyTreeNode):
    """Everything that changes from cycle to cycle. Rows advance independently.

    cache, draft: the target's cache and the drafter's state, which hold the same committed positions.
    root: [B] int32, emitted and not yet processed; its position is `cache.lengths`. Only where the bonus is
        "condition".
    law: [B, V] float32, the next byte's log-probabilities (logits in greedy decoding), or None where the bonus is
        "condition".
    keys: [B], one key per row; a cycle uses it folded with the position of its first byte, so that what a row samples
        depends on nothing but its own key and text.
    out: [B, M + N + 1] int32, new ids; from_draft: the same shape, True where the id was an accepted draft.
    count, limit: [B] int32, ids written and allowed. status: [B] int32, RUNNING, STOP or LENGTH.
    forwards, drafted, accepted: [B] int32, target passes, drafts proposed, drafts kept.
    histogram: [B, N + 1] int32 (N + 2 where the bonus is "standard"), cycles by the number of ids they added.
    """

    cache: Any
    draft: Any
    root: jax.Array
    law: jax.Array | None
    keys: jax.Array
    out: jax.Array
    from_draft: jax.Array
    count: jax.Array
    limit: jax.Array
    status: jax.Array
    forwards: jax.Array
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
    """Processes the prompts and, where the bonus is "condition", draws each row's first id.

    ids [B, T] int32 padded on the right, lengths and limit [B] int32 (each >= 1), keys [B].
    capacity: committed positions the cache can hold, at least T and prompt + limit; room: at least every limit.
    """
    b, n, adapter = ids.shape[0], drafter.block_width, drafter.target_adapter()
    extended, cache = target.prefill(ids, lengths, target.init_cache(b, capacity, n, adapter), adapter, drafter.taps)
    law = _laws(target, rules, extended.hidden)[:, -1]
    zeros = jnp.zeros((b,), jnp.int32)
    state = State(
        cache=cache,
        draft=drafter.init(target, Prompt(ids, lengths, extended, cache, rules.warp, capacity)),
        root=zeros,
        law=law,
        keys=keys,
        out=jnp.zeros((b, room + n + 1), jnp.int32),
        from_draft=jnp.zeros((b, room + n + 1), bool),
        count=zeros,
        limit=limit,
        status=zeros + RUNNING,
        forwards=zeros,
        drafted=zeros,
        accepted=zeros,
        histogram=jnp.zeros((b, n + 1 + (rules.bonus == "standard")), jnp.int32),
    )
    if rules.bonus != "condition":
        return state
    root = accept.choose(law, rules.warp, _keys(keys, lengths - 1, VERIFY))
    return state.replace(
        root=root,
        law=None,
        out=state.out.at[:, 0].set(root),
        count=zeros + 1,
        status=jnp.where(jnp.isin(root, rules.stop), STOP, jnp.where(limit <= 1, LENGTH, RUNNING)),
    )


def run(target: Target, drafter: Drafter, rules: Rules, state: State, max_cycles: jax.Array) -> State:
    """Runs cycles until every row has ended, at most `max_cycles` [] int32 of them.

    Where the drafter has a fallback, it takes the cycles in which no running row's draft is worth more. Each of them
    has a loop of its own within the loop: XLA would copy the caches into the branches of a conditional.
    """
    drafters = _with_fallbacks(drafter) if rules.bonus == "condition" else [drafter]

    def unfinished(carry):
        done, state = carry
        return (done < max_cycles) & (state.status == RUNNING).any()

    def cycles_of(index):
        turn = lambda carry: unfinished(carry) & (_chosen(drafters, carry[1]) == index)
        step = lambda carry: (carry[0] + 1, cycle(target, drafters[index], rules, carry[1]))
        return lambda carry: jax.lax.while_loop(unfinished if len(drafters) == 1 else turn, step, carry)

    carry = jnp.int32(0), state
    if len(drafters) == 1:
        return cycles_of(0)(carry)[1]
    every = [cycles_of(index) for index in range(len(drafters))]
    return jax.lax.while_loop(unfinished, lambda carry: functools.reduce(lambda c, f: f(c), every, carry), carry)[1]


def _with_fallbacks(drafter: Drafter) -> list[Drafter]:
    """The drafter, its fallback, that one's, ..., the widest first."""
    chain = [drafter]
    while (narrower := chain[-1].fallback()) is not None:
        chain.append(narrower)
    return chain


def _chosen(drafters: list[Drafter], state: State) -> jax.Array:
    """Index of the first drafter whose draft is worth its block to some running row; the last one's always is."""
    running = state.status == RUNNING
    worth = [(drafter.worth(state.draft, state.root) & running).any() for drafter in drafters[:-1]]
    return jnp.argmax(jnp.stack([*worth, jnp.bool_(True)]))


def drafting_keys(state: State) -> jax.Array:
    """The next cycle's randomness for drafting, [B]."""
    return _keys(state.keys, state.cache.lengths, DRAFT)


def cycle(target: Target, drafter: Drafter, rules: Rules, state: State) -> State:
    """Draft, one target pass over the block, accept, commit. Ended rows stay as they are."""
    active, rooted = state.status == RUNNING, rules.bonus == "condition"
    keys = lambda purpose: _keys(state.keys, state.cache.lengths, purpose)
    draft = drafter.propose(state.draft, state.root if rooted else None, drafting_keys(state), rules.warp)
    if (room := target.room(state.cache)) is not None:
        draft = draft.replace(block=draft.block.cut(room))
    block = draft.block
    chex.assert_shape(block.ids, (active.shape[0], drafter.block_width))
    extended = target.extend(block, state.cache, drafter.target_adapter(), drafter.taps)
    laws = _laws(target, rules, extended.hidden[:, : block.nodes])
    verdict = _judge(draft, laws, None if rooted else state.law, rules, state)
    bonus = accept.choose(verdict.law, rules.warp, keys(VERIFY)) if verdict.bonus is None else verdict.bonus
    stays = (verdict.kept == 0) | (rules.bonus in ("condition", "standard"))  # whether the bonus is emitted

    path = jnp.broadcast_to(jnp.arange(laws.shape[1], dtype=jnp.int32), laws.shape[:2])
    ids = block.ids[:, : block.nodes]
    if verdict.path is not None:
        path, ids = verdict.path, jnp.take_along_axis(ids, verdict.path, axis=1)
    state, kept = _emit(state, rules, ids[:, rooted:], verdict.kept, bonus, stays)
    rows = jnp.where(active, verdict.kept + rooted, 0)
    state = state.replace(
        cache=target.commit(state.cache, extended.pending, path, rows),
        draft=drafter.observe(state.draft, target, Outcome(draft, extended, laws, rules.warp, path, rows)),
        forwards=state.forwards + active,
        drafted=state.drafted + jnp.where(active, block.is_draft.sum(-1, dtype=jnp.int32), 0),
        accepted=state.accepted + jnp.minimum(verdict.kept, kept),
    )
    if rooted:
        return state.replace(root=jnp.where(active, bonus, state.root))
    # What a rejection has ruled out is not drawn again: the next cycle begins with the law the byte was drawn from.
    law = verdict.law
    if law is None:  # the byte was chosen, and is what the next cycle begins with
        law = jnp.where(jnp.arange(laws.shape[-1]) == bonus[:, None], 0.0, -jnp.inf)
    if rules.bonus == "paper":
        law = accept.row(jnp.concatenate([state.law[:, None], laws], axis=1), verdict.kept)
    if not rules.warp.greedy:
        law = jax.nn.log_softmax(law)
    state = state.replace(law=jnp.where(active[:, None], law, state.law))
    return _process(target, drafter, rules, state, bonus, stays & (state.status == RUNNING))


def _laws(target: Target, rules: Rules, hidden: jax.Array) -> jax.Array:
    """What the target says after every row: log-probabilities, or logits in greedy decoding. -> [B, N, V] float32."""
    logits = target.unembed(hidden)
    return rules.warp.masked(logits) if rules.warp.greedy else rules.warp.log_probs(logits)


def _judge(draft: Draft, laws: jax.Array, first: jax.Array | None, rules: Rules, state: State) -> accept.Verdict:
    """What stays of a draft. laws [B, N, V]: the target's after each row of the block that may be emitted.

    first [B, V]: the law of the block's first row, if that is a draft.
    """
    block, warp, chosen = draft.block.front, rules.warp, rules.accept
    keys, begin = _keys(state.keys, state.cache.lengths, VERIFY), state.cache.lengths - (first is not None)
    draws = lambda levels: noise(state.keys, begin, levels, laws.shape[-1])
    if not block.is_chain:
        if first is not None or not rules.verify:
            raise ValueError("trees are judged under bonus 'condition', and always verified")
        if draft.children is not None and chosen == "recursive" and not warp.greedy:
            return trees.recursive(block, laws, draft.children, keys, accept.gumbel(keys, accept.BONUS, laws.shape[-1]))
        return trees.match(block, laws, None if warp.greedy else draws(block.max_levels))
    drafts = block.ids[:, 1:] if first is None else block.ids
    if draft.log_q is not None:
        chex.assert_shape(draft.log_q, (*drafts.shape, laws.shape[-1]))
    log_p = laws if first is None else jnp.concatenate([first[:, None], laws], axis=1)
    chain = accept.Chain(drafts, block.is_draft.sum(-1, dtype=jnp.int32), log_p, draft.log_q)
    if not rules.verify:
        return accept.everything(chain)
    if warp.greedy:
        return accept.greedy(chain)
    if chosen == "match" or draft.log_q is None:
        return accept.match(chain, draws(log_p.shape[1]))
    return accept.RULES[chosen](chain, keys)


def _emit(
    state: State, rules: Rules, drafts: jax.Array, kept: jax.Array, bonus: jax.Array, stays: jax.Array
) -> tuple[State, jax.Array]:
    """Writes the first `kept` [B] of drafts [B, M] and, where it stays, the bonus; ends rows at stop ids and limits.

    -> the state, and how many ids each row got, [B].
    """
    drafts = jnp.pad(drafts, ((0, 0), (0, 1)))
    index = jnp.arange(drafts.shape[1])
    is_draft = index < kept[:, None]
    new = jnp.where(is_draft, drafts, bonus[:, None])
    total = kept + stays
    ends = jnp.isin(new, rules.stop) & (index < total[:, None])
    never = new.shape[1] + 1
    first_stop = jnp.where(ends.any(-1), jnp.argmax(ends, -1) + 1, never)
    active = state.status == RUNNING
    added = jnp.where(active, jnp.minimum(jnp.minimum(total, first_stop), state.limit - state.count), 0)
    count = state.count + added
    status = jnp.where(added == first_stop, STOP, jnp.where(count >= state.limit, LENGTH, RUNNING))
    bins = jnp.arange(state.histogram.shape[1])
    state = state.replace(
        out=_write(state.out, new, state.count),
        from_draft=_write(state.from_draft, is_draft, state.count),
        count=count,
        status=jnp.where(active, status, state.status),
        histogram=state.histogram + (active[:, None] & (added[:, None] == bins)).astype(jnp.int32),
    )
    return state, added


def _process(target: Target, drafter: Drafter, rules: Rules, state: State, bonus: jax.Array, rows: jax.Array) -> State:
    """An extra pass for the rows [B] bool whose bonus was emitted, so that the next cycle finds it processed."""

    def forward(state):
        block = Block.chain(bonus[:, None])
        extended = target.extend(block, state.cache, drafter.target_adapter(), drafter.taps)
        laws, path, accepted = _laws(target, rules, extended.hidden), jnp.zeros_like(block.ids), rows.astype(jnp.int32)
        outcome = Outcome(Draft(block), extended, laws, rules.warp, path, accepted)
        return state.replace(
            cache=target.commit(state.cache, extended.pending, path, accepted),
            draft=drafter.observe(state.draft, target, outcome),
            law=jnp.where(rows[:, None], laws[:, 0], state.law),
            forwards=state.forwards + rows,
        )

    # A loop of at most one turn: into the branches of a conditional XLA would copy the caches.
    once = lambda carry: (jnp.bool_(False), forward(carry[1]))
    return jax.lax.while_loop(lambda carry: carry[0], once, (rows.any(), state))[1]


def _write(buffer: jax.Array, rows: jax.Array, starts: jax.Array) -> jax.Array:
    """Writes rows [B, N] into buffer [B, M] at column starts [B]."""
    return jax.vmap(lambda b, r, s: jax.lax.dynamic_update_slice(b, r, (s,)))(buffer, rows, starts)


def _keys(keys: jax.Array, positions: jax.Array, purpose: int) -> jax.Array:
    """Randomness of each row [B] at a position, that of the newest byte it may depend on, for one purpose."""
    return jax.vmap(lambda key, at: jax.random.fold_in(jax.random.fold_in(key, at), purpose))(keys, positions)


def noise(keys: jax.Array, begin: jax.Array, levels: int, vocab: int) -> jax.Array:
    """Gumbel noise of the bytes after positions begin, begin + 1, ..., the same that one byte per pass would draw with.

    keys, begin [B] -> [B, L, V].
    """
    at = jax.vmap(_keys, (None, 1, None), 1)(keys, begin[:, None] + jnp.arange(levels), VERIFY)
    return accept.gumbel(at, accept.BONUS, vocab)
