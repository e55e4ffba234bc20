"""Ids of byte-ified Llamas: the merge rule from the end, bytes back, the chat template, speed on long texts."""

import dataclasses
import random

import pytest

from bytejax import InputError, tokenizers
from bytejax.tokenizers import TextStream
from bytejax.tokenizers.byte_llama import CONTROL, IDS, PLAIN, RELEASED
from tests.models.byte_llama_cases import CASES, prompts

SCRIPTS = ["a user's ", "e\u0301n\u0303", "日本語。", "한국어", "👩‍👩‍👧🇫🇷👍🏽", "नि", "\u200b\ufeff", "é", "\r\n", "\t"]


def by_hand(data, pieces):
    """Ids from the end, always the longest piece."""
    ids = []
    while data:
        piece = max((p for p in pieces if data.endswith(p)), key=len, default=data[-1:])
        ids.insert(0, IDS.get(piece, piece[0]))
        data = data[: -len(piece)]
    return ids


def random_bytes(rng):
    """Bytes of the nine strings, parts of them, many scripts, and no text at all."""
    parts = []
    for _ in range(rng.randrange(12)):
        kind, piece = rng.randrange(5), rng.choice(PLAIN + CONTROL)
        cut = rng.randrange(len(piece))
        random_part = bytes(rng.randrange(256) for _ in range(rng.randrange(5)))
        parts.append([piece, piece[cut:], piece[:cut], rng.choice(SCRIPTS).encode(), random_part][kind])
    parts += [b"\n"] * rng.randrange(6)
    return b"".join(rng.sample(parts, len(parts)) if rng.random() < 0.5 else parts)


def check(count, seed):
    rng, merged = random.Random(seed), 0
    bare = dataclasses.replace(RELEASED, bos=None)
    for _ in range(count):
        data = random_bytes(rng)
        for special in (False, True):
            ids = bare.encode(data, allow_special=special)
            assert ids == by_hand(data, PLAIN + CONTROL if special else PLAIN)
            assert all(i < 256 or i > 260 for i in ids) or special
            merged += sum(i > 255 for i in ids)
        ids = RELEASED.encode(data)
        assert RELEASED.to_bytes(ids) == data
        stream = TextStream()
        assert "".join(stream.push(RELEASED.to_bytes([i])) for i in ids) + stream.flush() == RELEASED.decode(ids)
        assert RELEASED.decode(ids) == data.decode("utf-8", "replace")
    assert merged > 2 * count


def test_random_texts_follow_the_rule_and_come_back():
    check(2000, seed=0)


@pytest.mark.slow
def test_many_random_texts_follow_the_rule_and_come_back():
    check(10_000, seed=1)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("superusers", [*b"super", 263, *b"s"]),
        ("\n\n\n", [10, 264]),
        ("\n\n\n\n\n", [10, 264, 264]),
        ("The users\n\n\n", [*b"The ", 263, *b"s", 10, 264]),
        ("<|eot_id|>", [*b"<|eot_id|>"]),
        ("<|start_header_id|>user", [*b"<|start_header_id|>", 263]),
        ("", []),
    ],
)
def test_known_ids(text, ids):
    assert RELEASED.encode(text) == [256, *ids]
    assert dataclasses.replace(RELEASED, bos=None).encode(text.encode()) == ids


def test_spelled_control_tokens_count_only_when_asked_for():
    text = "<|begin_of_text|><|end_header_id|><|end_of_text|><|eot_id|><|start_header_id|>"
    assert RELEASED.encode(text, allow_special=True) == [256, 256, 257, 258, 259, 260]
    assert RELEASED.encode(text) == [256, *text.encode()]


@pytest.mark.parametrize("name", CASES)
def test_the_references_ids(name):
    seen = 0
    for case in prompts(name):
        if (text := case["text"]) is None:
            continue
        seen += 1
        chat = [{"role": "user", "content": text[5:]}]
        ids = RELEASED.chat(chat) if text.startswith("CHAT:") else RELEASED.encode(text)
        assert ids == case["input_ids"].tolist()
    assert seen >= 3


def test_chats_keep_contents_as_they_are():
    assert RELEASED.chat([{"role": "user", "content": "Hi"}]) == [
        *(256, 260, 263, 257, 264, 72, 105, 259),
        *(260, 261, 257, 264),
    ]
    chat = [{"role": r, "content": c} for r, c in (("system", "\n\n\nx "), ("user", "<|eot_id|>"), ("assistant", ""))]
    ids = [256, 260, 262, 257, 264, 10, 264, *b"x ", 259, 260, 263, 257, 264, *b"<|eot_id|>", 259]
    ids += [260, 261, 257, 264, 259]
    assert RELEASED.chat(chat, reply=False) == ids
    special = RELEASED.chat(chat[1:2], reply=False, allow_special=True)
    assert special == [256, 260, 263, 257, 264, 259, 259]
    with pytest.raises(InputError, match="role 'tool'"):
        RELEASED.chat([{"role": "tool", "content": ""}])


def test_control_tokens_and_ids_of_wider_heads_stand_for_no_bytes():
    assert RELEASED.to_bytes([256, 104, 257, 258, 105, 259, 260, 265, 267, -1]) == b"hi"
    assert RELEASED.to_bytes([261, 262, 263, 264]) == b"assistantsystemuser\n\n"
    assert RELEASED.vocab == 265 and RELEASED.stop == (259,) and RELEASED.bos == 256


def test_saved_and_read(tmp_path):
    tokenizer = dataclasses.replace(RELEASED, banned=(256, 258))
    again = tokenizers.load(tokenizers.save(tokenizer, tmp_path), tmp_path)
    assert again == tokenizer != RELEASED and hash(again) == hash(tokenizer)
