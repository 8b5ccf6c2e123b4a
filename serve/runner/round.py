"""The two passes of the engine: a prefill chunk, and a round (verify -> accept -> commit -> extend -> propose).

A round is one function of device state. Nothing in it waits for the host, so it can be captured whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.kernels.kv.cache import move_rows
from slipstream.kernels.speculation.round_state import end_round, start_round, store_proposal
from slipstream.kernels.speculation.verify import ancestor_masks, unpack, verify
from slipstream.models.targets.decoder import Target
from slipstream.serve.attention.base import Backend
from slipstream.serve.drafters.base import Drafter
from slipstream.serve.engine.plan import SamplingMode
from slipstream.serve.runner.batch import AttentionMetadata, DraftBatch, PassRows, VerifyResult
from slipstream.serve.runner.kv import NetworkKV
from slipstream.serve.runner.logits import count_emitted, sample_target
from slipstream.serve.runner.prefill import PrefillPass
from slipstream.serve.runner.request_state import RequestState

GOLDEN = 0x9E3779B1  # 2^32 / golden ratio: its multiples modulo 2^32 spread evenly


@dataclass(frozen=True, slots=True)
class Runner:
    """Everything a pass needs on the device."""

    target: Target
    attention: Mapping[str, Backend]  # of the phases prefill and verify
    drafter: Drafter
    state: RequestState
    kv: tuple[NetworkKV, ...]  # the target's and, if it has some, the draft's
    branches: bool = False  # some proposals are trees, by the drafter or by the host
    accept_length: float | None = None  # simulated: see `simulate`

    @torch.inference_mode()
    def prefill(self, prompts: PrefillPass, width: int, *, proposes: bool = True) -> Tensor:
        """Computes prompt chunks and samples the token after each.

        If `proposes`, the drafter proposes after those that end their prompts. Returns the sampled tokens (B,) int64,
        meaningless where a prompt goes on; -1 where nothing can be sampled, and what is drafted for that request is of
        no use.
        """
        inputs, metadata, state = prompts.inputs, prompts.metadata, self.state
        hidden, aux_states = self.target(inputs.tokens, self.attention_for(metadata), self.drafter.aux_layers)
        logits, is_last = self.target.logits(hidden[inputs.last]), inputs.is_last.bool()
        sampled = sample_target(state, inputs.requests, prompts.mode, logits, inputs.ends)
        ending, roots = torch.where(is_last, inputs.requests, state.padding), sampled.clamp(min=0)
        count_emitted(state, ending, prompts.mode, sampled[:, None])
        state.lengths[inputs.requests] = inputs.ends.int()
        if aux_states is not None:
            # One place more, cut off again, for chunks that do not end a prompt.
            places = torch.where(is_last, inputs.last, len(inputs.tokens))
            next_tokens = pad(inputs.next_tokens, (0, 1)).index_copy_(0, places, roots)[:-1]
            rows = PassRows(replace(metadata, phase="draft"), next_tokens, inputs.requests, inputs.last)
            self.drafter.extend(rows, aux_states, None)
        if proposes:
            lengths, sampling = torch.where(is_last, inputs.ends, 0), state.sampling(ending, prompts.mode)
            self._propose(DraftBatch(state, ending, lengths, roots, max(metadata.kv_bounds), sampling), width)
        return sampled

    @torch.inference_mode()
    def round(self, requests: Tensor, bounds: tuple[int, ...], mode: SamplingMode, width: int) -> Tensor:
        """Verifies the stored proposals of `requests` (B,), cut to `width` nodes, and stores the next, as wide.

        `bounds`: host upper bound of each request's committed tokens before the round.
        Returns (B, 1 + N) int32: the number of tokens that each request emits, then the tokens, -1 padded. For trees
        (B, 1 + 2 * N): the accepted nodes follow. The last token is -1 where nothing can be sampled.
        """
        metadata, tokens, parents, inputs = self._begin(requests, bounds, width)
        mask = "causal" if metadata.ancestors is None else "tree"
        hidden, aux_states = self.target(inputs, self.attention_for(metadata), self.drafter.aux_layers, mask)
        sampling, positions = self.state.sampling(requests, mode), metadata.positions + 1  # after each node
        logits, nodes = self.target.logits(hidden), (tokens, metadata.ancestors)
        sampled = sample_target(self.state, requests, mode, logits, positions, *nodes).view(-1, width)
        verified = VerifyResult(*verify(tokens, parents, sampled, metadata.ancestors))
        if self.accept_length is not None:
            verified = simulate(sampled, self.state.keys[requests], metadata.lengths, self.accept_length)
        count_emitted(self.state, requests, mode, verified.tokens)
        self._move_accepted(metadata, verified)
        end = end_round(
            self.state.lengths, requests, self.state.padding, metadata.lengths, verified.tokens, verified.lengths
        )
        if aux_states is not None:
            self.drafter.extend(*accepted_rows(metadata, aux_states, verified), verified)
        bound = max(metadata.kv_bounds)
        self._propose(DraftBatch(self.state, requests, end.lengths, end.roots, bound, sampling), width)
        return end.results if metadata.ancestors is None else torch.cat((end.results, verified.nodes), dim=1)

    def attention_for(self, metadata: AttentionMetadata) -> Backend:
        attention = self.attention[metadata.phase]
        attention.plan(metadata)
        return attention

    def _begin(
        self, requests: Tensor, bounds: tuple[int, ...], width: int
    ) -> tuple[AttentionMetadata, Tensor, Tensor, Tensor]:
        """Returns tokens and parents (B, N) to verify and the ids (T,) that the target reads, after their metadata."""
        state = self.state
        tokens, parents, lengths, inputs = start_round(state.tokens, state.parents, state.lengths, requests, width)
        # The KV of a tree's nodes, too, lies in node order.
        metadata = AttentionMetadata.uniform("verify", state, requests, lengths, width, max(bounds) + width)
        if self.branches and width > 1:
            ancestors = ancestor_masks(parents)
            positions = (lengths[:, None] + unpack(ancestors).sum(dim=-1) - 1).flatten()
            metadata = replace(metadata, positions=positions, ancestors=ancestors)
        return metadata, tokens, parents, inputs

    def _move_accepted(self, metadata: AttentionMetadata, verified: VerifyResult) -> None:
        """Moves the accepted nodes' KV down to follow the committed tokens.

        A chain's accepted nodes lie there already. A tree's remaining KV is copied onto itself.
        """
        if metadata.ancestors is not None:
            B, N = verified.nodes.shape
            order = torch.arange(N, device=verified.nodes.device).expand(B, N)
            nodes = torch.where(verified.nodes < 0, order, verified.nodes.long())
            for network in self.kv:
                for group in network.caches:
                    slots = metadata.slots.of(group).view(B, N)
                    move_rows(network.flat(group), slots.gather(1, nodes), slots)

    def _propose(self, batch: DraftBatch, width: int) -> None:
        proposal = self.drafter.propose(batch, min(width, max(self.drafter.widths)))
        store_proposal(self.state.tokens, self.state.parents, batch.requests, proposal.tokens, proposal.parents)


def accepted_rows(metadata: AttentionMetadata, aux_states: Tensor, verified: VerifyResult) -> tuple[PassRows, Tensor]:
    """A round's rows in the order in which their tokens were accepted, and their aux hidden states (B * N, K * H)."""
    (B, N), requests = verified.nodes.shape, metadata.requests
    first = torch.arange(0, B * N, N, device=aux_states.device)  # row of each request
    if metadata.ancestors is None:  # a chain, whose accepted nodes come first anyway
        own = replace(metadata, phase="draft")
    else:
        nodes, bound = first[:, None] + verified.nodes.clamp(min=0), max(metadata.kv_bounds)
        aux_states = aux_states[nodes.flatten()]
        own = AttentionMetadata.uniform("draft", metadata.state, requests, metadata.lengths, N, bound)
    return PassRows(own, verified.tokens.flatten(), requests, first + verified.lengths - 1), aux_states


def simulate(sampled: Tensor, keys: Tensor, positions: Tensor, accept_length: float) -> VerifyResult:
    """A verification result for benchmarks of the runtime alone; its tokens are wrong. Accepts so many nodes of each
    chain that a round emits `accept_length` tokens on average.

    sampled (B, N): the target's token after each node; keys (B,) and positions (B,) seed the coin. It takes few
    launches, since benchmarks time it with the round.
    """
    N = sampled.shape[1]
    whole, fraction = int(accept_length), accept_length % 1
    coin = (positions * GOLDEN + keys) & 0xFFFFFFFF  # (B,) in [0, 2^32)
    lengths = (whole + (coin < int(fraction * 2**32))).clamp(max=N).int()
    nodes = torch.arange(N, dtype=torch.int32, device=sampled.device).expand(len(sampled), N)
    padding = nodes >= lengths[:, None]
    return VerifyResult(nodes.masked_fill(padding, -1), sampled.int().masked_fill(padding, -1), lengths)
