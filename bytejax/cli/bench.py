"""`decode.py --bench`: Spec-Bench by a config file, resumed where it was left, and its tables."""

import dataclasses
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from bytejax.benchmark import config as configs
from bytejax.benchmark import records, runner
from bytejax.benchmark.summary import Summary, markdown, summaries
from bytejax.cli import common, render
from bytejax.errors import InputError

DEPTHS = 3  # that the table shows
DESCRIPTION = """Runs Spec-Bench by a config file: every drafter and autoregression in turns, on the same prompts. A
line per temperature, question and drafter goes into a file; what is there already is not measured again. Then tables,
by category and on average: accept length, the share of cycles that kept at least 1, 2, 3 drafts, target passes saved,
speed, and how many texts are those of autoregression where they must be."""


def asked_for(argv: Sequence[str]) -> bool:
    """Whether the arguments of `decode.py` are for this command, which has flags of its own."""
    return any(a == "--bench" or a.startswith("--bench=") for a in argv)


def run(argv: Sequence[str]) -> int:
    """Runs the command. -> exit status. Raises InputError."""
    if {"-h", "--help"}.intersection(argv):  # also in the place of the config
        _parser().print_help()
        return 0
    args = _parser().parse_intermixed_args(argv)
    if args.json and args.markdown:
        raise InputError("--json and --markdown exclude each other")
    flags = {"target": args.target, "questions": args.questions, "out": args.out}
    given = {name: x for name, x in flags.items() if x is not None}
    config = _only(configs.load(args.bench, args.overrides, given), args.drafter)
    common.use_compilation_cache()
    bench = runner.Bench.load(config, args.bench)
    file = records.File.open(Path(config.out), bench.header(), {name: bench.made_of(name) for name in bench.drafters})
    found = _measured(bench, file)
    rows = summaries(found, config.temperatures, list(bench.drafters))
    if args.json:
        report = {**bench.header(), "out": config.out, "questions_left_out": bench.left_out}
        print(json.dumps(report | {"summaries": [dataclasses.asdict(s) for s in rows], "records": found}))
    elif args.markdown:
        print(render.printable("\n".join(markdown(rows))))
    else:
        _show(render.console(), bench, rows, found)
    return 0


def _only(config: configs.Config, names: list[str] | None) -> configs.Config:
    if names is None:
        return config
    if unknown := [name for name in names if name not in config.drafters]:
        raise InputError(
            f"--drafter {unknown[0]!r} is not in the config, which has {', '.join(map(repr, config.drafters))}"
        )
    return dataclasses.replace(config, drafters={name: config.drafters[name] for name in names})


def _measured(bench: runner.Bench, file: records.File) -> list[records.Record]:
    """Records of everything that was asked for, in the order of the config."""
    found = {records.key(r): r for r in file.found}
    wanted = bench.keys()
    left = [key for key in wanted if key not in found]
    if left:
        file.start()
        _tell(f"{len(left)} of {len(wanted)} results to measure; they go to {file.path}")
    for new in runner.run(bench, found.keys()):
        file.append(new)
        found |= {records.key(r): r for r in new}
        done = len(wanted) - sum(key not in found for key in wanted)
        _tell(f"{done} of {len(wanted)}: temperature {new[0]['temperature']:g}, question {new[0]['question_id']}")
    return [found[key] for key in wanted]


def _tell(text: str) -> None:
    print(render.printable(text), file=sys.stderr, flush=True)


def _show(console: render.Console, bench: runner.Bench, rows: list[Summary], found: list[dict[str, Any]]) -> None:
    unit = bench.target.tokenizer.unit
    for temperature in bench.config.temperatures:
        console.print(_table([s for s in rows if s.temperature == temperature], temperature, unit))
    for r in found:
        for d in r["differences"]:
            where = f"question {r['question_id']}, turn {d['turn'] + 1}, new {unit.removesuffix('s')} {d['position']}"
            how = f"{r['drafter']} at temperature {r['temperature']:g} first differs in {where}"
            console.print(Text(f"{how}; the two likeliest ids are {d['gap']:.1e} apart there"), soft_wrap=True)
    if bench.left_out:
        console.print(Text(f"{bench.left_out} questions do not fit the target's context"), soft_wrap=True)


def _table(rows: list[Summary], temperature: float, unit: str) -> Table:
    """The categories one below the other, each with autoregression and the drafters."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), title=f"temperature {temperature:g}, speed in {unit}/s")
    table.add_column("")
    for name in ("length", *(f"{d}+" for d in range(1, DEPTHS + 1)), "saved", "speed", "ratio", "identical"):
        table.add_column(name, justify="right", no_wrap=True)
    for category, group in itertools.groupby(rows, key=lambda s: s.category):
        group = list(group)
        table.add_section()
        table.add_row(Text(render.printable(category), render.TITLE))
        table.add_row("autoregression", "1.00", *[""] * DEPTHS, "", _number(group[0].autoregression, ".1f"), "1.00")
        for s in group:
            table.add_row(Text(render.printable(s.drafter)), *_cells(s))
    return table


def _cells(s: Summary) -> list[str]:
    depths = (_number(s.kept[d] if d < len(s.kept) else 0.0, ".0%") for d in range(DEPTHS))
    same = f"{s.identical}/{s.compared}" if s.compared else "n/a"
    speed = (_number(s.tokens_per_second, ".1f"), _number(s.ratio, ".2f"))
    return [_number(s.accept_length, ".2f"), *depths, _number(s.saved, ".0%"), *speed, same]


def _number(x: float | None, form: str) -> str:
    return "n/a" if x is None else format(x, form)


def _parser() -> common.Parser:
    parser = common.Parser(prog="decode.py --bench", description=DESCRIPTION, allow_abbrev=False)
    add = parser.add_argument
    add("--bench", required=True, metavar="CONFIG", help="a YAML file, e.g. configs/bench/spec_bench_demo.yaml")
    add("overrides", nargs="*", metavar="key=value", help="e.g. per_category=1 drafters.pld.draft_tokens=8")
    add("--target", help="what decode.py takes as a target")
    add("--questions", metavar="FILE", help="question.jsonl of Spec-Bench")
    add("--out", metavar="FILE", help="results, a JSON object per line")
    add("--drafter", action="append", metavar="NAME", help="only this one of the config; may be given several times")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    add("--markdown", action="store_true", help="print Markdown tables and nothing else")
    return parser
