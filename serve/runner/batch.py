"""What the engine passes around: proposals, verification results and batches.

Letters: B requests of a batch, N tree nodes per request (root included), T packed query tokens, R request slots,
P pages per request, V target vocabulary, K captured states, H hidden, G KV heads, D head dim.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.sampling.sample import Sampling
from slipstream.models.targets.config import RopeConfig
from slipstream.serve.engine.plan import SamplingMode
from slipstream.serve.runner.request_state import RequestState


class KVSpec(NamedTuple):
    """Per-token KV of one network."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig

    def has_positions_of(self, other: "KVSpec") -> bool:
        """Whether the same rotary embedding serves both."""
        return (self.rope, self.head_dim) == (other.rope, other.head_dim)

    def allocate(self, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """(L, 2, num_pages, page_size, G, D), zeros. Padding writes to page 0, the dump page; nothing reads it."""
        shape = self.num_layers, 2, num_pages, page_size, self.num_kv_heads, self.head_dim
        if device.type == "cpu":  # the system's zero pages, each taken when it is first written: torch.zeros writes all
            return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
        return torch.zeros(shape, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class Proposal:
    """Candidate tokens to verify."""

    tokens: Tensor  # (B, N) target ids; [:, 0] the last emitted token, whose KV is not written yet; unused nodes -1
    parents: Tensor  # (B, N); parents[:, 0] = -1, parents[:, i] < i; siblings distinct; best nodes first
    scores: Tensor  # (B, N) fp32 log-probability, by the draft, that a node is reached; 0 of roots, -inf of unused ones


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Which candidates the target accepted, and the tokens that this emits."""

    nodes: Tensor  # (B, N) int32 accepted node ids, root first, -1 padded
    tokens: Tensor  # (B, N) int32 emitted tokens: accepted children, then the target's own token; -1 padded
    lengths: Tensor  # (B,) int32 accepted nodes = tokens emitted this round, 1..depth + 1


@dataclass(frozen=True, slots=True)
class Batch:
    """One pass over T packed query tokens of B requests, request after request.

    `query_lens` and `kv_bounds` are host numbers: how many queries each request has, and an upper bound of the KV
    tokens it has once they are written. Exact lengths live on the device only, so that rounds need no host.
    """

    state: RequestState
    requests: Tensor  # (B,) int64 request slots
    lengths: Tensor  # (B,) int64 committed KV tokens before this pass
    positions: Tensor  # (T,) int64 depth positions for rotary embedding: lengths + depth in the tree
    slots: Tensor  # (T,) int64 where each query's KV goes
    query_lens: tuple[int, ...]
    kv_bounds: tuple[int, ...]
    mode: SamplingMode = "greedy"
    roots: Tensor | None = None  # (B,) int64 last emitted tokens; for drafting
    next_tokens: Tensor | None = None  # (T,) int64 the token after each query; prefill only, as the next two
    last: Tensor | None = None  # (B,) int64 which of the T is each request's last query
    real: Tensor | None = None  # (T,) bool: False for queries that pad the pass
    ancestors: Tensor | None = None  # (B, N) int64 bit masks (kernels/speculation/verify.py); tree passes only
    first_node: int = 0  # tree passes: nodes of each request before its queries

    @property
    def sampling(self) -> Sampling:
        return self.state.sampling(self.requests, self.mode)

    def uniform(self, starts: Tensor, count: int, spare: int = 0) -> "Batch":
        """The same requests with `count` chained queries each, at positions starts (B,) + 0..count-1.

        `spare`: how many KV tokens may exceed the present bounds.
        """
        positions, slots = self.state.chain(self.requests, starts, count)
        return replace(
            self,
            lengths=starts,
            positions=positions,
            slots=slots,
            query_lens=(count,) * len(self.query_lens),
            kv_bounds=tuple(bound + spare for bound in self.kv_bounds),
            next_tokens=None,
            last=None,
            real=None,
            ancestors=None,
            first_node=0,
        )

    def last_nodes(self, positions: Tensor, slots: Tensor, ancestors: Tensor, first_node: int) -> "Batch":
        """The same requests with queries for the last n of first_node + n tree nodes after the committed tokens.

        positions and slots (B * n,) int64; ancestors (B, n) int64 over all of these nodes.
        """
        count = ancestors.shape[1]
        return replace(
            self,
            positions=positions,
            slots=slots,
            query_lens=(count,) * len(self.query_lens),
            kv_bounds=tuple(bound + first_node + count for bound in self.kv_bounds),
            next_tokens=None,
            ancestors=ancestors,
            first_node=first_node,
        )


class PassRows(NamedTuple):
    """The C rows of a target pass whose tokens belong to their requests' texts: those of prompt chunks; after a round N
    for each request, the accepted nodes first and in order. The next round overwrites the KV of the others."""

    batch: Batch  # with their positions (C,) and slots (C,)
    next_tokens: Tensor  # (C,) the token after each
    last: Tensor  # (B,) int64 each request's last row
