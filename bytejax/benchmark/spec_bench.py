"""Questions of Spec-Bench (Xia et al. 2024, arXiv 2401.07851), and conversations about them as prompts."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bytejax import checkpoints
from bytejax.errors import InputError
from bytejax.tokenizers import Tokenizer

CATEGORIES = (
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
    "translation",
    "summarization",
    "qa",
    "math_reasoning",
    "rag",
)


@dataclasses.dataclass(frozen=True)
class Question:
    """turns: what the user says, one after the other; the first eight categories have two."""

    id: int | str
    category: str
    turns: tuple[str, ...]


def read(path: Path) -> list[Question]:
    """All questions of a question.jsonl, in its order. Raises InputError naming the line at fault."""
    if not path.exists():
        where = "it is data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench"
        raise InputError(f"{path}: no such file of Spec-Bench questions; {where}, and --questions says where it lies")
    with checkpoints.file_errors(path):
        lines = path.read_bytes().splitlines()
    found: dict[int | str, Question] = {}
    for number, line in enumerate(lines, 1):
        try:
            question = _question(json.loads(line))
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            raise InputError(f"{path}, line {number} is no question of Spec-Bench ({_told(e)})") from None
        if question.id in found:
            raise InputError(f"{path}, line {number} has the question_id {question.id} of an earlier line")
        found[question.id] = question
    if not found:
        raise InputError(f"{path} holds no questions")
    return list(found.values())


def first(questions: Sequence[Question], per_category: int | None, categories: Sequence[str]) -> list[Question]:
    """The first questions of each category, all of them where `per_category` is None; category by category."""
    of = lambda category: [q for q in questions if q.category == category]
    return [q for category in categories for q in of(category)[:per_category]]


def prompt(tokenizer: Tokenizer, turns: Sequence[str], answers: Sequence[str]) -> list[int]:
    """Ids of a conversation whose last turn is to be answered: in the tokenizer's chat template where it has one, else
    as plain text, with blank lines in between.

    turns: the user's. answers: the model's to all of them but the last.
    """
    said = [*zip(turns, answers, strict=False), (turns[-1],)]
    texts = [text for pair in said for text in pair]
    if not tokenizer.has_template:
        return tokenizer.encode("\n\n".join(texts))
    roles = ("user", "assistant")
    return tokenizer.chat([{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)])


def _question(row: Any) -> Question:
    number, category, turns = row["question_id"], row["category"], row["turns"]
    if type(number) not in (int, str):
        raise TypeError("question_id is neither a number nor a text")
    if not isinstance(category, str):
        raise TypeError("category is no text")
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise TypeError("turns is no list of texts")
    return Question(number, category, tuple(turns))


def _told(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)
