"""Measures the shipped demo on held-out modules of the standard library: `python -m bytejax.benchmark.demo KIND`.

identity: greedy ids of every drafter against autoregression of the same block width, and of width 1.
acceptance: accept length of every drafter, in greedy decoding and in sampling, and a1 (see `first_acceptance`).
speed: bytes per second of one drafter against autoregression in the same run.

Prints one JSON object per line.
"""

import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bytejax import loading
from bytejax.circuits import head as heads
from bytejax.cli import common, measure
from bytejax.decoding.generate import generate
from bytejax.drafters.base import Autoregressive
from bytejax.drafters.circuit import GREEDY_RULES
from bytejax.models.base import Target
from bytejax.training import corpus

PROMPT_BYTES = 128


def held_out_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Pieces of held-out modules, each after a start id: `count` lists of 1 + PROMPT_BYTES ids."""
    ids = corpus.stdlib().held_out
    text = ids[ids < corpus.BOS].astype(int)
    starts = np.random.default_rng(seed).integers(0, len(text) - PROMPT_BYTES, count)
    return [[corpus.BOS, *text[s : s + PROMPT_BYTES].tolist()] for s in starts]


def identity(target: Target, names: list[str], options: dict[str, Any], batch: int) -> Iterator[dict[str, Any]]:
    """Per drafter: how many rows differ from each kind of autoregression, and the top-2 gap of the second kind's."""
    prompts, chosen = held_out_prompts(options.pop("count")), options.pop("chosen")
    batches = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
    run = lambda drafter: measure.Job(target, drafter, batches, options | {"temperature": 0.0, "ignore_stop": True})
    plain = run(Autoregressive()).run().ids
    for name in names:
        drafter = loading.load_drafter(name, target, **chosen)
        job = run(drafter)
        drafted, padded = job.run(), run(Autoregressive(width=drafter.block_width)).run().ids
        ties = measure.first_differences(job, drafted.ids, plain)
        yield {
            "drafter": name,
            "rows": len(prompts),
            "differ_at_same_width": sum(a != b for a, b in zip(drafted.ids, padded, strict=True)),
            "differ_from_width_1": len(ties),
            "largest_gap": max((t["gap"] for t in ties), default=0.0),
            "accept_length": drafted.stats.accept_length,
        }


def acceptance(target: Target, names: list[str], options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Per drafter: accept length in greedy decoding, by rule, and in sampling."""
    prompts = held_out_prompts(options.pop("count"))
    options |= {"ignore_stop": True}
    temperature, chosen = options.pop("temperature") or 1.0, options.pop("chosen")
    for name in names:
        drafter = loading.load_drafter(name, target, **chosen)
        sampled = generate(target, prompts, drafter=drafter, temperature=temperature, **options)
        row = {"drafter": name, "temperature": temperature, "sampling": sampled.stats.accept_length}
        row |= {"histogram": sampled.stats.accept_histogram, "distinct_8grams": measure.distinct(sampled.ids, 8)}
        for rule in GREEDY_RULES:
            drafter = loading.load_drafter(name, target, greedy_rule=rule, **chosen)
            row[f"greedy_{rule}"] = generate(target, prompts, drafter=drafter, **options).stats.accept_length
        yield row | {"a1": first_acceptance(target, name, prompts)}


def first_acceptance(target: Target, name: str, prompts: list[list[int]]) -> float:
    """a1: how probable it is that a first byte drawn from the circuit, before conditioning, passes verification.

    The mean of sum_x min(p(x), q_1(x)) over the positions of the prompts (Leviathan et al. 2023, Eq. 3).
    """
    hidden = target.states(jnp.asarray(prompts))
    p = jax.nn.softmax(target.unembed(hidden))
    config, params = loading.load_head(loading.drafter_directory(name))
    theta = heads.theta(params, config, hidden)
    q = jnp.exp(config.circuit.conditional(theta, jnp.zeros((*hidden.shape[:2], 0), jnp.int32)))
    return float(jnp.minimum(p, q[..., : p.shape[-1]]).sum(-1).mean())


def speed(target: Target, names: list[str], options: dict[str, Any], repeats: int) -> Iterator[dict[str, Any]]:
    """Per drafter: medians of `repeats` runs in turns with both layouts of the single-token baseline, batch 1."""
    prompts, chosen = held_out_prompts(options.pop("count")), options.pop("chosen")
    for name in names:
        drafter = loading.load_drafter(name, target, **chosen)
        job = measure.Job(target, drafter, [[p] for p in prompts], options | {"ignore_stop": True})
        result = measure.compare(job, repeats)
        yield {
            "drafter": name,
            "draft_tokens": drafter.block_width - 1,
            "temperature": options["temperature"],
            "ratio": result.drafted.stats.tokens_per_second / result.baseline.stats.tokens_per_second,
            "bytes_per_second": result.drafted.stats.tokens_per_second,
            "baseline_bytes_per_second": result.baseline.stats.tokens_per_second,
            "baseline_layout": result.layout,
            "layouts": result.layouts,
            "accept_length": result.drafted.stats.accept_length,
            "distinct_8grams": measure.distinct(result.drafted.ids, 8),
            "identical": result.identical,
        }


def main(argv: list[str] | None = None) -> int:
    """Entry point of `python -m bytejax.benchmark.demo`."""
    parser = common.Parser(prog="python -m bytejax.benchmark.demo", description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=("identity", "acceptance", "speed"))
    parser.add_argument("--drafters", nargs="+", default=loading.demo_drafters(), help="default: all of the demo's")
    parser.add_argument("--prompts", type=common.number(int, 1), default=20)
    parser.add_argument("--max-new-tokens", type=common.number(int, 1), default=256)
    parser.add_argument("--temperature", type=common.number(float, 0), default=0.0)
    parser.add_argument("--draft-tokens", type=common.number(int, 1), help="default: all of a head's window")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=common.number(int, 1), default=10, help="prompts at once, for identity")
    parser.add_argument("--repeats", type=common.number(int, 1), default=3, help="runs of each side, for speed")
    args = parser.parse_args(argv)
    target = loading.load_target("demo", args.dtype)
    options = {"count": args.prompts, "max_new_tokens": args.max_new_tokens, "temperature": args.temperature}
    options["chosen"] = {} if args.draft_tokens is None else {"draft_tokens": args.draft_tokens}
    if args.kind == "identity":
        rows = identity(target, args.drafters, options, args.batch)
    elif args.kind == "acceptance":
        rows = acceptance(target, args.drafters, options)
    else:
        rows = speed(target, args.drafters, options, args.repeats)
    for row in rows:
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(common.run(main))
