"""What the engine passes around: proposals, verification results, batches, and the per-request state on the device.

Letters: B requests of a batch, N tree nodes per request (root included), T packed query tokens, R request slots,
P pages per request, V target vocabulary, K captured states, H hidden, G KV heads, D head dim.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from slipstream.kernels.kv.cache import chain_slots
from slipstream.kernels.sampling.sample import Filters, Sampling, noise_key
from slipstream.models.targets.config import RopeConfig
from slipstream.serve.request import Request

SamplingMode = Literal["greedy", "plain", "full"]  # all requests greedy | temperature only | filters too


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
class HostProposal:
    """Proposals drafted on the host, in the layout of Proposal."""

    nodes: Tensor  # (2, B, N) int32 on the CPU, pinned for a GPU: tokens, unused ones -1, and parents
    scores: NDArray[np.float32]  # (B, N)
    counts: list[int]  # nodes in use, root included; 0: the request keeps its stored proposal
    kinds: list[int]  # from 1 up, higher where surer; serve/widths.py counts acceptance by kind


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Which candidates the target accepted, and the tokens that this emits."""

    nodes: Tensor  # (B, N) int32 accepted node ids, root first, -1 padded
    tokens: Tensor  # (B, N) int32 emitted tokens: accepted children, then the target's own token; -1 padded
    lengths: Tensor  # (B,) int32 accepted nodes = tokens emitted this round, 1..depth + 1


class RequestState:
    """Per-request device state, one slot per running request.

    The padding slot, `padding`, has length 0 and the dump page only. It pads a batch to the size of a captured one.
    """

    def __init__(self, num_slots: int, num_pages: int, page_size: int, width: int, device: torch.device) -> None:
        self.page_size = page_size
        self.device = device
        self.padding = num_slots
        num_slots += 1
        self.lengths = torch.zeros(num_slots, dtype=torch.int32, device=device)  # (R,) committed KV tokens
        self.pages = torch.zeros(num_slots, num_pages, dtype=torch.int64, device=device)  # (R, P); 0 = dump page
        self.nodes = torch.full((2, num_slots, width), -1, dtype=torch.int32, device=device)  # stored proposals
        self.tokens, self.parents = self.nodes  # (R, N) each
        self.keys = torch.zeros(num_slots, dtype=torch.int64, device=device)  # (R,) noise keys
        self.temperature = torch.zeros(num_slots, device=device)  # (R,)
        self.top_k = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.top_p = torch.ones(num_slots, device=device)
        self.min_p = torch.zeros(num_slots, device=device)

    def admit(self, slot: int, request: Request) -> None:
        params = request.params
        values = (
            (self.lengths, 0),
            (self.keys, noise_key(request.seed, request.choice)),
            (self.temperature, params.temperature),
            (self.top_k, params.top_k),
            (self.top_p, params.top_p),
            (self.min_p, params.min_p),
        )
        for column, value in values:
            column[slot].fill_(value)  # an assignment would wait for the device

    def upload(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        """Copies values to the device as int64. The host does not wait; the copy runs after the work queued there."""
        if self.device.type != "cuda":
            return torch.tensor(values, dtype=torch.int64, device=self.device)
        return torch.tensor(values, dtype=torch.int64, pin_memory=True).to(self.device, non_blocking=True)

    def set_pages(self, changes: Sequence[tuple[int, int, int]]) -> None:
        """Writes each (row, index, page) into the page table."""
        if changes:
            requests, indices, pages = self.upload(list(zip(*changes, strict=True)))
            self.pages[requests, indices] = pages

    def store(self, requests: Tensor, proposal: HostProposal) -> None:
        """Replaces the stored proposals of the requests in `requests` (B,), except where the count is 0."""
        if not any(proposal.counts):
            return
        nodes = proposal.nodes.to(self.device, non_blocking=True)
        if 0 in proposal.counts:
            chosen = self.upload([index for index, count in enumerate(proposal.counts) if count])
            requests, nodes = requests[chosen], nodes[:, chosen]
        unused = self.nodes.shape[2] - nodes.shape[2]
        nodes = pad(nodes, (0, unused), value=-1) if unused else nodes
        self.nodes.index_copy_(1, requests, nodes)

    def sampling(self, requests: Tensor, mode: SamplingMode) -> Sampling:
        temperature = None if mode == "greedy" else self.temperature
        filters = Filters(self.top_k, self.top_p, self.min_p) if mode == "full" else None
        return Sampling(self.keys, temperature, filters, requests)

    @contextmanager
    def filtered_padding(self) -> Iterator[None]:
        """Inside, the padding slot samples with common filters, so that timed passes do the work of real ones."""
        for column, value in ((self.temperature, 0.6), (self.top_k, 20), (self.top_p, 0.95)):
            column[self.padding].fill_(value)
        try:
            yield
        finally:
            for column, value in ((self.temperature, 0), (self.top_k, 0), (self.top_p, 1)):
                column[self.padding].fill_(value)

    def chain(self, requests: Tensor, starts: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Positions starts (B,) + 0..count-1 of `requests` (B,), and their KV slots, each (B * count,) int64."""
        return chain_slots(self.pages, self.page_size, requests, starts, count)

    def slots(self, requests: Tensor, positions: Tensor) -> Tensor:
        """KV slot (...) int64 of each position (...); `requests` (...) broadcasts against it."""
        return self.pages[requests, positions // self.page_size] * self.page_size + positions % self.page_size


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
