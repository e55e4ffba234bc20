"""The `decode.py` command: prompts in, text out as it is accepted, what it cost, and how autoregression compares."""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bytejax
from bytejax import loading
from bytejax.benchmark import measure
from bytejax.cli import bench, common, render
from bytejax.decoding.accept import NAMES
from bytejax.decoding.generate import Result, checked_rule, stream
from bytejax.decoding.loop import BONUS
from bytejax.drafters.circuit import GREEDY_RULES
from bytejax.errors import InputError, input_errors_of
from bytejax.models.base import Target

PROMPT = '''\
class Server:
    def __init__(self, address, handler):
        self.address = address
        self.handler = handler

    def serve_forever(self):
        """Handle requests until told to stop."""
'''
PROMPT_SHOWN = 600  # characters of a prompt that are shown above its continuation

DESCRIPTION = """Generates text from a byte-level target, several bytes per forward pass, without changing what it says:
greedy text is the target's own, samples have the target's own distribution. Without arguments it continues a prompt of
its own with the demo."""
EPILOG = """The prompt is --prompt, --prompt-file, whatever is piped in, or else, without --chat, a built-in one. Exit
status: 0 done, 2 wrong input, 130 interrupted."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """name: how an error calls it. data: its bytes, which need not be UTF-8."""

    name: str
    data: bytes


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with the given arguments (those of the process if None). -> exit status."""
    return common.run(lambda: _decode(argv))


def _decode(argv: Sequence[str] | None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if bench.asked_for(argv):
        return bench.run(argv)
    args = _parser().parse_args(argv)
    if args.json and args.stream:
        raise InputError("--stream and --json exclude each other: with --json, standard output is one JSON object")
    compare = args.compare or not argv
    prompts, built_in = _prompts(args)
    common.use_compilation_cache()
    job, settings = _job(args, prompts)
    if args.json:
        first = None if compare else job.run()
        print(json.dumps(_report(job, first, args.repeats if compare else 0, settings)))
        return 0

    console = render.console()
    first = _show(job, console, prompts, streaming=args.stream is not False, echo=built_in or console.is_terminal)
    report = _report(job, first, args.repeats if compare else 0, settings)
    render.summary(console, report)
    if compare:
        render.comparison(console, report)
    return 0


def _report(job: measure.Job, first: Result | None, repeats: int, settings: dict[str, Any]) -> dict[str, Any]:
    return measure.report(first, measure.compare(job, repeats) if repeats else None, settings)


def _show(job: measure.Job, console: render.Console, prompts: list[Prompt], streaming: bool, echo: bool) -> Result:
    """Runs the job, printing each text as it grows, or once it is whole; with `echo` its prompt's end before it."""
    many, parts, tokenizer = len(prompts) > 1, [], job.target.tokenizer
    titles = [f"{p.name} ({i} of {len(prompts)})" if many else None for i, p in enumerate(prompts, 1)]
    shown = [_ending(p.data.decode("utf-8", "replace")) if echo else None for p in prompts]
    for batch in job.batches:
        printer = render.RowsPrinter(console, tokenizer, titles[: len(batch)], shown[: len(batch)])
        titles, shown = titles[len(batch) :], shown[len(batch) :]
        for result in stream(job.laid_out, batch, drafter=job.drafter, **job.options):
            if streaming or "running" not in result.finish_reasons:
                printer.update(result)
        parts.append(result)
    return measure.merge(parts)


def _job(args: argparse.Namespace, prompts: list[Prompt]) -> tuple[measure.Job, dict[str, Any]]:
    """Everything loaded and checked; and the settings as they took effect."""
    source = args.drafter
    if source is None:
        source = loading.DEFAULT_DRAFTER if args.target == "demo" else "none"
    unroll = True if loading.needs_unrolled(source) else None
    target = loading.load_target(args.target, args.dtype, unroll)
    chosen = {name: getattr(args, name) for name in ("draft_tokens", "greedy_rule")}
    flags, options = {k: v for k, v in chosen.items() if v is not None}, dict(map(common.option, args.option or ()))
    for name in flags.keys() & options.keys():
        raise InputError(f"{name} is given twice, by --{name.replace('_', '-')} and by --option")
    chosen = flags | options
    drafter = loading.load_drafter(source, target, **chosen)
    rows = [_ids(target, prompt, args) for prompt in prompts]
    options = {name: getattr(args, name) for name in ("max_new_tokens", "temperature", "top_p", "top_k", "seed")}
    options |= {"ignore_stop": args.ignore_stop, "verify": args.verify == "on"}
    options |= {"accept": checked_rule(args.accept, args.bonus, drafter), "bonus": args.bonus}
    settings = {
        "target": args.target,
        "drafter": source,
        "draft_tokens": drafter.block_width - 1 if drafter.proposes_chains else None,
        "block_rows": drafter.block_width,
        "options": chosen,
        "greedy_rule": getattr(drafter, "greedy_rule", None),
        "dtype": args.dtype,
        "unit": target.tokenizer.unit,
        "chat": args.chat is not None,
        "allow_special": args.allow_special,
        "prompts": [p.name for p in prompts],
        "prompt_ids": [len(row) for row in rows],
        **options,
        "verify": args.verify,
        "batch": args.batch,
        "repeats": args.repeats,
        **measure.environment(),
    }
    batches = [rows[i : i + args.batch] for i in range(0, len(rows), args.batch)]
    return measure.Job(target, drafter, batches, options), settings


def _ids(target: Target, prompt: Prompt, args: argparse.Namespace) -> list[int]:
    if args.chat is None:
        ids = target.tokenizer.encode(prompt.data, allow_special=args.allow_special)
    else:
        messages = [_message(text) for text in args.chat if text is not None]
        if prompt.data or not messages:
            messages.append({"role": "user", "content": prompt.data.decode("utf-8", "surrogateescape")})
        with input_errors_of("--chat"):
            ids = target.tokenizer.chat(messages, allow_special=args.allow_special)
    if not ids:
        raise InputError(f"{prompt.name} is empty, and the target has no start id to begin with")
    if len(ids) >= target.context:
        raise InputError(f"{prompt.name} has {len(ids)} ids; the target's context has room for {target.context - 1}")
    return ids


def _message(text: str) -> dict[str, str]:
    role, colon, content = text.partition(":")
    if not colon:
        raise InputError(f"--chat {text!r} is not of the form ROLE:TEXT")
    return {"role": role.strip(), "content": content.removeprefix(" ")}


def _prompts(args: argparse.Namespace) -> tuple[list[Prompt], bool]:
    """The prompts, and whether they are the built-in one."""
    if args.prompt and args.prompt_file:
        raise InputError("--prompt and --prompt-file exclude each other")
    if args.prompt:
        return [Prompt(f"prompt {i}", _argument_bytes(text)) for i, text in enumerate(args.prompt, 1)], False
    if args.prompt_file:
        return [Prompt(f"prompt file {path}", _file_bytes(path)) for path in args.prompt_file], False
    if any(text is not None for text in args.chat or ()):
        return [Prompt("the chat", b"")], False
    piped = b"" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer.read()
    if piped:
        return [Prompt("the prompt on standard input", piped)], False
    if args.chat is not None:
        raise InputError("the chat is empty; give --prompt, --prompt-file or --chat ROLE:TEXT")
    return [Prompt("the built-in prompt", PROMPT.encode())], True


def _argument_bytes(text: str) -> bytes:
    try:
        return os.fsencode(text)  # as they were typed, UTF-8 or not
    except UnicodeEncodeError:
        raise InputError(f"--prompt {text!r} stands for no bytes; put them into a file and use --prompt-file") from None


def _file_bytes(path: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except AttributeError:
        raise InputError("prompt file -: standard input is closed") from None
    except (OSError, ValueError) as e:
        raise InputError(f"prompt file {path}: {getattr(e, 'strerror', None) or e}") from None


def _ending(text: str) -> str:
    return text if len(text) <= PROMPT_SHOWN else "…" + text[-PROMPT_SHOWN:]


def _parser() -> common.Parser:
    parser = common.Parser(prog="decode.py", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False)
    add, number = parser.add_argument, common.number
    sources = '"demo", a directory of ours or a released one, a .gguf file, or a hub id'
    add("--target", default="demo", help=f"{sources} (default: demo)")
    default = f"{loading.DEFAULT_DRAFTER} for the demo, else none"
    names = ", ".join(loading.BUILT_IN)
    add("--drafter", help=f"a drafter that ships with the demo, a directory, or one of {names} (default: {default})")
    add("--option", action="append", metavar="KEY=VALUE", help="an option of the drafter, such as budget=30")
    add("--prompt", action="append", metavar="TEXT", help="text to continue; may be given several times")
    add("--prompt-file", action="append", metavar="PATH", help="the same from a file of bytes; - is standard input")
    turns = "prompts are a user's turn, in the target's own template; with ROLE:TEXT, which may be given several times,"
    add("--chat", nargs="?", action="append", metavar="ROLE:TEXT", help=f"{turns} after these messages")
    add("--allow-special", action="store_true", help="control tokens spelled in the text count as such")
    add(
        "--max-new-tokens",
        type=number(int, 1),
        default=256,
        metavar="N",
        help="bytes, or tokens of a subword model, per prompt (default: 256)",
    )
    add("--temperature", type=number(float, 1e-3, also=0), default=0.0, metavar="T", help="0, the default, is greedy")
    add("--top-p", type=number(float, 1e-6, 1), default=1.0, metavar="P", help="keep this share (default: 1, all)")
    add("--top-k", type=number(int, 0, 2**31 - 1), default=0, metavar="K", help="keep K ids (default: 0, all)")
    add("--seed", type=number(int, 0, 2**32 - 1), default=0, metavar="N", help="of the samples (default: 0)")
    add("--batch", type=number(int, 1), default=1, metavar="N", help="prompts decoded together (default: 1)")
    how = argparse.BooleanOptionalAction
    add("--stream", action=how, help="print text as it is accepted, or once it is whole (default: as it is accepted)")
    add("--compare", action="store_true", help="time autoregression on the same prompts; compare its text if greedy")
    add("--repeats", type=number(int, 1), default=3, metavar="N", help="runs of each side of --compare (default: 3)")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    add("--verify", choices=("on", "off"), default="on", help="off keeps every draft unseen: LOSSY, for measuring")
    add(
        "--accept",
        choices=NAMES,
        help="how sampled drafts are judged (default: the drafter's best rule; token with --bonus paper)",
    )
    bonus = "the target's extra byte. " + ". ".join(f"{name}: {what}" for name, what in BONUS.items())
    add("--bonus", choices=tuple(BONUS), default="condition", help=f"{bonus}. The default is condition")
    add("--dtype", default="float32", metavar="TYPE", help="of the weights: float32 (default) or bfloat16")
    add("--ignore-stop", action="store_true", help="never generate a stop id: every text runs to its limit")
    add(
        "--draft-tokens",
        type=number(int, 1),
        metavar="K",
        help="bytes drafted after the root of a block (default: as many as it can)",
    )
    add("--greedy-rule", choices=GREEDY_RULES, help="how a circuit chooses its drafts in greedy decoding")
    add("--bench", metavar="CONFIG", help="run Spec-Bench by a config file; see decode.py --bench --help")
    add("--version", action="version", version=f"bytejax {bytejax.__version__}")
    return parser
