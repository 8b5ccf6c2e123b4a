"""The values that target pass, drafter and attention exchange.

Letters: B requests of a batch, N tree nodes per request (root included), T packed query tokens, S segments of a ragged
pass, R request slots, P pages per request, V target vocabulary, K captured states, H hidden, G KV heads, D head dim.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor

from slipstream.kernels.attention.paths import Paths
from slipstream.kernels.attention.ragged import Segments
from slipstream.kernels.kv.cache import DraftPlaces
from slipstream.kernels.sampling.sample import Sampling
from slipstream.serve.engine.plan import PromptChunk, PromptPhase
from slipstream.serve.runner.request_state import KVSlots, RequestState

Phase = Literal["prefill", "verify", "draft"]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Candidate tokens to verify."""

    tokens: Tensor  # (B, N) target ids; [:, 0] the last emitted token, whose KV is not written yet; unused nodes -1
    parents: Tensor  # (B, N); parents[:, 0] = -1, parents[:, i] < i; siblings distinct; best nodes first
    scores: Tensor  # (B, N) fp32 log-probability, by the draft, that a node is reached; 0 of roots, -inf of unused ones


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Describes one pass to attention: T packed queries of B requests, request after request.

    `query_lens` and `kv_bounds` are host numbers: how many queries each request has, and an upper bound of the KV
    tokens it has once they are written; of prompts it is exact. Exact lengths live on the device, so that drafting
    needs no host. Of a ragged pass, whose requests are its segments, the host knows neither, and ancestors are (T,).
    """

    phase: Phase  # selects the kernels; requests of a draft's pass have equal numbers of queries
    state: RequestState
    requests: Tensor  # (B,) int64 request slots
    lengths: Tensor  # (B,) int64 committed KV tokens before this pass
    # Of all rows of the pass; the other fields may be those of a part of it.
    positions: Tensor  # (T,) int64 depth positions for rotary embedding: lengths + depth in the tree
    slots: KVSlots  # destination of each row's KV
    query_lens: tuple[int, ...]
    kv_bounds: tuple[int, ...]
    ancestors: Tensor | None = None  # (B, N) int64 bit masks of a tree (kernels/speculation/verify.py); None: chains
    first_node: int = 0  # nodes of each request before its queries
    segments: Segments | None = None  # of a ragged pass
    read_starts: Tensor | None = None  # (R,) see RequestState; None: all is read
    paths: Paths | None = None  # paths of its trees, where a node's bits must be those of a chain
    works: dict[Any, Any] = field(default_factory=dict)  # plans that backends made for a ragged pass

    @classmethod
    def uniform(
        cls, phase: Phase, state: RequestState, requests: Tensor, starts: Tensor, count: int, kv_bound: int
    ) -> "AttentionMetadata":
        """`count` chained queries for each of `requests` (B,), at positions starts (B,) + 0..count-1.

        `kv_bound`: at least as many KV tokens as any of them has then.
        """
        positions, slots = state.chain(requests, starts, count)
        return cls(
            phase=phase,
            state=state,
            requests=requests,
            lengths=starts,
            positions=positions,
            slots=slots,
            query_lens=(count,) * len(requests),
            kv_bounds=(kv_bound,) * len(requests),
            read_starts=state.read_starts,
        )


class HostShape(NamedTuple):
    """The segments of a pass, as the host knows them."""

    counts: tuple[int, ...]  # nodes of each decoding request
    bounds: tuple[int, ...]  # most tokens that each of them can have committed before
    chunks: tuple[PromptChunk, ...]
    prompts_by: PromptPhase  # verify: its backend computes all rows in one ragged pass


class PassRows(NamedTuple):
    """C rows of a target pass: those of prompt chunks, and of each decoding request its accepted nodes in order before
    the others, whose KV the next step overwrites."""

    positions: Tensor  # (C,) int64 places in the text
    slots: KVSlots  # destination of each row's KV, (C,) int64 by KV group
    next_tokens: Tensor  # (C,) the token after each; -1 after rejected nodes and rows that fill up a pass
    requests: Tensor  # (B,) int64 request slots
    last: Tensor  # (B,) int64 each request's last row whose token belongs to its text
    attention: AttentionMetadata | None = None  # of these rows as chains, for drafters that attend to context
    owners: Tensor | None = None  # (C,) int64 request slot of each row
    are_first: Tensor | None = None  # (B,) bool whether a request computes its first rows since it got its slot


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """B requests to draft for."""

    state: RequestState
    requests: Tensor  # (B,) int64 request slots
    lengths: Tensor  # (B,) int64 committed KV tokens
    roots: Tensor  # (B,) int64 last emitted tokens, whose KV is not written yet
    kv_bound: int  # on the host: at least as many KV tokens as any request has before drafting
    sampling: Sampling
    places: DraftPlaces  # count: the nodes to propose and 1

    def at(self, index: int) -> AttentionMetadata:
        """A query for each request, `index` tokens after its last committed one."""
        B = len(self.requests)
        positions = self.places.positions[index]
        return AttentionMetadata(
            phase="draft",
            state=self.state,
            requests=self.requests,
            lengths=positions,
            positions=positions,
            slots=KVSlots(lambda _: self.places.slots[index]),  # of the one group that the draft has
            query_lens=(1,) * B,
            kv_bounds=(self.kv_bound + index,) * B,
            read_starts=self.state.read_starts,
        )

    def uniform(self, starts: Tensor, count: int, spare: int = 0) -> AttentionMetadata:
        """`count` chained queries for each request, at positions starts (B,) + 0..count-1.

        `spare`: how many KV tokens may exceed the bound.
        """
        bound = self.kv_bound + spare
        return AttentionMetadata.uniform("draft", self.state, self.requests, starts, count, bound)

    def last_nodes(self, positions: Tensor, slots: KVSlots, ancestors: Tensor, first_node: int) -> AttentionMetadata:
        """Queries for the last n of first_node + n tree nodes after the committed tokens.

        positions (B * n,) int64; ancestors (B, n) int64 over all of these nodes.
        """
        B, n = ancestors.shape
        return AttentionMetadata(
            phase="draft",
            state=self.state,
            requests=self.requests,
            lengths=self.lengths,
            positions=positions,
            slots=slots,
            query_lens=(n,) * B,
            kv_bounds=(self.kv_bound + first_node + n,) * B,
            ancestors=ancestors,
            first_node=first_node,
            read_starts=self.state.read_starts,
        )
