"""Gemma 4's assistants: they draft a chain from the target's state and its KV cache.

No KV of their own and lookahead 0. State per request: the target's state after the final norm at the last committed
token. A step's query stands at the position of the round's first token and sees the committed tokens.
Letters: B requests, H hidden size, R request slots.
"""

import torch
from torch import Tensor

from slipstream.kernels.gemm.gathered_head import head_logits, head_topk
from slipstream.kernels.sampling.sample import Sampling, perturbed_topk
from slipstream.models.drafts.gemma4_assistant import Gemma4Assistant, Gemma4AssistantConfig
from slipstream.models.targets.decoder import Target
from slipstream.serve.attention.base import Backend
from slipstream.serve.drafters import base
from slipstream.serve.drafters.options import AssistantOptions, widths_up_to
from slipstream.serve.drafters.vocabulary import DraftVocabulary
from slipstream.serve.runner.batch import DraftBatch, PassRows, Proposal
from slipstream.serve.runner.request_state import RequestState


class Drafter(base.NetworkDrafter):
    Network = Gemma4Assistant

    def __init__(self, module: Gemma4Assistant, vocabulary: DraftVocabulary, options: AssistantOptions) -> None:
        self.module = module
        self.vocabulary = vocabulary
        self.options = options
        self.aux_layers = (module.config.target_num_layers,)
        self.clusters = module.masked_embedding
        self.cluster_ids = None if self.clusters is None else self.clusters.cluster_ids()

    @classmethod
    def plan_network(cls, options: AssistantOptions, config: Gemma4AssistantConfig) -> base.DraftPlan:  # noqa: ARG003
        return base.DraftPlan(widths=widths_up_to(options.depth + 1), reads_target=True)

    def attach(self, target: Target, state: RequestState, attention: Backend | None) -> None:
        assert attention is not None
        self.target = target
        self.attention = attention
        size = target.config.hidden_size
        self.hidden = torch.zeros(len(state.lengths), size, dtype=target.dtype, device=target.device)  # (R, H)

    def extend(self, rows: PassRows, aux_states: Tensor) -> None:
        self.hidden[rows.requests] = aux_states[rows.last]

    def propose(self, batch: DraftBatch, width: int) -> Proposal:
        if width == 1:
            return super().propose(batch, width)
        hidden = self.hidden[batch.requests]
        # Rows of the last committed tokens see all of these; the queries are turned one position further.
        rows = batch.uniform((batch.lengths - 1).clamp(min=0), 1)  # padding has no tokens
        self.attention.plan(rows)
        self.attention.plan_writes(batch.lengths, rows.slots)
        chain = [batch.roots]
        log_probs = [base.root_scores(len(batch.roots), batch.roots.device)]
        for step in range(1, width):
            states = self.module(self.target.embed(chain[-1].clamp(min=0)), hidden, self.attention)
            values, columns = self._find(states, batch.lengths + step, batch.sampling)
            log_probs.append(values)
            chain.append(self.vocabulary.target_ids(columns[:, 0]))
            if step < width - 1:
                hidden = self.module.post_projection(states)
        parents = base.chain_parents(len(batch.roots), width, batch.roots.device)
        return Proposal(torch.stack(chain, dim=1), parents, torch.cat(log_probs, dim=1).cumsum(dim=1))

    def _find(self, states: Tensor, positions: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """The best token after each state: log-probability and column (B, 1)."""
        head = self.vocabulary.head
        if self.clusters is None or self.cluster_ids is None:
            return head_topk(head, states, 1, positions, sampling)
        logits = head_logits(head, states)
        is_open = self.clusters(states, self.cluster_ids)
        return perturbed_topk(logits.masked_fill(~is_open, -torch.inf), 1, positions, sampling, head.ids)
