"""Every family that is known: its reference's tiny checkpoint through `load_target`, and converted there and back."""

import json
import shutil

import jax
import numpy as np
import pytest

import bytejax
from bytejax import InputError
from bytejax.checkpoints import SafetensorsFile
from bytejax.cli import convert
from bytejax.conversion import families
from tests.conversion import cases
from tests.models.byte_llama_cases import FIXTURES

SOURCES = {name: FIXTURES / name for name in ("a_untied_expand", "b_tied_noexpand")}
SOURCES |= {"evabyte": FIXTURES.parent / "evabyte" / "w16c4_h8"}
LOGITS = jax.jit(lambda target, ids: target.logits(ids))


@pytest.mark.parametrize("name", SOURCES)
def test_there_and_back_it_is_the_same_target(name, tmp_path, capsys):
    source = SOURCES[name]
    for a, b in ((source, tmp_path / "ours"), (tmp_path / "ours", tmp_path / "back")):
        assert convert.main([str(a), str(b)]) == 0, capsys.readouterr().err
    targets = [bytejax.load_target(x) for x in (source, tmp_path / "ours", tmp_path / "back")]
    assert len({(type(t), t.config, t.tokenizer) for t in targets}) == 1
    ids = np.arange(2 * 40).reshape(2, 40) % targets[0].vocab
    logits = [np.asarray(LOGITS(t, ids)) for t in [*targets, bytejax.load_target(source, unroll=False)]]
    assert all((x == logits[0]).all() for x in logits[1:3])
    np.testing.assert_allclose(logits[3], logits[0], atol=1e-4)
    before, after = SafetensorsFile(source / "model.safetensors"), SafetensorsFile(tmp_path / "back/model.safetensors")
    for tensor in after.names():
        assert before.read(tensor).tobytes() == after.read(tensor).tobytes()
    model_type = json.loads((tmp_path / "back" / "config.json").read_text())["model_type"]
    assert model_type == json.loads((source / "config.json").read_text())["model_type"]


def test_every_model_type_has_its_family():
    for model_type in families.MODEL_TYPES:
        assert model_type in families.family(model_type, "").model_types
    for model_type in ("gpt2", None, 3, []):
        with pytest.raises(InputError, match="here has the model_type .*known: tpu_llama, llama"):
            families.family(model_type, "here")


def test_a_target_that_no_family_writes_is_refused(tmp_path, monkeypatch):
    cases.write_released(tmp_path)
    target = bytejax.load_target(tmp_path)
    monkeypatch.setattr(families, "MODEL_TYPES", {"evabyte": families.MODEL_TYPES["evabyte"]})
    with pytest.raises(InputError, match="a Llama like this one has no released layout"):
        families.family_of(target)


def test_layers_come_in_the_form_that_the_whole_target_has(tmp_path):
    """What a layer becomes piece by piece is what the whole target becomes at once."""
    for name, source in SOURCES.items():
        shutil.copytree(source, tmp_path / name)
        stacked = bytejax.load_target(tmp_path / name, unroll=False)
        got = bytejax.load_target(tmp_path / name).params
        jax.tree.map(np.testing.assert_array_equal, got, stacked.in_panels().params)
