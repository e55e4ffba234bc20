"""Benchmark configs: those that ship, and values that come from elsewhere."""

from pathlib import Path

import pytest

from bytejax.benchmark import config as configs
from bytejax.benchmark.config import SOURCE
from bytejax.errors import InputError

SHIPPED = sorted((Path(__file__).parents[2] / "configs" / "bench").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_configs_are_complete(path):
    config = configs.load(path, given={"target": "somewhere"})
    assert config.target == "somewhere" and config.temperatures == [0, 1]
    assert all(SOURCE in entry for entry in config.drafters.values())


def test_options_of_drafters_stay_what_they_are(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "target: demo\nquestions: q\nout: o\nmax_new_tokens: 3\ntemperatures: [0, 0.5]\n"
        "drafters:\n  a: {drafter: esp, widths: [15, 4], rate: 0.1, prune: false}\n"
    )
    config = configs.load(tmp_path / "a.yaml", ["seed=5", "drafters.a.masks=2"], {"questions": "a=b.jsonl"})
    assert config.drafters == {"a": {"drafter": "esp", "widths": [15, 4], "rate": 0.1, "prune": False, "masks": 2}}
    assert (config.seed, config.questions, config.temperatures) == (5, "a=b.jsonl", [0.0, 0.5])


def test_missing_keys_are_named(tmp_path):
    (tmp_path / "a.yaml").write_text("target: demo\ndrafters: {}\n")
    with pytest.raises(InputError, match=r"a.yaml: missing max_new_tokens, out, questions, temperatures"):
        configs.load(tmp_path / "a.yaml")
