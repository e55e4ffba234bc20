"""Drafting timed against autoregression."""

import dataclasses
import io

import jax.numpy as jnp
import numpy as np
import pytest

import bytejax
from bytejax.benchmark import measure
from bytejax.cli import render
from bytejax.decoding.generate import Result, Stats, row_keys
from bytejax.decoding.logits import make_warp
from bytejax.decoding.loop import noise
from bytejax.drafters.base import Autoregressive
from bytejax.models import layouts
from tests.cli.helpers import generated


def test_the_baseline_is_the_faster_layout_and_figures_are_medians(loaded, monkeypatch):
    target, drafter = loaded
    template = generated(loaded, "def f")
    speeds = {"drafted": iter([9.0, 1.0, 30.0]), "panels": iter([2.0, 4.0, 3.0]), "[in, out]": iter([7.0, 6.0, 1.0])}

    def run(job):
        side = next(iter(job.target.layouts())) if isinstance(job.drafter, Autoregressive) else "drafted"
        stats = dataclasses.replace(template.stats, tokens_per_second=next(speeds[side]))
        return dataclasses.replace(template, stats=stats)

    monkeypatch.setattr(measure.Job, "run", run)
    monkeypatch.setattr(measure.Job, "warm_up", lambda job: 1.5 if "panels" in job.target.layouts() else 2.5)
    job = measure.Job(target, drafter, [[[1]]], {"temperature": 0.0, "ignore_stop": False})
    comparison = measure.compare(job, repeats=3)
    assert comparison.drafted.stats.tokens_per_second == 9 and comparison.baseline.stats.tokens_per_second == 6
    assert comparison.layout == "[in, out]" and comparison.identical is True
    assert (comparison.drafted_compile, comparison.baseline_compile) == (1.5, 2.5)
    report = measure.report(template, comparison, {"verify": "on", "bonus": "condition"})
    assert report["ratio"] == 1.5 and report["baseline"]["layout"] == "[in, out]"
    assert report["baseline"]["layouts"] == {"panels": 3.0, "[in, out]": 6.0}
    assert report["compile_seconds"] == pytest.approx(template.stats.compile_seconds + 1.5)


def test_a_difference_is_placed_and_measured(loaded):
    target, drafter = loaded
    options = {"temperature": 0.0, "ignore_stop": False}
    job = measure.Job(target, drafter, [[[256, 5], [256, 6]], [[256, 7]]], options)
    rows = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert measure.first_differences(job, rows, rows) == []
    (found,) = measure.first_differences(job, rows, [rows[0], rows[1], [7, 8, 1]])
    logits = np.array(target.logits(jnp.array([[256, 7, 7, 8]]))[0, -1])
    logits[256] = -np.inf  # the start id is banned
    first, second = np.sort(logits)[::-1][:2]
    assert (found["prompt"], found["position"]) == (2, 2)
    assert found["gap"] == pytest.approx(first - second, abs=1e-6)


def test_a_difference_in_sampling_is_measured_with_the_noise_of_its_position(loaded):
    """The choice there is the larger one of the two: the id that autoregression draws."""
    target, _ = loaded
    options = {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "seed": 3, "ignore_stop": False}
    prompt = target.tokenizer.encode("def f")
    ids = generated((target, None), prompt, **options, max_new_tokens=6).ids[0]
    job = measure.Job(target, Autoregressive(), [[prompt]], options)
    (found,) = measure.first_differences(job, [ids[:4] + [0, 0]], [ids])
    assert found["position"] == next(i for i in (4, 5) if ids[i] != 0) and found["gap"] > 0
    keys = row_keys(3, [prompt])
    at = found["position"]
    text = prompt + ids[:at]
    warp = make_warp(target.vocab, 0.8, 5, 0.9, target.tokenizer.banned)
    drawn = noise(keys, jnp.asarray([len(text) - 1]), 1, target.vocab)[0, 0]
    scores = np.asarray(warp.log_probs(target.logits([text])[0, -1]) + drawn)
    assert scores.argmax() == ids[at]
    assert found["gap"] == pytest.approx(np.diff(np.sort(scores)[-2:]).item(), abs=1e-5)


def test_merged_batches_add_up(loaded):
    parts = [generated(loaded, "def f", "x"), generated(loaded, "class A:")]
    merged, stats = measure.merge(parts), [p.stats for p in parts]
    assert merged.ids == parts[0].ids + parts[1].ids and merged.texts == parts[0].texts + parts[1].texts
    assert merged.stats.tokens == sum(map(len, merged.ids))
    assert sum(merged.stats.accept_histogram) == merged.stats.target_forwards == sum(s.target_forwards for s in stats)
    assert merged.stats.accept_length == (merged.stats.tokens - 3) / merged.stats.target_forwards
    accepted = sum(map(sum, merged.from_draft))
    assert merged.stats.acceptance_rate == pytest.approx(accepted / (3 * merged.stats.target_forwards), abs=0.02)


def test_distinct_ngrams_tell_a_loop():
    assert measure.distinct([[1, 2, 3, 4]], 2) == 1
    assert measure.distinct([[1, 2] * 50, [2, 1] * 50], 2) == pytest.approx(2 / 198)
    assert measure.distinct([[1]], 2) is None


def test_a_difference_is_told_with_its_gap_and_the_width_that_settles_it():
    stats = Stats(9, 1, 4, 2.0, [0, 4], 12, 4, 0.3, 0.1, 0.1, 0.0, 90.0)
    result = Result([[1]], [""], ["length"], [[False]], [4], stats)
    found = [{"prompt": 0, "position": 7, "gap": 1e-5}]
    comparison = measure.Comparison(result, result, "[in, out]", {"[in, out]": 90.0}, 0.0, 0.0, False, found, True)
    settings = {"verify": "on", "bonus": "condition", "repeats": 1, "drafter": "d", "block_rows": 5}
    out = io.StringIO()
    render.comparison(render.Console(file=out, width=100), measure.report(None, comparison, settings))
    assert "identical: false\n" in out.getvalue()
    assert "prompt 0, new byte 7; the two likeliest ids are 1.0e-05 apart" in out.getvalue()
    assert "identical to autoregression in blocks of 5 rows: true" in out.getvalue()


def test_only_cycles_of_one_width_have_a_twin(loaded):
    """Autoregression in blocks of a drafter's width makes the same passes only where every cycle has that width."""
    target, head = loaded
    twin = lambda drafter, **options: measure.Job(target, drafter, [[[1]]], {"temperature": 0.0} | options).has_a_twin
    assert twin(head) and not twin(head, bonus="carry")
    assert not twin(bytejax.load_drafter("pld", target)) and not twin(bytejax.load_drafter("esp", target, budget=6))


def test_drafting_runs_in_the_layout_that_suits_its_blocks(loaded, monkeypatch):
    target, head = loaded
    monkeypatch.setattr(layouts, "FEW_SMALL", head.block_width - 1)
    job = measure.Job(target, head, [[[1, 2]]], {"temperature": 0.0, "ignore_stop": False, "max_new_tokens": 6})
    assert job.laid_out.layout_names == ("[in, out]",) and job.autoregressive().laid_out is target
    assert list(measure.compare(job, repeats=1).layouts) == ["panels", "[in, out]"]
