"""The two passes of a step: the target's, over nodes of decoding requests and chunks of prompts, and the draft's.

The target's pass verifies, accepts, commits and extends the drafter's KV; the draft's pass proposes what the next step
verifies. Both are functions of device state. A target pass is captured, of fixed sizes, or eager: launched kernel by
kernel, and as large as its work. Nothing in a captured one waits for the host; an eager one reads how many nodes each
request has, since its attention is planned by shapes.
Letters: B decoding requests, M chunks, S = B + M segments, T rows of the pass, W nodes that a request slot stores.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.attention.paths import trace_paths
from slipstream.kernels.attention.ragged import Segments
from slipstream.kernels.gemm.fixed_order import FixedOrder
from slipstream.kernels.kv.cache import draft_places, move_rows
from slipstream.kernels.limits import MAX_NODES
from slipstream.kernels.sampling.logprobs import COLUMNS, Emitted, emitted_logprobs
from slipstream.kernels.sampling.sample import Sampling, mix, sample
from slipstream.kernels.speculation.ragged import (
    Chunks,
    Layout,
    Verified,
    admit,
    lay_out,
    select_heads,
    store,
    verify_rows,
)
from slipstream.models.layers.attention import Attention
from slipstream.models.targets.decoder import Target
from slipstream.serve.attention.base import Backend
from slipstream.serve.attention.parts import Nodes, PartsAttention
from slipstream.serve.drafters.base import Drafter
from slipstream.serve.engine.plan import PromptChunk, PromptPhase, SamplingMode
from slipstream.serve.runner.batch import AttentionMetadata, DraftBatch, HostShape, PassRows
from slipstream.serve.runner.kept_states import KeptStates
from slipstream.serve.runner.kv import NetworkKV
from slipstream.serve.runner.logits import NodeTokens, count_emitted, prompt_logprobs, with_processors
from slipstream.serve.runner.recurrence import MixedAttention, RecurrentStates
from slipstream.serve.runner.request_state import KVSlots, RequestState

GOLDEN = 0x9E3779B1  # 2^32 / golden ratio


class StepInputs(NamedTuple):
    """The inputs of a target pass besides request state."""

    budget: Tensor  # (1,) int64 nodes to verify, roots included
    requests: Tensor  # (B,) int64 slots of decoding requests
    chunks: Chunks
    passes: Tensor | None = None  # (1,) int64 counts passes whose results take turns: see `verify_rows`


class Results(NamedTuple):
    """The results of a target pass for the host, for S segments of W tokens."""

    tokens: Tensor  # ([N,] S, 2 + 2 * W) int32, for trees 2 + 3 * W: see `verify_rows`; N passes take turns
    logprobs: Tensor | None  # (COLUMNS, S, W) int32: see `emitted_logprobs`
    prompt_logprobs: Tensor | None = None  # (2 + 2 * K, N) int32: see `token_logprobs`


class PassSizes(NamedTuple):
    """The sizes of a target pass."""

    rows: int  # T
    heads: int  # rows with logits: all nodes, and the last row of each chunk
    host: HostShape | None = None  # of a pass that is not captured


@dataclass(frozen=True, slots=True)
class CapturedPass:
    """A pass of fixed sizes over static buffers, filled up with padding."""

    inputs: StepInputs
    mode: SamplingMode
    results: Results  # the buffers; log-probabilities are taken only if there is one for them
    rows: int
    heads: int
    branches: bool = False  # its proposals may be trees

    def write_changes(self, state: RequestState) -> None:
        """Writes what the host has changed in requests."""
        state.write_sent()

    def sizes(self, counts: Tensor) -> PassSizes:
        """Returns the sizes of the pass if its requests have counts (B,) nodes."""
        return PassSizes(self.rows, self.heads)


@dataclass(frozen=True, slots=True)
class EagerPass:
    """A pass launched kernel by kernel, as large as its work."""

    inputs: StepInputs
    mode: SamplingMode
    results: Results  # as in CapturedPass
    bounds: tuple[int, ...]  # as in HostShape
    chunks: tuple[PromptChunk, ...]
    prompts_by: PromptPhase
    branches: bool = False  # as in CapturedPass

    def write_changes(self, state: RequestState) -> None:
        """Writes what the host has changed in requests."""
        state.write_changes()

    def sizes(self, counts: Tensor) -> PassSizes:
        """Returns the sizes of the pass if its requests have counts (B,) nodes."""
        node_counts = tuple(counts.tolist()) if len(counts) else ()  # sync
        num_nodes = sum(node_counts)
        rows = num_nodes + sum(len(chunk.tokens) for chunk in self.chunks)
        host = HostShape(node_counts, self.bounds, self.chunks, self.prompts_by)
        return PassSizes(rows, num_nodes + len(self.chunks), host)


TargetPass = CapturedPass | EagerPass


class ForwardPass(NamedTuple):
    """A target pass before it samples."""

    layout: Layout
    hidden: Tensor  # (T, H) after the final norm
    aux_states: Tensor | None  # (T, K * H)
    sizes: PassSizes
    are_first: Tensor | None = None  # as in PassRows


@dataclass(frozen=True, slots=True)
class StepPasses:
    """Everything a step needs on the device."""

    target: Target
    attention: Mapping[str, Backend]  # of the phases prefill and verify
    drafter: Drafter
    state: RequestState
    kv: tuple[NetworkKV, ...]  # the target's and, if it has some, the draft's
    states: RecurrentStates | None = None  # of the target's recurrent layers
    usual_nodes: int = MAX_NODES  # nodes of a proposal, but for rare ones that have more
    chain_nodes: int = MAX_NODES  # likewise, of a pass whose proposals are chains
    branches: bool = False  # some passes verify trees, by the drafter or by the host
    order: FixedOrder | None = None  # order of the target's products; attention's is then fixed, too
    accept_length: float | None = None  # simulated: see `simulate`
    kept_states: KeptStates | None = None  # of committed tokens
    logprobs_of_samples: bool = False  # log-probabilities of the sampled distribution, not of the target's logits

    @torch.inference_mode()
    def step(self, target_pass: TargetPass) -> Results:
        """Runs a target pass."""
        return self.verify(target_pass, self.forward(target_pass))

    @torch.inference_mode()
    def forward(self, target_pass: TargetPass) -> ForwardPass:
        """Runs the part of a pass that reads neither masks nor anything else of how tokens are sampled."""
        state = self.state
        stored = state.stored
        budget, requests, chunks, passes = target_pass.inputs
        target_pass.write_changes(state)
        counts = admit(stored.probabilities, requests, budget, state.proposals.shape[2], stored.lengths, passes)
        sizes = target_pass.sizes(counts)
        layout = lay_out(
            stored,
            counts,
            requests,
            chunks,
            state.pages[0],
            state.page_size,
            sizes.rows,
            target_pass.branches,
            state.padding,
        )
        attention, mask = self._attention(layout, len(requests), sizes.host)
        network: Attention = attention
        if self.states is not None:
            are_chains = not target_pass.branches
            network = MixedAttention.plan(
                attention, self.states, layout, len(requests), sizes.host, are_chains=are_chains
            )
        drafter_layers = self.drafter.aux_layers
        if self.kept_states is None:
            hidden, aux_states = self.target(layout.tokens, network, drafter_layers, mask)
        else:
            hidden, states = self.target(layout.tokens, network, self.kept_states.union(drafter_layers), mask)
            assert states is not None
            aux_states = self.kept_states.store(layout.kv_slots, states, drafter_layers)
        are_first = state.lengths[layout.segment_slots] == 0 if self.drafter.needs_first else None
        return ForwardPass(layout, hidden, aux_states, sizes, are_first)

    @torch.inference_mode()
    def verify(self, target_pass: TargetPass, forward: ForwardPass) -> Results:
        """Runs the rest of a pass: samples, verifies, commits and extends the drafter."""
        state = self.state
        results = target_pass.results
        _, requests, chunks, passes = target_pass.inputs
        layout, hidden, aux_states, sizes, are_first = forward
        B = len(requests)
        logits, sampling, sampled = self._sample(layout, chunks, hidden, B, sizes.heads, target_pass.mode)
        verified = verify_rows(layout, sampled, state.stored, chunks, B, results.tokens, state.padding, passes)
        if results.logprobs is not None:
            emitted = Emitted(layout.starts, verified.nodes, verified.tokens, verified.lengths, layout.segment_slots)
            basis = sampling if self.logprobs_of_samples else None
            emitted_logprobs(logits, emitted, state.logprobs, basis, results.logprobs)
        if sizes.host is not None and sizes.host.chunks:
            first = sum(sizes.host.counts)
            scores = prompt_logprobs(self.target, hidden[first:], verified.next_tokens[first:], sizes.host.chunks)
            results = results._replace(prompt_logprobs=scores)
        if target_pass.mode == "all":
            count_emitted(state, layout.segment_slots, verified.tokens)
        self._commit(layout, verified, B)
        if aux_states is not None:
            attention = self._chains(layout, B, sizes.host) if self.drafter.attends_to_context else None
            rows = PassRows(
                positions=layout.places,
                slots=self._kv_slots(layout),
                next_tokens=verified.next_tokens,
                requests=layout.segment_slots,
                last=verified.last,
                attention=attention,
                owners=layout.requests,
                are_first=are_first,
            )
            self.drafter.observe(rows)
            # nodes in the order in which they were accepted
            self.drafter.extend(rows, aux_states if verified.order is None else aux_states[verified.order])
        return results

    def result_columns(self, *, branches: bool) -> int:
        """Numbers that a pass tells the host of each segment: see `Results`."""
        return 2 + (3 if branches else 2) * self.state.proposals.shape[2]

    def empty_results(
        self, num_segments: int, *, has_logprobs: bool, branches: bool = False, num_passes: int = 0
    ) -> Results:
        """Zeros. For a number of passes, which take turns, tokens (N, S, ...) are in the host's memory, which a GPU
        writes to."""
        device = self.state.device
        width = self.state.proposals.shape[2]
        columns = self.result_columns(branches=branches)
        zeros = partial(torch.zeros, dtype=torch.int32)
        if num_passes:
            tokens = zeros(num_passes, num_segments, columns, pin_memory=device.type == "cuda")
        else:
            tokens = zeros(num_segments, columns, device=device)
        return Results(tokens, zeros(COLUMNS, num_segments, width, device=device) if has_logprobs else None)

    @torch.inference_mode()
    def draft(self, requests: Tensor, mode: SamplingMode, width: int, kv_bound: int) -> None:
        """The draft's pass: proposes and stores `width` nodes for each of `requests` (B,) int64.

        `kv_bound`: on the host, at least as many KV tokens as any of them has.
        """
        state = self.state
        stored = self.state.stored
        pages = state.pages[self.drafter.group]
        places = draft_places(pages, state.page_size, requests, stored.lengths, stored.roots, width + 1)
        sampling = state.sampling(requests, mode)
        batch = DraftBatch(state, requests, places.positions[1], places.roots, kv_bound, sampling, places)
        proposal = self.drafter.propose(batch, width)
        store(
            stored,
            requests,
            proposal.tokens,
            proposal.parents,
            proposal.scores,
            state.acceptance_table,
            state.padding,
        )

    def _sample(
        self, layout: Layout, chunks: Chunks, hidden: Tensor, num_requests: int, heads: int, mode: SamplingMode
    ) -> tuple[Tensor, Sampling, Tensor]:
        """Logits (H, V), how they are sampled, and the target's token after each row that has them (H,), -1 where
        nothing can be sampled: NaN, or no token allowed."""
        requests = layout.requests
        positions = layout.following
        nodes = layout.nodes
        if len(chunks.slots):
            logit_rows = select_heads(layout, num_requests, heads, self.state.padding)
            hidden = hidden[logit_rows.rows]
            requests = logit_rows.requests
            positions = logit_rows.positions
            nodes = logit_rows.nodes
        logits = self.target.logits(hidden)
        sampling = self.state.sampling(requests, mode)
        if mode == "all":
            path = NodeTokens(nodes, layout.tokens, layout.ancestors)
            sampling = with_processors(sampling, self.state, requests, path)
        sampled = sample(logits, positions, sampling)
        if self.accept_length is not None:
            sampled = simulate(sampled, layout, num_requests, self.state, self.accept_length)
        return logits, sampling, sampled

    def _attention(
        self, layout: Layout, num_requests: int, host: HostShape | None
    ) -> tuple[Backend | PartsAttention, str]:
        """The target's attention, planned, and the mask of nodes."""
        verify = self.attention["verify"]
        mask = "tree" if layout.ancestors is not None and num_requests else "causal"
        if host is None or host.prompts_by == "verify":
            verify.plan(self._ragged(layout, num_requests))
            return verify, mask
        is_tree = mask == "tree" and max(host.counts) > 1
        if not host.chunks and not is_tree and verify.supports_ragged_nodes:
            verify.plan(self._nodes(layout, host, host.counts))
            return verify, "causal"
        nodes = Nodes.of(host.counts, self.state.device)
        attention = PartsAttention(nodes, verify, self.attention["prefill"])
        of_nodes = None
        if nodes.counts:
            counts = nodes.counts if verify.supports_ragged_nodes else (nodes.max_nodes,) * num_requests
            ancestors = None
            if is_tree and layout.ancestors is not None:
                ancestors = nodes.pad(layout.ancestors).view(num_requests, nodes.max_nodes)
            of_nodes = self._nodes(layout, host, counts, ancestors)
        of_prompts = self._prompts(layout, host) if host.chunks else None
        attention.plan(of_nodes, of_prompts)
        return attention, mask if is_tree else "causal"

    def _ragged(self, layout: Layout, num_requests: int) -> AttentionMetadata:
        paths = None
        if self.order is not None and layout.ancestors is not None:
            paths = trace_paths(layout.starts, num_requests, layout.ancestors, layout.positions)
        return self._metadata(
            layout,
            slice(None),
            phase="verify",
            positions=layout.positions,
            query_lens=(),
            kv_bounds=(),
            ancestors=layout.ancestors,
            segments=self._segments(layout, num_requests, by_path=paths is not None),
            paths=paths,
        )

    def _segments(self, layout: Layout, num_requests: int, *, by_path: bool = False) -> Segments:
        return Segments(
            starts=layout.starts,
            slots=layout.segment_slots,
            lengths=layout.segment_lengths,
            num_decoding=num_requests,
            most_nodes=min(self.state.proposals.shape[2], MAX_NODES),
            usual_nodes=self.chain_nodes if layout.ancestors is None else self.usual_nodes,
            by_path=by_path,
        )

    def _kv_slots(self, layout: Layout) -> KVSlots:
        return KVSlots(lambda group: self.state.slots(layout.requests, layout.places, group), {0: layout.kv_slots})

    def _metadata(self, layout: Layout, part: slice, **fields: Any) -> AttentionMetadata:
        """Describes the rows of a part of the segments. `fields`: what differs between these."""
        return AttentionMetadata(
            state=self.state,
            requests=layout.segment_slots[part],
            lengths=layout.segment_lengths[part],
            slots=self._kv_slots(layout),
            **fields,
        )

    def _nodes(
        self, layout: Layout, host: HostShape, counts: tuple[int, ...], ancestors: Tensor | None = None
    ) -> AttentionMetadata:
        return self._metadata(
            layout,
            slice(len(counts)),
            phase="verify",
            positions=layout.positions,
            query_lens=counts,
            kv_bounds=tuple([bound + count for bound, count in zip(host.bounds, counts, strict=True)]),
            ancestors=ancestors,
        )

    def _prompts(self, layout: Layout, host: HostShape) -> AttentionMetadata:
        return self._metadata(
            layout,
            slice(len(host.counts), None),
            phase="prefill",
            positions=layout.positions,
            query_lens=tuple(len(chunk.tokens) for chunk in host.chunks),
            kv_bounds=tuple(chunk.end for chunk in host.chunks),
        )

    def _commit(self, layout: Layout, verified: Verified, num_requests: int) -> None:
        """Moves the accepted nodes' KV down to follow the committed tokens, and marks their records to be replayed. The
        drafter writes its own anew.

        A chain's accepted nodes lie there already. A tree's remaining KV is copied onto itself.
        """
        if self.states is not None:
            self.states.commit(layout, verified, num_requests)
        if layout.ancestors is not None and num_requests:
            width = verified.nodes.shape[1]
            order = torch.arange(width, device=verified.nodes.device).expand(num_requests, width)
            nodes = torch.where(verified.nodes < 0, order, verified.nodes.long())
            lengths = layout.segment_lengths[:num_requests, None]
            requests = layout.segment_slots[:num_requests, None]
            caches = [(cache.flat, cache.group) for cache in self.kv[0].caches]
            caches += [] if self.kept_states is None else [(self.kept_states.flat, 0)]
            for rows, group in caches:
                sources = self.state.slots(requests, lengths + nodes, group)
                move_rows(rows, sources, self.state.slots(requests, lengths + order, group))

    def _chains(self, layout: Layout, num_requests: int, host: HostShape | None) -> AttentionMetadata:
        """Describes the pass's rows to the drafter: nodes in the order in which they were accepted are a chain, as
        prompts' rows are."""
        lens: tuple[int, ...] = ()
        bounds: tuple[int, ...] = ()
        if host is not None:
            lens = (*host.counts, *(len(chunk.tokens) for chunk in host.chunks))
            nodes = (bound + count for bound, count in zip(host.bounds, host.counts, strict=True))
            bounds = (*nodes, *(chunk.end for chunk in host.chunks))
        return self._metadata(
            layout,
            slice(None),
            phase="draft",
            positions=layout.places,
            query_lens=lens,
            kv_bounds=bounds,
            segments=self._segments(layout, num_requests),
        )


def simulate(sampled: Tensor, layout: Layout, num_requests: int, state: RequestState, accept_length: float) -> Tensor:
    """Tokens for benchmarks of the runtime alone: so many nodes of each chain are accepted that a step emits
    `accept_length` tokens on average, as far as they are in the pass. Tokens are wrong.

    sampled (H,): first after each node of the `num_requests` decoding requests, then after chunks of prompts, which
    stay as they are. A coin by key and length decides between two numbers.
    """
    owners = layout.requests[: len(sampled)]
    nodes = layout.nodes[: len(sampled)]
    base = int(accept_length)
    fraction = accept_length % 1
    coin = mix(state.lengths[owners] * GOLDEN + state.keys[owners])  # in [0, 2^32)
    accepted = base + (coin < int(fraction * 2**32))
    following = layout.tokens.roll(-1)[: len(sampled)]
    is_node = torch.arange(len(sampled), device=sampled.device) < layout.starts[num_requests]
    targets = torch.where(nodes + 1 < accepted, following, (following + 1) % state.processors.counts.shape[1])
    return torch.where(is_node, targets, sampled)
