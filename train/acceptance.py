"""The simulated accept length: replays held-out answers as a server would decode them.

The prompt's pass gives an answer's first token. Each round starts at the last emitted token (the root), and emits the
drafted tokens that agree with the text, then one of the target's own, cut at the answer's end. Accept length is
(emitted tokens - 1) / rounds, summed over answers. A server that drafts fewer tokens accepts the first of them, so the
same agreements give the accept length at every depth up to the evaluated one. The draft's chain is the one that
training-time test predicts at the root's row, exactly, since both read the same tokens as long as they agree.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.train.batches import Batch


@dataclass(frozen=True, slots=True)
class Walk:
    """One answer, tokens first to last of the flattened batch, and its rounds: their root and what they accepted."""

    first: int
    last: int
    rounds: list[tuple[int, int]]


def walk_answers(batch: Batch, asking: Tensor, accepted: Tensor) -> Iterator[Walk]:
    """Walks every answer of the batch.

    `asking` (N,) rows of the flattened batch, `accepted` (N,) leading draft tokens of that row which agree with the
    text of its answer; the root is the token after the row. Both on the host.
    """
    accepted_at = torch.zeros(batch.tokens.numel(), dtype=torch.int64).index_copy(0, asking, accepted).tolist()
    for first, last in answers(batch):
        rounds = []
        root = first
        while root < last:
            num_accepted = accepted_at[root - 1]
            rounds.append((root, num_accepted))
            root = min(root + num_accepted + 1, last)
        yield Walk(first, last, rounds)


def walk_metrics(walks: list[Walk], depth: int) -> dict[str, Tensor]:
    """Sums over answers as metrics (sum, count): `accept_length` and, per draft position, `accept_rate_i`."""
    accepted = [num_accepted for walk in walks for _, num_accepted in walk.rounds]
    emitted = sum(walk.last - walk.first for walk in walks)
    counts = [sum(num_accepted > position for num_accepted in accepted) for position in range(depth)]
    metrics = {"accept_length": torch.tensor([emitted, len(accepted)])}
    return metrics | {f"accept_rate_{i}": torch.tensor([count, len(accepted)]) for i, count in enumerate(counts)}


def depth_metrics(batch: Batch, asking: Tensor, accepted: Tensor, depth: int) -> dict[str, Tensor]:
    """Metrics (sum, count) `accept_length_at_depth_d`, of servers that draft d = 1 .. `depth` tokens in a round."""
    metrics = {}
    for limit in range(1, depth + 1):
        walks = list(walk_answers(batch, asking, accepted.clamp(max=limit)))
        metrics[f"accept_length_at_depth_{limit}"] = walk_metrics(walks, 0)["accept_length"]
    return metrics


def category_metrics(batch: Batch, walks: list[Walk], categories: Sequence[str]) -> dict[str, Tensor]:
    """Metrics (sum, count) `accept_length_by_category/NAME` of all `categories`, also of those that the batch lacks:
    all processes must hold the same names."""
    by_name: dict[str, list[Walk]] = {name: [] for name in categories}
    documents = batch.documents.flatten().tolist() if batch.categories else []
    for walk in walks if documents else ():
        category = batch.categories[documents[walk.first]]
        if category in by_name:
            by_name[category].append(walk)
    return {
        f"accept_length_by_category/{name}": walk_metrics(part, 0)["accept_length"] for name, part in by_name.items()
    }


def answers(batch: Batch) -> Iterator[tuple[int, int]]:
    """First and last token of every run of supervised tokens of one document, as indices into the flattened batch."""
    supervised = batch.supervised.flatten()
    documents = batch.documents.flatten()
    joined = supervised[1:] & supervised[:-1] & (documents[1:] == documents[:-1])
    begins = supervised.clone()
    begins[1:] &= ~joined
    ends = supervised.clone()
    ends[:-1] &= ~joined
    yield from zip(begins.nonzero().flatten().tolist(), ends.nonzero().flatten().tolist(), strict=True)


def count_accepted(predicted: Tensor, text: Tensor, counts: Tensor) -> Tensor:
    """Leading agreements: predicted and text (S, N) target ids, counts (S, N) bool where the text goes on -> (N,)."""
    return ((predicted == text) & counts).long().cumprod(dim=0).sum(dim=0)
