"""EAGLE3 drafter (arXiv 2503.01840): a chain drafted by one decoder layer over the target's features.

Its KV at slot t comes from the target's feature at t and the token at t + 1, hence lookahead 1. Row state: the draft's
hidden state at the last committed slot, from which the next chain starts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.sampling import sample
from slipstream.models.checkpoint import resolve
from slipstream.models.eagle3 import Eagle3
from slipstream.models.eagle3_checkpoint import load_eagle3
from slipstream.models.target import Target
from slipstream.serve.attention.base import Backend
from slipstream.serve.batch import Batch, KVSpec, Proposal, Rows, Verdict
from slipstream.serve.drafters import base


@dataclass(frozen=True, slots=True)
class Eagle3Options:
    depth: int = 3
    """Tokens drafted per round; the target verifies depth + 1 nodes."""

    def __post_init__(self) -> None:
        if not 1 <= self.depth <= 63:
            raise ValueError(f"drafter.depth is {self.depth}; it must be between 1 and 63")


class Drafter(base.Drafter):
    Options = Eagle3Options
    lookahead = 1

    def __init__(self, module: Eagle3, depth: int) -> None:
        self.module = module
        self.feature_layers = module.config.feature_layers
        layer = module.config.layer_config()
        self.kv = KVSpec(1, layer.num_kv_heads, layer.head_dim, layer.rope)
        self.widths = (*(2**power for power in range(6) if 2**power <= depth), depth + 1)
        self.target_ids = module.target_ids

    @classmethod
    def load(cls, draft: str, options: Eagle3Options, target: Target) -> "Drafter":
        weight = target.embed_tokens.weight
        return cls(load_eagle3(resolve(draft), target.config, weight.dtype, weight.device), options.depth)

    def scratch(self, width: int) -> int:
        return max(0, width - 2)  # the first draft token comes from `hidden`, the last one is not fed back

    def attach(self, target: Target, state: Rows, attention: Backend | None) -> None:
        assert attention is not None
        self.embed, self.attention = target.embed_tokens, attention
        size = self.module.config.hidden_size
        weight = target.embed_tokens.weight
        self.hidden = torch.zeros(len(state.lengths), size, dtype=weight.dtype, device=weight.device)  # (R, H)

    def observe(self, batch: Batch, features: Tensor | None, verdict: Verdict | None) -> None:
        assert features is not None
        if verdict is None:
            self._observe_prefill(batch, features)
        else:
            self._observe_round(batch, features, verdict)

    def propose(self, batch: Batch, width: int) -> Proposal:
        assert batch.roots is not None
        sampling, hidden = batch.sampling, self.hidden[batch.rows]
        chain, behind = [batch.roots], [batch.lengths]  # tokens; the committed length and 0, 1, ... more
        for step in range(width - 1):
            if step:
                self.attention.plan(batch.uniform(behind[step - 1], 1, spare=step))
                hidden = self.module(self.embed(chain[-1]), hidden, self.attention)
            behind.append(batch.lengths + (step + 1))
            draft_ids = sample(self.module.logits(hidden), behind[-1], sampling, self.target_ids)
            chain.append(self.target_ids[draft_ids])
        return Proposal(torch.stack(chain, dim=1), base.chain_parents(len(batch.roots), width, batch.roots.device))

    def _observe_prefill(self, batch: Batch, features: Tensor) -> None:
        """Writes every query's KV; only the last query of a request is asked for its hidden state."""
        assert batch.next_tokens is not None
        embeds, hidden = self.embed(batch.next_tokens), self.module.fuse(features)
        self.attention.plan(batch)
        self.module.write_context(embeds, hidden, self.attention)
        query_lens = batch.state.upload(batch.query_lens)
        last = query_lens.cumsum(0) - 1  # (B,)
        self.attention.plan(batch.uniform(batch.lengths + query_lens - 1, 1))
        self.hidden[batch.rows] = self.module(embeds[last], hidden[last], self.attention)

    def _observe_round(self, batch: Batch, features: Tensor, verdict: Verdict) -> None:
        """Replaces the drafted KV of the accepted nodes by one made from the target's own features.

        All N rows are computed, so shapes are fixed; those beyond the accepted ones are overwritten by the next round.
        """
        B, N = verdict.nodes.shape
        nodes = verdict.nodes.clamp(min=0).long()
        features = features.view(B, N, -1).gather(1, nodes[:, :, None].expand(B, N, features.shape[-1]))
        self.attention.plan(batch.uniform(batch.lengths, N))
        embeds = self.embed(verdict.tokens.clamp(min=0)).flatten(0, 1)
        hidden = self.module(embeds, self.module.fuse(features).flatten(0, 1), self.attention).view(B, N, -1)
        self.hidden[batch.rows] = hidden[torch.arange(B, device=nodes.device), verdict.lengths.long() - 1]
