"""Any text through every tokenizer and back, whole and as a stream."""

import random

import pytest

from bytejax.tokenizers import DEMO, EvaByteTokenizer, SubwordTokenizer, TextStream
from bytejax.tokenizers.byte_llama import RELEASED
from tests.conversion import cases

SCRIPTS = [
    "🙂",
    "\U0001f469\u200d\U0001f467\U0001f3fd",
    "漢字かな",
    "e\u0301a\u0308o\u0302\u0323",
    "Привет",
    "עברית",
    "ไทย",
]
SCRIPTS += ["עברית", "ไทย", "\r\n\t  ", "user\n\n", "\x00\x07"]
CONTROLS = ["<|eot_id|>", "<|begin_of_text|>", "<bos>", "<extra_id_12>", *cases.CONTROLS]


@pytest.fixture(scope="module", params=["byte", "evabyte", "byte-llama", "subword"])
def tokenizer(request, tmp_path_factory):
    if request.param == "subword":
        path = tmp_path_factory.mktemp("tokenizer")
        cases.write_tokenizer(path)
        return SubwordTokenizer.from_directory(path, cases.VOCAB)
    return {"byte": DEMO, "evabyte": EvaByteTokenizer(), "byte-llama": RELEASED}[request.param]


def random_bytes(rng):
    kinds = [
        lambda: rng.choice(SCRIPTS).encode(),
        lambda: rng.choice(SCRIPTS).encode()[rng.randrange(3) :][: rng.randrange(1, 6)],
        lambda: rng.choice(CONTROLS).encode(),
        lambda: chr(rng.choice([rng.randrange(32, 0xD7FF), rng.randrange(0x10000, 0x10FFFF)])).encode(),
        lambda: rng.randbytes(rng.randrange(5)),
    ]
    return b"".join(rng.choice(kinds)() for _ in range(rng.randrange(12)))


def check(tokenizer, count):
    rng, invalid = random.Random(count), 0
    for _ in range(count):
        data = random_bytes(rng)
        text = data.decode("utf-8", "replace")
        invalid += "\ufffd" in text
        ids = tokenizer.encode(data)
        assert all(0 <= i < tokenizer.vocab for i in ids)
        assert tokenizer.to_bytes(ids) == data
        assert tokenizer.decode(ids) == text
        stream = TextStream()
        assert "".join(stream.push(tokenizer.to_bytes([i])) for i in ids) + stream.flush() == text
    assert count / 10 < invalid < count


def test_random_texts_come_back(tokenizer):
    check(tokenizer, 300)


@pytest.mark.slow
def test_many_random_texts_come_back(tokenizer):
    check(tokenizer, 10_000)
