"""Loss masks of a prepared dataset, many documents at once, and what a longest length cuts of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow
import pyarrow.compute as pc
from datasets import Dataset
from tqdm import tqdm

SCAN_ROWS = 4096  # documents at once


@dataclass(frozen=True, slots=True)
class LossMasks:
    """The masks of D documents, N tokens, one after another."""

    lengths: np.ndarray  # (D,) int64
    supervised: np.ndarray  # (N,) bool
    documents: np.ndarray  # (N,) int64, from 0
    positions: np.ndarray  # (N,) int64, from 0 in each document

    @classmethod
    def of(cls, table: pyarrow.Table) -> Self:
        lengths = pc.list_value_length(table["loss_mask"]).to_numpy().astype(np.int64)
        documents = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(len(documents)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return cls(lengths, pc.list_flatten(table["loss_mask"]).to_numpy(), documents, positions)

    def count(self, tokens: np.ndarray) -> np.ndarray:
        """tokens (N,) bool, or numbers of tokens -> (D,) int64: how many of them each document has."""
        return np.bincount(self.documents[tokens], minlength=len(self.lengths))

    def beyond(self, max_length: int) -> np.ndarray:
        """(D,) int64: supervised tokens from `max_length` on; -1 if the document is not longer."""
        counts = self.count(self.supervised & (self.positions >= max_length))
        return np.where(self.lengths > max_length, counts, -1)


@dataclass(frozen=True, slots=True)
class Cut:
    """The documents that are longer than `max_length`, and their supervised tokens beyond it."""

    max_length: int
    num_documents: int
    num_supervised: int

    @classmethod
    def of(cls, max_length: int, beyond: Sequence[np.ndarray]) -> Self:
        """`beyond`: what LossMasks.beyond says of all documents, in parts."""
        counts = np.concatenate([np.zeros(0, np.int64), *beyond])
        return cls(max_length, int((counts >= 0).sum()), int(counts.clip(0).sum()))

    def sentence(self, option: str) -> str:
        """`option`: the name of max_length."""
        return (
            f"{self.num_documents} documents cut, {self.num_supervised} supervised tokens beyond {option} "
            f"{self.max_length}"
        )


def scan(dataset: Dataset) -> Iterator[LossMasks]:
    """The masks of all documents in order, some thousand at a time."""
    tables = dataset.with_format("arrow").iter(batch_size=SCAN_ROWS)
    num_tables = -(-len(dataset) // SCAN_ROWS)
    for table in tqdm(tables, "measuring documents", num_tables, unit="batch", disable=num_tables <= 1):
        yield LossMasks.of(table)
