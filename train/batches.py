"""Packs prepared datasets into batches. The order of rows depends on the seed alone.

Rows hold windows of one folder's documents: whole documents up to `max_length` tokens, and of longer ones the parts
that windows.py describes. An epoch has a folder's rows as often as its weight says. Letters: B rows, S tokens in a row.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from torch import Tensor

from slipstream.models.files.checkpoint import Values
from slipstream.models.files.prepared import load_saved, read_report
from slipstream.train.cached_states import CachedStates
from slipstream.train.windows import WindowLayout, measure

BATCHES_AHEAD = 3  # that are read before the loop wants them, if they carry states


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed rows. Padding: document -1, token 0, position 0, unsupervised."""

    tokens: Tensor  # (B, S) int64
    documents: Tensor  # (B, S) int64, counted from 0 through the batch, in reading order
    positions: Tensor  # (B, S) int64, from 0 in each document
    supervised: Tensor  # (B, S) bool; never a document's first token, which nothing predicts
    numbers: Tensor  # (B,) int64 index of each row in the whole run; seeds its random draws
    cached: CachedStates | None = None  # target states read from disk, if any
    categories: Sequence[str | None] = ()  # of each document, where there are any
    is_shared: bool = False  # another process counts its tokens: the first of those that share the rows
    weights: Tensor | None = None  # (B, S) fp32 of tokens in the loss, 0 where unsupervised; None: 1 where supervised

    @property
    def num_supervised(self) -> int:
        return 0 if self.is_shared else int(self.supervised.sum())

    @property
    def total_weight(self) -> float:
        """The sum of the weights of all tokens, which divides the loss."""
        if self.is_shared or self.weights is None:
            return float(self.num_supervised)
        return float(self.weights.double().sum())


@dataclass(frozen=True, slots=True)
class Share:
    """The documents of one folder in a split, which follow those of the folder before."""

    name: str
    num_documents: int
    passes: float = 1.0  # times that an epoch has its rows: the weight
    copies: Sequence[int] = ()  # documents, by number in the folder, that are held out elsewhere


@dataclass(frozen=True, slots=True)
class PackedShare:
    """A folder's usable documents, packed into rows."""

    name: str
    passes: float  # times that an epoch has its rows: the weight
    first_document: int  # by number in the split
    rows: range  # its rows among all
    num_documents: int
    num_tokens: int
    num_supervised: int
    num_copies: int  # of held-out documents, which are left out

    @property
    def epoch_rows(self) -> int:
        """Rows in an epoch: to the nearest whole row, and one at least."""
        return max(1, round(self.passes * len(self.rows))) if self.rows else 0

    @property
    def actual_passes(self) -> float:
        """Times that an epoch has a row, on average."""
        return self.epoch_rows / max(1, len(self.rows))

    @property
    def sentence(self) -> str:
        copies = f" ({self.num_copies:,} copies of held-out ones left out)" if self.num_copies else ""
        return (
            f"{self.name}: {self.num_documents:,} documents{copies}, {self.num_tokens:,} tokens, "
            f"{self.num_supervised:,} of them supervised, in {len(self.rows):,} rows"
        )

    def draw(self, seed: Sequence[int]) -> np.ndarray:
        """(epoch_rows,) int64 rows: all as often as the whole part of the weight says, a random choice once more."""
        times, rest = divmod(self.epoch_rows, len(self.rows))
        choice = np.random.default_rng(seed).permutation(len(self.rows))[:rest]
        return self.rows.start + np.concatenate((np.tile(np.arange(len(self.rows)), times), choice))


class PackedRows:
    """The usable windows of one split, packed into rows."""

    def __init__(
        self, dataset: Dataset, max_length: int, shares: Sequence[Share] = (), *, is_split: bool = False
    ) -> None:
        """`shares` of the folders whose documents `dataset` joins; default: it is all of one. `is_split`: into windows
        where documents are longer, which are cut otherwise. Raises ValueError for documents that supervise nothing."""
        self.dataset = dataset
        self.max_length = max_length
        self.windows, self.cut = measure(dataset, WindowLayout(max_length, is_split))
        self.rows: list[list[int]] = []  # of windows
        self.shares: list[PackedShare] = []
        first = 0
        for share in shares or [Share("", len(dataset))]:
            last = first + share.num_documents
            self._pack(share, first, last)
            first = last
        assert first == len(dataset)
        self.num_documents = sum(share.num_documents for share in self.shares)
        self.num_dropped = len(dataset) - self.num_documents - sum(share.num_copies for share in self.shares)
        self.num_tokens = sum(share.num_tokens for share in self.shares)
        self.num_supervised = sum(share.num_supervised for share in self.shares)
        self.categories: Sequence[str | None] = ()  # of the split's documents, where evaluations tell them apart
        # Adds target states to a batch of documents, given by number in the split (state_source.py, engine_states.py).
        self.add_states: Callable[[Batch, list[int]], Batch] | None = None
        self.batches_ahead = BATCHES_AHEAD

    def _pack(self, share: Share, first: int, last: int) -> None:
        """Appends the rows of a folder's documents, those numbered from `first` to below `last`."""
        windows = self.windows
        start, stop = np.searchsorted(windows.documents, (first, last))
        learnable = start + np.flatnonzero(windows.num_supervised[start:stop])
        usable = learnable[~np.isin(windows.documents[learnable] - first, share.copies)]
        if len(learnable) and not len(usable):
            raise ValueError(
                f"every document of {share.name} is held out in another folder of data.path; leave one of them out"
            )
        if not len(usable) and share.num_documents:
            source = f" in {share.name}" if share.name else ""
            raise ValueError(
                f"no document of {share.num_documents}{source} has two supervised tokens in a row within "
                f"data.max_length {self.max_length}; raise data.max_length, or prepare conversations that have answers"
            )
        rows = pack(windows.lengths[usable], self.max_length)
        place = range(len(self.rows), len(self.rows) + len(rows))
        self.rows += [[int(usable[item]) for item in row] for row in rows]
        self.shares.append(
            PackedShare(
                name=share.name,
                passes=share.passes,
                first_document=first,
                rows=place,
                num_documents=len(np.unique(windows.documents[usable])),
                num_tokens=int(windows.lengths[usable].sum()),
                num_supervised=int(windows.num_supervised[usable].sum()),
                num_copies=len(np.unique(windows.documents[learnable])) - len(np.unique(windows.documents[usable])),
            )
        )

    def __len__(self) -> int:
        """Rows in an epoch."""
        return sum(share.epoch_rows for share in self.shares)

    @property
    def num_split_documents(self) -> int:
        """Documents that have several windows."""
        return len(np.unique(self.windows.documents[self.windows.starts > 0]))

    @property
    def long_sentence(self) -> str:
        """Says what becomes of the documents that are longer than a row; empty if there are none."""
        if not self.cut.num_documents:
            return ""
        if not self.num_split_documents:
            return self.cut.sentence("data.max_length")
        num_windows = self.num_split_documents + int((self.windows.starts > 0).sum())
        return (
            f"{self.num_split_documents} documents longer than data.max_length {self.max_length} are split into "
            f"{num_windows} windows, {self.cut.num_supervised} supervised tokens beyond the first"
        )

    @property
    def documents(self) -> list[int]:
        """Documents that rows hold, by number in the split; one with several windows as often."""
        return [self._document_of(window) for row in self.rows for window in row]

    def category_counts(self) -> Counter[str]:
        """Documents of each category, the most frequent first."""
        documents = sorted(set(self.documents)) if self.categories else []
        names = (self.categories[document] for document in documents)
        return Counter(name for name in names if name is not None)

    @property
    def is_mixed(self) -> bool:
        """Whether an epoch is anything but each row of one folder once."""
        return len(self.shares) > 1 or self.shares[0].passes != 1

    def epoch(self, seed: int, number: int) -> list[int]:
        """The rows of an epoch, shuffled."""
        rows = np.concatenate([share.draw((seed, number, place + 1)) for place, share in enumerate(self.shares)])
        return rows[np.random.default_rng((seed, number)).permutation(len(rows))].tolist()

    @property
    def epoch_tokens(self) -> float:
        """Tokens in an epoch, without padding."""
        return sum(share.actual_passes * share.num_tokens for share in self.shares)

    @property
    def row_tokens(self) -> float:
        """Mean over the rows of an epoch, without padding."""
        return self.epoch_tokens / len(self)

    @property
    def supervised_share(self) -> float:
        """Share of an epoch's tokens that are supervised."""
        return sum(share.actual_passes * share.num_supervised for share in self.shares) / self.epoch_tokens

    def batch(self, rows: list[int], first_number: int = 0) -> Batch:
        """These rows, padded to the longest; `first_number` is the index of the first one in the run."""
        batch = collate([self._documents(self.rows[row]) for row in rows], self.max_length, first_number)
        documents = [self._document_of(window) for row in rows for window in self.rows[row]]
        if self.categories:
            batch = replace(batch, categories=[self.categories[document] for document in documents])
        return batch if self.add_states is None else self.add_states(batch, documents)

    def _documents(self, windows: list[int]) -> list[tuple[list[int], list[float]]]:
        """The tokens of each window, and their weights in the loss."""
        columns = self.dataset[[self._document_of(window) for window in windows]]
        documents = zip(windows, columns["input_ids"], document_weights(columns), strict=True)
        return [
            (self.windows.values(window, ids), self.windows.weights(window, weights))
            for window, ids, weights in documents
        ]

    def _document_of(self, window: int) -> int:
        return int(self.windows.documents[window])


def document_weights(columns: Values) -> list[Sequence[float]]:
    """The weights of the tokens of each document; its loss mask where it has none."""
    weights = columns.get("loss_weights") or [None] * len(columns["loss_mask"])
    return [mask if row is None else row for mask, row in zip(columns["loss_mask"], weights, strict=True)]


def collate(
    rows: Sequence[Sequence[tuple[Sequence[int], Sequence[float]]]], max_length: int, first_number: int = 0
) -> Batch:
    """`rows` hold documents, a document its tokens and their loss mask, or their weights."""
    width = max(sum(min(len(tokens), max_length) for tokens, _ in row) for row in rows)
    shape = (len(rows), width)
    tokens = np.zeros(shape, np.int64)
    documents = np.full(shape, -1, np.int64)
    positions = np.zeros(shape, np.int64)
    weights = np.zeros(shape, np.float32)
    names = itertools.count()
    for index, row in enumerate(rows):
        start = 0
        for ids, mask in row:
            end = start + min(len(ids), max_length)
            tokens[index, start:end] = ids[:max_length]
            documents[index, start:end] = next(names)
            positions[index, start:end] = np.arange(end - start)
            weights[index, start + 1 : end] = mask[1:max_length]
            start = end
    supervised = weights != 0
    return Batch(
        tokens=torch.from_numpy(tokens),
        documents=torch.from_numpy(documents),
        positions=torch.from_numpy(positions),
        supervised=torch.from_numpy(supervised),
        numbers=torch.arange(first_number, first_number + len(rows)),
        weights=None if (weights[supervised] == 1).all() else torch.from_numpy(weights),
    )


def possible_roots(batch: Batch) -> Tensor:
    """(N,) int64 rows of the flattened batch, ascending: every supervised token that a supervised token of its document
    follows. A round of drafting can begin there."""
    supervised = batch.supervised.flatten()
    documents = batch.documents.flatten()
    return (supervised[:-1] & supervised[1:] & (documents[:-1] == documents[1:])).nonzero().squeeze(1)


def moved(columns: Any, device: torch.device) -> Any:
    """A dataclass with its tensors on `device`."""
    values = {field.name: getattr(columns, field.name) for field in fields(columns)}
    return replace(columns, **{name: x.to(device) for name, x in values.items() if isinstance(x, Tensor)})


def pack(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Best-fit decreasing: each item goes where it leaves the least room. Items of each row, rows in creation order."""
    rows: list[list[int]] = []
    rows_by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r is set while a row with room r exists: the lowest bit at or above a length is its best fit
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                rooms &= ~(1 << room)
        else:
            room = capacity
            row = len(rows)
            rows.append([])
        rows[row].append(item)
        if room > length:
            rows_by_room[room - length].append(row)
            rooms |= 1 << (room - length)
    return rows


def row_order(rows: PackedRows, seed: int, start: int) -> Iterator[int]:
    """Rows of the whole run from the one numbered `start` on, without end: each epoch is drawn anew."""
    size = len(rows)
    for epoch in itertools.count(start // size):
        yield from rows.epoch(seed, epoch)[max(0, start - epoch * size) :]


def training_batches(
    rows: PackedRows, batch_size: int, seed: int, start: int, end: int | None, process: int, num_processes: int
) -> Iterator[tuple[Batch, bool]]:
    """Yields one process's batches of rows `start` to `end` of the run (endless if None), and whether each is new.

    Processes take `batch_size` rows each in turn. After `end` they get filler batches, marked False, so that every
    process makes the same number of passes. A filler is the latest pass's first row again: its gradient, times 0, is
    only NaN in a step that has such a row anyway.
    """
    order = itertools.islice(row_order(rows, seed, start), None if end is None else end - start)
    share = slice(process * batch_size, (process + 1) * batch_size)
    filler = 0
    filler_number = start
    for first in itertools.count(start, batch_size * num_processes):
        numbers = list(itertools.islice(order, batch_size * num_processes))
        if numbers:
            filler = numbers[0]
            filler_number = first
        share_rows = numbers[share]
        yield rows.batch(share_rows or [filler], first + share.start if share_rows else filler_number), bool(share_rows)


def evaluation_batches(
    rows: PackedRows, batch_size: int, process: int, num_processes: int
) -> Iterator[tuple[Batch, bool]]:
    """One pass over every row, split over processes. Sharded models need the same number of batches on each: a process
    that runs out repeats the first row, marked False."""
    step = batch_size * num_processes
    for first in range(0, len(rows), step):
        offset = first + process * batch_size
        share_rows = list(range(offset, min(offset + batch_size, len(rows))))
        yield rows.batch(share_rows or [0], offset if share_rows else 0), bool(share_rows)


def load_prepared(path: Path, tokenizer_hash: str) -> tuple[DatasetDict, dict[str, Any]]:
    """The splits and report.json that data_tools/prepare.py wrote. Raises ValueError unless both are there, made with
    the target's tokenizer, with rows to train on; the held-out split may be empty."""
    report = read_report(path, "data.path", tokenizer_hash)
    if not report["split_rows"].get("train"):
        raise ValueError(f"data.path {path}: split train is empty; prepare more conversations or a smaller --heldout")
    return load_saved(path), report
