"""DFLASH drafter (arXiv 2602.06036): one pass over [last token, mask, mask, ...] drafts a whole chain.

Its KV of a committed token depends on the target's states of that token alone, hence lookahead 0. The block's KV
follows the committed tokens until the next step overwrites it. The drafter keeps no state per request.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.gemm.gathered_head import head_topk
from slipstream.kernels.gemm.linear import linear
from slipstream.kernels.kv.rope import store_context
from slipstream.kernels.speculation.verify import MAX_NODES
from slipstream.models.drafts.dflash import DFlash
from slipstream.models.targets.decoder import Target
from slipstream.serve.attention.base import Backend
from slipstream.serve.drafters import base
from slipstream.serve.drafters.vocabulary import DraftVocabulary, TokenMapOptions
from slipstream.serve.options import check_draft_cache
from slipstream.serve.runner.batch import DraftBatch, PassRows, Proposal
from slipstream.serve.runner.request_state import RequestState


@dataclass(frozen=True, slots=True)
class DFlashOptions(TokenMapOptions):
    block: int | None = None
    """Most nodes that the target verifies: tokens drafted per step + 1. Default: what the draft was trained on."""
    full_block: bool = False
    """Draft the whole block even where a step verifies fewer nodes."""
    sample_from_anchor: bool | None = None
    """Whether slot 0, the anchor, predicts the token after it; for files that do not say it."""
    kv_cache_dtype: str = "auto"
    """Of the draft's KV cache: auto, as the target computes, or fp8, calibrated at start-up."""

    def __post_init__(self) -> None:
        TokenMapOptions.__post_init__(self)
        check_draft_cache(self.kv_cache_dtype)
        if self.block is not None and not 2 <= self.block <= MAX_NODES:
            raise ValueError(f"drafter.block is {self.block}; it must be between 2 and {MAX_NODES}")


class Drafter(base.NetworkDrafter):
    Options, Network = DFlashOptions, DFlash

    def __init__(self, module: DFlash, vocabulary: DraftVocabulary, options: DFlashOptions) -> None:
        config = module.config
        self.module, self.vocabulary = module, vocabulary
        self.layers: dict[int, list[int]] = {}  # by KV group
        self.first_slot = 0 if config.sample_from_anchor else 1  # block position that drafts the first token
        trained = config.block_size + 1 - self.first_slot
        if options.block is not None and options.block > trained:
            raise ValueError(
                f"drafter.block is {options.block}; this draft was trained on blocks of {config.block_size} and offers "
                f"at most {trained} nodes"
            )
        nodes = options.block or min(trained, MAX_NODES)
        self.full_slots = nodes - 1 + self.first_slot if options.full_block else 0
        self.aux_layers = config.aux_layers
        self.kv = tuple(layer.attention for layer in config.layers)
        self.widths = (*(2**power for power in range(6) if 2**power < nodes), nodes)

    def scratch(self, width: int) -> int:
        return self._slots(width) if width > 1 else 0

    def attach(self, target: Target, state: RequestState, attention: Backend | None) -> None:
        assert attention is not None
        self.embed, self.attention, groups = target.embed_tokens, attention, attention.kv.groups
        own = {group: [layer for layer, one in enumerate(groups) if one == group] for group in attention.kv.caches}
        if own != self.layers:  # else as at the last call
            self.layers, self.contexts = own, {group: self.module.stack_context(own[group]) for group in own}

    def extend(self, rows: PassRows, aux_states: Tensor) -> None:
        self.vocabulary.observe(rows)
        context, eps = self.module.fuse(aux_states), self.module.config.rms_norm_eps
        rope = self.attention.ropes[0]
        for group, (weight, bias, k_norm) in self.contexts.items():
            where = rows.positions, rows.slots.of(group), self.attention.kv.flat(group)
            scales = self.attention.kv.scales.get(group)
            store_context(linear(context, weight, bias), k_norm, eps, rope.cos, rope.sin, *where, scales)

    def propose(self, batch: DraftBatch, width: int) -> Proposal:
        if width == 1:
            return super().propose(batch, width)
        roots, B = batch.roots, len(batch.roots)
        slots = self._slots(width)
        block = batch.uniform(batch.lengths, slots, spare=slots)
        self.attention.plan(block)
        hidden = self.module(self.embed(self.module.block_tokens(roots, slots).flatten()), self.attention)
        drafting = slice(self.first_slot, self.first_slot + width - 1)
        hidden, own = (x.unflatten(0, (B, slots))[:, drafting].flatten(0, 1) for x in (hidden, block.positions))
        positions = own if self.first_slot else own + 1  # of the drafted tokens
        log_probs, columns = head_topk(self.vocabulary.head, hidden, 1, positions, batch.sampling.repeat(width - 1))
        drafted = self.vocabulary.target_ids(columns).view(B, width - 1)
        log_probs = torch.cat((base.root_scores(B, roots.device), log_probs.view(B, width - 1)), dim=1)
        tokens, parents = torch.cat((roots[:, None], drafted), dim=1), base.chain_parents(B, width, roots.device)
        return Proposal(tokens, parents, log_probs.cumsum(dim=1))

    def _slots(self, width: int) -> int:
        """Block size needed for `width` nodes."""
        return self.full_slots or width - 1 + self.first_slot
