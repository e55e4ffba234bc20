"""Questions of Spec-Bench, and conversations as prompts."""

import json

import pytest

from bytejax.benchmark import spec_bench
from bytejax.benchmark.spec_bench import Question
from bytejax.errors import InputError
from bytejax.tokenizers import DEMO
from bytejax.tokenizers.subword import SubwordTokenizer
from tests.conversion import cases

GOOD = {"question_id": 1, "category": "qa", "turns": ["a"], "reference": ["b"]}


def test_the_first_of_each_category_in_the_categories_order(tmp_path):
    rows = [GOOD | {"question_id": i, "category": "rag" if i % 2 else "qa", "turns": ["a", f"b{i}"]} for i in range(6)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    questions = spec_bench.read(tmp_path / "q.jsonl")
    assert questions[3] == Question(3, "rag", ("a", "b3")) and len(questions) == 6
    assert [q.id for q in spec_bench.first(questions, 2, ["rag", "qa", "stem"])] == [1, 3, 0, 2]
    assert [q.id for q in spec_bench.first(questions, None, ["qa"])] == [0, 2, 4]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 is no question of Spec-Bench"),
        ("3", "line 2 is no question"),
        ("", "line 2 is no question"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "turns"}), "it has no 'turns'"),
        (json.dumps(GOOD | {"turns": "a"}), "turns is no list of texts"),
        (json.dumps(GOOD | {"turns": []}), "turns is no list of texts"),
        (json.dumps(GOOD | {"turns": ["a", 3]}), "turns is no list of texts"),
        (json.dumps(GOOD | {"question_id": None}), "question_id is neither"),
        (json.dumps(GOOD | {"question_id": 2, "category": 3}), "category is no text"),
        (json.dumps(GOOD), "line 2 has the question_id 1 of an earlier line"),
    ],
)
def test_a_broken_line_is_named(line, said, tmp_path):
    (tmp_path / "q.jsonl").write_text(json.dumps(GOOD) + "\n" + line + "\n")
    with pytest.raises(InputError) as error:
        spec_bench.read(tmp_path / "q.jsonl")
    assert "q.jsonl, line 2" in str(error.value) and said in str(error.value) and "\n" not in str(error.value)


def test_no_file_and_no_questions(tmp_path):
    with pytest.raises(InputError, match="no.jsonl: no such file"):
        spec_bench.read(tmp_path / "no.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(InputError, match="empty.jsonl holds no questions"):
        spec_bench.read(tmp_path / "empty.jsonl")


def test_a_second_turn_follows_the_answer_in_the_chat_template(tmp_path):
    cases.write_tokenizer(tmp_path)
    tokenizer = SubwordTokenizer.from_directory(tmp_path)
    said = [("user", "the fox"), ("assistant", "jumps"), ("user", "over what?")]
    chat = tokenizer.chat([{"role": role, "content": text} for role, text in said])
    assert tokenizer.has_template
    assert spec_bench.prompt(tokenizer, ("the fox", "over what?"), ["jumps"]) == chat
    assert spec_bench.prompt(tokenizer, ("the fox",), []) == tokenizer.chat([{"role": "user", "content": "the fox"}])


def test_without_a_template_turns_are_plain_text():
    assert not DEMO.has_template
    assert spec_bench.prompt(DEMO, ("one", "two"), ["answer"]) == DEMO.encode("one\n\nanswer\n\ntwo")
    assert spec_bench.prompt(DEMO, ("one",), []) == DEMO.encode("one")
