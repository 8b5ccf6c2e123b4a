"""Gemma 4's assistants: they draft a chain or a tree from the target's state and its KV cache.

No KV of their own and lookahead 0. State per request: the target's state after the final norm at the last committed
token. The query of every node stands at the position of the round's first token and sees the committed tokens alone, so
the nodes of a tree's level are queries of as many requests with one text.
Letters: B requests, k nodes of a tree's level, H hidden size, R request slots.
"""

import torch
from torch import Tensor

from slipstream.kernels.gemm.gathered_head import head_logits, head_topk
from slipstream.kernels.sampling.sample import Sampling, perturbed_topk
from slipstream.kernels.speculation.draft_tree import Candidates, Frontier, Place, choose, grow
from slipstream.models.drafts.gemma4_assistant import Gemma4Assistant, Gemma4AssistantConfig
from slipstream.models.layers.linear import derive
from slipstream.models.targets.decoder import Target
from slipstream.serve.attention.base import Backend
from slipstream.serve.drafters import base
from slipstream.serve.drafters.options import AssistantOptions
from slipstream.serve.drafters.vocabulary import DraftVocabulary
from slipstream.serve.runner.batch import AttentionMetadata, DraftBatch, PassRows, Proposal
from slipstream.serve.runner.request_state import RequestState

NO_PAGES = 1 << 30  # a page size that no text reaches: nodes have no KV, so their slots say nothing


class Drafter(base.NetworkDrafter):
    Network = Gemma4Assistant

    def __init__(self, module: Gemma4Assistant, vocabulary: DraftVocabulary, options: AssistantOptions) -> None:
        self.module = module
        self.vocabulary = vocabulary
        self.options = options
        self.aux_layers = (module.config.target_num_layers,)
        self.clusters = module.masked_embedding
        self.cluster_ids = None if self.clusters is None else derive(self.clusters, self.clusters.cluster_ids)

    @classmethod
    def plan_network(cls, options: AssistantOptions, config: Gemma4AssistantConfig) -> base.DraftPlan:  # noqa: ARG003
        return base.DraftPlan(
            widths=options.widths, chain_nodes=options.chain_nodes, branches=options.topk > 1, reads_target=True
        )

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
        if width > self.options.chain_nodes:
            return self._propose_tree(batch, width)
        hidden = self.hidden[batch.requests]
        self._plan(batch, 1)
        chain = [batch.roots]
        log_probs = []
        for positions in batch.places.positions[2 : width + 1]:
            states = self.module(self.target.embed(chain[-1].clamp(min=0)), hidden, self.attention)
            values, columns = self._find(states, 1, positions, batch.sampling)
            log_probs.append(values)
            chain.append(self.vocabulary.target_ids(columns[:, 0]))
            if len(chain) < width:
                hidden = self.module.post_projection(states)
        return base.chain_proposal(chain, log_probs)

    def _plan(self, batch: DraftBatch, count: int) -> None:
        """Plans `count` queries of each request. Rows of the last committed tokens see all of these; the queries are
        turned one position further."""
        requests, lengths = (x.repeat_interleave(count) for x in (batch.requests, batch.lengths))
        last = (lengths - 1).clamp(min=0)  # padding has no tokens
        rows = AttentionMetadata.uniform("draft", batch.state, requests, last, 1, batch.kv_bound)
        self.attention.plan(rows)
        self.attention.plan_writes(lengths, rows.slots)

    def _propose_tree(self, batch: DraftBatch, width: int) -> Proposal:
        shape = self.options.shape.within(width)
        place = Place(batch.state.pages[0], NO_PAGES, batch.requests, batch.lengths)
        candidates = Candidates.empty(len(batch.roots), shape, batch.roots.device)
        tokens = batch.roots
        hidden = self.hidden[batch.requests]
        positions = batch.places.positions[2]
        sampling = batch.sampling
        frontier: Frontier | None = None
        for level in range(shape.depth):
            if level < 2:
                self._plan(batch, shape.topk if level else 1)
            states = self.module(self.target.embed(tokens.clamp(min=0)), hidden, self.attention)
            best = self._find(states, shape.topk, positions, sampling)
            frontier = grow(
                candidates, frontier, *best, self.vocabulary.head.ids, place, level, level == shape.depth - 1
            )
            if frontier is not None:
                hidden = self.module.post_projection(states)[frontier.sources]
                tokens = frontier.tokens
                positions = frontier.sampled_at
                sampling = batch.sampling.repeat(shape.topk)
        return Proposal(*choose(candidates, batch.roots, width))

    def _find(self, states: Tensor, count: int, positions: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """The best tokens after each state: log-probabilities and columns (B, count)."""
        head = self.vocabulary.head
        if self.clusters is None or self.cluster_ids is None:
            return head_topk(head, states, count, positions, sampling)
        logits = head_logits(head, states)
        is_open = self.clusters(states, self.cluster_ids)
        return perturbed_topk(logits.masked_fill(~is_open, -torch.inf), count, positions, sampling, head.ids)
