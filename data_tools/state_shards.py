"""Shards of captured states: which documents each holds, and the target's passes that fill them.

The plan depends on the data and the options alone, so a capture continues, or repairs one shard, with the same plan.
Letters: B documents of a pass, L tokens of its longest, K captured layers, Ht the target's hidden size.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from slipstream.models.files.loss_masks import Cut, LossMasks, scan
from slipstream.models.files.state_store import ShardRange, ShardTensors, StateFormat, encode, needed_tokens, new_shard
from slipstream.models.targets.frozen import FrozenTarget, load_frozen_target

TIMED_PASSES = 3


def measure(dataset: Dataset, max_length: int, is_whole: bool = False) -> tuple[np.ndarray, Cut]:
    """(D, 2) int64: per document cut at `max_length`, the tokens whose states training reads and the supervised ones
    among them (models/state_store.needed_tokens, here for many documents at once). `is_whole`: of all its tokens. And
    what was cut."""
    needs = [np.zeros((0, 2), np.int64)]
    beyond = list[np.ndarray]()
    for masks in scan(dataset):
        needs.append(measure_masks(masks, max_length, is_whole))
        beyond.append(masks.beyond(max_length))
    return np.concatenate(needs), Cut.of(max_length, beyond)


def measure_masks(masks: LossMasks, max_length: int, is_whole: bool) -> np.ndarray:
    positions = masks.positions
    indices = np.flatnonzero(masks.supervised & (positions > 0) & (positions < max_length))
    supervised = masks.count(indices)
    if is_whole:
        return np.stack([np.minimum(masks.lengths, max_length), supervised], axis=1)
    tokens = np.zeros(len(masks.lengths), np.int64)
    np.maximum.at(tokens, masks.documents[indices], positions[indices])
    return np.stack([tokens, np.maximum(supervised - 1, 0)], axis=1)  # nothing reads the state of the last one


def plan_shards(split: str, needs: np.ndarray, form: StateFormat, shard_bytes: int) -> Iterator[ShardRange]:
    """Consecutive documents in shards of at most `shard_bytes`, or of one document. needs: (D, 2), from `measure`."""
    first = tokens = supervised = 0
    for number, (more, more_supervised) in enumerate(needs.tolist()):
        count = number - first
        if count and form.num_bytes(count + 1, tokens + more, supervised + more_supervised) > shard_bytes:
            yield ShardRange(split, first, count, tokens, supervised)
            first = number
            tokens = 0
            supervised = 0
        tokens += more
        supervised += more_supervised
    if len(needs) > first:
        yield ShardRange(split, first, len(needs) - first, tokens, supervised)


@dataclass(frozen=True, slots=True)
class Document:
    """The part of a document whose states are kept."""

    slot: int  # in its shard
    tokens: Tensor  # (S,) int64
    supervised: Tensor  # (S,) bool

    @classmethod
    def of(cls, slot: int, ids: Sequence[int], mask: Sequence[int], is_whole: bool = False) -> "Document":
        """The tokens of a document that training reads, or all."""
        supervised = torch.tensor(mask, dtype=torch.bool)
        supervised[:1] = False  # nothing predicts the first token
        length = len(supervised) if is_whole else needed_tokens(supervised)
        return cls(slot, torch.tensor(ids[:length]).long(), supervised[:length])


def read_documents(dataset: Dataset, span: ShardRange, max_length: int, is_whole: bool = False) -> list[Document]:
    rows = dataset.select(range(span.first, span.first + span.count))
    return [
        Document.of(slot, row["input_ids"], row["loss_mask"][:max_length], is_whole) for slot, row in enumerate(rows)
    ]


def empty_shard(span: ShardRange, documents: Sequence[Document], form: StateFormat, pinned: bool) -> ShardTensors:
    """A shard with the tokens of `documents`, without states yet."""
    lengths = torch.tensor([len(document.tokens) for document in documents])
    shard = new_shard(span, lengths, torch.cat([document.supervised for document in documents]), form, pinned)
    shard.tensors["tokens"].copy_(torch.cat([document.tokens for document in documents]))
    return shard


def passes(documents: list[Document], batch_tokens: int) -> Iterator[list[Document]]:
    """Batches of documents of similar length: at most `batch_tokens` with padding, or one document."""
    documents = [document for document in documents if len(document.tokens)]
    remaining = sorted(documents, key=lambda document: -len(document.tokens))
    start = 0
    while start < len(remaining):
        count = max(1, batch_tokens // len(remaining[start].tokens))
        yield remaining[start : start + count]
        start += count


class Capturer:
    """The target on one device, the format of its states, and the largest number of tokens in a pass."""

    num_missing = 0  # documents whose states were to be there already, and were not

    def __init__(
        self, path: Path, form: StateFormat, device: torch.device, batch_tokens: int, trust_remote_code: bool
    ) -> None:
        self.target: FrozenTarget = load_frozen_target(path, form.layers, device, trust_remote_code)
        self.form = form
        self.device = device
        self.batch_tokens = batch_tokens

    def capture(self, span: ShardRange, documents: list[Document], advance: Callable[[int], object]) -> ShardTensors:
        """Calls `advance` with the tokens of each pass."""
        shard = self._begin(span, documents)
        self.run(passes(documents, self.batch_tokens), shard, advance)
        return shard

    def measure_rate(self, span: ShardRange, documents: list[Document]) -> float:
        """Tokens per second of a few passes after a warm-up pass."""
        shard = self._begin(span, documents)
        counts = list[int]()
        batches = list(islice(passes(documents, self.batch_tokens), 1 + TIMED_PASSES))
        self.run(batches[:1], shard, int)
        began = time.perf_counter()
        self.run(batches[-TIMED_PASSES:], shard, counts.append)
        return sum(counts) / (time.perf_counter() - began)

    def _begin(self, span: ShardRange, documents: list[Document]) -> ShardTensors:
        return empty_shard(span, documents, self.form, pinned=self.device.type == "cuda")

    def run(self, batches: Iterable[list[Document]], shard: ShardTensors, advance: Callable[[int], object]) -> None:
        """Computes passes, and returns once `shard` has their states."""
        for batch in batches:
            self._pass(batch, shard)
            advance(sum(len(document.tokens) for document in batch))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # wait for the copies to the host

    def _pass(self, batch: list[Document], shard: ShardTensors) -> None:
        """One pass. Padding follows each document, so causal attention never sees it."""
        width = max(len(document.tokens) for document in batch)
        tokens = torch.zeros(len(batch), width, dtype=torch.int64)
        for row, document in enumerate(batch):
            tokens[row, : len(document.tokens)] = document.tokens
        positions = torch.arange(width, device=self.device).expand(len(batch), -1)
        aux_states, final = self.target.aux_states(tokens.to(self.device), positions)
        values, scales = encode(aux_states.unflatten(-1, (len(self.form.layers), -1)), self.form.dtype)  # (B, L, K, Ht)
        for row, document in enumerate(batch):
            length = len(document.tokens)
            place = shard.document(document.slot)
            keep(place, "features", values[row, :length], None if scales is None else scales[row, :length])
            if self.form.last_hidden:
                rows = document.supervised.nonzero().squeeze(1).to(self.device)
                keep(place, "last_hidden", *encode(final[row, rows], self.form.dtype))


def keep(place: dict[str, Tensor], name: str, values: Tensor, scales: Tensor | None) -> None:
    place[name].copy_(values, non_blocking=True)
    if scales is not None:
        place[f"{name}_scales"].copy_(scales, non_blocking=True)
