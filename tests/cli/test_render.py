"""Text on its way to a terminal."""

import io
import re

import pytest

from bytejax.cli import render
from bytejax.decoding.generate import Result
from bytejax.tokenizers import DEMO

SGR = re.compile(r"\x1b\[[0-9;]*m")


HARD = "héllo 👩‍👩‍👧 日本 e\u0301\t".encode() + b"\xff \xe6\x97 \xc3\xa9 \xf0\x9f"


def result_of(rows, reasons, drafted=lambda i: i % 3 == 0):
    """A result with these bytes, as it stands at some moment."""
    flags = [[drafted(i) for i in range(len(row))] for row in rows]
    return Result([list(row) for row in rows], [], reasons, flags, [], None)


def printed(results, width, **options):
    out = io.StringIO()
    printer = render.RowsPrinter(render.Console(file=out, width=width, **options), DEMO, [None] * 9, [None] * 9)
    for result in results:
        printer.update(result)
    return out.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_streamed_text_is_the_final_text_wherever_it_is_cut(terminal):
    final = HARD.decode("utf-8", "replace")
    for cut in range(len(HARD) + 1):
        results = [result_of([HARD[:cut]], ["running"]), result_of([HARD], ["stop"])]
        out = printed(results, 10, force_terminal=terminal, color_system="standard" if terminal else None)
        assert SGR.sub("", out) == final + "\n"


def test_text_appears_as_soon_as_its_bytes_are_there():
    results = [result_of([HARD[:i]], ["running"]) for i in range(1, len(HARD))]
    for i, _ in enumerate(results):
        whole = HARD[: i + 1].decode("utf-8", "replace")
        assert whole.rstrip("\ufffd").startswith(printed(results[: i + 1], 80).rstrip("\ufffd"))
    assert printed(results[:2], 80) == "hé"[:1] and printed(results[:3], 80) == "hé"


def test_accepted_drafts_are_coloured_on_a_terminal_only(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    results = [result_of([b"abcd"], ["stop"], drafted=lambda i: i in (1, 2))]
    terminal = {"force_terminal": True, "color_system": "standard"}
    assert printed(results, 80, **terminal) == "a\x1b[32mbc\x1b[0md\n"
    assert printed(results, 80) == "abcd\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert printed(results, 80, **terminal) == "abcd\n"


def test_generated_control_characters_cannot_drive_the_terminal():
    text = "\x1b[2J\x1b]0;title\x07 \x9b31m\r\x00\x7f"
    out = printed([result_of([text.encode()], ["stop"])], 80)
    assert out == r"\x1b[2J\x1b]0;title\x07 \x9b31m\x0d\x00\x7f" + "\n"
    assert printed([result_of([b"a\tb\n" + b"long " * 40], ["stop"])], 20) == "a\tb\n" + "long " * 40 + "\n"


def test_rows_come_one_below_the_other_while_all_grow():
    steps = [
        result_of([b"on", b"tw", b"t"], ["running", "running", "running"]),
        result_of([b"one", b"two", b"th"], ["running", "stop", "running"]),
        result_of([b"one!", b"two", b"thr"], ["length", "stop", "running"]),
    ]
    assert [printed(steps[:n], 80) for n in (1, 2, 3)] == ["on", "one", "one!\ntwo\nthr"]
