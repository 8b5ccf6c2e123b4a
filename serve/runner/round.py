"""The two passes of the engine: a prefill chunk, and a round (verify -> accept -> commit -> extend -> propose).

A round is one function of device state. Nothing in it waits for the host, so it can be captured whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.kernels.kv.cache import move_rows
from slipstream.kernels.sampling.sample import sample
from slipstream.kernels.speculation.round_state import end_round, start_round, store_proposal
from slipstream.kernels.speculation.verify import ancestor_masks, unpack, verify
from slipstream.models.targets.decoder import Target
from slipstream.serve.attention.base import Backend
from slipstream.serve.drafters.base import Drafter
from slipstream.serve.engine.plan import SamplingMode
from slipstream.serve.runner.batch import Batch, PassRows, VerifyResult
from slipstream.serve.runner.request_state import RequestState

GOLDEN = 0x9E3779B1  # 2^32 / golden ratio: its multiples modulo 2^32 spread evenly


@dataclass(frozen=True, slots=True)
class Runner:
    """Everything a pass needs on the device."""

    target: Target
    attention: Mapping[str, Backend]  # prefill and verify
    drafter: Drafter
    state: RequestState
    caches: tuple[Tensor, ...]  # (L, 2, slots, G, D) views of the pool's groups
    branches: bool = False  # some proposals are trees, by the drafter or by the host
    accept_length: float | None = None  # simulated: see `simulate`

    @torch.inference_mode()
    def prefill(
        self,
        batch: Batch,
        tokens: Tensor,
        ends: Tensor,
        is_last: Tensor,
        width: int,
        *,
        proposes: bool = True,
        attended: Batch | None = None,
    ) -> Tensor:
        """Computes packed prompt chunks and samples the token after each.

        tokens (T,); ends (B,) int64 committed tokens after the pass; is_last (B,) bool: the chunk ends its prompt. If
        `proposes`, the drafter proposes for those. batch.next_tokens (T,) holds the known successors; where a prompt
        ends, the sampled token is filled in. `attended`: the same queries grouped otherwise, for the target's
        attention. Returns the sampled tokens (B,) int64, meaningless where a prompt goes on.
        """
        assert batch.next_tokens is not None
        assert batch.last is not None
        hidden, aux_states = self.target(tokens, self.attention_for(attended or batch), self.drafter.aux_layers)
        sampled = sample(self.target.logits(hidden[batch.last]), ends, batch.sampling)
        # One place more, cut off below, for chunks that do not end a prompt.
        places = torch.where(is_last, batch.last, len(tokens))
        successors = pad(batch.next_tokens, (0, 1)).index_copy_(0, places, sampled)[:-1]
        batch = replace(batch, next_tokens=successors)
        self.state.lengths[batch.requests] = ends.int()
        if aux_states is not None:
            assert batch.last is not None
            self.drafter.extend(PassRows(batch, successors, batch.last), aux_states, None)
        if proposes:
            requests = torch.where(is_last, batch.requests, self.state.padding)
            lengths = torch.where(is_last, ends, 0)
            ones = (1,) * len(batch.query_lens)
            begun = replace(batch, requests=requests, lengths=lengths, roots=sampled, query_lens=ones, next_tokens=None)
            self._propose(begun, width)
        return sampled

    @torch.inference_mode()
    def round(self, requests: Tensor, bounds: tuple[int, ...], mode: SamplingMode, width: int) -> Tensor:
        """Verifies the stored proposals of `requests` (B,), cut to `width` nodes, and stores the next, as wide.

        `bounds`: host upper bound of each request's committed tokens before the round.
        Returns (B, 1 + N) int32: the number of tokens that each request emits, then the tokens, -1 padded. For trees
        (B, 1 + 2 * N): the accepted nodes follow.
        """
        batch, tokens, parents, inputs = self._begin(requests, bounds, mode, width)
        mask = "causal" if batch.ancestors is None else "tree"
        hidden, aux_states = self.target(inputs, self.attention_for(batch), self.drafter.aux_layers, mask)
        positions = batch.positions + 1  # of the token that follows each node
        sampled = sample(self.target.logits(hidden), positions, batch.sampling.repeat(width)).view(-1, width)
        verified = VerifyResult(*verify(tokens, parents, sampled, batch.ancestors))
        if self.accept_length is not None:
            verified = simulate(sampled, self.state.keys[requests], batch.lengths, self.accept_length)
        self._move_accepted(batch, verified)
        end = end_round(
            self.state.lengths, requests, self.state.padding, batch.lengths, verified.tokens, verified.lengths
        )
        if aux_states is not None:
            self.drafter.extend(*accepted_rows(batch, aux_states, verified), verified)
        self._propose(replace(batch, lengths=end.lengths, roots=end.roots), width)
        return end.results if batch.ancestors is None else torch.cat((end.results, verified.nodes), dim=1)

    def attention_for(self, batch: Batch) -> Backend:
        attention = self.attention["verify" if batch.next_tokens is None else "prefill"]
        attention.plan(batch)
        return attention

    def _begin(
        self, requests: Tensor, bounds: tuple[int, ...], mode: SamplingMode, width: int
    ) -> tuple[Batch, Tensor, Tensor, Tensor]:
        """Returns the batch, tokens and parents (B, N) to verify, and the ids (T,) that the target reads."""
        state = self.state
        tokens, parents, lengths, inputs = start_round(state.tokens, state.parents, state.lengths, requests, width)
        positions, slots = state.chain(requests, lengths, width)  # nodes' KV in node order
        ancestors = ancestor_masks(parents) if self.branches and width > 1 else None
        if ancestors is not None:
            positions = (lengths[:, None] + unpack(ancestors).sum(dim=-1) - 1).flatten()
        batch = Batch(
            state=state,
            requests=requests,
            lengths=lengths,
            positions=positions,
            slots=slots,
            query_lens=(width,) * len(bounds),
            kv_bounds=tuple(bound + width for bound in bounds),
            mode=mode,
            ancestors=ancestors,
        )
        return batch, tokens, parents, inputs

    def _move_accepted(self, batch: Batch, verified: VerifyResult) -> None:
        """Moves the accepted nodes' KV down to follow the committed tokens.

        A chain's accepted nodes lie there already. A tree's remaining KV is copied onto itself.
        """
        if batch.ancestors is not None:
            B, N = verified.nodes.shape
            slots = batch.slots.view(B, N)
            order = torch.arange(N, device=slots.device).expand(B, N)
            sources = slots.gather(1, torch.where(verified.nodes < 0, order, verified.nodes.long()))
            for cache in self.caches:
                move_rows(cache, sources, slots)

    def _propose(self, batch: Batch, width: int) -> None:
        proposal = self.drafter.propose(batch, min(width, max(self.drafter.widths)))
        store_proposal(self.state.tokens, self.state.parents, batch.requests, proposal.tokens, proposal.parents)


def accepted_rows(batch: Batch, aux_states: Tensor, verified: VerifyResult) -> tuple[PassRows, Tensor]:
    """A round's rows in the order in which their tokens were accepted, and their aux hidden states (B * N, K * H)."""
    B, N = verified.nodes.shape
    first = torch.arange(0, B * N, N, device=aux_states.device)  # row of each request
    if batch.ancestors is not None:  # a tree; a chain's accepted nodes come first anyway
        nodes = first[:, None] + verified.nodes.clamp(min=0)
        aux_states, batch = aux_states[nodes.flatten()], batch.uniform(batch.lengths, N)
    return PassRows(batch, verified.tokens.clamp(min=0).flatten(), first + verified.lengths - 1), aux_states


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
