"""Training-time test (EAGLE-3, arXiv 2503.01840): the draft's own chain, run at every row of a packed batch at once.

Index t of step s reads token t+1+s and the state of step s-1 (at s = 0 the target's features at t) and predicts token
t+2+s. Row t asks if tokens t+1 (a possible root) and t+2 are supervised and of t's document; it counts at step s if all
of t+1 .. t+2+s are. Rows that ask run through the whole draft; earlier rows of their documents only leave their keys.

Letters: N asking rows, C context rows, K = N + C keys.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.train.batches import Batch


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows are indices into the flattened batch, ascending. Made on the host, so that nothing waits for a device."""

    asking: Tensor  # (N,) int64
    context: Tensor  # (C,) int64
    counts: Tensor  # (steps, N) bool: every token that step s reads or predicts at this row is supervised
    keys: Tensor  # (K,) int64: reading order of the concatenation [context, asking]
    asking_positions: Tensor  # (N,) int64 position in the document
    context_positions: Tensor  # (C,) int64
    num_asking: list[int]  # per document
    num_keys: list[int]  # per document
    runs: list[tuple[int, int, int]]  # neighbouring asking rows: how many, first key and number of keys of the last one

    def to(self, device: torch.device) -> "Rows":
        return replace(
            self,
            asking=self.asking.to(device),
            context=self.context.to(device),
            counts=self.counts.to(device),
            keys=self.keys.to(device),
            asking_positions=self.asking_positions.to(device),
            context_positions=self.context_positions.to(device),
        )


def find_rows(batch: Batch, num_steps: int) -> Rows:
    """`batch` on the host. It must hold at least one asking row, as every batch of PackedRows does."""
    supervised, documents = batch.supervised.flatten(), batch.documents.flatten()  # (B * S,)
    same = documents[2:] == documents[:-2]  # a document is contiguous: t and t+2 enclose t+1
    asking = (supervised[1:-1] & supervised[2:] & same).nonzero().squeeze(1)
    names, num_asking = documents[asking].unique_consecutive(return_counts=True)
    last_asking = torch.full((int(documents.max()) + 2,), -1)  # by document; the extra entry is padding's, number -1
    last_asking[names] = asking[num_asking.cumsum(0) - 1]
    is_key = torch.arange(len(documents)) <= last_asking[documents]
    keys = is_key.nonzero().squeeze(1)
    num_keys = documents[keys].unique_consecutive(return_counts=True)[1]
    context = is_key.index_fill(0, asking, False).nonzero().squeeze(1)
    positions = batch.positions.flatten()
    return Rows(
        asking=asking,
        context=context,
        counts=counting_rows(asking, num_steps),
        keys=torch.cat((context, asking)).argsort(),
        asking_positions=positions[asking],
        context_positions=positions[context],
        num_asking=num_asking.tolist(),
        num_keys=num_keys.tolist(),
        runs=find_runs(asking, keys, asking - positions[asking]),
    )


def find_runs(asking: Tensor, keys: Tensor, starts: Tensor) -> list[tuple[int, int, int]]:
    """Asking rows (N,) and key rows (K,), ascending; where each asking row's document starts (N,). Runs never cross
    documents: the last two rows of one do not ask."""
    is_first = torch.ones(len(asking) + 1, dtype=torch.bool)
    is_first[1:-1] = asking[1:] != asking[:-1] + 1
    bounds = is_first.nonzero().squeeze(1)
    first, last = bounds[:-1], bounds[1:] - 1
    columns = last - first + 1, torch.searchsorted(keys, starts[first]), asking[last] - starts[first] + 1
    return list(zip(*(column.tolist() for column in columns), strict=True))


def counting_rows(asking: Tensor, num_steps: int) -> Tensor:
    """(S, N) bool: a row counts at step s if the s rows after it ask too, so if entry n + s is its s-th neighbour."""
    counts = torch.zeros(num_steps, len(asking), dtype=torch.bool)
    for step in range(min(num_steps, len(asking))):
        counts[step, : len(asking) - step] = asking[step:] == asking[: len(asking) - step] + step
    return counts
