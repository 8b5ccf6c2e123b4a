"""Runs the target over the documents of a shard and keeps what the index asks for.

Letters: B documents of a pass, L tokens of its longest, K captured layers, Ht the target's hidden size.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from datasets import Dataset
from torch import Tensor

from slipstream.models.feature_store import FeatureFormat, ShardRange, ShardTensors, encode, needed_tokens, new_shard
from slipstream.models.frozen_target import FrozenTarget, load_frozen_target


@dataclass(frozen=True, slots=True)
class Document:
    """The part of a document that training reads."""

    slot: int  # in its shard
    tokens: Tensor  # (S,) int64
    supervised: Tensor  # (S,) bool


def read_documents(dataset: Dataset, span: ShardRange, max_length: int) -> list[Document]:
    documents = []
    for slot, row in enumerate(dataset.select(range(span.first, span.first + span.count))):
        supervised = torch.tensor(row["loss_mask"][:max_length], dtype=torch.bool)
        supervised[:1] = False  # nothing predicts the first token
        length = needed_tokens(supervised)
        documents.append(Document(slot, torch.tensor(row["input_ids"][:length]).long(), supervised[:length]))
    return documents


def passes(documents: list[Document], batch_tokens: int) -> Iterator[list[Document]]:
    """Documents of similar length together, at most `batch_tokens` with padding unless one alone has more."""
    remaining = sorted((one for one in documents if len(one.tokens)), key=lambda one: -len(one.tokens))
    start = 0
    while start < len(remaining):
        count = max(1, batch_tokens // len(remaining[start].tokens))
        yield remaining[start : start + count]
        start += count


class Capturer:
    """The target on one device, and the format in which its states are kept."""

    def __init__(self, path: Path, form: FeatureFormat, device: torch.device, trust_remote_code: bool) -> None:
        self.target: FrozenTarget = load_frozen_target(path, form.layers, device, trust_remote_code)
        self.form = form
        self.device = device

    def capture(
        self, span: ShardRange, documents: list[Document], batch_tokens: int, advance: Callable[[int], object]
    ) -> ShardTensors:
        """`advance` is told how many tokens each pass has done."""
        shard = self.begin(span, documents)
        for batch in passes(documents, batch_tokens):
            self.run(batch, shard)
            advance(sum(len(one.tokens) for one in batch))
        self.wait()
        return shard

    def measure_rate(self, span: ShardRange, documents: list[Document], batch_tokens: int, num_passes: int) -> float:
        """Tokens per second of a few passes, of which the first warms up."""
        shard, batches = self.begin(span, documents), list(islice(passes(documents, batch_tokens), 1 + num_passes))
        for batch in batches[:1]:
            self.run(batch, shard)
        self.wait()
        began = time.perf_counter()
        for batch in batches[-num_passes:]:
            self.run(batch, shard)
        self.wait()
        return sum(len(one.tokens) for batch in batches[-num_passes:] for one in batch) / (time.perf_counter() - began)

    def begin(self, span: ShardRange, documents: list[Document]) -> ShardTensors:
        lengths = torch.tensor([len(one.tokens) for one in documents])
        supervised = torch.cat([one.supervised for one in documents])
        shard = new_shard(span, lengths, supervised, self.form, pinned=self.device.type == "cuda")
        shard.tensors["tokens"].copy_(torch.cat([one.tokens for one in documents]))
        return shard

    def wait(self) -> None:
        """Until the copies to the host are done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def run(self, batch: list[Document], shard: ShardTensors) -> None:
        """One pass; padding stands behind every document, where causal attention does not look."""
        width = max(len(one.tokens) for one in batch)
        tokens = torch.zeros(len(batch), width, dtype=torch.int64)
        for row, one in enumerate(batch):
            tokens[row, : len(one.tokens)] = one.tokens
        positions = torch.arange(width, device=self.device).expand(len(batch), -1)
        features, final = self.target.features(tokens.to(self.device), positions)
        values, scales = encode(features.unflatten(-1, (len(self.form.layers), -1)), self.form.dtype)  # (B, L, K, Ht)
        for row, one in enumerate(batch):
            length, place = len(one.tokens), shard.document(one.slot)
            keep(place, "features", values[row, :length], None if scales is None else scales[row, :length])
            if self.form.last_hidden:
                rows = one.supervised.nonzero().squeeze(1).to(self.device)
                keep(place, "last_hidden", *encode(final[row, rows], self.form.dtype))


def keep(place: dict[str, Tensor], name: str, values: Tensor, scales: Tensor | None) -> None:
    place[name].copy_(values, non_blocking=True)
    if scales is not None:
        place[f"{name}_scales"].copy_(scales, non_blocking=True)
