"""What the decode command refuses, how it ends, and the programs it keeps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from bytejax.cli import common, decode
from tests.cli.helpers import CONTEXT, NEW, generated, is_refused

ROOT = Path(__file__).parents[2]


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
    "bonus": (["--bonus", "keep"], "--bonus"),
    "accept": (["--accept", "all"], "--accept"),
    "paper by blocks": (["--bonus", "paper", "--accept", "block"], "token-wise"),
    "bonus without drafts": (["--bonus", "carry"], "needs a drafter"),
    "stream and json": (["--stream", "--json"], "exclude each other"),
}


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
