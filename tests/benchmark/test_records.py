"""The file of results: written, resumed, refused."""

import json

import pytest

from bytejax.benchmark.records import FORMAT, File, key
from bytejax.errors import InputError

HEADER = {"format": FORMAT, "target": "t", "settings": {"seed": 0, "max_new_tokens": 8}}
NONE, PLD = ({"settings": {"drafter": name}, "files_sha256": None} for name in ("none", "pld"))
DRAFTERS = {"a": NONE}


def record(question, drafter="a", **changes):
    row = {"temperature": 0.0, "question_id": question, "category": "qa", "drafter": drafter, "tokens": 3}
    row |= {"from_prompts": 1, "target_forwards": 2, "decode_seconds": 0.5, "accept_histogram": [0, 2]}
    side = {"tokens": 2, "decode_seconds": 0.4}
    return row | {"autoregression": {"own": side}, "identical": True, "differences": []} | NONE | changes


@pytest.mark.parametrize(
    "changes",
    [
        {"drafter": [1]},
        {"question_id": [1]},
        {"temperature": True},
        {"tokens": "x"},
        {"category": 3},
        {"accept_histogram": ["x"]},
        {"autoregression": {"own": {}}},
        {"autoregression": {"own": {"tokens": None, "decode_seconds": 1}}},
    ],
)
def test_damaged_results_are_refused(path, changes):
    path.write_text(path.read_text() + json.dumps(record(3, **changes)) + "\n")
    with pytest.raises(InputError, match="line 4 is no result"):
        File.open(path, HEADER, DRAFTERS)


@pytest.fixture
def path(tmp_path):
    """A file with two results."""
    file = File.open(tmp_path / "runs" / "out.jsonl", HEADER, DRAFTERS)
    file.start()
    file.append([record(1)])
    file.append([record(2)])
    return file.path


def test_what_is_there_is_found_again(path):
    file = File.open(path, HEADER | {"target": "another name of it"}, DRAFTERS)
    assert [key(r) for r in file.found] == [(0.0, 1, "a"), (0.0, 2, "a")]
    file.start()
    file.append([record(3)])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [HEADER, record(1), record(2), record(3)]


@pytest.mark.parametrize("cut", [1, 30])
def test_an_unfinished_line_counts_for_nothing(path, cut):
    path.write_bytes(path.read_bytes()[:-cut])
    file = File.open(path, HEADER, DRAFTERS)
    assert [r["question_id"] for r in file.found] == [1]
    file.start()
    file.append([record(7)])
    assert [json.loads(line).get("question_id") for line in path.read_text().splitlines()] == [None, 1, 7]


def test_more_drafters_are_no_other_settings(path):
    assert len(File.open(path, HEADER, DRAFTERS | {"b": PLD}).found) == 2
    assert len(File.open(path, HEADER, {"b": PLD}).found) == 2


@pytest.mark.parametrize(
    ("header", "drafters", "said"),
    [
        ({"settings": {"seed": 0, "max_new_tokens": 9}}, DRAFTERS, "max_new_tokens: 8 -> 9"),
        ({"settings": {"seed": 0}}, DRAFTERS, "max_new_tokens: 8 -> None"),
        ({}, {"a": PLD}, "drafters.a.settings: {'drafter': 'none'} -> {'drafter': 'pld'}"),
        ({}, {"a": NONE | {"files_sha256": "ab"}}, "drafters.a.files_sha256: None -> ab"),
    ],
)
def test_other_settings_are_refused(path, header, drafters, said):
    before = path.read_bytes()
    with pytest.raises(InputError) as error:
        File.open(path, HEADER | header, drafters)
    assert said in str(error.value) and "was made with other settings" in str(error.value)
    assert "\n" not in str(error.value) and path.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}\n", "is no file of benchmark results"),
        (json.dumps(HEADER | {"settings": 3}) + "\n", "is no file of benchmark results"),
        ('{"notes": 1}', "is no file of benchmark results"),
        ("a line without an end", "is no file of benchmark results"),
        ("[1]\n", "line 1 is not a JSON object"),
        (json.dumps(HEADER) + "\nx\n", "line 2 is not JSON"),
        (
            json.dumps(HEADER) + '\n{"temperature": 0}\n',
            "line 2 is no result: it has no accept_histogram, auto",
        ),
    ],
)
def test_files_that_are_none_of_ours(text, said, tmp_path):
    (tmp_path / "out.jsonl").write_text(text)
    with pytest.raises(InputError) as error:
        File.open(tmp_path / "out.jsonl", HEADER, DRAFTERS)
    assert "out.jsonl" in str(error.value) and said in str(error.value)
    assert (tmp_path / "out.jsonl").read_text() == text
