"""Questions with known answers, and whether a text answers one: the last number counts, as is usual for GSM8K."""

import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
MARK = "####"  # GSM8K's, before the final answer


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    answer: Decimal


def final_number(text: str) -> Decimal | None:
    """The first number behind the last "####", else the last number of the text; None where there is none."""
    _, mark, behind = text.rpartition(MARK)
    found = NUMBER.findall(behind)
    if not found:
        return None
    return Decimal((found[0] if mark else found[-1]).replace(",", ""))


def is_right(question: Question, answer: str) -> bool:
    return final_number(answer) == question.answer


def read_questions(path: Path, split: str, count: int) -> list[Question]:
    """The first `count` questions of a file of JSON lines (also .gz), in each `question` and `answer`, or `messages`
    whose last two turns they are. Rows that name a `split` count if it is the one asked for.

    Raises ValueError naming the line that holds no answer, or where there are fewer questions.
    """
    questions: list[Question] = []
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for question in _parse(lines, str(path), split):
            if len(questions) == count:
                break
            questions.append(question)
    if len(questions) < count:
        raise ValueError(f"questions is {count}; {path} has {len(questions)} of split {split!r}: ask for fewer")
    return questions


def _parse(lines: Any, path: str, split: str) -> Iterator[Question]:
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if row.get("split", split) != split:
                continue
            text, answer = _turns(row)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}:{number} holds no question and answer: {error!r}") from error
        known = final_number(answer)
        if known is None:
            raise ValueError(f"{path}:{number}: its answer holds no number")
        yield Question(text, known)


def _turns(row: dict[str, Any]) -> tuple[str, str]:
    if "question" in row:
        return str(row["question"]), str(row["answer"])
    question, answer = row["messages"][-2:]
    return str(question["content"]), str(answer["content"])
