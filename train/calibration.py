"""Calibration of a confidence head: one temperature for each slot, so that a product of its probabilities is the share
of chains that get so far (DSpark, arXiv 2607.05147, section 4).

Letters: N blocks, K slots.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_BINS = 15
TEMPERATURES = torch.logspace(-1, 1, 81)  # the grid: 0.1 .. 10


@dataclass(frozen=True, slots=True)
class Confidences:
    """What a head said of drafted chains, and how they fared. On the host."""

    logits: Tensor  # (N, K) before calibration
    accepted: Tensor  # (N,) int64 leading tokens that the text has, too
    counts: Tensor  # (N, K) bool: the text goes on so far

    @classmethod
    def joined(cls, parts: "list[Confidences]") -> "Confidences":
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in ("logits", "accepted", "counts")))

    def of(self, rows: slice) -> "Confidences":
        return Confidences(self.logits[rows], self.accepted[rows], self.counts[rows])

    def survival(self, temperatures: Tensor) -> Tensor:
        """(N, K) probability that all slots up to each are accepted; temperatures (K,)."""
        return torch.sigmoid(self.logits / temperatures).cumprod(dim=1)

    @property
    def survived(self) -> Tensor:
        """(N, K) bool: whether they were."""
        return self.accepted.unsqueeze(1) > torch.arange(self.logits.shape[1])


def calibration_error(probabilities: Tensor, outcomes: Tensor) -> float:
    """Expected calibration error (Naeini et al. 2015) of probabilities (M,) against outcomes (M,): the mean over them
    of the gap between mean probability and share of true outcomes in their bin, of NUM_BINS equal ones."""
    if not len(probabilities):
        return 0.0
    bins = (probabilities * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    gaps = torch.zeros(NUM_BINS, dtype=torch.float64)
    gaps.index_add_(0, bins, probabilities.double() - outcomes.double())
    return float(gaps.abs().sum() / len(probabilities))


def chain_error(found: Confidences, temperatures: Tensor) -> float:
    """The calibration error of all chains' survival, over all slots that count."""
    return calibration_error(found.survival(temperatures)[found.counts], found.survived[found.counts])


def fit_temperatures(found: Confidences) -> Tensor:
    """(K,) the temperatures, from left to right: at each slot the one of the grid with the least calibration error of
    the product up to it; of equal ones the nearest to 1."""
    count = found.logits.shape[1]
    chosen, before = torch.ones(count), torch.ones(len(found.logits))
    grid = TEMPERATURES[TEMPERATURES.log().abs().argsort()]
    for slot in range(count):
        here = found.counts[:, slot]
        outcomes = found.survived[here, slot]
        products = [before * torch.sigmoid(found.logits[:, slot] / temperature) for temperature in grid]
        errors = [calibration_error(product[here], outcomes) for product in products]
        best = min(range(len(grid)), key=errors.__getitem__)
        chosen[slot], before = grid[best], products[best]
    return chosen
