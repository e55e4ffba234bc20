"""The benchmark command on the demo, as short as it gets."""

import json

import numpy as np
import pytest

from bytejax import InputError
from bytejax.benchmark import demo


def lines(capsys, *arguments):
    assert demo.main([*arguments, "--prompts", "2", "--max-new-tokens", "12", "--repeats", "1"]) == 0
    return capsys.readouterr().out.splitlines()


def rows(capsys, *arguments):
    return [json.loads(line) for line in lines(capsys, *arguments)]


def test_identity_counts_what_differs(capsys):
    (row,) = rows(capsys, "identity", "--drafters", "ff-8:draft_tokens=3", "--batch", "2")
    assert row["rows"] == 2 and row["differ_at_same_width"] == 0 and row["accept_length"] > 1


def test_variants_have_settings_of_the_drafter_and_of_the_run():
    v = demo.Variant.parse("cp-8:draft_tokens=3,bonus=carry,merged=true")
    assert (v.name, v.drafter, v.run) == ("cp-8", {"draft_tokens": 3, "merged": True}, {"bonus": "carry"})
    with pytest.raises(InputError, match="KEY=VALUE"):
        demo.Variant.parse("cp-8:bonus")


def test_the_interval_holds_the_mean_of_the_pairs():
    mean, low, high = demo.interval(np.random.default_rng(1).normal(0.5, 1.0, 400))
    assert low < mean < high and low > 0.3 and high < 0.7 and 0.15 < high - low < 0.25
    assert demo.interval(np.zeros(5)) == [0, 0, 0]


@pytest.mark.slow
def test_acceptance_is_paired_with_the_first(capsys):
    first, second = rows(capsys, "acceptance", "--drafters", "cp-8", "cp-8:bonus=carry", "--temperature", "1")
    assert first["accept_length"] > 1 and 0.5 < first["a1"] < 1 and first["beyond_first"] == [0, 0, 0]
    assert second["a1"] == first["a1"] and second["beyond_first"][0] != 0


@pytest.mark.slow
def test_speed_has_both_layouts(capsys):
    (row,) = rows(capsys, "speed", "--drafters", "hmm-8:draft_tokens=4")
    assert row["ratio"] == row["bytes_per_second"] / max(row["layouts"].values())
    assert len(row["layouts"]) == 2 and row["block_rows"] == 5


@pytest.mark.slow
@pytest.mark.parametrize("temperature", ["0", "1"])
def test_cycles_are_compared_with_constant_drafts(capsys, temperature):
    first, second = rows(capsys, "cycles", "--drafters", "btree-8", "ff-8", "--temperature", temperature)
    assert first["over_first"] == 1 != second["over_first"] and min(second["ms"], second["constant_ms"]) > 0


@pytest.mark.slow
def test_the_table_begins_with_the_baseline(capsys):
    head, rule, baseline, row = lines(capsys, "table", "--drafters", "btree-8:bonus=carry")
    assert (
        baseline.startswith("| none | 1 |") and baseline.endswith(" 1.00 |") and "| btree | 8 | 16 | 0 | carry |" in row
    )
    assert len({line.count("|") for line in (head, rule, baseline, row)}) == 1
