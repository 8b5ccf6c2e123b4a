"""Texts that a server has answered, in memory of a stated size, and their states as a StateSource reads them.

States are kept in fp8. Every HELD_OUT-th text of a client is held out: evaluations read it, and training never does.
Half of the memory keeps recent texts, the other half a sample of all that gave way to them, so that old traffic stays
in sight. Where it is full, the client with the most bytes loses a text, so that nobody's flood drives out the texts of
others.
"""

import heapq
import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from torch import Tensor

from slipstream.models.files.learning import ServedText
from slipstream.models.files.state_store import DTYPES, StateFormat, encode

HELD_OUT = 8
HELD_OUT_SHARE = 0.2  # of the memory
Texts = dict[str, list[ServedText]]  # by client


@dataclass(slots=True)
class TextRing:
    """A client's text of the lowest rank gives way first. `ranks`: of new texts, ascending for a ring of recent ones,
    random for a sample that each text of the stream is as likely to be in."""

    most_bytes: int
    ranks: Callable[[], float]
    heaps: dict[str, list[tuple[float, int, ServedText]]] = field(default_factory=dict)  # by client
    nbytes: Counter[str] = field(default_factory=Counter)  # by client
    numbers: Callable[[], int] = field(default_factory=lambda: count().__next__)  # of texts, which cannot be compared

    def add(self, text: ServedText) -> list[ServedText]:
        """Returns the texts that gave way."""
        heapq.heappush(self.heaps.setdefault(text.client, []), (self.ranks(), self.numbers(), text))
        self.nbytes[text.client] += text.nbytes
        lost = []
        while self.nbytes.total() > max(self.most_bytes, text.nbytes):
            client = max(self.nbytes, key=lambda name: (self.nbytes[name], name))
            lost.append(heapq.heappop(self.heaps[client])[-1])
            self.nbytes[client] -= lost[-1].nbytes
            if not self.heaps[client]:
                del self.heaps[client], self.nbytes[client]
        return lost

    def texts(self) -> Texts:
        return {client: [text for *_, text in heap] for client, heap in self.heaps.items()}


class Split(NamedTuple):
    """Texts of a split."""

    recent: Texts
    past: Texts

    @property
    def num_recent(self) -> int:
        return sum(map(len, self.recent.values()))


class Splits(NamedTuple):
    train: Split
    heldout: Split


class SplitMemory:
    def __init__(self, most_bytes: int) -> None:
        self.recent = TextRing(most_bytes // 2, count().__next__)
        self.past = TextRing(most_bytes // 2, random.random)

    def add(self, text: ServedText) -> None:
        for lost in self.recent.add(text):
            self.past.add(lost)

    def now(self) -> Split:
        return Split(self.recent.texts(), self.past.texts())


class ServedTexts:
    """The texts of both splits. Threads may share one. `max_length`: tokens that are read of a text."""

    def __init__(self, most_bytes: int, max_length: int) -> None:
        self._lock = threading.Lock()
        self._max_length = max_length
        held_out = int(HELD_OUT_SHARE * most_bytes)
        self.train = SplitMemory(most_bytes - held_out)
        self.heldout = SplitMemory(held_out)
        self._counts: Counter[str] = Counter()  # texts by client

    def add(self, text: ServedText) -> None:
        if text.num_prompt + 2 > self._max_length:
            return  # it would teach nothing
        entry = in_fp8(text)
        with self._lock:
            self._counts[text.client] += 1
            (self.heldout if self._counts[text.client] % HELD_OUT == 0 else self.train).add(entry)

    def add_past(self, memory: SplitMemory, text: ServedText) -> bool:
        """Returns whether there is no more room."""
        entry = in_fp8(text)
        with self._lock:
            return bool(memory.past.add(entry))

    def now(self) -> Splits:
        """Returns the texts that are there."""
        with self._lock:
            return Splits(self.train.now(), self.heldout.now())


def in_fp8(text: ServedText) -> ServedText:
    states, scales = encode(text.states, "fp8")
    return replace(text, states=states, scales=scales)


def dataset_of(texts: list[ServedText]) -> Dataset:
    """A split as `prepare` writes it: the answers are supervised."""
    masks = [[False] * text.num_prompt + [True] * (len(text.tokens) - text.num_prompt) for text in texts]
    return Dataset.from_dict({"input_ids": [text.tokens for text in texts], "loss_mask": masks})


class MemoryStates:
    """The states of texts, as models/files/state_store.StateStore has them on disk: one shard."""

    def __init__(self, texts: list[ServedText], layers: tuple[int, ...], num_layers: int) -> None:
        """`layers`: the K whose states the texts hold."""
        states = texts[0].states
        dtype: Any = next(name for name, dtype in DTYPES.items() if dtype == states.dtype)
        self.texts = texts
        form = StateFormat(
            layers=layers, num_layers=num_layers, hidden_size=states.shape[-1], dtype=dtype, last_hidden=False
        )
        self.index = SimpleNamespace(form=form)

    def find(self, _: str, document: int) -> tuple[int, int]:
        return 0, document

    def is_complete(self, _: int) -> bool:
        return True

    def length(self, _: int, slot: int) -> int:
        return len(self.texts[slot].states)

    def read(self, _: int, slot: int) -> Mapping[str, Tensor]:
        text = self.texts[slot]
        scales = {} if text.scales is None else {"features_scales": text.scales}
        return {"tokens": torch.tensor(text.tokens[:-1]), "features": text.states, **scales}
