"""Attention of a pass of nodes and prompts by two backends: where a pass is not captured.

All rows are rotated and stored together. A backend that takes as many nodes of each request gets a request's last node
repeated, and what the copies compute is dropped. Prompts go to the backend of prefills.
Letters: T rows of the pass, n of them nodes, B decoding requests, N most nodes of one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.models.layers.attention import Attention, AttentionLayer, Mask
from slipstream.serve.attention.base import Backend
from slipstream.serve.runner.batch import AttentionMetadata


class Nodes(NamedTuple):
    """The first rows of a pass."""

    counts: tuple[int, ...]  # (B,)
    total: int  # n
    padded: Tensor | None  # (B * N,) int64 rows of the pass, N for each request; None: the first ones as they are
    node_rows: Tensor | None  # (n,) int64 the nodes among these; None: all of them

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device) -> "Nodes":
        """The rows of requests with counts (B,) nodes."""
        if len(set(counts)) <= 1:
            return cls(tuple(counts), sum(counts), None, None)
        sizes = np.array(counts)
        max_nodes = max(counts)
        starts = sizes.cumsum() - sizes
        padded = starts[:, None] + np.minimum(np.arange(max_nodes), sizes[:, None] - 1)
        node_rows = np.repeat(max_nodes * np.arange(len(sizes)) - starts, sizes) + np.arange(sizes.sum())
        rows = [torch.from_numpy(array).to(device) for array in (padded.ravel(), node_rows)]
        return cls(tuple(counts), sum(counts), *rows)

    @property
    def max_nodes(self) -> int:
        """N."""
        return max(self.counts, default=0)

    def pad(self, values: Tensor) -> Tensor:
        """values (T, ...) of all rows -> (B * N, ...)."""
        if self.padded is None:
            return values[: self.total]
        return values.index_select(0, self.padded)  # on a CPU in a third of the time of values[rows]

    def keep(self, values: Tensor) -> Tensor:
        """values (B * N, ...) -> (n, ...)."""
        return values if self.node_rows is None else values.index_select(0, self.node_rows)


@dataclass(slots=True)
class PartsAttention(Attention):
    """Attention over nodes, over prompts, or over both. The backend of prompts stores the KV of all rows."""

    nodes: Nodes
    backend: Backend  # of nodes
    prompts: Backend
    has_prompts: bool = False

    def plan(self, nodes: AttentionMetadata | None, prompts: AttentionMetadata | None) -> None:
        """Prepares a pass. Positions and slots of both are those of all rows."""
        self.has_prompts = prompts is not None
        rows = nodes or prompts
        assert rows is not None, "a pass has rows"
        if nodes is not None:
            self.backend.plan_reads(nodes)
        if prompts is not None:
            self.prompts.plan_reads(prompts)
        self.prompts.plan_writes(rows.positions, rows.slots)

    def write(self, k: Tensor, v: Tensor, layer: AttentionLayer) -> None:
        raise AssertionError("a target's rows all ask")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, mask: Mask) -> Tensor:
        count = self.nodes.total
        q = self.prompts.rotate_and_store(q, k, v, layer)
        if not count:
            return self.prompts.attend_stored(q, layer, "causal")
        if self.backend.supports_ragged_nodes:
            out = self.backend.attend_stored(q[:count], layer, mask)
        else:
            out = self.nodes.keep(self.backend.attend_stored(self.nodes.pad(q), layer, mask))
        if not self.has_prompts:
            return out
        return torch.cat((out, self.prompts.attend_stored(q[count:], layer, "causal")))
