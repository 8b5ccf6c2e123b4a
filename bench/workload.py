"""Prompts and answer lengths of the serving benchmarks, drawn from a seed, and grading of answers: as is usual for
GSM8K, the last number of a text is its answer.
"""

import gzip
import json
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from slipstream.models.chat.messages import DEFAULT_DATE
from slipstream.models.chat.template import PromptTemplate

QUESTIONS = Path(__file__).resolve().parent.parent / "assets" / "gsm8k.jsonl.gz"
KINDS = ("random", "gsm8k")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
MARK = "####"  # GSM8K's, before the final answer


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    answer: str

    @property
    def chat(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.text}, {"role": "assistant", "content": self.answer}]


@dataclass(frozen=True, slots=True)
class Task:
    """One request: prompt and answer length, which is a maximum unless end of text is ignored."""

    prompt: list[int]
    max_tokens: int
    number: Decimal | None = None
    """The correct answer, if the prompt is a question."""
    repeat: int = 0
    """How many earlier tasks ask the same question."""

    def is_right(self, answer: str) -> bool:
        return self.number is not None and final_number(answer) == self.number


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Lengths are drawn uniformly from [range_ratio * length, length], as other engines' benchmarks do.

    "random" prompts are random token ids. "gsm8k" prompts are held-out questions after as many solved examples as fill
    `input_len`; the first example is cut. With `input_len` 0 there are no examples. Any other kind is a file of
    questions (`read_questions`).
    """

    tokenizer: Any
    kind: str
    input_len: int
    output_len: int
    range_ratio: float = 1.0
    template: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template."""

    def tasks(self, count: int, seed: str) -> list[Task]:
        """Different seeds give different prompts, so a prefix cache does not help. If there are fewer questions, they
        are asked again. Raises ValueError if there are none."""
        rng = random.Random(seed)
        lengths = [(self._length(rng, self.input_len), self._length(rng, self.output_len)) for _ in range(count)]
        if self.kind == "random":
            ids = sorted(set(range(len(self.tokenizer))) - set(self.tokenizer.all_special_ids))
            return [Task(rng.choices(ids, k=prompt), answer) for prompt, answer in lengths]
        path = QUESTIONS if self.kind == "gsm8k" else Path(self.kind)
        questions = read_questions(path)
        answered = read_questions(path, "train") if self.input_len else []
        if self.input_len and not answered:
            raise ValueError(
                f"input_len is {self.input_len}; {path} has no rows of split 'train' to use as examples: give 0"
            )
        if not questions:
            raise ValueError(
                f"{path} has no questions: its rows of split 'heldout' are asked, and those without a split"
            )
        first = rng.randrange(len(questions))
        tasks = []
        for index, (length, answer_len) in enumerate(lengths):
            question = questions[(first + index) % len(questions)]
            prompt = self._few_shot(rng, question, answered, length)
            tasks.append(Task(prompt, answer_len, final_number(question.answer), index // len(questions)))
        return tasks

    def _length(self, rng: random.Random, longest: int) -> int:
        return rng.randint(max(1, int(longest * self.range_ratio)), longest) if longest else 0

    def _few_shot(self, rng: random.Random, question: Question, answered: list[Question], length: int) -> list[int]:
        ids = self._encode(question.chat[:1], prompt=True)
        if not length:
            return ids
        while len(ids) < length:
            ids = self._encode(rng.choice(answered).chat) + ids
        return ids[-length:]

    def _encode(self, chat: list[Any], prompt: bool = False) -> list[int]:
        template = PromptTemplate(self.tokenizer, date=DEFAULT_DATE, variables={})
        text = template.render(chat, prompt=prompt, variables=self.template)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def final_number(text: str) -> Decimal | None:
    """The first number after the last "####", else the last number of the text, else None."""
    _, mark, rest = text.rpartition(MARK)
    numbers = NUMBER.findall(rest)
    if not numbers:
        return None
    return Decimal((numbers[0] if mark else numbers[-1]).replace(",", ""))


def read_questions(path: Path = QUESTIONS, split: str = "heldout") -> list[Question]:
    """Reads JSON lines (also .gz) with `question` and `answer`, or `messages` whose last two turns are the question and
    its answer. Rows without `split` belong to "heldout".

    Raises ValueError naming the first line without a question and an answer.
    """
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        return list(_parse(lines, str(path), split))


def _parse(lines: Any, path: str, split: str) -> Iterator[Question]:
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if row.get("split", "heldout") != split:
                continue
            if "question" in row:
                question = row["question"]
                answer = row["answer"]
            else:
                question, answer = (turn["content"] for turn in row["messages"][-2:])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}:{number} holds no question and answer: {error!r}") from error
        if final_number(answer) is None:
            raise ValueError(f"{path}:{number}: its answer holds no number")
        yield Question(question, answer)
