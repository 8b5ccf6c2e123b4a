"""The lattice of a block draft: the likeliest candidates of every slot, and how well each follows each of the slot
before. Whatever joins the slots of a block (block_heads.py) is read through it, by chains and by trees.

Letters: B blocks, K slots that draft, k candidates of a slot.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.sampling.sample import gumbel


@dataclass(frozen=True, slots=True)
class Lattice:
    """Scores are logits, not normalised: a chain compares candidates of one slot after one predecessor only."""

    candidates: Tensor  # (B, K, k) int64 target ids, best first by the logits of the slot alone
    start: Tensor  # (B, k) of the first slot's candidates, after the anchor
    edges: Tensor  # (B, K - 1, k, k) of candidate j of slot s + 1 after candidate i of slot s

    def tokens(self, chosen: Tensor) -> Tensor:
        """Target ids (B, K) of the candidates `chosen` (B, K)."""
        return self.candidates.gather(2, chosen.unsqueeze(2)).squeeze(2)


@dataclass(frozen=True, slots=True)
class WalkNoise:
    """The requests' noise, as everywhere (kernels/sampling/sample.py)."""

    temperature: Tensor  # (B,) fp32; 0 is greedy
    keys: Tensor  # (B,) int64
    positions: Tensor  # (B,) int64, of the tokens that the first slots draft


def walk(lattice: Lattice, noise: WalkNoise | None = None) -> Tensor:
    """The drafted chain as candidates' numbers (B, K): from left to right, in each slot the best one after the one
    chosen before; with noise the best of score + T * gumbel(key, position, token id). Without noise it is greedy."""
    chosen: list[Tensor] = []
    for slot in range(lattice.candidates.shape[1]):
        if chosen:
            edges = lattice.edges[:, slot - 1]  # (B, k, k)
            scores = edges.gather(1, chosen[-1].view(-1, 1, 1).expand(-1, 1, edges.shape[2])).squeeze(1)
        else:
            scores = lattice.start
        if noise is not None:
            drawn = gumbel(noise.keys, noise.positions + slot, lattice.candidates[:, slot])
            scores = scores + noise.temperature.unsqueeze(1) * drawn
        chosen.append(scores.argmax(dim=-1))
    return torch.stack(chosen, dim=1)
