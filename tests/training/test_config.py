"""Configs: what is read, and the one line that a wrong one gets."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from bytejax.errors import InputError
from bytejax.training import config as configs

from .conftest import values

SHIPPED = sorted((Path(__file__).parents[2] / "configs" / "train").glob("*.yaml"))


@pytest.fixture
def path(tmp_path):
    OmegaConf.save(OmegaConf.create(values(tmp_path)), tmp_path / "run.yaml")
    return tmp_path / "run.yaml"


def test_overrides_reach_every_level(path):
    config = configs.load(path, ["steps=9", "optimizer.learning_rate=2e-4", "mtp=null", "data.files=[a,b]"])
    assert (config.steps, config.optimizer.learning_rate, config.mtp) == (9, 2e-4, None)
    assert config.data.files == ["a", "b"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("stps=3", "unknown key stps; did you mean steps?"),
        ("optimizer.learing_rate=1", "did you mean optimizer.learning_rate?"),
        ("optimizer.zzz=1", "unknown key optimizer.zzz; known: "),
        ("mtp.windw=2", "did you mean mtp.window?"),
        ("steps=many", "steps: value 'many'"),
        ("steps=-1", "steps=-1 must be positive"),
        ("steps", "not of the form key=value"),
        ("data=3", "data must be a mapping"),
        ("mtp.window=1.5", "mtp.window: value '1.5'"),
        ("task=targt", "task=targt is unknown; known: target, head"),
        ("optimizer.schedule=step", "known: constant, cosine, linear"),
        ("gamma=0", "gamma=0.0 must be above 0"),
        ("architecture=null", "needs the section architecture"),
        ("architecture.kv_heads=3", "kv_heads=3 must divide"),
        ("data.source=stdlib", "need data.source=files"),
        ("task=head", "needs at least one entry under heads"),
        ("data.accumulate=3", "data.accumulate=3 must divide data.batch=2"),
        ("windows=33", "windows=33 is more than data.sequence_length=32"),
        ("kl=0.5", "task target takes none of kl"),
        ("kl=1.5", "kl=1.5 must be between 0 and 1"),
        ("first_weight=-1", "first_weight=-1.0 must be between 0 and 1"),
        ("heads.a.circuit=ff", "missing heads.a.adapter_rank, heads.a.rank, heads.a.window"),
    ],
)
def test_wrong_values_are_told_in_one_line(path, override, said):
    with pytest.raises(InputError) as error:
        configs.load(path, [override])
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_architecture_number_has_no_default(path):
    tree = OmegaConf.load(path)
    del tree.architecture.rope_theta
    OmegaConf.save(tree, path)
    with pytest.raises(InputError, match="missing architecture.rope_theta"):
        configs.load(path)


def test_missing_file_names_its_neighbours(path):
    with pytest.raises(InputError, match="no such config file; .* has run.yaml"):
        configs.load(path.with_name("rum.yaml"))


@pytest.mark.parametrize("text", ["a: [1", "- 1\n- 2\n", "\xff"])
def test_files_that_are_no_configs(path, text):
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError) as error:
        configs.load(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_what_may_change_between_runs(tiny):
    old, new = (configs.to_values(tiny(**change)) for change in ({}, {"steps": 50, "log_every": 1, "workdir": "x"}))
    assert configs.differences(old, new) == []
    other = configs.to_values(tiny(optimizer__learning_rate=1e-3, mtp=None))
    assert "optimizer.learning_rate: 0.003 -> 0.001" in configs.differences(old, other)
    assert any(d.startswith("mtp") for d in configs.differences(old, other))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_shipped_configs_load_and_say_how_they_are_launched(path):
    configs.load(path)
    assert path.read_text().startswith(f"# python train.py configs/train/{path.name}\n")
