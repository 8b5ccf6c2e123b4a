"""Known texts served as if a target produced them: what the n-gram drafter alone decides, without an engine."""

import gzip
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.serve.drafters.ngram_core import NgramCore

ASK = "\n\nAnswer:\n"
EDIT = "Correct the text.\n\n"


@dataclass(frozen=True, slots=True)
class Exchange:
    """A prompt and the answer that the target would give, greedily."""

    prompt: list[int]
    answer: list[int]


def questions(path: Path, count: int, tokenizer: Any) -> list[Exchange]:
    """Prompts and answers as they are in the data."""
    return [
        Exchange(_ids(tokenizer, asked + ASK), _ids(tokenizer, answer)) for asked, answer in read_chats(path, count)
    ]


def edits(path: Path, count: int, tokenizer: Any, changes: float, seed: int = 0) -> list[Exchange]:
    """The prompt holds a text, the answer is the text with a share `changes` of its words changed."""
    rng = random.Random(seed)
    texts = ["\n".join(chat) for chat in read_chats(path, count)]
    return [Exchange(_ids(tokenizer, EDIT + text + ASK), _ids(tokenizer, edited(text, changes, rng))) for text in texts]


def edited(text: str, changes: float, rng: random.Random) -> str:
    """Words replaced by others of the text, left out, or followed by another, a third of the changes each."""
    words = text.split(" ")
    result: list[str] = []
    for word in words:
        change = rng.choice(("replace", "remove", "add")) if rng.random() < changes else "keep"
        result += {"keep": [word], "replace": [rng.choice(words)], "remove": [], "add": [word, rng.choice(words)]}[
            change
        ]
    return " ".join(result)


def read_chats(path: Path, count: int) -> list[tuple[str, str]]:
    """The first question and answer of each of `count` rows. Raises ValueError if there are fewer."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        rows = [json.loads(line)["messages"] for line, _ in zip(lines, range(count), strict=False)]
    if len(rows) < count:
        raise ValueError(f"texts is {count}; {path} has {len(rows)} rows: ask for fewer or name another file")
    contents = [[message["content"] for message in row if message["role"] != "system"] for row in rows]
    return [(asked, answer) for asked, answer, *_ in contents]


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@dataclass(slots=True)
class Replayed:
    """Sums over requests."""

    tokens: int = 0  # emitted in rounds: all but each answer's first
    rounds: int = 0  # of requests
    batches: int = 0
    seconds: float = 0.0  # in the core's calls

    @property
    def accept_length(self) -> float:
        return self.tokens / self.rounds


def replay(core: NgramCore, exchanges: Sequence[Exchange], batch: int, width: int) -> Replayed:
    """Serves all exchanges, `batch` at a time, every one to its end; insertions are done between rounds."""
    total = Replayed()
    waiting = iter([exchange for exchange in exchanges if len(exchange.answer) > 1])
    running: dict[int, tuple[Exchange, int]] = {}  # row -> its exchange, and how much of the answer is emitted
    trees, lengths = np.zeros((2, batch, width), np.int32), np.zeros(batch, np.int32)
    while _admit(core, waiting, running, batch):
        rows = sorted(running)
        (tokens, parents), matches = trees[:, : len(rows)], lengths[: len(rows)]
        start = time.perf_counter()
        core.propose(rows, tokens, parents, matches)
        total.seconds += time.perf_counter() - start
        gained = np.full((len(rows), width), -1, np.int32)
        for index, row in enumerate(rows):
            exchange, done = running[row]
            count = emitted(tokens[index].tolist(), parents[index].tolist(), exchange.answer[done:])
            gained[index, :count] = exchange.answer[done : done + count]
            running[row] = exchange, done + count
            total.tokens += count
        start = time.perf_counter()
        core.extend(rows, gained)
        total.seconds += time.perf_counter() - start
        core.flush()
        total.rounds += len(rows)
        total.batches += 1
        for row in rows:
            if running[row][1] == len(running[row][0].answer):
                core.release(row)
                del running[row]
    return total


def emitted(tokens: list[int], parents: list[int], truth: list[int]) -> int:
    """Tokens that a round yields: the longest path from the root along `truth`, and one more of the target's own."""
    node = count = 0
    while count < len(truth):
        below = [child for child in range(node + 1, len(tokens)) if parents[child] == node]
        node = next((child for child in below if tokens[child] == truth[count]), -1)
        if node < 0:
            break
        count += 1
    return min(count + 1, len(truth))


def _admit(core: NgramCore, waiting: Iterator[Exchange], running: dict[int, Any], batch: int) -> bool:
    """Fills free rows; the prompt's pass has emitted the first token. False when nothing runs any more."""
    for row in sorted(set(range(batch)) - running.keys()):
        exchange = next(waiting, None)
        if exchange is not None:
            core.admit(row, exchange.prompt)
            core.extend([row], [exchange.answer[:1]])
            running[row] = exchange, 1
    core.flush()
    return bool(running)
