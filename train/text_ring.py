"""Texts that a server has answered, in memory of a stated size, and their states as a StateSource reads them.

Every HELD_OUT-th text of a client is held out: evaluations read it, and training never does. Where memory is full, the
client with the most bytes loses its oldest text, so that nobody's flood drives out the texts of others.
"""

import threading
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from torch import Tensor

from slipstream.models.files.learning import ServedText
from slipstream.models.files.state_store import StateFormat

HELD_OUT = 8
HELD_OUT_SHARE = 0.2  # of the memory
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@dataclass(slots=True)
class TextRing:
    """The texts of one split."""

    most_bytes: int
    texts: dict[str, deque[ServedText]] = field(default_factory=dict)  # by client, the oldest first
    nbytes: Counter[str] = field(default_factory=Counter)  # by client

    def add(self, text: ServedText) -> None:
        self.texts.setdefault(text.client, deque()).append(text)
        self.nbytes[text.client] += text.nbytes
        while self.nbytes.total() > self.most_bytes and self.nbytes.total() > text.nbytes:
            client = max(self.nbytes, key=lambda name: (self.nbytes[name], name))
            self.nbytes[client] -= self.texts[client].popleft().nbytes
            if not self.texts[client]:
                del self.texts[client], self.nbytes[client]

    def all_texts(self) -> list[ServedText]:
        return [text for texts in self.texts.values() for text in texts]


class Splits(NamedTuple):
    train: list[ServedText]
    heldout: list[ServedText]


class ServedTexts:
    """The texts of both splits. Threads may share one."""

    def __init__(self, most_bytes: int) -> None:
        self._lock = threading.Lock()
        held_out = int(HELD_OUT_SHARE * most_bytes)
        self.train = TextRing(most_bytes - held_out)
        self.heldout = TextRing(held_out)
        self._counts: Counter[str] = Counter()  # texts by client

    def add(self, text: ServedText) -> None:
        with self._lock:
            self._counts[text.client] += 1
            (self.heldout if self._counts[text.client] % HELD_OUT == 0 else self.train).add(text)

    def now(self) -> "Splits":
        """Returns the texts that are there."""
        with self._lock:
            return Splits(self.train.all_texts(), self.heldout.all_texts())


def dataset_of(texts: list[ServedText]) -> Dataset:
    """A split as `prepare` writes it: the answers are supervised."""
    masks = [[False] * text.num_prompt + [True] * (len(text.tokens) - text.num_prompt) for text in texts]
    return Dataset.from_dict({"input_ids": [text.tokens for text in texts], "loss_mask": masks})


@dataclass(frozen=True, slots=True)
class MemoryIndex:
    form: StateFormat


class MemoryStates:
    """The states of texts, as models/files/state_store.StateStore has them on disk: one shard."""

    def __init__(self, texts: list[ServedText], layers: tuple[int, ...], num_layers: int) -> None:
        """`layers`: the K whose states the texts hold."""
        states = texts[0].states
        dtype: Any = DTYPES[states.dtype]
        self.texts = texts
        form = StateFormat(
            layers=layers, num_layers=num_layers, hidden_size=states.shape[-1], dtype=dtype, last_hidden=False
        )
        self.index = MemoryIndex(form)

    def find(self, _: str, document: int) -> tuple[int, int]:
        return 0, document

    def is_complete(self, _: int) -> bool:
        return True

    def length(self, _: int, slot: int) -> int:
        return len(self.texts[slot].states)

    def read(self, _: int, slot: int) -> Mapping[str, Tensor]:
        text = self.texts[slot]
        return {"tokens": torch.tensor(text.tokens[:-1]), "features": text.states}
