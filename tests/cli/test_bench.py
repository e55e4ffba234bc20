"""`decode.py --bench` on the tiny target: what is measured, resumed, shown and refused."""

import json
from pathlib import Path

import pytest

import bytejax
from bytejax.benchmark import measure, runner, spec_bench
from bytejax.cli import decode
from tests.cli.helpers import is_refused

TOKENS = 8
QUESTIONS = [
    {"question_id": 7, "category": "writing", "turns": ["def f", "class A:"]},
    {"question_id": 8, "category": "qa", "turns": ["x" * 95]},  # does not fit
    {"question_id": 9, "category": "qa", "turns": ["import os"]},
    {"question_id": 10, "category": "qa", "turns": ["never asked"]},
]


@pytest.fixture(scope="module")
def config(saved):
    """A config file, its questions beside it."""
    root = saved / "bench"
    root.mkdir()
    (root / "question.jsonl").write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS))
    (root / "bench.yaml").write_text(
        f"target: {saved / 'target'}\n"
        f"questions: {root / 'question.jsonl'}\n"
        f"out: {root / 'runs' / 'out.jsonl'}\n"
        f"per_category: 2\nmax_new_tokens: {TOKENS}\ntemperatures: [0, 1]\ncapacity_step: 128\n"
        "drafters:\n"
        "  nothing: {drafter: none}\n"
        f"  head: {{drafter: {saved / 'head'}, draft_tokens: 2}}\n"
        f"  matched: {{drafter: {saved / 'head'}, draft_tokens: 2, accept: match}}\n"
    )
    return root / "bench.yaml"


@pytest.fixture
def bench(config, capsys):
    def run(*flags):
        status = decode.main(["--bench", str(config), *map(str, flags)])
        return status, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def measured(config):
    """The whole benchmark once: the lines of its file."""
    assert decode.main(["--bench", str(config), "--json"]) == 0
    return [json.loads(line) for line in (config.parent / "runs" / "out.jsonl").read_text().splitlines()]


def test_a_record_per_temperature_question_and_drafter(measured, saved):
    header, *records = measured
    assert header["settings"]["max_new_tokens"] == TOKENS and header["settings"]["chat"] is False
    keys = {(r["temperature"], r["question_id"], r["drafter"]) for r in records}
    assert keys == {(t, q, d) for t in (0.0, 1.0) for q in (7, 9) for d in ("nothing", "head", "matched")}
    for r in records:
        turns = len(r["prompt_ids"])
        assert turns == (2 if r["question_id"] == 7 else 1) and r["from_prompts"] == turns
        assert r["accept_length"] == pytest.approx((r["tokens"] - turns) / r["target_forwards"])
        assert sum(r["accept_histogram"]) == r["target_forwards"]
        assert r["forwards_saved"] == r["tokens"] - turns - r["target_forwards"]
        layouts = r["autoregression"]
        assert set(layouts) == {"panels", "[in, out]"} and min(s["decode_seconds"] for s in layouts.values()) > 0
        assert r["ratio"] == r["tokens_per_second"] / max(s["tokens_per_second"] for s in layouts.values())
        assert r["tokens_per_second"] == pytest.approx((r["tokens"] - turns) / r["decode_seconds"])
        assert (r["files_sha256"] is None) == (r["drafter"] == "nothing")
        if r["drafter"] == "nothing":
            assert r["accept_length"] == 1 and r["kept"] == [] and r["drafted"] == 0
    assert max(r["accept_length"] for r in records) > 1
    assert any(r["kept"] and r["kept"][0] > 0 for r in records)


def test_texts_are_compared_where_they_must_be_those_of_autoregression(measured):
    identical = {(r["temperature"], r["drafter"]): r["identical"] for r in measured[1:]}
    assert identical == {
        (0.0, "nothing"): True,
        (0.0, "head"): True,
        (0.0, "matched"): True,
        (1.0, "nothing"): True,
        (1.0, "head"): None,  # block verification: the same law, not the same text
        (1.0, "matched"): True,
    }


def test_a_second_turn_follows_what_autoregression_has_answered(measured, saved):
    target = bytejax.load_target(saved / "target")
    turns = QUESTIONS[0]["turns"]
    for r in measured[1:]:
        if r["question_id"] == 7:
            first = spec_bench.prompt(target.tokenizer, turns[:1], [])
            options = {"max_new_tokens": TOKENS, "temperature": r["temperature"], "capacity_step": 128}
            answer = bytejax.generate(target, [first], **options).texts[0]
            second = spec_bench.prompt(target.tokenizer, turns, [answer])
            assert r["prompt_ids"] == [len(first), len(second)]


def test_what_is_there_is_not_measured_again(measured, bench, config, monkeypatch):
    monkeypatch.setattr(runner, "ask", lambda *_: pytest.fail("measured again"))
    status, out, err = bench("--json")
    report = json.loads(out)
    assert status == 0 and report["records"] == measured[1:] and report["questions_left_out"] == 1
    rows = {(s["temperature"], s["drafter"], s["category"]): s for s in report["summaries"]}
    assert len(rows) == 2 * 3 * 3 and err == ""
    average = rows[0.0, "head", "average"]
    by_category = [rows[0.0, "head", c]["accept_length"] for c in ("writing", "qa")]
    assert average["accept_length"] == pytest.approx(sum(by_category) / 2) and average["identical"] == 2


def test_the_rest_of_an_interrupted_run_is_measured(measured, bench, config, tmp_path, monkeypatch):
    (tmp_path / "out.jsonl").write_text("".join(json.dumps(r) + "\n" for r in measured[:-1]) + '{"temp')
    asked = []

    def ask(bench, question, temperature, names):
        asked.append((question.id, temperature, names))
        return [measured[-1]]

    monkeypatch.setattr(runner, "ask", ask)
    last = measured[-1]
    status, _, err = bench("--out", tmp_path / "out.jsonl", "--json")
    assert status == 0 and asked == [(last["question_id"], last["temperature"], [last["drafter"]])]
    assert "1 of 12 results to measure" in err
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == measured


def test_results_of_other_weights_are_refused(measured, bench, tmp_path):
    """A head trained anew in the same place."""
    old = [r | {"files_sha256": "0" * 64} if r.get("drafter") == "head" else r for r in measured]
    (tmp_path / "out.jsonl").write_text("".join(json.dumps(r) + "\n" for r in old))
    is_refused(*bench("--out", tmp_path / "out.jsonl"), "drafters.head.files_sha256: 0000")


def test_a_difference_is_told_with_its_gap(measured, bench, config, tmp_path):
    changed = [dict(r) for r in measured]
    changed[2] |= {"identical": False, "differences": [{"turn": 1, "position": 5, "gap": 1e-5}]}
    (tmp_path / "out.jsonl").write_text("".join(json.dumps(r) + "\n" for r in changed))
    status, out, _ = bench("--out", tmp_path / "out.jsonl")
    where = f"question {changed[2]['question_id']}, turn 2, new byte 5"
    assert status == 0 and f"{changed[2]['drafter']} at temperature 0 first differs in {where}" in out
    assert "1.0e-05 apart there" in out and "1/2" in out and "1 questions do not fit" in out


def test_differences_are_placed_by_turn(config, monkeypatch):
    from bytejax.benchmark import config as configs

    bench = runner.Bench.load(configs.load(config, ["temperatures=[0]"]), str(config))
    found = iter([[], [{"prompt": 0, "position": 3, "gap": 0.5}]])
    monkeypatch.setattr(measure, "first_differences", lambda *_: next(found))
    (record,) = runner.ask(bench, bench.questions[0], 0.0, ["nothing"])
    assert record["identical"] is False and record["differences"] == [{"turn": 1, "position": 3, "gap": 0.5}]


def test_tables_for_people_and_in_markdown(measured, bench):
    status, out, _ = bench()
    assert status == 0 and "temperature 0" in out and "temperature 1" in out
    lines = [line.split() for line in out.splitlines()]
    assert lines.count(["average"]) == 2 and ["writing"] in lines
    assert sum(line[:2] == ["nothing", "1.00"] for line in lines) == 6
    status, out, _ = bench("--markdown", "--drafter", "head")
    assert status == 0 and "| drafter | writing | qa | average |" in out.splitlines()
    assert sum(line.startswith("| head | ") for line in out.splitlines()) == 2 and "matched" not in out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--drafter", "hed"], ["--drafter 'hed'", "'nothing', 'head', 'matched'"]),
        (["drafters.new.drafter=nobody"], ["bench.yaml: drafters.new: unknown drafter 'nobody'"]),
        (["drafters.head.masks=2"], ["bench.yaml: drafters.head: drafter option 'masks' is unknown"]),
        (["drafters.nothing.accept=block"], ["bench.yaml: drafters.nothing: acceptance rule 'block'"]),
        (["drafters.panels.drafter=none"], ["bench.yaml: drafters.panels", "layout"]),
        (["drafters.new.window=2"], ["drafters.new needs drafter"]),
        (["per_categry=1"], ["unknown key per_categry; did you mean per_category?"]),
        (["temperatures=[-1]"], ["temperatures: [-1.0]"]),
        (["repeats=0"], ["repeats=0 must be at least 1"]),
        (["per_category"], ["not of the form key=value"]),
        (["categories=[rag]"], ["has no category 'rag'; it has writing, qa"]),
        (["max_new_tokens=99"], ["no question leaves room for max_new_tokens=99"]),
        (
            ["--questions", "no.jsonl"],
            ["no.jsonl: no such file of Spec-Bench questions", "github.com/hemingkx/Spec-Bench"],
        ),
        (["--target", "./no"], ["target './no': no such directory"]),
        (["--json", "--markdown"], ["exclude each other"]),
        (["--temperature", "1"], ["unrecognized arguments: --temperature"]),
        (["seed=3"], ["was made with other settings (seed: 0 -> 3)", "out.jsonl"]),
        (["drafters.head.draft_tokens=3"], ["other settings (drafters.head.settings: ", "'draft_tokens': 3"]),
    ],
)
def test_wrong_input_ends_in_one_line(measured, bench, flags, words):
    is_refused(*bench(*flags), *words)


def test_a_broken_question_is_named(bench, tmp_path, monkeypatch):
    (tmp_path / "broken.jsonl").write_text(json.dumps(QUESTIONS[0]) + "\n{}\n")
    is_refused(*bench("--questions", tmp_path / "broken.jsonl"), "broken.jsonl, line 2 is no question of Spec-Bench")


def test_a_config_that_is_not_there(capsys):
    status = decode.main(["--bench", str(Path(__file__).parents[2] / "configs" / "bench" / "spec_bench_dem.yaml")])
    is_refused(status, *capsys.readouterr(), "no such config file; ", "bench has spec_bench_demo.yaml")
