"""Passes of the target over packed rows, for their states alone: no KV cache, no tokens.

They compute what training computes with the target in its own process (models/targets/frozen.py), with the weights that
serve, between two steps of the engine.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.models.targets.decoder import Target
from slipstream.models.targets.packed_attention import PackedAttention
from slipstream.serve.engine.team import Team


class PackedText(NamedTuple):
    """Packed rows, on the host."""

    tokens: Tensor  # (B, S) int32
    positions: Tensor  # (B, S) int32, from 0 in each document
    layers: tuple[int, ...]  # distinct ids of states, as in models/targets/config.py


class StatePasses:
    """The target, or a rank's part of it. `team`: the other ranks, which compute what this one does."""

    def __init__(self, target: Target, team: Team | None = None) -> None:
        self.target = target
        self.team = team
        self._attention = PackedAttention()

    def compute(self, text: PackedText) -> tuple[Tensor, Tensor]:
        """The states (B * S, K, Ht) of the text's layers and those after the final norm (B * S, Ht), on the device."""
        if self.team is None:
            return self._compute(text)
        with self.team.guard():
            self.team.check()
            self.team.order("compute_states", text)
            return self._compute(text)

    @torch.inference_mode()
    def _compute(self, text: PackedText) -> tuple[Tensor, Tensor]:
        device = self.target.device
        self._attention.plan(text.positions.to(device).long())
        final, states = self.target(text.tokens.to(device).long().flatten(), self._attention, text.layers)
        assert states is not None
        return states.unflatten(1, (len(text.layers), -1)), final
