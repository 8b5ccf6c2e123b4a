"""Attention of a pass of nodes and prompts by backends that take each by itself: where a pass is not captured.

All rows are rotated and stored together. Nodes are attended as many for each request, so where counts differ a
request's last node is repeated, and what the copies compute is dropped. Where a few requests have far more nodes
than the others, these are a part of their own. Prompts go to the backend of prefills.
Letters: T rows of the pass, n of them nodes, B decoding requests, b of a part, N most nodes of one.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.models.layers.attention import AttentionLayer, Mask
from slipstream.serve.attention.base import Backend
from slipstream.serve.runner.batch import AttentionMetadata
from slipstream.serve.runner.kv import KVSlots

WORTH_A_PART = 16  # copies that a second part must save: fewer cost less than one more call


class NodeRows(NamedTuple):
    """The rows of a part's nodes as N for each of its requests."""

    members: list[int]  # (b,) which of the pass's requests
    most: int  # N
    repeated: Tensor | None  # (b * N,) int64 rows of the pass; None: the first ones as they are
    kept: Tensor | None  # (m,) int64 which of these are no copies
    places: Tensor | None  # (m,) int64 the rows of the pass that those are; None: its first n

    @classmethod
    def of(cls, counts: list[int], members: list[int], device: torch.device) -> "NodeRows":
        """Of the requests `members`, if those of the pass have counts (B,) nodes."""
        most, is_all = max(counts[index] for index in members), len(members) == len(counts)
        if is_all and min(counts) == most:
            return cls(members, most, None, None, None)
        own, ends = torch.tensor(counts, device=device), torch.tensor(counts, device=device).cumsum(0)
        own, ends = own[members, None], ends[members, None]  # (b, 1)
        nodes = torch.arange(most, device=device)
        rows = (ends - own + torch.minimum(nodes, own - 1)).flatten()  # (b * N,)
        kept = (nodes < own).flatten().nonzero().flatten()
        return cls(members, most, rows, kept, None if is_all else rows[kept])

    def repeat(self, values: Tensor) -> Tensor:
        """values (T, ...) of all rows -> (b * N, ...)."""
        return values[: len(self.members) * self.most] if self.repeated is None else values[self.repeated]

    def keep(self, values: Tensor) -> Tensor:
        """values (b * N, ...) -> (m, ...)."""
        return values if self.kept is None else values[self.kept]


def split_nodes(counts: list[int], device: torch.device) -> list[NodeRows]:
    """The parts of requests with counts (B,) nodes: none, one, or two where that saves enough copies."""
    order, B = sorted(range(len(counts)), key=lambda index: -counts[index]), len(counts)
    if not counts:
        return []
    sizes = [first * counts[order[0]] + (B - first) * counts[order[first]] for first in range(1, B)]
    least = min(sizes, default=B * counts[order[0]])
    if B * counts[order[0]] - least < WORTH_A_PART:
        return [NodeRows.of(counts, list(range(B)), device)]
    first = 1 + sizes.index(least)
    return [NodeRows.of(counts, sorted(members), device) for members in (order[:first], order[first:])]


@dataclass(slots=True)
class PartsAttention:
    """Attention over nodes, over prompts, or over both. Each part of the nodes has a backend of its own; that
    of prompts stores the KV of all rows."""

    nodes: list[tuple[Backend, NodeRows]]
    prompts: Backend
    num_nodes: int
    has_prompts: bool = False

    def plan(
        self, nodes: list[AttentionMetadata], prompts: AttentionMetadata | None, positions: Tensor, slots: KVSlots
    ) -> None:
        """positions (T,) int64 of all rows, whose KV goes to `slots`."""
        self.has_prompts = prompts is not None
        for (backend, _), own in zip(self.nodes, nodes, strict=True):
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
        parts = [rows.keep(backend.attend_stored(rows.repeat(q), layer, mask)) for backend, rows in self.nodes]
        if len(parts) == 1:
            return parts[0]
        out = torch.empty_like(q[: self.num_nodes])
        for (_, rows), own in zip(self.nodes, parts, strict=True):
            out[rows.places] = own
        return out
