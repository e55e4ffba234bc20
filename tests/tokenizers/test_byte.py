"""Ids and bytes, and text from bytes that arrive in pieces."""

import itertools

import pytest

from bytejax.tokenizers import DEMO, ByteTokenizer, TextStream

SHIFTED = ByteTokenizer(vocab=320, offset=64, bos=1, stop=(2,), banned=(0, 1))
BARE = ByteTokenizer(vocab=256, offset=0, bos=None, stop=(), banned=())

TEXTS = {
    "ascii": b"def f(x):\n\treturn x\n",
    "emoji": "family 👩‍👩‍👧, flag 🇫🇷, thumb 👍🏽".encode(),
    "cjk": "日本語 and 漢字，한국어".encode(),
    "combining": "e\u0301 n\u0303 \u0928\u093f".encode(),
    "latin-1": "caf\xe9 na\xefve".encode("latin-1"),
    "cut characters": b"a\xf0\x9f\x98 b\xe6\x97c\xc3",
    "lone continuations": b"\x80\xbf\xbf ok \x80",
    "overlong, surrogate, too large": b"\xc0\xaf|\xe0\x80\xaf|\xed\xa0\x80|\xf4\x90\x80\x80|\xf5\xff",
    "ends inside an emoji": "so far 👍".encode()[:-1],
    "empty": b"",
}


@pytest.mark.parametrize("tokenizer", [DEMO, SHIFTED, BARE])
@pytest.mark.parametrize("data", TEXTS.values(), ids=TEXTS)
def test_bytes_survive_the_round_trip(tokenizer, data):
    ids = tokenizer.encode(data)
    assert tokenizer.to_bytes(ids) == data
    assert tokenizer.decode(ids) == data.decode("utf-8", "replace")
    assert all(0 <= i < tokenizer.vocab for i in ids)
    assert len(ids) == len(data) + (tokenizer.bos is not None)


def test_ids_are_offset_bytes_after_the_start_id():
    assert DEMO.encode("aé") == [256, 97, 0xC3, 0xA9]
    assert SHIFTED.encode("a") == [1, 64 + 97]
    assert BARE.encode("") == []


def test_special_ids_stand_for_no_bytes():
    assert DEMO.to_bytes([256, 104, 257, 105]) == b"hi"
    assert SHIFTED.to_bytes([0, 2, 63, 64, 319]) == b"\x00\xff"


def test_escaped_bytes_of_an_argument_become_bytes_again():
    assert DEMO.to_bytes(DEMO.encode(b"\xff\xfe!".decode("utf-8", "surrogateescape"))) == b"\xff\xfe!"


@pytest.mark.parametrize("data", TEXTS.values(), ids=TEXTS)
def test_streamed_text_is_the_whole_text_wherever_it_is_cut(data):
    whole = data.decode("utf-8", "replace")
    for i, j in itertools.combinations_with_replacement(range(len(data) + 1), 2):
        stream = TextStream()
        parts = [stream.push(data[:i]), stream.push(data[i:j]), stream.push(data[j:])]
        assert "".join(parts) + stream.flush() == whole


@pytest.mark.parametrize("data", [d for name, d in TEXTS.items() if name in ("ascii", "emoji", "cjk", "combining")])
def test_nothing_is_ever_half_shown_or_held_back(data):
    """After every byte exactly the characters complete by then have come out."""
    stream, shown = TextStream(), ""
    for i in range(len(data)):
        shown += stream.push(data[i : i + 1])
        assert shown == data[: i + 1].decode("utf-8", "ignore")
    assert stream.flush() == ""


def test_an_impossible_byte_does_not_stall_the_text():
    stream = TextStream()
    assert stream.push(b"\xf0\x9f") == ""
    assert stream.push(b"A") == "\ufffdA"
    assert stream.push(b"\xff") == "\ufffd"
    assert stream.push(b"\xf0\x9f\x98") == "" and stream.flush() == "\ufffd"
