"""Attention of a pass of nodes and prompts by backends that take each by itself: where a pass is not captured.

All rows are rotated and stored together. Nodes are attended as many for each request, so where counts differ a
request's last node is repeated, and what the copies compute is dropped. Where that would be many, requests with about
as many nodes are parts of their own. Prompts go to the backend of prefills.
Letters: T rows of the pass, n of them nodes, B decoding requests, b of a part, N most nodes of one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.models.layers.attention import AttentionLayer, Mask
from slipstream.serve.attention.base import Backend
from slipstream.serve.runner.batch import AttentionMetadata
from slipstream.serve.runner.kv import KVSlots

MOST_PARTS = 4
COPIES_OF_A_PART = 12  # that take as long as one more part


class NodeRows(NamedTuple):
    """The rows of a part's nodes as N for each of its requests."""

    members: list[int]  # (b,) which of the pass's requests
    most: int  # N
    repeated: Tensor | None  # (b * N,) int64 rows of the pass; None: the first ones as they are

    def repeat(self, values: Tensor) -> Tensor:
        """values (T, ...) of all rows -> (b * N, ...)."""
        if self.repeated is None:
            return values[: len(self.members) * self.most]
        return values.index_select(0, self.repeated)  # on a CPU in a third of the time of values[rows]


class Nodes(NamedTuple):
    """The nodes of a pass, by parts."""

    parts: list[NodeRows]
    kept: Tensor | None  # (n,) int64 the nodes among the rows of all parts, one after another; None: all of them

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device) -> "Nodes":
        """Of requests with counts (B,) nodes."""
        if not counts:
            return cls([], None)
        if min(counts) == max(counts):
            return cls([NodeRows(list(range(len(counts))), counts[0], None)], None)
        own = np.array(counts)
        starts, moves, parts, place = own.cumsum() - own, np.empty_like(own), list[NodeRows](), 0
        for members in split_requests(counts):
            most = max(counts[request] for request in members)
            rows = starts[members, None] + np.minimum(np.arange(most), own[members, None] - 1)
            parts.append(NodeRows(members, most, torch.from_numpy(rows.ravel()).to(device)))
            moves[members] = place + most * np.arange(len(members)) - starts[members]
            place += rows.size
        kept = np.repeat(moves, own) + np.arange(own.sum())
        return cls(parts, torch.from_numpy(kept).to(device))

    def keep(self, values: Sequence[Tensor]) -> Tensor:
        """values (b * N, ...) of each part -> (n, ...)."""
        rows = values[0] if len(values) == 1 else torch.cat(tuple(values))
        return rows if self.kept is None else rows.index_select(0, self.kept)


def split_requests(counts: Sequence[int]) -> list[list[int]]:
    """Requests with counts (B,) nodes, in the at most MOST_PARTS parts that take least time: requests with most nodes
    first, in ascending order within a part."""
    sizes = sorted(set(counts), reverse=True)
    fewer = [0, *accumulate(sum(count == size for count in counts) for size in sizes)]  # requests with more than that
    # By the number of parts: the least time, in rows, of the requests with the first so many sizes, and where their
    # last part begins.
    least = [(0.0, 0)] + [(float("inf"), 0)] * len(sizes)
    ways = []
    for _ in range(min(MOST_PARTS, len(sizes))):
        before, least = least, [(float("inf"), 0)]
        for end in range(1, len(sizes) + 1):
            times = [
                (before[first][0] + sizes[first] * (fewer[end] - fewer[first]) + COPIES_OF_A_PART, first)
                for first in range(end)
            ]
            least.append(min(times))
        ways.append(least)
    number, end = min(range(len(ways)), key=lambda index: ways[index][-1]), len(sizes)
    parts = []
    for way in reversed(ways[: number + 1]):
        first = way[end][1]
        held = set(sizes[first:end])
        parts.append([request for request, count in enumerate(counts) if count in held])
        end = first
    return parts[::-1]


@dataclass(slots=True)
class PartsAttention:
    """Attention over nodes, over prompts, or over both. Each part of the nodes has a backend of its own; that
    of prompts stores the KV of all rows."""

    nodes: Nodes
    backends: Sequence[Backend]  # of the nodes' parts; there may be more
    prompts: Backend
    num_nodes: int
    has_prompts: bool = False

    def plan(
        self, nodes: list[AttentionMetadata], prompts: AttentionMetadata | None, positions: Tensor, slots: KVSlots
    ) -> None:
        """positions (T,) int64 of all rows, whose KV goes to `slots`."""
        self.has_prompts = prompts is not None
        for backend, own in zip(self.backends[: len(nodes)], nodes, strict=True):
            backend.plan(own)
        if prompts is not None:
            self.prompts.plan(prompts)
        self.prompts.plan_writes(positions, slots)

    def write(self, k: Tensor, v: Tensor, layer: AttentionLayer) -> None:
        raise AssertionError("a target's rows all ask")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, mask: Mask) -> Tensor:
        count, q = self.num_nodes, self.prompts.rotate_and_store(q, k, v, layer)
        if not count:
            return self.prompts.attend_stored(q, layer, "causal")
        own = self._attend_nodes(q, layer, mask)
        if not self.has_prompts:
            return own
        return torch.cat((own, self.prompts.attend_stored(q[count:], layer, "causal")))

    def _attend_nodes(self, q: Tensor, layer: AttentionLayer, mask: Mask) -> Tensor:
        """(n, Q, D)."""
        parts = zip(self.backends[: len(self.nodes.parts)], self.nodes.parts, strict=True)
        return self.nodes.keep([backend.attend_stored(rows.repeat(q), layer, mask) for backend, rows in parts])
