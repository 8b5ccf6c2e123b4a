"""Provides target states: computed by the target, read from a capture on disk, or both in one batch;
train/engine_states.py has those of engines.

A background thread reads batches ahead of the loop, and several threads copy the documents of each: disk reads and
checksums overlap with training.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from slipstream.models.files.state_store import DTYPES, StateStore
from slipstream.models.targets.frozen import FrozenTarget
from slipstream.train.batches import Batch, PackedRows
from slipstream.train.cached_states import CachedStates, empty_states
from slipstream.train.options import DataOptions
from slipstream.train.training import DraftTraining

COPYING_THREADS = 4

ItemT = TypeVar("ItemT")


def target_states(target: FrozenTarget, batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Captured states (B * S, K * Ht) of a batch and the state after the final norm (B * S, Ht), cached or computed.

    The former in the dtype that the draft reads, the latter in that of the target's head. Cached states are zero where
    training reads none: from a document's last supervised token on, and after the final norm at unsupervised tokens.
    """
    tokens = batch.tokens.to(device)
    positions = batch.positions.to(device)
    if batch.cached is None:
        aux_states, final = target.aux_states(tokens, positions)
    else:
        aux_states, final = batch.cached.to(device).spread(target, tokens, positions)
    return target.as_read(aux_states).flatten(0, 1), final.flatten(0, 1)


class Place(NamedTuple):
    """Where a document's states are."""

    store: StateStore
    number: int  # of the shard
    slot: int  # there


class StateSource:
    """Adds the cached states of one split to its batches."""

    def __init__(
        self,
        stores: Mapping[int, StateStore | None],
        split: str,
        layers: tuple[int, ...],
        *,
        final_state: bool,
        online: bool = False,
        pinned: bool = False,
    ) -> None:
        """`stores` of one format by the number of their folder's first document in the split, ascending; None: without
        states. `layers`: those that the draft reads, in its order. `final_state`: also read the state after the final
        norm. `online`: let the target compute documents without states. `pinned`: pin memory, for asynchronous
        copies."""
        self.stores = list(stores.values())
        self.first_documents = list(stores)
        form = self.form = next(store.index.form for store in self.stores if store is not None)
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
        places = [self.find(document, length) for document, length in zip(documents, needed.tolist(), strict=True)]
        cached = np.array([place is not None for place in places], dtype=bool)
        rows = rows_of(starts[cached], needed[cached])
        final_rows = rows[batch.supervised.flatten()[rows]] if self.takes_final else rows[:0]
        states = empty_states(
            rows,
            final_rows,
            rows_of(starts[~cached], needed[~cached]),
            shape=(len(self.places), self.form.hidden_size),
            dtype=DTYPES[self.form.dtype],
            pinned=self.pinned,
        )
        jobs = []
        row = 0
        final_row = 0
        for place, start, length in zip(places, starts.tolist(), needed.tolist(), strict=True):
            if place is None:
                continue
            tokens, supervised = (part.flatten()[start : start + length] for part in (batch.tokens, batch.supervised))
            count = int(supervised.sum())
            part = slice(row, row + length)
            final_part = slice(final_row, final_row + count)
            jobs.append(self.threads.submit(self.copy, place, tokens, supervised, states, part, final_part))
            row = row + length
            final_row = final_row + count
        return replace(batch, cached=replace(states, copies=tuple(jobs)))

    def find(self, document: int, length: int) -> Place | None:
        """The place of a document's states; None if the target computes them."""
        place = self.locate(document)
        if place is not None and (not self.online or place.store.is_complete(place.number)):
            if place.store.length(place.number, place.slot) >= length:
                return place
            fault = f"was captured up to max_length {place.store.index.max_length} and is longer"
        else:
            fault = "was not captured"
        if self.online:
            return None
        raise self.lacks(document, fault)

    def locate(self, document: int) -> Place | None:
        """The place of a document by its number in the split; None if no capture has it."""
        folder = bisect_right(self.first_documents, document) - 1
        store = self.stores[folder]
        place = None if store is None else store.find(self.split, document - self.first_documents[folder])
        return None if store is None or place is None else Place(store, *place)

    def check(self, documents: Iterable[int]) -> None:
        """Raises ValueError, before training starts, for a document that was not captured and for a missing shard.
        `add` finds those that were captured too short."""
        shards: dict[StateStore, set[int]] = {}
        for document in documents:
            place = self.locate(document)
            if place is None:
                raise self.lacks(document, "was not captured")
            shards.setdefault(place.store, set()).add(place.number)
        for store, numbers in shards.items():
            for number in sorted(numbers):
                if not store.is_complete(number):
                    store.fail(number, "is missing")

    def lacks(self, document: int, fault: str) -> ValueError:
        folder = bisect_right(self.first_documents, document) - 1
        store = self.stores[folder]
        assert store is not None, "every folder has a capture, unless the target runs"
        return ValueError(
            f"document {document - self.first_documents[folder]} of {self.split} {fault} in data.aux_states "
            f"{store.folder}; capture more, lower data.max_length or evaluation.documents, or set "
            "data.aux_states_missing to online"
        )

    def copy(
        self,
        place: Place,
        tokens: Tensor,
        supervised: Tensor,
        states: CachedStates,
        rows: slice,
        final: slice,
    ) -> None:
        """One document: tokens and supervised (S,) are the part of it that is read."""
        stored = place.store.read(place.number, place.slot)
        if not torch.equal(stored["tokens"][: len(tokens)].long(), tokens):
            place.store.fail(place.number, "holds other tokens than the data")
        places = states.states
        self.take(stored, "", supervised, places["aux_states"][rows], places["final"][final])
        if "aux_scales" in places:
            self.take(stored, "_scales", supervised, places["aux_scales"][rows], places["final_scales"][final])

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


def open_states(options: DataOptions, identities: Mapping[str, Mapping[str, Any]]) -> list[StateStore | None]:
    """The capture of each folder, whose `identities` are given by path; an empty list without data.aux_states. Raises
    ValueError for a capture of another target or dataset, and for a folder without one, unless the target may run."""
    folders = {identity["data_hash"]: path for path, identity in identities.items()}
    stores: dict[str, StateStore] = {}
    for capture in options.captures:
        store = StateStore(Path(capture))
        path = folders.get(store.index.data_hash)
        if path is None and len(folders) > 1:
            raise ValueError(
                f"data.aux_states {capture} holds states of other data (data_hash {store.index.data_hash[:12]}) than "
                f"{', '.join(identities)}; leave it out, or add its folder to data.path"
            )
        store.check(identities[path or next(iter(identities))])
        first = next(iter(stores.values()), store)
        if store.index.form != first.index.form:
            raise ValueError(
                f"data.aux_states {capture} has another format than {first.folder}; capture both with the same "
                "--layers, --last-hidden and --dtype"
            )
        stores[store.index.data_hash] = store
    missing = [path for digest, path in folders.items() if digest not in stores]
    if stores and missing and options.aux_states_missing == "error":
        raise ValueError(
            f"data.aux_states has no capture of {missing[0]}; name one (slipstream capture-states), or set "
            "data.aux_states_missing to online"
        )
    return [stores.get(identity["data_hash"]) for identity in identities.values()] if stores else []


def read_states(
    stores: Sequence[StateStore | None],
    options: DataOptions,
    training: DraftTraining,
    rows: Mapping[str, PackedRows],
    layers: tuple[int, ...],
    device: torch.device,
) -> None:
    """Makes the batches of `rows`, by split, carry the states of `layers` that each folder's store holds. Frees the
    target's layers unless it computes some states online. Raises ValueError if a capture lacks states."""
    final_state = training.reads_final_state
    online = options.aux_states_missing == "online"
    for store in stores:
        if store is not None:
            store.check_states(layers, final_state=final_state)
    for split, packed in rows.items():
        pinned = device.type == "cuda"
        first_documents = [share.first_document for share in packed.shares]
        by_document = dict(zip(first_documents, stores, strict=True))
        source = StateSource(by_document, split, layers, final_state=final_state, online=online, pinned=pinned)
        if not online:
            source.check(packed.documents)
        packed.add_states = source.add
    if not online:
        training.target.layers.to("meta")  # they do not run


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
    """Reads `batches` of `rows` ahead in a thread if they carry states."""
    if rows.add_states is None:
        yield from batches
        return
    reader = ThreadPoolExecutor(1, "batches")
    end = object()
    pending: deque[Any] = deque(reader.submit(next, batches, end) for _ in range(rows.batches_ahead))
    try:
        while (batch := pending.popleft().result()) is not end:
            pending.append(reader.submit(next, batches, end))
            yield batch
    finally:
        reader.shutdown(cancel_futures=True)
