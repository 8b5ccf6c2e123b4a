"""Reads the questions that `accept` and `compare` ask.

A row is a JSON line (or a row of a .parquet file) in one of these forms:

- `turns`: the user's messages, each asked after the answer to the one before, as in MT-bench, Spec-Bench and
  SPEED-Bench, with `question_id` and `category` beside it;
- `messages` in OpenAI's form: all up to the last answer are given, and the answer itself is left out;
- `prompt`: a text, or token ids, without a chat template.

Imports nothing heavy.
"""

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.models.chat.messages import read_messages
from slipstream.serve.load import Prompt

ASSETS = Path(__file__).resolve().parent.parent.parent / "assets"
BUNDLED = {"gsm8k": ASSETS / "gsm8k.jsonl.gz", "mt_bench": ASSETS / "mt_bench.jsonl"}
HELDOUT = "heldout"  # rows of other splits are for training
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"
REMEDY = (
    "SPEED-Bench leaves out texts of others: write them with prepare_data.py of NVIDIA's Model-Optimizer, "
    "examples/specdec_bench, and give the file that it writes"
)


@dataclass(frozen=True, slots=True)
class Question:
    """A first prompt and the user's further messages, `turns`. `id` is unique among all questions read."""

    id: str
    category: str
    first: Prompt
    turns: tuple[str, ...] = ()

    @property
    def num_turns(self) -> int:
        return 1 + len(self.turns)


def read_questions(names: Sequence[str], limit: int | None = None) -> list[Question]:
    """Returns the questions of files and bundled sets, at most `limit` of each category, from the beginning.

    Raises ValueError naming the file and row that has none, a placeholder in place of its text, or a used id.
    """
    questions: dict[str, Question] = {}
    for name in names:
        path = BUNDLED.get(name, Path(name))
        if not path.is_file():
            raise ValueError(f"questions is {name!r}; give a file, or one of {', '.join(BUNDLED)}")
        counts = Counter[str]()
        for place, row in rows_of(path):
            if row.get("split", HELDOUT) != HELDOUT:
                continue
            question = read_question(row, place, default=path.name.split(".")[0])
            counts[question.category] += 1
            if limit is not None and counts[question.category] > limit:
                continue
            if question.id in questions:
                raise ValueError(f"{place}: id {question.id} is that of another question; give each its own")
            questions[question.id] = question
        if not counts:
            raise ValueError(f"{name} has no questions; it must hold at least one row")
    return list(questions.values())


def rows_of(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the rows of a file, each with its place."""
    try:
        yield from rows_of_table(path) if path.suffix == ".parquet" else rows_of_lines(path)
    except (UnicodeDecodeError, EOFError, OSError, zlib.error) as error:
        raise ValueError(f"questions {path} cannot be read ({error}); give JSON lines or a .parquet file") from error


def rows_of_table(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    from pyarrow import ArrowException, parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    except ArrowException as error:
        raise OSError(error) from error
    for number, row in enumerate(rows, start=1):
        yield f"{path}, row {number}", row


def rows_of_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{place} is not JSON ({error}); give JSON lines") from error
            if not isinstance(row, dict):
                raise ValueError(f"{place} is {line.strip()[:40]!r}; it must be an object")
            yield place, row


def read_question(row: dict[str, Any], place: str, default: str) -> Question:
    """`default`: the category of rows that name none, and the beginning of the ids of rows that have none."""
    name = next((str(row[key]) for key in ("question_id", "id", "src_id") if row.get(key) is not None), None)
    category = str(row.get("category") or default)
    try:
        first, turns = read_texts(row)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{place} has no prompt, messages or turns: {error!r}") from error
    contents = (
        [first] if isinstance(first, str) else [message["content"] for message in first if isinstance(message, dict)]
    )
    if any(text.lstrip().startswith(PLACEHOLDER) for text in (*contents, *turns)):
        raise ValueError(f"{place}: question {name} holds a placeholder in place of its text; {REMEDY}")
    return Question(name if name is not None else f"{default}-{place.rsplit(':')[-1]}", category, first, turns)


def read_texts(row: dict[str, Any]) -> tuple[Prompt, tuple[str, ...]]:
    """Returns the first prompt and the user's further messages."""
    if row.get("turns") is not None:
        turns = row["turns"]
        if isinstance(turns, str) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise ValueError(f"turns is {turns!r}; it must be a list of at least one text")
        return [{"role": "user", "content": turns[0]}], tuple(turns[1:])
    if "prompt" in row:
        prompt = row["prompt"]
        is_ids = isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
        if not isinstance(prompt, str) and not is_ids:
            raise ValueError(f"prompt is {prompt!r}; it must be a text or token ids")
        return prompt, ()
    messages = [{name: message[name] for name in ("role", "content")} for message in read_messages(row["messages"])]
    return messages[:-1] if messages[-1]["role"] == "assistant" else messages, ()
