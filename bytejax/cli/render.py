"""What commands show a person: text as it arrives, and tables.

Everything goes through a `rich` console, which colours on a terminal only, and not where NO_COLOR is set.
"""

import itertools
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table
from rich.text import Text

from bytejax.decoding.generate import Result
from bytejax.tokenizers import TextStream, Tokenizer

DRAFTED, TITLE, PROMPT, WARNING = Style(color="green"), Style(bold=True), Style(dim=True), Style(color="red")
CONTROLS = {i: f"\\x{i:02x}" for i in [*range(32), *range(127, 160)] if chr(i) not in "\n\t"}
BAR = 32  # characters of the longest bar


class Console(RichConsole):
    """A console whose broken pipe is the command's to handle."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console() -> Console:
    """Standard output, in UTF-8."""
    if (sys.stdout.encoding or "").lower().replace("-", "") != "utf8":
        sys.stdout.reconfigure(encoding="utf-8")
    return Console(file=sys.stdout, highlight=False, markup=False, emoji=False)


def printable(text: str) -> str:
    """Control characters (C0, DEL, C1) but newline and tab become escapes, so that text cannot drive a terminal."""
    return text.translate(CONTROLS)


def pieces(
    stream: TextStream, tokenizer: Tokenizer, ids: Iterable[int], from_draft: Iterable[bool]
) -> list[tuple[str, bool]]:
    """Text that the ids make certain, cut where it changes between accepted drafts and the target's own bytes.

    A character counts as drafted if its last byte was.
    """
    texts = [(stream.push(tokenizer.to_bytes([i])), drafted) for i, drafted in zip(ids, from_draft, strict=True)]
    groups = itertools.groupby((t for t in texts if t[0]), key=lambda t: t[1])
    return [("".join(text for text, _ in group), drafted) for drafted, group in groups]


class RowsPrinter:
    """Prints the rows of a batch one below the other: each as it grows, the next one once it has ended.

    titles, prompts: what to show above each row; None for nothing.
    """

    def __init__(
        self,
        console: Console,
        tokenizer: Tokenizer,
        titles: Sequence[str | None],
        prompts: Sequence[str | None],
    ):
        self._console, self._tokenizer, self._titles, self._prompts = console, tokenizer, titles, prompts
        self._row, self._shown, self._stream, self._at_line_start = 0, 0, TextStream(), True

    def update(self, result: Result) -> None:
        """Shows what is new. result: everything so far, as `stream` yields it."""
        while self._row < len(result.ids):
            row = self._row
            if self._shown == 0:
                self._begin()
            new, from_draft = (rows[row][self._shown :] for rows in (result.ids, result.from_draft))
            for text, drafted in pieces(self._stream, self._tokenizer, new, from_draft):
                self._write(text, DRAFTED if drafted else None)
            self._shown += len(new)
            if result.finish_reasons[row] == "running":
                return
            self._write(self._stream.flush())
            self._write("" if self._at_line_start else "\n")
            self._row, self._shown, self._stream = row + 1, 0, TextStream()

    def _begin(self):
        if self._titles[self._row] is not None:
            self._write(f"--- {self._titles[self._row]} ---\n", TITLE)
        if self._prompts[self._row] is not None:
            self._write(self._prompts[self._row], PROMPT)

    def _write(self, text: str, style: Style | None = None):
        if text:
            # Segments go out as they are: a printed string would have its tabs expanded and its lines wrapped.
            self._console.print(Segments([Segment(printable(text), style)]), end="", crop=False)
            self._at_line_start = text.endswith("\n")


def summary(console: Console, report: Mapping[str, Any]) -> None:
    """What a run cost and how its drafts fared."""
    settings = report["settings"]
    console.print()
    if not report["lossless"]:
        unseen = "(--verify off): every draft was kept unseen; this is not the target's own text"
        leaning = "(--bonus paper): rejections are forgotten; samples lean towards the drafter"
        _line(console, f"LOSSY {unseen if settings['verify'] == 'off' else leaning}", WARNING)
    table = _grid()
    finish = ", ".join(f"{n} {reason}" for reason, n in Counter(report["finish_reasons"]).items())
    decoding = "greedy" if settings["temperature"] == 0 else f"sampling, temperature {settings['temperature']:g}"
    models = f"{_name(settings['drafter'])} on {_name(settings['target'])}"
    _row(table, "drafter", f"{models}, {settings['dtype']}, {decoding}")
    _row(table, "finish reason", finish if len(report["finish_reasons"]) > 1 else report["finish_reasons"][0])
    unit = settings.get("unit", "bytes")
    _row(table, "speed", f"{report['tokens_per_second']:.0f} {unit}/s ({_times(report)})")
    _row(table, "compile time", f"{report['compile_seconds']:.2f} s, not part of the speed")
    _row(table, "target forwards", f"{report['target_forwards']} for {report['tokens']} {unit}")
    _row(table, "acceptance rate", f"{report['acceptance_rate']:.1%} of the drafted {unit}")
    _row(table, "accept length", f"{report['accept_length']:.2f} {unit} per target forward")
    console.print(table)
    console.print(_histogram(report["accept_histogram"]))


def comparison(console: Console, report: Mapping[str, Any]) -> None:
    """The table of `--compare` and what it comes to."""
    settings, baseline = report["settings"], report["baseline"]
    table = Table(title=f"median of {settings['repeats']} runs each, in turns")
    table.add_column("")
    for name in (_name(settings["drafter"]), "autoregression"):
        table.add_column(Text(printable(name)), justify="right", no_wrap=True)
    both = (report, baseline)
    table.add_row("layout", Text(next(iter(baseline["layouts"]))), Text(baseline["layout"]))
    unit = settings.get("unit", "bytes")
    table.add_row(f"{unit}/s", *(f"{x['tokens_per_second']:.0f}" for x in both))
    table.add_row(unit, *(str(x["tokens"]) for x in both))
    table.add_row("target forwards", *(str(x["target_forwards"]) for x in both))
    table.add_row(f"{unit} per forward", *(f"{x['accept_length']:.2f}" for x in both))
    table.add_row("ms per forward", *(f"{1e3 * x['decode_seconds'] / max(x['target_forwards'], 1):.2f}" for x in both))
    table.add_row("compile time, s", *(f"{x['compile_seconds']:.2f}" for x in both))
    console.print()
    console.print(table)
    ratio, identical = report["ratio"], report["identical"]
    _line(console, "ratio: " + ("n/a" if ratio is None else f"{ratio:.2f}"), TITLE)
    _line(console, f"identical: {'n/a' if identical is None else str(identical).lower()}", TITLE)
    for difference in report["differences"]:
        at = f"prompt {difference['prompt']}, new {unit.removesuffix('s')} {difference['position']}"
        _line(console, f"first difference in {at}; the two likeliest ids are {difference['gap']:.1e} apart there")
    if report["identical_at_same_width"] is not None:
        same = str(report["identical_at_same_width"]).lower()
        _line(console, f"identical to autoregression in blocks of {settings['block_rows']} rows: {same}")


def _name(source: str) -> str:
    return Path(source).name or source


def _times(report: Mapping[str, Any]) -> str:
    return f"{report['decode_seconds']:.2f} s, and {report['prefill_seconds']:.2f} s for the prompt"


def _histogram(counts: Sequence[int]) -> Table:
    """Bars: the share of target forwards that added 0, 1, 2, ... bytes."""
    total, highest = max(sum(counts), 1), max(*counts, 1)
    longest = max((i for i, count in enumerate(counts) if count), default=0)
    table = _grid()
    for length, count in enumerate(counts[: longest + 1]):
        if length or count:
            _row(table, f"{length:>15}", f"{'█' * round(BAR * count / highest):{BAR}} {count / total:6.1%}")
    return table


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style=TITLE, no_wrap=True)
    table.add_column()
    return table


def _row(table: Table, name: str, value: str) -> None:
    table.add_row(name, Text(printable(value)))


def _line(console: Console, text: str, style: Style | None = None) -> None:
    console.print(Text(text, style or ""), soft_wrap=True)
