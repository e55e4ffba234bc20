"""Records put together, by hand."""

import pytest

from bytejax.benchmark.runner import kept
from bytejax.benchmark.summary import markdown, summaries


def record(category, drafter, histogram, seconds, panels, plain, identical=True, temperature=0.0):
    """Of one turn. panels, plain: seconds of autoregression for the same tokens in its two layouts."""
    tokens = sum(i * n for i, n in enumerate(histogram))
    alone = {"panels": panels, "[in, out]": plain}
    return {
        "temperature": temperature,
        "category": category,
        "drafter": drafter,
        "tokens": tokens + 1,
        "from_prompts": 1,
        "target_forwards": sum(histogram),
        "accept_histogram": histogram,
        "decode_seconds": seconds,
        "autoregression": {name: {"tokens": tokens, "decode_seconds": s} for name, s in alone.items()},
        "identical": identical,
    }


RECORDS = [
    record("rag", "a", [0, 2, 2], 2.0, 6.0, 3.0),  # 6 tokens in 4 passes
    record("rag", "a", [0, 0, 1, 1], 1.0, 2.0, 2.0, identical=False),  # 5 in 2
    record("writing", "a", [0, 4], 4.0, 1.0, 8.0),  # 4 in 4
    record("rag", "b", [0, 1], 1.0, 1.0, 1.0, identical=None),
]


def test_kept_counts_cycles_by_how_many_drafts_they_kept():
    assert kept([0, 1, 2, 1]) == [0.75, 0.25]
    assert kept([0, 5]) == [] and kept([]) == []


def test_questions_of_a_category_are_pooled():
    writing, rag, _, average, _ = summaries(RECORDS, [0.0], ["a", "b"])
    assert (writing.category, rag.category, average.category) == ("writing", "rag", "average")
    assert rag.questions == 2 and rag.accept_length == pytest.approx(11 / 6)
    assert rag.kept == pytest.approx([4 / 6, 1 / 6]) and rag.saved == pytest.approx(5 / 11)
    assert rag.tokens_per_second == pytest.approx(11 / 3) and (rag.compared, rag.identical) == (2, 1)


def test_the_baseline_is_the_layout_that_is_faster_over_all_categories():
    writing, rag, *_ = summaries(RECORDS, [0.0], ["a"])
    assert rag.autoregression == pytest.approx(11 / 8)  # panels: 15 tokens in 9 s against 13 s
    assert rag.ratio == pytest.approx(8 / 3) and writing.ratio == pytest.approx(1 / 4)


def test_the_average_is_over_categories():
    *_, average = summaries(RECORDS, [0.0], ["a"])
    assert average.accept_length == pytest.approx((11 / 6 + 1) / 2) and average.ratio == pytest.approx(
        (8 / 3 + 0.25) / 2
    )
    assert average.kept == pytest.approx([2 / 6, 1 / 12]) and average.questions == 3
    assert (average.compared, average.identical) == (3, 2)


def test_a_drafter_that_was_never_compared_has_nothing_identical():
    (row, average) = summaries(RECORDS, [0.0], ["b"])
    assert row.compared == average.compared == 0 and row.accept_length == average.accept_length == 1


def test_markdown_has_a_line_per_drafter_and_a_column_per_category():
    rows = summaries([*RECORDS, record("qa", "a", [0, 0, 0], 0.0, 0.0, 0.0, temperature=1.0)], [0.0, 1.0], ["a", "b"])
    lines = markdown(rows)
    assert lines[0].startswith("Temperature 0:") and lines[2] == "| drafter | writing | rag | average |"
    assert lines[4] == "| a | 1.00 (0.25) | 1.83 (2.67) | 1.42 (1.46) |"
    assert lines[5] == "| b |  | 1.00 (1.00) | 1.00 (1.00) |"
    assert lines[10] == "|---|---|---|" and lines[11] == "| a | n/a (n/a) | n/a (n/a) |"
