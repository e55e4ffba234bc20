"""How a mask embedding's state nears the true token's, layer by layer: `python -m bytejax.analysis.alignment`.

ESP (arXiv 2603.17942), Figure 2. In the place of every token of an answer, a row is processed whose input is the mean
of the prompt's embeddings; it sees what the token saw. Its residual stream is compared with the token's own, apart for
the rows whose arg-max is the true next token (a draft that would be accepted) and for the others. Answers are the
target's own, greedy. One JSON object per layer; layer 0 is the input.
"""

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import bytejax
from bytejax import loading
from bytejax.benchmark import spec_bench
from bytejax.cli import common
from bytejax.errors import InputError
from bytejax.models import layers as L  # noqa: N812
from bytejax.models.llama import Llama

STEP = 256  # texts are padded to a multiple of so many ids, so that they share programs


@dataclasses.dataclass(frozen=True)
class Alignment:
    """Of M rows of one answer. cosines: [layers + 1, M] float32, with the token whose place each has; accepted: [M]."""

    cosines: np.ndarray
    accepted: np.ndarray


def alignment(target: Llama, prompt: Sequence[int], answer: Sequence[int]) -> Alignment:
    """Mask rows in the places of all M tokens of an answer but the last, which has no next token.

    Raises InputError where there is no such token.
    """
    if not prompt or len(answer) < 2:
        raise InputError("a comparison needs a prompt, and an answer of at least two ids")
    text = [*prompt, *answer]
    ids = np.zeros((1, -(-len(text) // STEP) * STEP), np.int32)
    ids[0, : len(text)] = text
    rows = -(-(len(answer) - 1) // STEP) * STEP
    cosines, accepted = _aligned(target, jnp.asarray(ids), jnp.int32(len(prompt)), rows)
    m = len(answer) - 1
    return Alignment(np.asarray(cosines)[:, :m], np.asarray(accepted)[:m])


@jax.jit(static_argnames="rows")
def _aligned(target: Llama, ids: jax.Array, start: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """For `rows` positions from `start` on, some of them past the text. ids [1, T] -> [layers + 1, rows], [rows]."""
    t = ids.shape[1]
    in_prompt = (jnp.arange(t) < start)[:, None]
    mask = jnp.where(in_prompt, target.embed(ids[0]).astype(jnp.float32), 0).sum(0) / start
    at = jnp.minimum(start + jnp.arange(rows), t - 1)
    embeds = jnp.broadcast_to(mask, (1, rows, len(mask)))
    stream = target.residuals(ids, embeds, at[None])[:, 0]
    last = L.rms_norm(stream[-1, t:], target.params["final_norm"], target.config.norm_eps)
    next_ids = ids[0, jnp.minimum(at + 1, t - 1)]
    return cosine(stream[:, at], stream[:, t:]), jnp.argmax(target.unembed(last), -1) == next_ids


def cosine(a: jax.Array, b: jax.Array) -> jax.Array:
    """Cosine of the angle between the last axes, in float32. [..., D] -> [...]."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    lengths = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)
    return (a * b).sum(-1) / jnp.maximum(lengths, 1e-30)


def by_layer(found: Sequence[Alignment]) -> Iterator[dict[str, Any]]:
    """One object per layer: mean cosines of accepted and rejected mask rows, None where there is none, and counts."""
    cosines = np.concatenate([x.cosines for x in found], axis=1)
    accepted = np.concatenate([x.accepted for x in found])
    mean = lambda x: float(x.mean()) if x.size else None
    for layer, row in enumerate(cosines):
        means = {"accepted": mean(row[accepted]), "rejected": mean(row[~accepted])}
        yield {"layer": layer, **means, "accepted_rows": int(accepted.sum()), "rejected_rows": int((~accepted).sum())}


def measured(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The alignment on the answers to the first questions of each category."""
    asked = spec_bench.read(Path(args.questions))
    asked = spec_bench.first(asked, args.per_category, list(dict.fromkeys(q.category for q in asked)))
    target = loading.load_target(args.target, args.dtype)
    if not isinstance(target, Llama):
        raise InputError(f"target {args.target!r}: mask embeddings are compared in Llama targets only")
    found = []
    for question in asked:
        prompt = spec_bench.prompt(target.tokenizer, question.turns[:1], ())
        if len(prompt) + args.tokens <= target.context:
            answer = bytejax.generate(target, [prompt], max_new_tokens=args.tokens, capacity_step=512).ids[0]
            if len(answer) > 1:
                found.append(alignment(target, prompt, answer))
    if not found:
        raise InputError(f"{args.questions}: no question has an answer of two ids within the target's context")
    yield from by_layer(found)


def main(argv: list[str] | None = None) -> int:
    """Runs the measurement. -> exit status."""
    return common.run(lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    parser = common.Parser(prog="python -m bytejax.analysis.alignment", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    number = common.number
    parser.add_argument("--target", default="demo", help="what decode.py takes as a target (default: demo)")
    parser.add_argument("--questions", default="question.jsonl", metavar="FILE", help="of Spec-Bench")
    parser.add_argument("--per-category", type=number(int, 1), default=1, metavar="N", help="questions (default: 1)")
    parser.add_argument("--tokens", type=number(int, 2), default=64, metavar="N", help="of answers (default: 64)")
    parser.add_argument("--dtype", default="float32", metavar="TYPE", help="of the weights (default: float32)")
    args = parser.parse_args(argv)
    common.use_compilation_cache()
    for row in measured(args):
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
