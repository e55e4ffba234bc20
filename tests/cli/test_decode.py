"""The decode command: what it prints, and where its prompts come from."""

import io
import json
import os
import re
import sys

import jax
import pytest

import bytejax
from bytejax import loading
from bytejax.cli import decode
from tests.cli.helpers import NEW, generated, shown

SPEEDS = {"ratio", "tokens_per_second", "baseline_tokens_per_second", "compile_seconds"}
COUNTS = {"accept_length", "accept_histogram", "acceptance_rate", "target_forwards", "finish_reasons"}
KEYS = SPEEDS | COUNTS | {"identical", "settings", "text"}


def test_a_run_prints_the_text_and_what_it_cost(command, loaded):
    status, out, err = command("--prompt", "def f")
    expected = generated(loaded, "def f")
    assert (status, err) == (0, "")
    text, statistics = out[: len(shown(expected.texts[0]))], out[len(shown(expected.texts[0])) :]
    assert text == shown(expected.texts[0])
    forwards = expected.stats.target_forwards
    assert re.search(rf"target forwards +{forwards} for {NEW} bytes", statistics)
    assert re.search(rf"accept length +{(NEW - 1) / forwards:.2f} bytes per target forward", statistics)
    for wanted in (
        r"finish reason +length",
        r"speed +\d+ bytes/s",
        r"compile time +[\d.]+ s",
        r"acceptance rate +[\d.]+%",
    ):
        assert re.search(wanted, statistics), wanted
    assert expected.stats.acceptance_rate > 0 and "\x1b" not in out


def test_streamed_and_whole_text_are_the_same(command):
    streamed, whole = (command("--prompt", "def f", flag)[1] for flag in ("--stream", "--no-stream"))
    texts = [out[: out.index("\ndrafter ")] for out in (streamed, whole)]
    assert texts[0] == texts[1] != ""


def test_compare_prints_the_verdict(command, loaded):
    status, out, err = command("--prompt", "def f", "--compare", "--repeats", 1)
    assert (status, err) == (0, "")
    assert out.startswith(shown(generated(loaded, "def f").texts[0]))
    assert "\nidentical: true\n" in out and re.search(r"\nratio: \d+\.\d\d\n", out)
    assert re.search(r"layout\W+panels\W+(panels|in, out)\b", out)
    assert re.search(r"bytes per forward\W+[\d.]+\W+1\.00\W", out) and re.search(rf"forwards\W+\d+\W+{NEW - 1}\W", out)


def test_json_is_one_object_that_agrees_with_generate(command, loaded):
    status, out, err = command("--prompt", "def f", "--compare", "--json", "--repeats", 2)
    report, expected = json.loads(out), generated(loaded, "def f")
    assert (status, err, out.count("\n")) == (0, "", 1)
    assert KEYS.issubset(report)
    assert report["text"] == expected.texts[0] and report["finish_reasons"] == expected.finish_reasons
    assert report["identical"] is True and report["differences"] == [] and report["lossless"] is True
    assert report["ratio"] == pytest.approx(report["tokens_per_second"] / report["baseline_tokens_per_second"])
    assert report["accept_histogram"] == expected.stats.accept_histogram
    assert sum(report["accept_histogram"]) == report["target_forwards"]
    assert report["tokens"] == NEW and report["baseline"]["target_forwards"] == NEW - 1
    settings = report["settings"]
    assert settings["draft_tokens"] == 3 and settings["max_new_tokens"] == NEW and settings["dtype"] == "float32"
    assert settings["versions"]["jax"] == jax.__version__ and settings["device"].startswith(jax.default_backend())


def test_json_without_compare_leaves_the_comparison_empty(command):
    report = json.loads(command("--prompt", "def f", "--json")[1])
    assert KEYS.issubset(report)
    assert report["identical"] is report["ratio"] is report["baseline_tokens_per_second"] is None
    assert report["tokens_per_second"] > 0


def test_sampling_has_no_identical(command, loaded):
    flags = ("--prompt", "def f", "--temperature", 0.7, "--top-p", 0.9, "--seed", 3)
    report = json.loads(command(*flags, "--compare", "--json", "--repeats", 1)[1])
    assert report["identical"] is None and report["ratio"] > 0
    assert report["text"] == generated(loaded, "def f", temperature=0.7, top_p=0.9, seed=3).texts[0]
    assert "identical: n/a" in command(*flags, "--compare", "--repeats", 1)[1]


def test_prompts_in_batches_are_told_apart_and_in_order(command, loaded):
    prompts = ["def f", "x", "class A:"]
    flags = [x for p in prompts for x in ("--prompt", p)]
    texts = [generated(loaded, p).texts[0] for p in prompts]
    assert json.loads(command(*flags, "--batch", 2, "--json")[1])["text"] == texts
    out = command(*flags, "--batch", 2)[1]
    expected = "".join(f"--- prompt {i} ({i} of 3) ---\n{shown(t)}" for i, t in enumerate(texts, 1))
    assert out.startswith(expected)


def test_ignore_stop_and_bfloat16_reach_the_run(command, saved):
    report = json.loads(command("--prompt", "a", "--json", "--dtype", "bfloat16", "--ignore-stop")[1])
    target = bytejax.load_target(saved / "target", "bfloat16")
    drafter = bytejax.load_drafter(saved / "head", target)
    options = {"drafter": drafter, "max_new_tokens": NEW, "ignore_stop": True}
    assert report["text"] == bytejax.generate(target, ["a"], **options).texts[0]


def test_unverified_text_is_marked_as_lossy(command):
    out = command("--prompt", "def f", "--verify", "off")[1]
    assert "LOSSY" in out
    report = json.loads(command("--prompt", "def f", "--verify", "off", "--compare", "--json", "--repeats", 1)[1])
    assert report["lossless"] is False and report["acceptance_rate"] == 1 and report["settings"]["verify"] == "off"
    assert report["identical"] is False and report["identical_at_same_width"] is False
    (difference,) = report["differences"]
    assert difference["prompt"] == 0 and 0 < difference["position"] < NEW and difference["gap"] >= 0


def test_the_published_cycle_is_marked_as_lossy_where_it_is(command):
    for temperature, lossless in ((0, True), (1, False)):
        flags = ("--prompt", "def f", "--bonus", "paper", "--temperature", temperature)
        report = json.loads(command(*flags, "--json", "--compare", "--repeats", 1)[1])
        assert report["lossless"] is lossless and report["settings"]["accept"] == "token"
        assert report["identical"] is (True if lossless else None)
        assert ("LOSSY (--bonus paper)" in command(*flags)[1]) is not lossless


def test_policies_and_rules_reach_the_run(command):
    run = lambda *flags: json.loads(command("--prompt", "def f", "--json", "--temperature", 1, *flags)[1])
    block, token, carry = run(), run("--accept", "token"), run("--bonus", "carry")
    assert [r["settings"]["accept"] for r in (block, token, carry)] == ["block", "token", "block"]
    assert len({r["text"] for r in (block, token, carry)}) == 3
    assert (block["from_prompts"], carry["from_prompts"]) == (1, 0)


def test_without_a_drafter_it_is_plain_autoregression(command, loaded):
    report = json.loads(command("--prompt", "def f", "--json", drafter=None)[1])
    assert report["settings"]["drafter"] == "none" and report["accept_length"] == 1
    assert report["text"] == generated(loaded, "def f").texts[0]


def test_prompt_files_are_bytes(command, loaded, tmp_path):
    data = b"caf\xe9 \xff\x00\xf0\x9f"
    (tmp_path / "p.bin").write_bytes(data)
    report = json.loads(command("--prompt-file", tmp_path / "p.bin", "--prompt-file", tmp_path / "p.bin", "--json")[1])
    assert report["text"] == [generated(loaded, data).texts[0]] * 2
    assert report["settings"]["prompt_ids"] == [len(data) + 1] * 2


@pytest.mark.parametrize("flags", [(), ("--prompt-file", "-")])
def test_a_piped_prompt(command, loaded, monkeypatch, flags):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"def \xff")))
    report = json.loads(command("--json", *flags)[1])
    assert report["text"] == generated(loaded, b"def \xff").texts[0]


def test_an_argument_that_is_no_utf8(command, loaded):
    report = json.loads(command("--prompt", os.fsdecode(b"caf\xe9"), "--json")[1])
    assert report["text"] == generated(loaded, b"caf\xe9").texts[0]


def test_no_prompt_means_the_built_in_one(command, loaded, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    monkeypatch.setattr(decode, "PROMPT", "def f")
    out = command()[1]
    assert out.startswith(shown("def f" + generated(loaded, "def f").texts[0]))


def test_no_arguments_mean_a_comparison_on_the_demo(saved, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    monkeypatch.setattr(decode, "PROMPT", "def f")
    monkeypatch.setattr(loading, "DEFAULT_DRAFTER", str(saved / "head"))
    (saved / "demo").mkdir()
    (saved / "demo" / "target").symlink_to(saved / "target")
    monkeypatch.setattr(loading, "DEMO", saved / "demo")
    assert decode.main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("def f") and "identical: true" in out and "ratio: " in out


def test_drafters_have_options(command, loaded):
    status, out, err = command(
        "--prompt", "a = 1\nb = 1\n", "--drafter", "pld", "--option", "longest=6", "--json", drafter=None
    )
    report = json.loads(out)
    assert (status, err) == (0, "") and report["text"] == generated(loaded, "a = 1\nb = 1\n").texts[0]
    assert report["settings"]["options"] == {"longest": 6} and report["settings"]["accept"] == "match"
    assert report["settings"]["draft_tokens"] == 16
    for option, message in (("longest", "KEY=VALUE"), ("depth=3", "'depth' is unknown"), ("rule=best", "unknown rule")):
        status, out, err = command("--prompt", "x", "--drafter", "pld", "--option", option, drafter=None)
        assert (status, out) == (2, "") and message in err and err.count("\n") == 1
    status, out, err = command("--prompt", "x", "--drafter", "pld", "--accept", "block", drafter=None)
    assert (status, out) == (2, "") and "match" in err
