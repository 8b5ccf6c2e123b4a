"""Provides target states: computed by the target, read from a capture on disk, or both in one batch.

A background thread reads batches ahead of the loop, and several threads copy the documents of each: disk reads and
checksums overlap with training.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from slipstream.models.files.state_store import DTYPES, StateStore
from slipstream.models.targets.frozen import FrozenTarget
from slipstream.train.batches import Batch, PackedRows
from slipstream.train.cached_states import CachedStates
from slipstream.train.options import DataOptions
from slipstream.train.training import DraftTraining

BATCHES_AHEAD = 3
COPYING_THREADS = 4

ItemT = TypeVar("ItemT")


def target_states(target: FrozenTarget, batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Captured states (B, S, K * Ht) of a batch and the state after the final norm (B, S, Ht), cached or computed.

    The former in the dtype that the draft reads, the latter in that of the target's head. Cached states are zero where
    training reads none: from a document's last supervised token on, and after the final norm at unsupervised tokens.
    """
    tokens = batch.tokens.to(device)
    positions = batch.positions.to(device)
    if batch.cached is None:
        aux_states, final = target.aux_states(tokens, positions)
    else:
        aux_states, final = batch.cached.to(device).spread(target, tokens, positions)
    return target.as_read(aux_states), final


class StateSource:
    """Adds the cached states of one split to its batches."""

    def __init__(
        self,
        store: StateStore,
        split: str,
        layers: tuple[int, ...],
        *,
        final_state: bool,
        online: bool = False,
        pinned: bool = False,
    ) -> None:
        """`layers`: those that the draft reads, in its order. `final_state`: also read the state after the final norm.
        `online`: let the target compute documents without states. `pinned`: pin memory, for asynchronous copies."""
        form = store.index.form
        self.store = store
        self.split = split
        self.places = [form.layers.index(layer) for layer in layers]
        self.in_order = self.places == list(range(len(form.layers)))
        self.final_place = form.layers.index(form.num_layers) if form.num_layers in form.layers else None
        self.takes_final = final_state and form.num_layers not in layers
        self.online = online
        self.pinned = pinned
        self.threads = ThreadPoolExecutor(COPYING_THREADS, "features")

    def add(self, batch: Batch, documents: list[int]) -> Batch:
        """`documents`: indices of the batch's documents in the split, in reading order. Returns while states are still
        being copied, so that reads of the next batch overlap. Raises ValueError for a document without states, unless
        `online`, and for a shard that cannot be opened."""
        starts, needed = document_rows(batch)
        found = [self.find(document, length) for document, length in zip(documents, needed.tolist(), strict=True)]
        cached = np.array([place is not None for place in found], dtype=bool)
        rows = rows_of(starts[cached], needed[cached])
        final_rows = rows[batch.supervised.flatten()[rows]] if self.takes_final else rows[:0]
        states = self.allocate(rows, final_rows, rows_of(starts[~cached], needed[~cached]))
        jobs = []
        row = 0
        final_row = 0
        for place, start, length in zip(found, starts.tolist(), needed.tolist(), strict=True):
            if place is None:
                continue
            tokens, supervised = (part.flatten()[start : start + length] for part in (batch.tokens, batch.supervised))
            count = int(supervised.sum())
            part = slice(row, row + length), slice(final_row, final_row + count)
            jobs.append(self.threads.submit(self.copy, place, tokens, supervised, states, *part))
            row = row + length
            final_row = final_row + count
        return replace(batch, cached=replace(states, copies=tuple(jobs)))

    def find(self, document: int, length: int) -> tuple[int, int] | None:
        """Shard and slot of a document's states; None if the target computes them."""
        place = self.store.find(self.split, document)
        if place is not None and (not self.online or self.store.is_complete(place[0])):
            if self.store.length(*place) >= length:
                return place
            fault = f"was captured up to max_length {self.store.index.max_length} and is longer"
        else:
            fault = "was not captured"
        if self.online:
            return None
        raise self.lacks(document, fault)

    def check(self, documents: Iterable[int]) -> None:
        """Raises ValueError, before training starts, for a document that was not captured and for a missing shard.
        `add` finds those that were captured too short."""
        shards = set()
        for document in documents:
            place = self.store.find(self.split, document)
            if place is None:
                raise self.lacks(document, "was not captured")
            shards.add(place[0])
        for number in sorted(shards):
            if not self.store.is_complete(number):
                self.store.fail(number, "is missing")

    def lacks(self, document: int, fault: str) -> ValueError:
        return ValueError(
            f"document {document} of {self.split} {fault} in data.aux_states {self.store.folder}; capture more, lower "
            "data.max_length or evaluation.documents, or set data.aux_states_missing to online"
        )

    def allocate(self, rows: Tensor, final_rows: Tensor, online_rows: Tensor) -> CachedStates:
        form = self.store.index.form
        dtype = DTYPES[form.dtype]
        scaled = form.dtype == "fp8"

        def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, pin_memory=self.pinned)

        def host(rows: Tensor) -> Tensor:
            return rows.pin_memory() if self.pinned else rows

        return CachedStates(
            rows=host(rows),
            aux_states=empty(len(rows), len(self.places), form.hidden_size),
            aux_scales=empty(len(rows), len(self.places), dtype=torch.float32) if scaled else None,
            final_rows=host(final_rows),
            final=empty(len(final_rows), form.hidden_size),
            final_scales=empty(len(final_rows), dtype=torch.float32) if scaled else None,
            online_rows=host(online_rows),
        )

    def copy(
        self,
        place: tuple[int, int],
        tokens: Tensor,
        supervised: Tensor,
        states: CachedStates,
        rows: slice,
        final: slice,
    ) -> None:
        """One document: tokens and supervised (S,) are the part of it that is read."""
        stored = self.store.read(*place)
        if not torch.equal(stored["tokens"][: len(tokens)].long(), tokens):
            self.store.fail(place[0], "holds other tokens than the data")
        self.take(stored, "", supervised, states.aux_states[rows], states.final[final])
        if states.aux_scales is not None and states.final_scales is not None:
            self.take(stored, "_scales", supervised, states.aux_scales[rows], states.final_scales[final])

    def take(
        self, stored: dict[str, Tensor], ending: str, supervised: Tensor, aux_states: Tensor, final: Tensor
    ) -> None:
        """Copies the draft's layers of a document's states, or of their scales, and its final states if needed."""
        states = stored["features" + ending][: len(supervised)]  # (S, K, ...)
        if self.in_order:
            aux_states.copy_(states)
        else:
            for index, place in enumerate(self.places):
                aux_states[:, index].copy_(states[:, place])
        if self.takes_final and self.final_place is not None:
            rows = supervised.nonzero().squeeze(1)
            final.copy_(states[:, self.final_place][rows])
        elif self.takes_final:
            final.copy_(stored["last_hidden" + ending][: len(final)])


def open_states(options: DataOptions, identity: Mapping[str, Any]) -> StateStore | None:
    """Opens the capture at data.aux_states, if any. Raises ValueError if it is of another target or dataset."""
    if options.aux_states is None:
        return None
    store = StateStore(Path(options.aux_states))
    store.check(identity)
    return store


def read_states(
    store: StateStore,
    options: DataOptions,
    training: DraftTraining,
    rows: Mapping[str, PackedRows],
    layers: tuple[int, ...],
    device: torch.device,
) -> None:
    """Makes the batches of `rows`, by split, carry the captured states of `layers`. Frees the target's layers unless it
    computes some states online. Raises ValueError if the capture lacks states."""
    final_state = training.reads_final_state
    online = options.aux_states_missing == "online"
    store.check_states(layers, final_state=final_state)
    for split, packed in rows.items():
        pinned = device.type == "cuda"
        source = StateSource(store, split, layers, final_state=final_state, online=online, pinned=pinned)
        if not online:
            source.check(packed.documents)
        packed.add_states = source.add
    if not online:
        training.target.drop_layers()


def document_rows(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Per document of a batch, (D,) int64: its first row, and how many rows training reads of it (needed_tokens)."""
    documents = batch.documents.flatten().numpy()
    positions = batch.positions.flatten().numpy()
    starts = np.flatnonzero((positions == 0) & (documents >= 0))
    needed = np.zeros(len(starts), np.int64)
    rows = np.flatnonzero(batch.supervised.flatten().numpy())
    needed[documents[rows]] = positions[rows]  # ascending, and the last one written stays
    return starts, needed


def rows_of(starts: np.ndarray, lengths: np.ndarray) -> Tensor:
    """start .. start + length - 1 of each, one after the other: (R,) int64."""
    offsets = np.cumsum(lengths) - lengths
    return torch.from_numpy(np.arange(lengths.sum()) + np.repeat(starts - offsets, lengths))


def read_ahead(batches: Iterator[ItemT], rows: PackedRows) -> Iterator[ItemT]:
    """Reads `batches` of `rows` ahead in a thread if their states come from disk."""
    if rows.add_states is None:
        yield from batches
        return
    reader = ThreadPoolExecutor(1, "batches")
    end = object()
    pending: deque[Any] = deque(reader.submit(next, batches, end) for _ in range(BATCHES_AHEAD))
    try:
        while (batch := pending.popleft().result()) is not end:
            pending.append(reader.submit(next, batches, end))
            yield batch
    finally:
        reader.shutdown(cancel_futures=True)
