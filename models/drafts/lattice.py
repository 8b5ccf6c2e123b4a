"""The lattice of a block draft: the likeliest candidates of every slot, and how well each follows each of the slot
before. Whatever joins the slots of a block (heads/) is read through it, by chains and by trees.

At T > 0 scores contain the request's noise (kernels/sampling/sample.py): the best of score + T * gumbel is a sample
from softmax(score / T). Candidates are the best tokens of a slot *with* the noise, so the chain is what sampling from
the whole vocabulary gives, unless a head lifts a token that is no candidate. DFlash 2 samples among the best tokens
without noise; that leaves out what only the noise makes the best, which the target, with the same noise, may well have
sampled. LiLiCorr reads its candidates' log-probabilities as it was trained to: it takes the best without noise, and the
noise is added to its scores.

Letters: B blocks, K slots that draft, k candidates of a slot.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Lattice:
    """Scores are logits, not normalised: a chain compares candidates of one slot after one predecessor only."""

    candidates: Tensor  # (B, K, k) int64 target ids, best first by the slot alone
    start: Tensor  # (B, k) of the first slot's candidates, after the anchor
    edges: Tensor  # (B, K - 1, k, k) of candidate j of slot s + 1 after candidate i of slot s

    def tokens(self, indices: Tensor) -> Tensor:
        """Target ids (B, K) of the candidates at `indices` (B, K)."""
        return self.candidates.gather(2, indices.unsqueeze(2)).squeeze(2)


def walk(lattice: Lattice) -> Tensor:
    """The drafted chain as candidates' numbers (B, K): from left to right, in each slot the best one after the one
    chosen before."""
    indices = [lattice.start.argmax(dim=-1)]
    for edges in lattice.edges.unbind(dim=1):  # (B, k, k)
        after = edges.gather(1, indices[-1].view(-1, 1, 1).expand(-1, 1, edges.shape[2])).squeeze(1)
        indices.append(after.argmax(dim=-1))
    return torch.stack(indices, dim=1)
