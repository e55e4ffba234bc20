"""The share of a cycle that drafting takes: the command's report."""

import json

import pytest

from bytejax.benchmark import overhead
from bytejax.drafters.probe import Probe
from tests.decoding.tiny import make_target


def test_a_constant_block_has_the_drafters_rows(monkeypatch, capsys):
    monkeypatch.setattr(overhead.loading, "load_target", lambda source: make_target())
    seen = []
    own = overhead.overhead
    monkeypatch.setattr(overhead, "overhead", lambda *args: seen.append(args[1]) or own(*args))
    monkeypatch.setattr(overhead, "PROMPT", "\1\2\3")
    options = ("--option", "budget=12", "--option", "masks=2", "--cycles", "2", "--pairs", "1")
    assert overhead.main(["--model", "x", *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["rows"] == 12 and isinstance(seen[0], Probe)
    assert report["share"] == pytest.approx(1 - report["with_constant_block"] / report["milliseconds"])
    assert report["with_constant_block"] > 0 and report["options"] == {"budget": 12, "masks": 2}
    assert overhead.main(["--model", "x", "--option", "budget"]) == 2
    assert "KEY=VALUE" in capsys.readouterr().err
