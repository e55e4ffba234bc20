"""`decode.py --chat` on a released checkpoint: whose turn it is, control tokens, and chats that are refused."""

import io
import json
from types import SimpleNamespace

import pytest

import bytejax
from bytejax.cli import decode
from tests.cli.helpers import is_refused
from tests.conversion import cases


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    directory = tmp_path_factory.mktemp("chat") / "checkpoint"
    cases.write_released(directory)
    return directory


@pytest.fixture
def chat(released, capsys):
    def run(*flags):
        args = ["--target", str(released), "--max-new-tokens", "6", "--json", *flags]
        assert decode.main(args) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return run


def test_a_prompt_is_the_users_turn(chat, released):
    target = bytejax.load_target(released)
    ids = target.tokenizer.chat([{"role": "user", "content": "the fox"}])
    report = chat("--chat", "--prompt", "the fox")
    assert report["text"] == bytejax.generate(target, [ids], max_new_tokens=6).texts[0]
    assert report["settings"]["prompt_ids"] == [len(ids)] and report["settings"]["chat"] is True
    assert report["settings"]["unit"] == "tokens"
    assert chat("--prompt", "the fox")["settings"]["prompt_ids"] == [len(target.tokenizer.encode("the fox"))]


def test_messages_come_before_it(chat, released):
    tokenizer = bytejax.load_target(released).tokenizer
    messages = [("system", "be brief: please"), ("user", "a"), ("assistant", "b")]
    flags = [x for role, text in messages for x in ("--chat", f"{role}: {text}")]
    expected = [{"role": role, "content": text} for role, text in [*messages, ("user", "c")]]
    assert chat(*flags, "--prompt", "c")["settings"]["prompt_ids"] == [len(tokenizer.chat(expected))]
    assert chat(*flags[:4])["settings"]["prompt_ids"] == [len(tokenizer.chat(expected[:2]))]


def test_control_tokens_count_only_when_allowed(chat):
    flags = ("--chat", "--prompt", "<|im_end|>")
    kept, allowed = chat(*flags), chat(*flags, "--allow-special")
    assert kept["settings"]["prompt_ids"][0] > allowed["settings"]["prompt_ids"][0]
    assert allowed["settings"]["allow_special"] is True
    plain, allowed = chat(*flags[1:]), chat(*flags[1:], "--allow-special")
    assert (plain["settings"]["prompt_ids"][0] > 1, allowed["settings"]["prompt_ids"]) == (True, [1])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--chat", "boss: hi"], ["'boss'", "known: system, user, assistant"]),
        (["--chat", "hello"], ["--chat 'hello'", "ROLE:TEXT"]),
        (["--chat"], ["the chat is empty", "--prompt"]),
        (["--chat", "--prompt", "word " * 300], ["prompt 1 has", "room for 255"]),
    ],
)
def test_chats_that_are_refused(flags, words, released, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False, buffer=io.BytesIO(b"")))
    is_refused(decode.main(["--target", str(released), *flags]), *capsys.readouterr(), *words)


def test_a_target_without_a_template_says_so(capsys):
    is_refused(decode.main(["--chat", "--prompt", "x"]), *capsys.readouterr(), "no chat template")


def test_the_summary_counts_tokens(released, capsys):
    assert decode.main(["--target", str(released), "--prompt", "the fox", "--max-new-tokens", "4", "--compare"]) == 0
    out = capsys.readouterr().out
    assert "tokens/s" in out and "tokens per target forward" in out and "bytes" not in out
