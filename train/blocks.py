"""The blocks of a packed batch: where they are anchored, what they read, what their slots predict.

A block begins at its anchor a, a token of an answer that the next one follows (a possible root of a round). It reads
the tokens of a's document before a; slot k of it stands at the position of token a + k and predicts that token, slot 0
nothing. Slot k counts if all of tokens a .. a+k are supervised and of one document.

Letters: C rows of the flattened batch, N blocks, S slots of a block, the anchor's included.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from slipstream.train.batches import Batch


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows are indices into the flattened batch. Made on the host, so that nothing waits for a device."""

    anchors: Tensor  # (N,) int64 rows, ascending
    starts: Tensor  # (N,) int64 rows: where the anchor's document begins, the first row that the block reads
    positions: Tensor  # (N, S) int64 positions in the document
    labels: Tensor  # (N, S - 1) int64 target ids of slots 1 .. S - 1, anything where the slot does not count
    counts: Tensor  # (N, S - 1) bool

    def __len__(self) -> int:
        return len(self.anchors)

    @property
    def size(self) -> int:
        return self.positions.shape[1]

    def to(self, device: torch.device) -> "Blocks":
        return replace(self, **{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    def parts(self, count: int) -> Iterator["Blocks"]:
        """The same blocks, `count` at a time."""
        columns = [getattr(self, field.name).split(count) for field in fields(self)]
        for column in zip(*columns, strict=True):
            yield Blocks(*column)


def possible_anchors(batch: Batch) -> Tensor:
    """(N,) int64 rows of every supervised token that a supervised token of its document follows, ascending."""
    supervised, documents = batch.supervised.flatten(), batch.documents.flatten()
    return (supervised[:-1] & supervised[1:] & (documents[:-1] == documents[1:])).nonzero().squeeze(1)


def draw_anchors(batch: Batch, limit: int, seed: int) -> tuple[Tensor, Tensor]:
    """At most `limit` of each row's possible anchors, drawn by (seed, number of the row in the run) alone.

    Returns rows (N,) int64, ascending, and (N,) fp32 how many possible anchors each of them stands for.
    """
    width = batch.tokens.shape[1]
    possible = possible_anchors(batch).numpy()
    bounds = np.searchsorted(possible, np.arange(len(batch.tokens) + 1) * width)
    chosen, weights = [], []
    for number, (first, last) in zip(batch.numbers.tolist(), pairwise(bounds.tolist()), strict=True):
        row = possible[first:last]
        if len(row) > limit:
            row = np.sort(np.random.default_rng((seed, number)).choice(row, limit, replace=False))
        chosen.append(row)
        weights.append(np.full(len(row), (last - first) / max(len(row), 1), np.float32))
    return torch.from_numpy(np.concatenate(chosen)), torch.from_numpy(np.concatenate(weights))


def find_blocks(batch: Batch, anchors: Tensor, size: int) -> Blocks:
    """Blocks of `size` slots at `anchors` (N,), rows of `batch`, which lies on the host."""
    tokens, positions = batch.tokens.flatten(), batch.positions.flatten()
    supervised, documents = batch.supervised.flatten(), batch.documents.flatten()
    rows = anchors.unsqueeze(1) + torch.arange(1, size)  # (N, S - 1)
    inside = rows.clamp(max=len(tokens) - 1)
    goes_on = (rows == inside) & supervised[inside] & (documents[inside] == documents[anchors].unsqueeze(1))
    return Blocks(
        anchors=anchors,
        starts=anchors - positions[anchors],
        positions=positions[anchors].unsqueeze(1) + torch.arange(size),
        labels=tokens[inside],
        counts=goes_on.long().cumprod(dim=1).bool(),
    )
