"""How often each guess of a target's prediction heads is right: `python -m bytejax.benchmark.ranks --target DIRECTORY`.

The target continues prompts greedily, and every head but the target's own is asked about every position of the
continuations: accuracies[d][r] is how often the id d + 2 positions later was that head's guess of rank r, 0 the best.
Prints one JSON object, from whose `accuracies` the drafter "evabyte" (`drafters.medusa`) builds the tree of any number
of nodes. They are the target's on any machine; what number of nodes is best depends on the machine.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bytejax import checkpoints, loading
from bytejax.benchmark.demo import held_out_prompts
from bytejax.cli import common
from bytejax.decoding.generate import generate
from bytejax.errors import InputError
from bytejax.models.base import Target
from bytejax.models.evabyte import EvaByte

ROUND = 128  # texts are padded to multiples of so many positions


def accuracies(
    target: Target, prompts: Sequence[bytes | Sequence[int]], tokens: int, ranks: int, batch: int = 8
) -> tuple[list[list[float]], list[int]]:
    """Shares of right guesses by depth and rank, and how many positions each depth was asked about.

    tokens: length of the continuations; batch: how many at once. Raises InputError for a target without heads, or
    continuations that leave a head unasked.
    """
    if not isinstance(target, EvaByte) or target.config.pred_heads < 2:
        raise InputError(f"a {type(target).__name__} without prediction heads beside its own has no guesses to count")
    depths = target.config.pred_heads - 1
    encode = target.tokenizer.encode
    rows = [encode(x) if isinstance(x, bytes) else list(x) for x in prompts]
    right, asked = np.zeros((depths, ranks)), np.zeros(depths, int)
    for at in range(0, len(rows), batch):
        written = generate(target, rows[at : at + batch], max_new_tokens=tokens).ids
        for row, new in zip(rows[at : at + batch], written, strict=True):
            text = np.zeros(-(-(len(row) + len(new)) // ROUND) * ROUND, np.int32)
            text[: len(row) + len(new)] = row + new
            found = np.asarray(_ranks(target, text))
            for d in range(depths):
                of_depth = found[len(row) - 1 : max(len(row) - 1, len(row) + len(new) - d - 2), d]
                asked[d] += len(of_depth)
                right[d] += (of_depth[:, None] == np.arange(ranks)).sum(0)
    if not asked.all():
        raise InputError(f"continuations of {tokens} ids are too short to ask all {depths + 1} heads about")
    return (right / asked[:, None]).tolist(), asked.tolist()


@jax.jit
def _ranks(target: EvaByte, ids: jax.Array) -> jax.Array:
    """Rank of what came among the guesses of heads 1, 2, ... at every position. ids [T] -> [T, P - 1]."""
    logits = target.all_logits(target.states(ids[None]))[0, :, 1:]
    came = jnp.stack([jnp.roll(ids, -2 - d) for d in range(logits.shape[1])], axis=1)[..., None]
    return (logits > jnp.take_along_axis(logits, came, axis=-1)).sum(-1)


def main(argv: list[str] | None = None) -> int:
    """Runs the command with the given arguments (those of the process if None). -> exit status."""
    return common.run(lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    args = _parser().parse_args(argv)
    common.use_compilation_cache()
    target = loading.load_target(args.target, args.dtype)
    prompts = _file_prompts(args.prompt_file) or [bytes(ids[1:]) for ids in held_out_prompts(args.prompts)]
    shares, asked = accuracies(target, prompts, args.tokens, args.ranks, args.batch)
    found: dict[str, Any] = {"target": args.target, "prompts": len(prompts), "tokens": args.tokens, "positions": asked}
    print(json.dumps(found | {"accuracies": [[round(x, 5) for x in depth] for depth in shares]}))
    return 0


def _file_prompts(paths: Sequence[str]) -> list[bytes]:
    prompts = []
    for path in map(Path, paths):
        with checkpoints.file_errors(path):
            prompts.append(path.read_bytes())
    return prompts


def _parser() -> common.Parser:
    parser = common.Parser(prog="python -m bytejax.benchmark.ranks", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add, count = parser.add_argument, common.number(int, 1)
    add("--target", required=True, help="a target with prediction heads, as decode.py takes it")
    default = "pieces of held-out modules of the standard library"
    add("--prompt-file", action="append", default=[], metavar="PATH", help=f"a prompt's bytes (default: {default})")
    add("--prompts", type=count, default=20, metavar="N", help="how many of those (default: 20)")
    add("--tokens", type=count, default=256, metavar="N", help="length of a continuation (default: 256)")
    add("--ranks", type=count, default=10, metavar="N", help="guesses of each head (default: 10)")
    add("--batch", type=count, default=8, metavar="N", help="prompts continued together (default: 8)")
    add("--dtype", default="float32", metavar="TYPE", help="of the weights: float32 (default) or bfloat16")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
