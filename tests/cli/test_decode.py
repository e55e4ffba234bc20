"""The decode command: what it prints, streams, compares and refuses."""

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bytejax
from bytejax import circuits, loading, parameters
from bytejax.circuits import head as heads
from bytejax.cli import common, decode, measure, render
from bytejax.decoding.generate import Result
from bytejax.drafters.base import Autoregressive
from bytejax.models import llama
from bytejax.tokenizers import DEMO, ByteTokenizer

ROOT = Path(__file__).parents[2]
SGR = re.compile(r"\x1b\[[0-9;]*m")
CONTEXT, NEW = 100, 24
SPEEDS = {"ratio", "tokens_per_second", "baseline_tokens_per_second", "compile_seconds"}
COUNTS = {"accept_length", "accept_histogram", "acceptance_rate", "target_forwards", "finish_reasons"}
KEYS = SPEEDS | COUNTS | {"identical", "settings", "text"}


def tiny(seed=5, width=16, tokenizer=DEMO):
    config = llama.Config(
        vocab=tokenizer.vocab,
        width=width,
        layers=1,
        heads=2,
        kv_heads=1,
        head_dim=8,
        ffn_width=24,
        rope_theta=10000.0,
        norm_eps=1e-5,
        tied=False,
        context=CONTEXT,
    )
    return llama.create(config, jax.random.key(seed), tokenizer)


def save_cp(directory, width=16, vocab=258):
    config = heads.HeadConfig(circuits.make("cp", 4, 2), width, vocab, None)
    loading.save_head(directory, config, parameters.init(heads.table(config), jax.random.key(1)), jnp.float32)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Directories of a random target, of a head that suits it, and of what does not."""
    root = tmp_path_factory.mktemp("saved")
    target = tiny()
    loading.save_target(root / "target", target, jnp.float32)
    loading.save_target(root / "startless", tiny(tokenizer=ByteTokenizer(256, 0, None, (), ())), jnp.float32)
    save_cp(root / "wide", width=32)
    save_cp(root / "poor", vocab=200)
    config = heads.HeadConfig(circuits.make("cp", 4, 2), 16, 258, None)
    params = parameters.init(heads.table(config), jax.random.key(1))
    # The target's own unembedding at every position: some drafts are right.
    params = heads.from_unembeddings(params, config, jnp.stack([target.params["head"].T] * 4))
    loading.save_head(root / "head", config, params, jnp.float32)
    for name, change in {
        "cut": lambda b: b[:-100],
        "noise": lambda b: b"no tensors here",
        "empty": lambda b: b"",
    }.items():
        loading.save_target(root / name, target, jnp.float32)
        weights = root / name / loading.WEIGHTS
        weights.write_bytes(change(weights.read_bytes()))
    loading.save_target(root / "foreign", target, jnp.float32)
    parameters.save(root / "foreign" / loading.WEIGHTS, {"encoder": np.zeros((2, 2), np.float32)})
    (root / "long.txt").write_bytes(b"x" * CONTEXT)
    return root


@pytest.fixture
def command(saved, capsys):
    """(*arguments, drafter="head") -> (exit status, standard output, standard error) of a run on the tiny target."""

    def run(*arguments, target="target", drafter="head"):
        argv = ["--target", str(saved / target), "--max-new-tokens", str(NEW), *map(str, arguments)]
        if drafter is not None:
            argv += ["--drafter", str(saved / drafter)]
        status = decode.main(argv)
        return status, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def loaded(saved):
    target = bytejax.load_target(saved / "target")
    return target, bytejax.load_drafter(saved / "head", target)


def generated(loaded, *prompts, **options):
    target, drafter = loaded
    return bytejax.generate(target, list(prompts), drafter=drafter, **({"max_new_tokens": NEW} | options))


def shown(text):
    """A text as the terminal gets it, on lines of its own."""
    text = render.printable(text)
    return text if text.endswith("\n") else text + "\n"


# --- what a run prints ---


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
    assert re.search(r"kernels stored as\W+\[in, out\]\W+\[(in, out|out, in)\]", out)
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
    assert settings["window"] == 4 and settings["max_new_tokens"] == NEW and settings["dtype"] == "float32"
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


def test_without_a_drafter_it_is_plain_autoregression(command, loaded):
    report = json.loads(command("--prompt", "def f", "--json", drafter=None)[1])
    assert report["settings"]["drafter"] == "none" and report["accept_length"] == 1
    assert report["text"] == generated(loaded, "def f").texts[0]


# --- where prompts come from ---


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


# --- the text on its way to a terminal ---


HARD = "héllo 👩‍👩‍👧 日本 e\u0301\t".encode() + b"\xff \xe6\x97 \xc3\xa9 \xf0\x9f"


def result_of(rows, reasons, drafted=lambda i: i % 3 == 0):
    """A result with these bytes, as it stands at some moment."""
    flags = [[drafted(i) for i in range(len(row))] for row in rows]
    return Result([list(row) for row in rows], [], reasons, flags, None)


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


# --- the comparison ---


def test_the_baseline_is_the_faster_layout_and_figures_are_medians(loaded, monkeypatch):
    target, drafter = loaded
    template = generated(loaded, "def f")
    speeds = {"drafted": iter([9.0, 1.0, 30.0]), False: iter([2.0, 4.0, 3.0]), True: iter([7.0, 6.0, 1.0])}

    def run(job):
        side = job.target.transposed if isinstance(job.drafter, Autoregressive) else "drafted"
        stats = dataclasses.replace(template.stats, tokens_per_second=next(speeds[side]))
        return dataclasses.replace(template, stats=stats)

    monkeypatch.setattr(measure.Job, "run", run)
    monkeypatch.setattr(measure.Job, "warm_up", lambda job: 2.5 if job.target.transposed else 1.5)
    job = measure.Job(target, drafter, [[[1]]], {"temperature": 0.0, "ignore_stop": False})
    comparison = measure.compare(job, repeats=3)
    assert comparison.drafted.stats.tokens_per_second == 9 and comparison.baseline.stats.tokens_per_second == 6
    assert comparison.layout == "[out, in]" and comparison.identical is True
    assert (comparison.drafted_compile, comparison.baseline_compile) == (1.5, 2.5)
    report = measure.report(template, comparison, {"verify": "on"})
    assert report["ratio"] == 1.5 and report["baseline"]["layout"] == "[out, in]"
    assert report["compile_seconds"] == pytest.approx(template.stats.compile_seconds + 1.5)


def test_a_difference_is_placed_and_measured(loaded):
    target, drafter = loaded
    options = {"temperature": 0.0, "ignore_stop": False}
    job = measure.Job(target, drafter, [[[256, 5], [256, 6]], [[256, 7]]], options)
    rows = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert measure.first_differences(job, rows, rows) == []
    (found,) = measure.first_differences(job, rows, [rows[0], rows[1], [7, 8, 1]])
    logits = np.array(target.logits(jnp.array([[256, 7, 7, 8]]))[0, -1])
    logits[256] = -np.inf  # the start id is banned
    first, second = np.sort(logits)[::-1][:2]
    assert (found["prompt"], found["position"]) == (2, 2)
    assert found["gap"] == pytest.approx(first - second, abs=1e-6)


def test_merged_batches_add_up(loaded):
    parts = [generated(loaded, "def f", "x"), generated(loaded, "class A:")]
    merged, stats = measure.merge(parts), [p.stats for p in parts]
    assert merged.ids == parts[0].ids + parts[1].ids and merged.texts == parts[0].texts + parts[1].texts
    assert merged.stats.tokens == sum(map(len, merged.ids))
    assert sum(merged.stats.accept_histogram) == merged.stats.target_forwards == sum(s.target_forwards for s in stats)
    assert merged.stats.accept_length == (merged.stats.tokens - 3) / merged.stats.target_forwards
    accepted = sum(map(sum, merged.from_draft))
    assert merged.stats.acceptance_rate == pytest.approx(accepted / (3 * merged.stats.target_forwards), abs=0.02)


def test_distinct_ngrams_tell_a_loop():
    assert measure.distinct([[1, 2, 3, 4]], 2) == 1
    assert measure.distinct([[1, 2] * 50, [2, 1] * 50], 2) == pytest.approx(2 / 198)
    assert measure.distinct([[1]], 2) is None


# --- what is refused ---


REFUSED = {
    "unknown flag": (["--colour"], "--colour"),
    "abbreviated flag": (["--max", "3"], "--max"),
    "no target": (["--target", "nowhere"], "nowhere"),
    "no drafter": (["--drafter", "btree-9999"], "btree-9999"),
    "empty drafter": (["--drafter", ""], "drafter"),
    "dtype": (["--dtype", "float8"], "float32, bfloat16"),
    "two kinds of prompt": (["--prompt", "a", "--prompt-file", "b"], "exclude each other"),
    "no prompt file": (["--prompt-file", "missing.txt"], "missing.txt"),
    "directory as prompt": (["--prompt-file", "/"], "prompt file /"),
    "NUL in a path": (["--prompt-file", "a\0b"], "prompt file a"),
    "surrogate": (["--prompt", "\ud800"], "--prompt-file"),
    "temperature nan": (["--temperature", "nan"], "--temperature"),
    "temperature negative": (["--temperature", "-1"], "--temperature"),
    "temperature infinite": (["--temperature", "inf"], "--temperature"),
    "temperature no number": (["--temperature", "hot"], "'hot'"),
    "temperature next to nothing": (["--temperature", "1e-40"], "at least 0.001"),
    "top_p zero": (["--top-p", "0"], "--top-p"),
    "top_p above one": (["--top-p", "1.5"], "--top-p"),
    "top_k negative": (["--top-k", "-3"], "--top-k"),
    "no new tokens": (["--max-new-tokens", "0"], "--max-new-tokens"),
    "half a token": (["--max-new-tokens", "2.5"], "'2.5'"),
    "negative seed": (["--seed", "-1"], "--seed"),
    "huge seed": (["--seed", str(2**64)], "--seed"),
    "no batch": (["--batch", "0"], "--batch"),
    "no repeats": (["--repeats", "0"], "--repeats"),
    "verify": (["--verify", "maybe"], "--verify"),
    "greedy rule": (["--greedy-rule", "random"], "--greedy-rule"),
    "stream and json": (["--stream", "--json"], "exclude each other"),
}


def is_refused(status, out, err, *words):
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n")
    assert "Traceback" not in err
    for word in words:
        assert word in err


@pytest.mark.parametrize("flags, word", REFUSED.values(), ids=REFUSED)
def test_wrong_flags_end_in_one_line(saved, capsys, flags, word):
    base = ["--target", str(saved / "target"), *([] if "--prompt" in "".join(flags) else ["--prompt", "a"])]
    is_refused(decode.main(base + flags), *capsys.readouterr(), word)


@pytest.mark.parametrize(
    "target, word",
    [
        ("cut", "not a complete safetensors file"),
        ("noise", "not a complete safetensors file"),
        ("empty", "not a complete safetensors file"),
        ("foreign", "unexpected encoder"),
        ("head", "config.json"),
    ],
)
def test_wrong_target_files_end_in_one_line(command, target, word):
    is_refused(*command("--prompt", "a", target=target, drafter=None), word)


@pytest.mark.parametrize(
    "drafter, words", [("wide", ("32", "16")), ("poor", ("200", "258")), ("target", ("config.json",))]
)
def test_heads_that_do_not_suit_the_target_end_in_one_line(command, drafter, words):
    is_refused(*command("--prompt", "a", drafter=drafter), *words)


def test_prompts_that_cannot_be_served_end_in_one_line(command, saved):
    long, room = saved / "long.txt", f"{CONTEXT - 1}"
    is_refused(*command("--prompt-file", long), "long.txt", room)
    is_refused(*command("--prompt", "fine", "--prompt", "x" * CONTEXT), "prompt 2", room)
    is_refused(*command("--prompt", "", target="startless", drafter=None), "start id")


def test_an_empty_prompt_is_fine_where_there_is_a_start_id(command, loaded):
    assert json.loads(command("--prompt", "", "--json")[1])["text"] == generated(loaded, "").texts[0]


def test_the_process_ends_with_the_status(tmp_path):
    ran = subprocess.run(
        [sys.executable, ROOT / "decode.py", "--prompt", "a", "--target", "no\nsuch"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    is_refused(ran.returncode, ran.stdout, ran.stderr, "such")
    assert list(tmp_path.iterdir()) == []


# --- ends that are no errors ---


def test_ctrl_c_ends_quietly(command, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(decode, "stream", interrupt)
    assert command("--prompt", "a") == (130, "", "")


def test_a_reader_that_leaves_ends_it_quietly(saved, capfd, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        flags = ["--target", str(saved / "target"), "--drafter", str(saved / "head"), "--prompt", "def f"]
        assert decode.main([*flags, "--max-new-tokens", str(NEW)]) == 130
        monkeypatch.undo()
    assert capfd.readouterr() == ("", "")


# --- compiled programs between runs ---


@pytest.fixture
def cache_setting():
    before = jax.config.jax_compilation_cache_dir
    threshold = jax.config.jax_persistent_cache_min_compile_time_secs
    yield lambda value: jax.config.update("jax_compilation_cache_dir", value)
    jax.config.update("jax_compilation_cache_dir", before)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", threshold)


def test_programs_are_kept_in_the_users_cache(tmp_path, monkeypatch, cache_setting):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    cache_setting(None)
    common.use_compilation_cache()
    assert Path(jax.config.jax_compilation_cache_dir).is_relative_to(tmp_path / "x")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    cache_setting(None)
    common.use_compilation_cache()
    assert Path(jax.config.jax_compilation_cache_dir).is_relative_to(tmp_path / "home" / ".cache")


def test_a_cache_that_was_chosen_stays_and_an_impossible_one_is_done_without(tmp_path, monkeypatch, cache_setting):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    cache_setting(str(tmp_path / "chosen"))
    common.use_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "chosen") and not (tmp_path / "x").exists()
    (tmp_path / "x").write_text("a file, not a directory")
    cache_setting(None)
    common.use_compilation_cache()
    assert jax.config.jax_compilation_cache_dir is None
