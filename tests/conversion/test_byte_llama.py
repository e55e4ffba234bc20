"""Checkpoints of byte-ified Llamas: config.json with its traps, and back."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from bytejax import InputError
from bytejax.conversion.byte_llama import ByteLlamaFamily
from bytejax.models import byte_llama, llama
from bytejax.models.base import Target
from tests.models.byte_llama_cases import EXPANDING, FIXTURES, load, raw

FAMILY = ByteLlamaFamily()
NAME = "a_untied_expand"


def test_configs_are_read():
    scaling = llama.RopeScaling(32.0, 1.0, 4.0, 8192)
    sizes = (265, 64, 2, 4, 2, 16, 96, 5e5, 1e-5, False, 131072, False, scaling)
    assert FAMILY.parse(raw(NAME)) == byte_llama.Config(*sizes, expand_vocab=620)
    plain = FAMILY.parse(raw("b_tied_noexpand"))
    assert type(plain) is llama.Config and plain.tied and plain.head_dim == 16
    assert type(load("b_tied_noexpand")) is llama.Llama
    ignored = FAMILY.parse(raw("c_qknorm_expand"))
    assert raw("c_qknorm_expand")["add_qk_norm"] and not ignored.qk_norm


def test_start_and_end_ids_are_the_tokenizers_not_the_configs():
    assert raw(NAME)["bos_token_id"] == 128000
    assert load(NAME).tokenizer.bos == 256 and load(NAME).tokenizer.stop == (259,)


@pytest.mark.parametrize("name", [*EXPANDING, "b_tied_noexpand"])
def test_a_config_that_is_written_means_the_same(name):
    target = load(name)
    written = FAMILY.config_of(target)
    assert written["model_type"] == "tpu_llama" and written["eos_token_id"] == [259]
    assert FAMILY.parse(written) == target.config and FAMILY.serves(target)
    again = FAMILY.make(target.params, target.config, FIXTURES, written)
    assert type(again) is type(target)
    if name in EXPANDING:
        symbols = [int(s) - 1 for key in raw(name)["expand_input_ids_dict"][0] if key for s in reversed(key.split(","))]
        windows = byte_llama._windows(np.asarray([symbols], np.int32))
        want = byte_llama.expand(target.lookup, windows)
        np.testing.assert_array_equal(byte_llama.expand(again.lookup, windows), want)
        assert len(np.unique(want)) > 400


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 266}, "vocab_size = 266 is not supported, only 265"),
        ({"expand_input_ids": "yes"}, "expand_input_ids = 'yes'"),
        ({"expand_input_ids_maxlen": 17}, "expand_input_ids_maxlen = 17"),
        ({"expand_input_ids_maxlen": None}, "expand_input_ids_maxlen is missing"),
        ({"expand_input_ids_vocab_size": None}, "expand_input_ids_vocab_size is missing"),
        ({"expand_input_ids_vocab_size": 600}, "config.json: .* leads to id 6.., beyond .* = 600"),
        ({"expand_input_ids_dict": None}, "config.json: .* no pair"),
        ({"expand_input_ids_dict": [{"1": 1}, "x"]}, "config.json: .* no pair"),
        ({"expand_input_ids_dict": [{"1": 1}, [256]]}, "config.json: .* special symbol 256"),
    ],
)
def test_bad_values_are_refused_in_one_line(change, message):
    with pytest.raises(InputError, match=message) as e:
        FAMILY.make(None, FAMILY.parse(raw(NAME) | change), Path("here"), raw(NAME) | change)
    assert "\n" not in str(e.value)


def test_other_targets_are_not_served():
    target = load("b_tied_noexpand")
    other = target.replace(tokenizer=dataclasses.replace(target.tokenizer, banned=(256,)))
    assert FAMILY.serves(other) and isinstance(other, Target)
    assert not FAMILY.serves(target.replace(tokenizer=None))
