"""Plain and streamed generation: prompts in, ids and text out, around the compiled loop."""

import dataclasses
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bytejax.decoding import accept as accept_rules
from bytejax.decoding import loop
from bytejax.decoding.logits import make_warp
from bytejax.drafters.base import Autoregressive, Draft, Drafter
from bytejax.errors import InputError, check_integer
from bytejax.models.base import Target

FINISH = {loop.RUNNING: "running", loop.STOP: "stop", loop.LENGTH: "length"}
WHOLE = 2**31 - 1  # cycles: until every row has ended


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts and times of a run. Tokens are kept ids.

    from_prompts: tokens that came from the prompts' own passes, the first of each row unless the bonus is dropped.
    accept_length: tokens per target pass, those of the prompts left out on both sides.
    accept_histogram: entry i is how many cycles added i tokens.
    drafted, accepted: bytes proposed and kept; acceptance_rate: their quotient, 0 where nothing was drafted.
    decode_seconds: cycles only; prefill_seconds: prompts; compile_seconds: building programs, in neither.
    """

    tokens: int
    from_prompts: int
    target_forwards: int
    accept_length: float
    accept_histogram: list[int]
    drafted: int
    accepted: int
    acceptance_rate: float
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    tokens_per_second: float


@dataclasses.dataclass(frozen=True)
class Result:
    """What was generated, one entry per prompt.

    ids: the new ids only, a stop id included. texts: their text. finish_reasons: "stop" or "length".
    from_draft: for every id, whether it was an accepted draft. forwards: target passes.
    """

    ids: list[list[int]]
    texts: list[str]
    finish_reasons: list[str]
    from_draft: list[list[bool]]
    forwards: list[int]
    stats: Stats


class Program:
    """A jitted function, compiled ahead of its first call per signature, so that compile time is known apart.

    compiled: number of programs built; seconds: time spent building them.
    """

    def __init__(self, function, static: tuple[str, ...] = (), donate: tuple[int, ...] = ()):
        self._jit = jax.jit(function, static_argnames=static, donate_argnums=donate)
        self._programs: dict[Any, Any] = {}
        self.compiled, self.seconds = 0, 0.0

    def __call__(self, *args, **static):
        leaves, structure = jax.tree.flatten(args)
        places = tuple(getattr(x, "sharding", None) for x in leaves)
        key = (structure, tuple(map(jax.typeof, leaves)), places, tuple(sorted(static.items())))
        if key not in self._programs:
            begin = time.perf_counter()
            self._programs[key] = self._jit.lower(*args, **static).compile()
            self.seconds += time.perf_counter() - begin
            self.compiled += 1
        return self._programs[key](*args)

    def clear(self) -> None:
        """Forgets every program; the next call of each signature builds its own anew."""
        self._programs.clear()
        self._jit.clear_cache()


START = Program(loop.start, static=("capacity", "room"))
RUN = Program(loop.run, donate=(3,))


class Generation:
    """One batch of prompts on its way: `advance` runs some cycles, `result` tells what there is.

    The arguments are those of `generate`. Raises InputError for anything that cannot be served, before any compute.
    """

    def __init__(
        self,
        target: Target,
        prompts: Sequence[str | bytes | Sequence[int]],
        *,
        drafter: Drafter | None = None,
        max_new_tokens: int | Sequence[int] = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
        banned_ids: Iterable[int] = (),
        ignore_stop: bool = False,
        verify: bool = True,
        accept: str | None = None,
        bonus: str = "condition",
        capacity_step: int = 128,
    ):
        if drafter is not None and not isinstance(drafter, Drafter):
            raise InputError(f"drafter is {drafter!r}; give what load_drafter({drafter!r}, target) returns")
        check_integer("capacity_step", capacity_step, 1, 2**20)
        check_integer("seed", seed, 0, 2**32 - 1)
        self._target, self._drafter = target, drafter if drafter is not None else Autoregressive()
        self._drafter.check(target)
        if isinstance(prompts, str | bytes):
            raise InputError("prompts is a list of prompts; put a single one in brackets")
        rows = [_prompt_ids(target, p, i) for i, p in enumerate(prompts)]
        if not rows:
            raise InputError("no prompts given")
        limits = _limits(rows, max_new_tokens, target.context)
        tokenizer = target.tokenizer
        banned = {*banned_ids, *tokenizer.banned, *(tokenizer.stop if ignore_stop else ())}
        warp = make_warp(target.vocab, temperature, top_k, top_p, banned)
        rule = checked_rule(accept, bonus, self._drafter)
        if not (verify or self._drafter.proposes_chains):
            raise InputError("this drafter proposes trees, which are always verified; leave verify on")
        self._rules = loop.Rules(warp, jnp.asarray(tokenizer.stop, jnp.int32), rule, bonus, verify)

        longest = max(map(len, rows))
        ids = np.zeros((len(rows), _prompt_bucket(longest)), np.int32)
        for row, x in zip(ids, rows, strict=True):
            row[: len(x)] = x
        need = max(len(x) + limit for x, limit in zip(rows, limits, strict=True))
        arrays = jnp.asarray(ids), *(jnp.asarray(x, jnp.int32) for x in ([len(x) for x in rows], limits))
        sizes = {"capacity": max(_round_up(need, capacity_step), ids.shape[1]), "room": _round_up(max(limits), 64)}
        keys = jax.block_until_ready(row_keys(seed, rows))
        compiled, begin = START.seconds, time.perf_counter()
        self._state = START(self._target, self._drafter, self._rules, *arrays, keys, **sizes)
        jax.block_until_ready(self._state)
        self._compile_seconds = START.seconds - compiled
        self._prefill_seconds = time.perf_counter() - begin - self._compile_seconds
        self._decode_seconds = 0.0

    @property
    def running(self) -> bool:
        """Whether any row has not ended."""
        return bool((np.asarray(self._state.status) == loop.RUNNING).any())

    def advance(self, cycles: int = WHOLE) -> None:
        """Runs until every row has ended, at most `cycles` cycles. The number is no part of the compiled program."""
        compiled, begin = RUN.seconds, time.perf_counter()
        self._state = RUN(self._target, self._drafter, self._rules, self._state, jnp.int32(min(cycles, WHOLE)))
        jax.block_until_ready(self._state)
        compiling = RUN.seconds - compiled
        self._compile_seconds += compiling
        self._decode_seconds += time.perf_counter() - begin - compiling

    def proposal(self) -> Draft:
        """What the drafter would propose now, for those who want to look at its trees. Not cut to the target's room,
        and the widest one where it has a `fallback`.
        """
        state, rules = self._state, self._rules
        root = state.root if rules.bonus == "condition" else None
        keys = loop.drafting_keys(state)
        return self._drafter.propose(state.draft, root, keys, rules.warp)

    def result(self) -> Result:
        """Everything generated so far."""
        s = jax.device_get(self._state.replace(cache=None, draft=None, keys=None))
        counts = s.count.tolist()
        ids = [row[:n].tolist() for row, n in zip(s.out, counts, strict=True)]
        tokens, forwards = sum(counts), int(s.forwards.sum())
        from_prompts = len(counts) if self._rules.bonus == "condition" else 0
        cycled = tokens - from_prompts
        drafted, accepted = int(s.drafted.sum()), int(s.accepted.sum())
        stats = Stats(
            tokens=tokens,
            from_prompts=from_prompts,
            target_forwards=forwards,
            accept_length=cycled / forwards if forwards else 0.0,
            accept_histogram=s.histogram.sum(0).tolist(),
            drafted=drafted,
            accepted=accepted,
            acceptance_rate=accepted / drafted if drafted else 0.0,
            prefill_seconds=self._prefill_seconds,
            decode_seconds=self._decode_seconds,
            compile_seconds=self._compile_seconds,
            tokens_per_second=cycled / self._decode_seconds if self._decode_seconds else 0.0,
        )
        return Result(
            ids=ids,
            texts=[self._target.tokenizer.decode(x) for x in ids],
            finish_reasons=[FINISH[x] for x in s.status.tolist()],
            from_draft=[row[:n].tolist() for row, n in zip(s.from_draft, counts, strict=True)],
            forwards=s.forwards.tolist(),
            stats=stats,
        )


def generate(target: Target, prompts: Sequence[str | bytes | Sequence[int]], **options) -> Result:
    """Generates from prompts, all in one batch, several bytes per pass of the target where a drafter is given.

    prompts: texts, bytes, or lists of ids (taken as they are; texts get the target's start id).
    drafter: what proposes blocks; None decodes one token at a time. The output is the target's own either way: with
        temperature 0 identical to its greedy decoding, else distributed exactly as its samples.
    max_new_tokens: an int, or one per prompt; a row also ends where the target's context is full.
    temperature, top_p, top_k: the target's distribution; 0, 1 and 0 switch each off.
    seed: a row's samples depend on the seed and its own prompt, not on the batch; the k-th repetition of a prompt
        within a call draws from the k-th stream.
    banned_ids: ids never generated. ignore_stop: stop ids are never generated either, so that rows run to their limit.
    verify: False keeps every draft unseen. Lossy; for measuring only.
    accept: how sampled drafts are judged, one of the drafter's `rules` (`decoding.accept`, `decoding.trees`); None for
        the first of them, and for "token" where the bonus is "paper".
    bonus: what becomes of the byte that the target adds after the kept drafts (`decoding.loop.BONUS`). With "paper"
        samples are not the target's.
    capacity_step: the cache's capacity is rounded up to a multiple of it; with a large one, prompts of many lengths
        share programs.

    Raises InputError for prompts or settings that cannot be served.
    """
    generation = Generation(target, prompts, **options)
    generation.advance()
    return generation.result()


def stream(
    target: Target, prompts: Sequence[str | bytes | Sequence[int]], *, cycles: int = 4, **options
) -> Iterator[Result]:
    """Like `generate`, yielding everything so far after the prompts and after every `cycles` cycles, to the end."""
    check_integer("cycles", cycles, 1)
    generation = Generation(target, prompts, **options)
    yield generation.result()
    while generation.running:
        generation.advance(cycles)
        yield generation.result()


def _prompt_ids(target: Target, prompt: str | bytes | Sequence[int], number: int) -> list[int]:
    ids = target.tokenizer.encode(prompt) if isinstance(prompt, str | bytes) else [int(i) for i in prompt]
    if not ids:
        raise InputError(f"prompt {number} is empty, and the target has no start id to begin with")
    bad = [i for i in ids if not 0 <= i < target.vocab]
    if bad:
        raise InputError(f"prompt {number} holds the id {bad[0]}; the target's ids are 0 to {target.vocab - 1}")
    if len(ids) >= target.context:
        raise InputError(
            f"prompt {number} has {len(ids)} ids, which leaves no room in the target's context of {target.context}"
        )
    return ids


def _limits(rows: list[list[int]], max_new_tokens: int | Sequence[int], context: int) -> list[int]:
    limits = [max_new_tokens] * len(rows) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    if len(limits) != len(rows):
        raise InputError(f"max_new_tokens has {len(limits)} entries for {len(rows)} prompts")
    if min(limits) < 1:
        raise InputError(f"max_new_tokens must be at least 1, got {min(limits)}")
    return [min(limit, context - len(row)) for limit, row in zip(limits, rows, strict=True)]


def checked_rule(rule: str | None, bonus: str, drafter: Drafter) -> str:
    """The acceptance rule's name. Raises InputError for combinations that cannot be."""
    if bonus not in loop.BONUS:
        raise InputError(f"unknown bonus {bonus!r}; known: {', '.join(loop.BONUS)}")
    if rule is not None and rule not in accept_rules.NAMES:
        raise InputError(f"unknown acceptance rule {rule!r}; known: {', '.join(accept_rules.NAMES)}")
    if bonus == "paper" and rule == "block":
        raise InputError(
            "bonus 'paper' is published with token-wise verification; use accept 'token', or bonus 'carry'"
        )
    if rule is not None and rule not in drafter.rules:
        raise InputError(
            f"acceptance rule {rule!r} does not fit this drafter's samples; use {' or '.join(map(repr, drafter.rules))}"
        )
    if bonus != "condition" and not drafter.drafts_first:
        raise InputError(f"bonus {bonus!r} needs a drafter that also drafts the byte after the processed ones")
    published = bonus == "paper" and "token" in drafter.rules
    return rule or ("token" if published else drafter.rules[0])


def row_keys(seed: int, rows: list[list[int]]) -> jax.Array:
    """One key per row: the seed's, folded with how often the same prompt came before."""
    seen: Counter[tuple[int, ...]] = Counter()
    repetition = []
    for row in rows:
        repetition.append(seen[tuple(row)])
        seen[tuple(row)] += 1
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.asarray(repetition, jnp.uint32))


def _prompt_bucket(length: int) -> int:
    return max(32, 1 << (length - 1).bit_length()) if length <= 256 else _round_up(length, 256)


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple
