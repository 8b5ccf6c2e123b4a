"""Drafts by several MTP modules in turn: token i by module i, and those beyond the last module by the last one.

Row t of module i reads the token at t + 1 + i and the state of module i - 1 at t (models/drafts/mtp.py), and its KV
lies at slot t. Of a text whose last token, the root, is at n, module i has rows up to n - 1 - i: it lags i rows behind
the target. So a pass extends module i by rows that begin i earlier than its own. The state of module i - 1 at the first
of them is one of the pass before, which each request keeps (`ends`).

After a prefix hit the pages hold the first rows of all modules, since the KV at slot t depends on tokens up to t + K
(lookahead K). No module computes them again, nor could it: the lag grows from 0 with the first rows of a request.

A proposal's node at depth d below the root is row n - 1 - i + d of module i, which reads module i - 1 at its parent.
Module i runs once, over all nodes of depth 1 to i, and knows then the children of the last ones. The last module goes
on level by level and reads its own states. Of a text shorter than i module i has no rows for the first depths: they are
hidden.
Letters: B requests, S segments and T rows of a pass, K modules, k frontier nodes of a level, R request slots, H hidden
size, n nodes, m states.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.speculation.draft_tree import Frontier
from slipstream.models.drafts.base import DraftConfig
from slipstream.models.drafts.mtp import MTP, MTPConfig, MTPModule
from slipstream.models.targets.decoder import Target
from slipstream.serve.attention.base import Backend
from slipstream.serve.drafters import base
from slipstream.serve.drafters.autoregressive import AutoregressiveDrafter
from slipstream.serve.drafters.options import TreeOptions
from slipstream.serve.drafters.vocabulary import DraftVocabulary
from slipstream.serve.runner.batch import AttentionMetadata, DraftBatch, PassRows
from slipstream.serve.runner.request_state import KVSlots, RequestState


class Nodes(NamedTuple):
    """Nodes of a proposal, level by level, that a module reads at once."""

    tokens: Tensor  # (B, n) int64
    ancestors: Tensor  # (B, n) int64 bit masks over all nodes below the root, their own included
    sources: Tensor  # (B, n) int64 place of each node's parent among the states that they read
    depths: Tensor  # (n,) int64, 1 of the root's children
    level: int  # the depth of the last ones
    width: int  # nodes of a level

    @property
    def first(self) -> int:
        """The nodes before them."""
        return self.level * self.width - self.tokens.shape[1]


class ModulesDrafter(AutoregressiveDrafter):
    """With one module as EAGLE's network drafts."""

    module: MTP

    def __init__(self, module: MTP, vocabulary: DraftVocabulary, options: TreeOptions) -> None:
        super().__init__(module, vocabulary, options)
        self.in_turn = module.in_turn
        self.needs_first = len(self.in_turn) > 1

    @classmethod
    def plan_network(cls, options: TreeOptions, config: DraftConfig) -> base.DraftPlan:
        assert isinstance(config, MTPConfig)
        if config.num_modules > 1 and (isinstance(options.window, int) or config.layer_spec.attention.window):
            raise ValueError(
                f"the draft has {config.num_modules} MTP modules, which draft in turn, and a window, with which they "
                "are not served: leave drafter.window out, or name another draft"
            )
        return replace(super().plan_network(options, config), lookahead=config.num_modules)

    def attach(self, target: Target, state: RequestState, attention: Backend | None) -> None:
        super().attach(target, state, attention)
        self.starts = torch.zeros_like(state.lengths)  # (R,) first place that this run of a request has computed
        count = len(self.in_turn) - 1
        self.ends = self.fused.new_zeros(count, *self.fused.shape)  # (K - 1, R, H) states of each module's last row

    def extend(self, rows: PassRows, aux_states: Tensor) -> None:
        if len(self.in_turn) == 1:
            super().extend(rows, aux_states)
            return
        self.take_adapters(rows.owners)
        metadata = rows.attention
        assert metadata is not None
        assert metadata.segments is not None
        assert rows.are_first is not None
        begins = metadata.segments.starts.long()  # (S + 1,)
        starts = torch.where(rows.are_first, metadata.lengths, self.starts[rows.requests].long())
        self.starts[rows.requests] = starts.int()
        computed = metadata.lengths - starts  # (S,) rows of earlier passes
        row = torch.arange(len(aux_states), device=aux_states.device)
        segment = torch.searchsorted(begins[1:], row, right=True).clamp(max=len(starts) - 1)
        states = self.module.fuse(aux_states)
        ends = []
        lag = torch.zeros_like(computed)
        for index, module in enumerate(self.in_turn):
            if index:
                is_first = (row == begins[segment])[:, None]
                before = torch.where(is_first, self.ends[index - 1][rows.requests[segment]], states.roll(1, 0))
                is_behind = (computed >= index)[segment, None]  # a row more than the module before
                states = torch.where(is_behind, before, states)
                lag = computed.clamp(max=index)
            ahead = index - lag  # (S,) how much further than the pass's rows their tokens are
            tokens = rows.next_tokens[(row + ahead[segment]).clamp(max=len(row) - 1)]
            self.attention.plan(lagging(metadata, lag, segment, row < begins[-1]))
            embeds = self.embeds(tokens, self.attention.positions)
            if index == len(self.in_turn) - 1:
                module.write_context(embeds, states, self.attention)
                break
            states = module(embeds, states, self.attention)
            last = rows.last - ahead
            former = self.ends[index][rows.requests]
            ends.append(torch.where((last >= begins[:-1])[:, None], states[last.clamp(min=0)], former))
        for index, states in enumerate(ends):
            self.ends[index][rows.requests] = states

    def _start(self, batch: DraftBatch) -> Tensor:
        """The states (B, 1, H) at the last committed tokens, which `extend` has computed."""
        return self.ends[0][batch.requests][:, None] if self.needs_first else super()._start(batch)

    def _head_input(self, states: Tensor, level: int, count: int) -> Tensor:
        if not self.needs_first:
            return super()._head_input(states, level, count)
        return self._module(level).head_input(states[:, -count:].flatten(0, 1))

    def _continue(self, batch: DraftBatch, chain: Sequence[Tensor], states: Tensor) -> Tensor:
        if not self.needs_first:
            return super()._continue(batch, chain, states)
        level = len(chain) - 1
        skipped = level - 1 if level >= len(self.in_turn) else 0
        depths = torch.arange(skipped + 1, level + 1, device=states.device)
        tokens = torch.stack([token.long() for token in chain[skipped + 1 :]], dim=1)
        ancestors = ((2 << depths - 1) - 1).expand_as(tokens)
        sources = (depths - 1 - skipped).expand_as(tokens)
        return self._read(batch, Nodes(tokens, ancestors, sources, depths, level, 1), states[:, -len(depths) :])

    def _expand(self, batch: DraftBatch, frontiers: Sequence[Frontier], states: Tensor) -> Tensor:
        if not self.needs_first:
            return super()._expand(batch, frontiers, states)
        B, k = frontiers[0].ancestors.shape
        level = len(frontiers)
        skipped = level - 1 if level >= len(self.in_turn) else 0
        read = frontiers[skipped:]
        sources = []
        for depth, frontier in enumerate(read, skipped):
            if depth == 0:
                sources.append(torch.zeros(B, k, dtype=torch.int64, device=states.device))  # the root
            else:
                # a remainder, so that the zeros of a dry run are places, too
                parents = frontier.sources.view(B, k) % k
                sources.append(parents + (0 if skipped else 1 + (depth - 1) * k))
        nodes = Nodes(
            tokens=torch.cat([frontier.tokens.view(B, k) for frontier in read], dim=1),
            ancestors=torch.cat([frontier.ancestors for frontier in read], dim=1),
            sources=torch.cat(sources, dim=1),
            depths=torch.arange(skipped + 1, level + 1, device=states.device).repeat_interleave(k),
            level=level,
            width=k,
        )
        return self._read(batch, nodes, states[:, -k:] if skipped else states)

    def _module(self, level: int) -> MTPModule:
        return self.in_turn[min(level, len(self.in_turn) - 1)]

    def _read(self, batch: DraftBatch, nodes: Nodes, states: Tensor) -> Tensor:
        """Runs the module of a level over nodes. states (B, m, H) as the level above returned them -> this module's: at
        the root and all nodes, or of the last module at the nodes alone."""
        B, n = nodes.tokens.shape
        count = len(self.in_turn)
        index = min(nodes.level, count - 1)
        lengths = (batch.lengths - index).clamp(min=0)
        places = lengths[:, None] + nodes.first + torch.arange(n, device=lengths.device)
        positions = (batch.lengths[:, None] + nodes.depths - (index + 1)).clamp(min=0).flatten()
        slots = KVSlots(lambda group: batch.state.slots(batch.requests[:, None], places, group).flatten())
        hidden = (index - batch.lengths).clamp(min=0)[:, None] * nodes.width  # nodes without a row
        self_bits = 1 << (places - lengths[:, None])
        ancestors = nodes.ancestors & (torch.full_like(hidden, -1) << hidden) | self_bits
        of_rows = replace(batch, lengths=lengths)
        self.attention.plan(of_rows.last_nodes(positions, slots, ancestors, nodes.first))
        request = torch.arange(B, device=lengths.device)[:, None]
        above = states[request, nodes.sources].flatten(0, 1)
        embeds = self.embeds(nodes.tokens.flatten(), positions)
        drafted = self.in_turn[index](embeds, above, self.attention, "tree").unflatten(0, (B, n))
        return drafted if index == count - 1 else torch.cat((self.ends[index][batch.requests][:, None], drafted), dim=1)


def lagging(metadata: AttentionMetadata, lag: Tensor, segment: Tensor, in_use: Tensor) -> AttentionMetadata:
    """Describes rows (T,) of a pass that begin `lag` (S,) places earlier than its own. segment (T,): of each row."""
    assert metadata.segments is not None
    lengths = metadata.lengths - lag
    positions = (metadata.positions - lag[segment]).clamp(min=0)
    requests = metadata.requests[segment]

    def find(group: int) -> Tensor:
        return torch.where(in_use, metadata.state.slots(requests, positions, group), 0)

    return replace(
        metadata,
        lengths=lengths,
        positions=positions,
        slots=KVSlots(find),
        segments=metadata.segments._replace(lengths=lengths),
        works={},
    )
