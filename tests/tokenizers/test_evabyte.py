"""EvaByte's ids and chats, against the release's tokenizer."""

import json

import numpy as np
import pytest

from bytejax import InputError, tokenizers
from bytejax.tokenizers import EvaByteTokenizer
from bytejax.tokenizers.evabyte import END_OF_TURN, SPECIAL
from tests.models.evabyte_cases import FOLDER

REFERENCE = json.loads((FOLDER / "tokenizer.json").read_text())
TOKENIZER = EvaByteTokenizer()


def test_encoding_equals_the_reference():
    assert len(REFERENCE["encode"]) > 10
    for row in REFERENCE["encode"]:
        assert TOKENIZER.encode(row["text"], allow_special=True) == row["ids"]
        assert TOKENIZER.encode(row["text"].encode(), allow_special=True) == row["ids"]


def test_decoding_equals_the_reference_but_for_broken_characters():
    """The release drops bytes that are no UTF-8; here they become U+FFFD."""
    for row in REFERENCE["decode"]:
        assert TOKENIZER.to_bytes(row["ids"]).decode("utf-8", "ignore") == row["text_skip_special"]


def test_control_tokens_are_the_references():
    named = {int(i): text for i, text in REFERENCE["special"].items()} if "0" in REFERENCE["special"] else None
    named = named or {i: text for text, i in REFERENCE["special"].items()}
    assert dict(enumerate(SPECIAL)) == named
    assert TOKENIZER.vocab == REFERENCE["len"] and TOKENIZER.bos == REFERENCE["bos"]
    assert TOKENIZER.stop == (REFERENCE["eos"],)


@pytest.mark.parametrize("seed", range(5))
def test_any_bytes_survive_the_round_trip(seed):
    rng = np.random.default_rng(seed)
    spellings = [SPECIAL[i].encode() for i in rng.integers(0, 64, 3)]
    data = rng.bytes(300) + bytes(range(256)) + b"".join(spellings) + rng.bytes(9)
    ids = TOKENIZER.encode(data)
    assert TOKENIZER.to_bytes(ids) == data
    assert ids[0] == 1 and min(ids[1:]) >= 64 and len(ids) == len(data) + 1


def test_spellings_of_control_tokens_are_text_unless_allowed():
    text = "a<|eot_id|>b<extra_id_5>"
    assert TOKENIZER.to_bytes(TOKENIZER.encode(text)) == text.encode()
    assert TOKENIZER.encode(text, allow_special=True)[:4] == [1, 161, 11, 162]
    assert TOKENIZER.to_bytes(TOKENIZER.encode(text, allow_special=True)) == b"ab<extra_id_5>"
    messages = [{"role": "user", "content": text}]
    assert TOKENIZER.chat(messages).count(END_OF_TURN) == 2
    assert TOKENIZER.chat(messages, allow_special=True).count(END_OF_TURN) == 3


def test_chats_equal_the_reference():
    kinds = set()
    for row in REFERENCE["chat"]:
        if "ids" not in row:
            with pytest.raises(InputError):
                TOKENIZER.chat(row["messages"])
            continue
        ids = TOKENIZER.chat(row["messages"], reply=row["add_generation_prompt"], allow_special=True)
        assert ids == row["ids"]
        kinds.add((row["messages"][0]["role"], row["add_generation_prompt"]))
    assert len(kinds) >= 3


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "empty"),
        ([{"role": "tool", "content": "x"}], "role 'tool'"),
        ([{"role": "user", "content": "x"}, {"role": "system", "content": "y"}], "only the first"),
    ],
)
def test_impossible_chats(messages, message):
    with pytest.raises(InputError, match=message):
        TOKENIZER.chat(messages)


def test_saved_tokenizers_come_back(tmp_path):
    tokenizer = EvaByteTokenizer(stop=(2, END_OF_TURN), banned=(0,))
    saved = json.loads(json.dumps(tokenizers.save(tokenizer, tmp_path)))
    assert tokenizers.load(saved, tmp_path) == tokenizer != TOKENIZER
    assert hash(tokenizer) != hash(TOKENIZER)
