"""config.json of EvaByte checkpoints."""

import dataclasses
import json

import pytest

from bytejax import InputError, parameters
from bytejax.conversion.evabyte import EvaByteFamily
from bytejax.models.evabyte import Config
from tests.models import evabyte_cases
from tests.models.evabyte_cases import FOLDER, NAMES

FAMILY = EvaByteFamily()
RAW = json.loads((FOLDER / "w32c8_h4" / "config.json").read_text())


def test_every_number_is_read():
    want = Config(320, 40, 2, 4, 107, 32, 8, 4, 1e5, 1.0, 1e-5, True, 512)
    assert FAMILY.parse(RAW) == want
    assert FAMILY.parse(RAW | {"some_future_key": 3, "return_dict": True}) == want
    lacking = {k: v for k, v in RAW.items() if not k.startswith("fp32_") and k not in ("mixedp_attn", "hidden_act")}
    assert FAMILY.parse(lacking) == want
    one = {k: v for k, v in RAW.items() if k not in ("num_pred_heads", "norm_add_unit_offset")}
    assert FAMILY.parse(one) == dataclasses.replace(want, pred_heads=1, unit_offset=False)
    assert FAMILY.parse(RAW | {"rope_scaling": {"type": "linear", "factor": 4}}).rope_scale == 4.0


def test_the_released_model_has_its_size():
    """6,488,330,240 parameters in 355 tensors, says the release."""
    table = FAMILY.table(Config(320, 4096, 32, 32, 11008, 2048, 16, 8, 1e5, 1.0, 1e-5, True, 32768))
    assert parameters.count(table) == 6_488_330_240
    assert sum(len(p.sources()) for p in parameters.flatten(table).values()) == 355


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window_size": None}, "window_size is missing"),
        ({"chunk_size": 7}, "window = 32 is not a multiple of chunk = 7"),
        ({"hidden_size": "40"}, "hidden_size = '40'"),
        ({"num_pred_heads": 0}, "num_pred_heads = 0"),
        ({"rope_theta": -1.0}, "rope_theta = -1.0"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"norm_add_unit_offset": "yes"}, "norm_add_unit_offset"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"vocab_size": 300}, "vocab_size = 300"),
    ],
)
def test_what_is_wrong_is_named(changes, message):
    with pytest.raises(InputError, match=message) as e:
        FAMILY.parse(RAW | changes)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_written_config_reads_as_it_was(name):
    target = evabyte_cases.load(name).target
    written = json.loads(json.dumps(FAMILY.config_of(target)))
    assert FAMILY.parse(written) == target.config
    assert written["model_type"] in FAMILY.model_types and FAMILY.serves(target)
    raw = json.loads((FOLDER / name / "config.json").read_text())
    same = {"eos_token_id"} | ({"max_position_embeddings"} if name == "w16c8_h1" else set())
    assert written["eos_token_id"] == [raw["eos_token_id"], 11]  # a turn's end stops, too
    assert {k: raw[k] for k in written if k in raw and k not in same} == {
        k: v for k, v in written.items() if k in raw and k not in same
    }


@pytest.mark.parametrize(
    ("files", "raw", "stop"),
    [
        ({}, {}, (2, 11)),
        ({}, {"eos_token_id": 11}, (11,)),
        ({"generation_config.json": '{"eos_token_id": [2, 11]}'}, {"eos_token_id": 2}, (2, 11)),
        ({"generation_config.json": "{}"}, {"eos_token_id": 11}, (11,)),
    ],
)
def test_end_ids(tmp_path, files, raw, stop):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert FAMILY.make({}, FAMILY.parse(RAW), tmp_path, raw).tokenizer.stop == stop


def test_impossible_end_ids(tmp_path):
    with pytest.raises(InputError, match="eos_token_id = 999"):
        FAMILY.make({}, FAMILY.parse(RAW), tmp_path, {"eos_token_id": 999})
