"""The share of a cycle that drafting takes: the command's report."""

import json

from bytejax.benchmark import trees
from bytejax.drafters.probe import Probe
from tests.decoding.tiny import make_target


def test_a_constant_tree_has_the_drafters_rows(monkeypatch, capsys):
    monkeypatch.setattr(trees.loading, "load_target", lambda source: make_target())
    seen = []
    own = trees.overhead
    monkeypatch.setattr(trees, "overhead", lambda *args: seen.append(args[1]) or own(*args))
    monkeypatch.setattr(trees, "PROMPT", "\1\2\3")
    options = ("--option", "budget=12", "--option", "masks=2", "--cycles", "2", "--pairs", "1")
    assert trees.main(["--model", "x", *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["rows"] == 12 and report["share"] < 1 and isinstance(seen[0], Probe)
    assert report["with_constant_tree"] > 0 and report["options"] == {"budget": 12, "masks": 2}
    assert trees.main(["--model", "x", "--option", "budget"]) == 2
    assert "KEY=VALUE" in capsys.readouterr().err
