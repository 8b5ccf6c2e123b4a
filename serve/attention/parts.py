"""Attention of a pass of nodes and prompts by backends that take each by itself: where a pass is not captured.

Nodes are attended as many for each request, so where counts differ a request's last node is repeated; what the copies
compute is dropped, and what they store equals what the node itself stores. Prompts go to the backend of prefills.
Letters: T rows of the pass, n of them nodes, B decoding requests, N most nodes of one.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.models.layers.attention import AttentionLayer, Mask
from slipstream.serve.attention.base import Backend
from slipstream.serve.runner.batch import AttentionMetadata


class NodeRows(NamedTuple):
    """The rows of nodes as N for each request; None: they are that already."""

    num_rows: int  # n
    repeated: Tensor | None  # (B * N,) int64 rows of the pass
    kept: Tensor | None  # (n,) int64 which of these are no copies

    @classmethod
    def of(cls, counts: list[int], device: torch.device) -> "NodeRows":
        num_rows, most = sum(counts), max(counts, default=0)
        if num_rows == most * len(counts):
            return cls(num_rows, None, None)
        ends = torch.tensor(counts, device=device).cumsum(0)
        nodes = torch.arange(most, device=device)
        own = torch.tensor(counts, device=device)[:, None]  # (B, 1)
        rows = (ends[:, None] - own) + torch.minimum(nodes, own - 1)  # (B, N)
        return cls(num_rows, rows.flatten(), (nodes < own).flatten().nonzero().flatten())

    def repeat(self, values: Tensor) -> Tensor:
        """values (T, ...) of all rows -> (B * N, ...)."""
        return values[: self.num_rows] if self.repeated is None else values[self.repeated]

    def keep(self, values: Tensor) -> Tensor:
        """values (B * N, ...) -> (n, ...)."""
        return values if self.kept is None else values[self.kept]


@dataclass(slots=True)
class PartsAttention:
    """Attention over nodes, over prompts, or over both."""

    nodes: Backend
    prompts: Backend
    rows: NodeRows
    has_prompts: bool = False

    def plan(self, nodes: AttentionMetadata | None, prompts: AttentionMetadata | None) -> None:
        self.has_prompts = prompts is not None
        if nodes is not None:
            self.nodes.plan(nodes)
        if prompts is not None:
            self.prompts.plan(prompts)

    def write(self, k: Tensor, v: Tensor, layer: AttentionLayer) -> None:
        raise AssertionError("a target's rows all ask")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, mask: Mask) -> Tensor:
        count, rows = self.rows.num_rows, self.rows
        if not count:
            return self.prompts.attend(q, k, v, layer, "causal")
        own = rows.keep(self.nodes.attend(rows.repeat(q), rows.repeat(k), rows.repeat(v), layer, mask))
        if not self.has_prompts:
            return own
        return torch.cat((own, self.prompts.attend(q[count:], k[count:], v[count:], layer, "causal")))
