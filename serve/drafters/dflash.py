"""DFLASH drafter (arXiv 2602.06036): one pass over [last token, mask, mask, ...] drafts a chain or a tree.

The pass gives each slot's best tokens. The head that joins the slots (models/drafts/heads/) scores each after those of
the slot before; a chain is a walk over these scores, a tree grows by them.
Its KV of a committed token depends on the target's states of that token alone, hence lookahead 0. The block's KV
follows the committed tokens until the next step overwrites it.
Letters: B requests, N nodes of a proposal, K slots that draft, k candidates of a slot, H hidden size, R request slots.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.gemm.gathered_head import head_topk
from slipstream.kernels.gemm.linear import linear
from slipstream.kernels.kv.rope import store_context
from slipstream.kernels.norm import rms_norm
from slipstream.kernels.sampling.sample import Sampling
from slipstream.kernels.speculation.lattice import add_noise, grow_lattice, walk_lattice
from slipstream.models.drafts.dflash import DFlash, DFlashConfig
from slipstream.models.drafts.heads.base import Block, Candidates, joined_scores
from slipstream.models.drafts.heads.confidence import ConfidenceHead
from slipstream.models.drafts.heads.markov import MarkovHead
from slipstream.models.targets.decoder import Target
from slipstream.serve.attention.base import Backend
from slipstream.serve.drafters import base
from slipstream.serve.drafters.options import AdmitBy, DFlashOptions, widths_up_to
from slipstream.serve.drafters.vocabulary import DraftVocabulary
from slipstream.serve.runner.batch import DraftBatch, PassRows, Proposal
from slipstream.serve.runner.request_state import RequestState


class Slots(NamedTuple):
    """The slots of a batch that draft."""

    requests: Tensor  # (B,) int64 request slots
    roots: Tensor  # (B,) int64
    hidden: Tensor  # (B, K, H) final states
    positions: Tensor  # (B * K,) int64 of the tokens that they draft
    sampling: Sampling  # with a row for each of them


class Drafter(base.NetworkDrafter):
    Network = DFlash

    def __init__(self, module: DFlash, vocabulary: DraftVocabulary, options: DFlashOptions) -> None:
        config = module.config
        self.module = module
        self.join = module.joining
        self.confidence = module.head(ConfidenceHead)
        self.vocabulary = vocabulary
        self.options = options
        self.topk = options.topk
        self.head = replace(vocabulary.head, softcap=config.final_logit_softcapping)
        self.layers: list[list[int]] = []  # by cache
        self.last_context: Tensor | None = None  # (R, H) of each request's last committed token, for heads that read it
        self.first_slot = config.first_slot
        self.depth = options.depth(config)
        self.branches = options.topk > 1
        self.candidates = min(self._num_candidates(options), vocabulary.num_tokens)
        if options.topk > self.candidates:
            raise ValueError(
                f"drafter.topk is {options.topk}; the draft has {self.candidates} candidates a slot to choose from"
            )
        self.admit_by = self._admission(options)
        self.aux_layers = config.aux_layers
        self._prepare_heads(options)

    @classmethod
    def plan_network(cls, options: DFlashOptions, config: DFlashConfig) -> base.DraftPlan:
        nodes = options.num_nodes(config)
        return base.DraftPlan(
            widths=widths_up_to(nodes),
            scratch=(0, 0, *(options.num_slots(config, width) for width in range(2, nodes + 1))),
            branches=options.topk > 1,
        )

    def _num_candidates(self, options: DFlashOptions) -> int:
        """k."""
        if self.join is None:
            return options.topk
        return options.markov_candidates if isinstance(self.join, MarkovHead) else self.module.config.num_candidates

    def _admission(self, options: DFlashOptions) -> AdmitBy:
        if options.admit_by == "confidence" and self.confidence is None:
            raise ValueError(
                "drafter.admit_by is confidence; this draft has no confidence head: leave it out or give candidates "
                "or position"
            )
        return options.admit_by or ("candidates" if self.confidence is None else "confidence")

    def keep_tokens(self, module: DFlash) -> None:
        """Keeps what heads hold of the tokens that a token map names."""
        if self.options.token_map is not None:
            assert self.head.ids is not None
            ids = self.head.ids.to(next(module.parameters()).device)
            for head in module.heads:
                head.keep(ids)

    def _prepare_heads(self, options: DFlashOptions) -> None:
        self.keep_tokens(self.module)
        for head in self.module.heads:
            if head.by_token and self.vocabulary.recent is not None:
                raise ValueError(
                    f"drafter.token_map_dynamic is {options.token_map_dynamic}; the tokens of a draft with "
                    f"{head.Config.option} are fixed when it is loaded: leave the option out"
                )
            head.prepare()

    def attach(self, target: Target, state: RequestState, attention: Backend | None) -> None:
        assert attention is not None
        self.numbers = state.adapters
        self.embed = target.embed_tokens
        self.attention = attention
        places = attention.kv.places
        layers = [
            [layer for layer, (cache, _) in enumerate(places) if cache == index]
            for index in range(len(attention.kv.caches))
        ]
        if layers != self.layers:  # else as at the last call
            self.contexts = [self.module.stack_context(members) for members in layers]
            self.layers = layers
        if self.join is not None and self.join.reads_context:
            sizes = len(state.lengths), self.module.config.hidden_size
            self.last_context = torch.zeros(sizes, dtype=target.dtype, device=target.device)

    def extend(self, rows: PassRows, aux_states: Tensor) -> None:
        self.take_adapters(rows.owners)
        context = self.module.fuse(aux_states)
        eps = self.module.config.rms_norm_eps
        if self.last_context is not None:
            self.last_context[rows.requests] = context[rows.last]
        rope = self.attention.ropes[0]
        for cache, (weight, bias, k_norm, norm, change) in zip(self.attention.kv.caches, self.contexts, strict=True):
            slots = rows.slots.of(cache.group)
            x = context if norm is None else rms_norm(context, norm, eps)
            kv = linear(x, weight, bias)
            kv = kv if change is None else change(kv, x)
            store_context(kv, k_norm, eps, rope.cos, rope.sin, rows.positions, slots, cache.flat, cache.scales)

    def propose(self, batch: DraftBatch, width: int) -> Proposal:
        if width == 1:
            return super().propose(batch, width)
        self.take_adapters(batch.requests)
        proposal = self._join(self._draft(batch, width), width)
        if self.admit_by != "position":
            return proposal
        return replace(proposal, scores=torch.where(proposal.scores > -torch.inf, 0.0, proposal.scores))

    def _join(self, slots: Slots, width: int) -> Proposal:
        """A chain or a tree of `width` nodes."""
        candidates = self._find(slots)
        values = candidates.values
        tokens = candidates.tokens
        roots = slots.roots
        scores = joined_scores(self.join, self._block(slots), candidates)
        confidence = None
        if self.confidence is not None and self.admit_by == "confidence":
            confidence = self.confidence.confidence(slots.hidden)
        if self.branches:
            return Proposal(*grow_lattice(scores, tokens, roots, values, self.topk, width, confidence))
        chain, reached = walk_lattice(scores, tokens, roots, values, confidence)
        return Proposal(chain, base.chain_parents(len(chain), width, chain.device), reached)

    def _block(self, slots: Slots) -> Block:
        """Returns what heads read of the slots."""
        context = None if self.last_context is None else self.last_context[slots.requests]
        noise = None if slots.sampling.temperature is None else partial(noise_of, slots)
        return Block(slots.roots, slots.hidden, context, self.embed, noise)

    def _draft(self, batch: DraftBatch, width: int) -> Slots:
        """The network's pass over the slots that `width` nodes need."""
        roots = batch.roots
        B = len(batch.roots)
        slots = self.options.num_slots(self.module.config, width)
        metadata = batch.uniform(batch.lengths, slots, spare=slots)
        self.attention.plan(metadata)
        embeds = self.embed(self.module.block_tokens(roots, slots).flatten())
        hidden = self.module(embeds, self.attention, slots)
        K = min(width - 1, self.depth)
        drafting = slice(self.first_slot, self.first_slot + K)
        hidden, positions = (x.unflatten(0, (B, slots))[:, drafting].contiguous() for x in (hidden, metadata.positions))
        positions = positions if self.first_slot else positions + 1  # of the drafted tokens
        return Slots(batch.requests, roots, hidden, positions.flatten(), batch.sampling.repeat(K))

    def _find(self, slots: Slots) -> Candidates:
        hidden = slots.hidden.flatten(0, 1)
        factor = self.module.config.output_multiplier
        hidden = hidden if factor == 1 else hidden * factor
        sampling = slots.sampling
        if self.join is not None and not self.join.is_noisy:
            sampling = replace(sampling, temperature=None, filters=None)
        best = head_topk(self.head, hidden, self.candidates, slots.positions, sampling)
        values, columns = (x.unflatten(0, slots.hidden.shape[:2]) for x in best)
        return Candidates(values, columns, self.vocabulary.target_ids(columns))


def noise_of(slots: Slots, candidates: Candidates) -> Tensor:
    """(B, K, k) fp32 that the requests add to the candidates' scores."""
    noise = torch.zeros_like(candidates.values).flatten(0, 1)
    noise = add_noise(noise, candidates.tokens.flatten(0, 1), slots.positions, slots.sampling)
    return noise.view_as(candidates.values)
