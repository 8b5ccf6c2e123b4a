"""EAGLE and EAGLE3: a recurrent hidden state drafts token by token, as a chain or as a tree.

Their KV at slot t depends on the target's states at t and the token at t + 1, hence lookahead 1. State per request:
what the draft makes of the target's states at the last committed token. A proposal starts with the draft's layer there,
so that steps after which nothing is drafted, and most rows of a pass, cost no more than their keys and values; of a
draft with several layers, also the layers below the last.
Letters: B requests, N nodes of a proposal, k frontier nodes of a tree's level, H hidden size, R request slots.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.kernels.gemm.gathered_head import head_topk
from slipstream.kernels.speculation.draft_tree import Candidates, Frontier, Place, choose, grow
from slipstream.models.drafts.base import DraftConfig
from slipstream.models.drafts.eagle import Eagle
from slipstream.models.drafts.eagle3 import Eagle3
from slipstream.models.drafts.mtp import MTP
from slipstream.models.targets.decoder import Target
from slipstream.serve.attention.base import Backend
from slipstream.serve.drafters import base
from slipstream.serve.drafters.options import TreeOptions
from slipstream.serve.drafters.vocabulary import DraftVocabulary
from slipstream.serve.runner.batch import DraftBatch, PassRows, Proposal
from slipstream.serve.runner.request_state import KVSlots, RequestState

logger = logging.getLogger(__name__)


class AutoregressiveDrafter(base.NetworkDrafter):
    def __init__(self, module: Eagle | Eagle3 | MTP, vocabulary: DraftVocabulary, options: TreeOptions) -> None:
        if options.topk > vocabulary.num_tokens:
            raise ValueError(
                f"drafter.topk is {options.topk}; the draft has {vocabulary.num_tokens} tokens to choose from"
            )
        if module.embed_tokens is not None:
            size = sum(x.nbytes for x in module.embed_tokens.parameters()) / 1e6
            logger.info("the draft has its own embedding: %.0f MB in addition to the target's", size)
        self.module = module
        self.vocabulary = vocabulary
        self.head = vocabulary.head
        self.options = options
        self.aux_layers = module.config.aux_layers
        self.attends_to_context = len(module.attention_specs) > 1

    @classmethod
    def plan_network(cls, options: TreeOptions, config: DraftConfig) -> base.DraftPlan:  # noqa: ARG003
        """A chain drafts from `hidden` and feeds back all tokens but the last; a tree all levels but the last."""
        return base.DraftPlan(
            widths=options.widths,
            scratch=(0, 0, *(options.shape.within(width).expanded for width in range(2, options.verified_nodes + 1))),
            chain_nodes=options.chain_nodes,
            branches=options.topk > 1,
            lookahead=1,
        )

    def attach(self, target: Target, state: RequestState, attention: Backend | None) -> None:
        assert attention is not None
        self.embed = self.module.embed_tokens or target.embed_tokens
        self.attention = attention
        (self.group,) = set(attention.kv.groups)
        size = self.module.config.hidden_size
        self.numbers = state.adapters
        self.fused = torch.zeros(len(state.lengths), size, dtype=target.dtype, device=target.device)  # (R, H)

    def embeds(self, tokens: Tensor, positions: Tensor) -> Tensor:  # noqa: ARG002
        """The embeddings (n, H) of tokens (n,) that the draft reads at positions (n,); any token's where one is -1."""
        return self.embed(tokens)

    def extend(self, rows: PassRows, aux_states: Tensor) -> None:
        self.take_adapters(rows.owners)
        if rows.attention is not None:
            self.attention.plan(rows.attention)
        else:
            self.attention.plan_writes(rows.positions, rows.slots)
        embeds = self.embeds(rows.next_tokens, rows.positions)
        fused = self.module.fuse(aux_states)
        self.module.write_context(embeds, fused, self.attention)
        self.fused[rows.requests] = fused[rows.last]

    def propose(self, batch: DraftBatch, width: int) -> Proposal:
        self.take_adapters(batch.requests)
        if width > self.options.chain_nodes:
            return self._propose_tree(batch, width)
        return self._propose_chain(batch, width)

    def _start(self, batch: DraftBatch) -> Tensor:
        """The draft's states (B, H) at the last committed tokens."""
        self.attention.plan(batch.at(0))
        embeds = self.embeds(batch.roots, batch.places.positions[0])
        return self.module(embeds, self.fused[batch.requests], self.attention)

    def _propose_chain(self, batch: DraftBatch, width: int) -> Proposal:
        sampling = batch.sampling
        states = self._start(batch)
        chain = [batch.roots]  # tokens
        log_probs = []
        for step in range(width - 1):
            if step:
                states = self._continue(batch, chain, states)
            head_input = self._head_input(states, step, 1)
            positions = batch.places.positions[step + 2]
            values, tokens = head_topk(self.head, head_input, 1, positions, sampling, as_ids=True)
            log_probs.append(values)
            chain.append(tokens[:, 0])
        return base.chain_proposal(chain, log_probs)

    def _continue(self, batch: DraftBatch, chain: Sequence[Tensor], states: Tensor) -> Tensor:
        """The draft's states at the last of a chain's tokens (B,), roots first; `states`: those one token before."""
        self.attention.plan(batch.at(len(chain) - 1))
        return self.module(self.embed(chain[-1]), states, self.attention)

    def _head_input(self, states: Tensor, level: int, count: int) -> Tensor:  # noqa: ARG002
        """The draft's states as the head reads them (B * count, H), of the `count` last nodes, which are of `level`."""
        return self.module.head_input(states)

    def _propose_tree(self, batch: DraftBatch, width: int) -> Proposal:
        shape = self.options.shape.within(width)
        state = batch.state
        place = Place(state.pages[self.group], state.page_size, batch.requests, batch.lengths)
        candidates = Candidates.empty(len(batch.roots), shape, batch.roots.device)
        sampling = batch.sampling
        states = self._start(batch)
        positions = batch.places.positions[2]
        frontiers: list[Frontier] = []
        for level in range(shape.depth):
            if frontiers:
                states = self._expand(batch, frontiers, states)
                positions = frontiers[-1].sampled_at
            level_sampling = sampling.repeat(shape.topk) if frontiers else sampling
            head_input = self._head_input(states, level, shape.topk if frontiers else 1)
            best = head_topk(self.head, head_input, shape.topk, positions, level_sampling)
            above = frontiers[-1] if frontiers else None
            frontier = grow(candidates, above, *best, self.head.ids, place, level, level == shape.depth - 1)
            frontiers += [] if frontier is None else [frontier]
        return Proposal(*choose(candidates, batch.roots, width))

    def _expand(self, batch: DraftBatch, frontiers: Sequence[Frontier], states: Tensor) -> Tensor:
        """The draft's states (B * k, H) at the last frontier's nodes; `states` holds those of the frontier above."""
        frontier = frontiers[-1]
        first_node = (len(frontiers) - 1) * frontier.ancestors.shape[1]
        slots = KVSlots(lambda _: frontier.slots)  # of the one group that the draft has
        self.attention.plan(batch.last_nodes(frontier.positions, slots, frontier.ancestors, first_node))
        return self.module(self.embed(frontier.tokens), states[frontier.sources], self.attention, "tree")
