"""The benchmark command on the demo, as short as it gets."""

import json

import pytest

from bytejax.benchmark import demo


def rows(capsys, *arguments):
    assert demo.main([*arguments, "--prompts", "2", "--max-new-tokens", "12"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_identity_counts_what_differs(capsys):
    (row,) = rows(capsys, "identity", "--drafters", "ff-8", "--batch", "2", "--draft-tokens", "3")
    assert row["rows"] == 2 and row["differ_at_same_width"] == 0 and row["accept_length"] > 1


@pytest.mark.slow
def test_acceptance_has_both_rules_and_a1(capsys):
    (row,) = rows(capsys, "acceptance", "--drafters", "cp-8")
    assert min(row[key] for key in ("sampling", "greedy_sequential", "greedy_joint")) > 1 and 0.5 < row["a1"] < 1


@pytest.mark.slow
def test_speed_has_both_layouts(capsys):
    (row,) = rows(capsys, "speed", "--drafters", "hmm-8", "--draft-tokens", "4", "--repeats", "1")
    assert row["ratio"] == row["bytes_per_second"] / max(row["layouts"].values())
    assert len(row["layouts"]) == 2 and row["draft_tokens"] == 4
