"""What a serving benchmark asks for: prompts as token ids, each with the length of its answer, fixed by a seed."""

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

QUESTIONS = Path(__file__).resolve().parent.parent / "assets" / "gsm8k.jsonl.gz"
KINDS = ("random", "gsm8k")


@dataclass(frozen=True, slots=True)
class Task:
    """One request: its prompt, and how many tokens to answer (at most, unless end of text is ignored)."""

    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Lengths are drawn uniformly from [range_ratio * length, length], as other engines' benchmarks do.

    "random" prompts are token ids without meaning. "gsm8k" ones are held-out questions behind as many answered ones as
    fill `input_len`, the first of which is cut; `input_len` 0 asks the bare question.
    """

    tokenizer: Any
    kind: str
    input_len: int
    output_len: int
    range_ratio: float = 1.0

    def tasks(self, count: int, seed: str) -> list[Task]:
        """Other seeds give other prompts, so that no prefix cache helps."""
        rng = random.Random(seed)
        lengths = [(self._length(rng, self.input_len), self._length(rng, self.output_len)) for _ in range(count)]
        if self.kind == "random":
            ids = sorted(set(range(len(self.tokenizer))) - set(self.tokenizer.all_special_ids))
            return [Task(rng.choices(ids, k=prompt), answer) for prompt, answer in lengths]
        questions, answered = read_chats("heldout"), read_chats("train")
        first = rng.randrange(len(questions))
        return [
            Task(self._few_shot(rng, questions[(first + index) % len(questions)], answered, prompt), answer)
            for index, (prompt, answer) in enumerate(lengths)
        ]

    def _length(self, rng: random.Random, longest: int) -> int:
        return rng.randint(max(1, int(longest * self.range_ratio)), longest) if longest else 0

    def _few_shot(self, rng: random.Random, question: list[Any], answered: list[list[Any]], length: int) -> list[int]:
        ids = self._encode(question[:1], add_generation_prompt=True)
        if not length:
            return ids
        while len(ids) < length:
            ids = self._encode(rng.choice(answered)) + ids
        return ids[-length:]

    def _encode(self, chat: list[Any], **options: Any) -> list[int]:
        text = self.tokenizer.apply_chat_template(chat, tokenize=False, **options)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def read_chats(split: str) -> list[list[Any]]:
    """The bundled GSM8K slice: a question and its answer each."""
    with gzip.open(QUESTIONS, "rt") as lines:
        rows: Iterator[dict[str, Any]] = map(json.loads, lines)
        return [row["messages"] for row in rows if row["split"] == split]
