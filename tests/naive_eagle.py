"""An EAGLE draft written out from its public tensors, in fp64, with nothing kept between calls: the tests' oracle."""

from pathlib import Path

import torch
from torch import Tensor

from slipstream.models.drafts.base import DraftNetwork
from slipstream.tests.naive_eagle3 import NaiveEagle3


class NaiveEagle(NaiveEagle3):
    """`embeddings` and `head` (V, H) are the target's; features are its states after the final norm."""

    attention = "layers.0.self_attn"

    def __init__(self, draft: Path | DraftNetwork, embeddings: Tensor, head: Tensor):
        self.target_ids = torch.arange(len(head))
        super().__init__(draft, embeddings)
        self.head = head.double()[self.target_ids]

    def fuse(self, aux_states: Tensor) -> Tensor:
        return aux_states.double()

    def states(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        residual, activations = self.parts(embeds, hidden)
        return residual + activations @ self.weights["layers.0.mlp.down_proj.weight"].T

    def parts(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The residual (n, H), to which down_proj's output is added, and down_proj's input (n, I)."""
        joined = self._project(torch.cat((embeds, hidden), dim=-1), "fc")
        x = joined + self._attention(joined)
        return x, self._gated(x, "layers.0")

    def head_input(self, states: Tensor) -> Tensor:
        return states.double()

    def logits(self, states: Tensor) -> Tensor:
        return self.head_input(states) @ self.head.T
