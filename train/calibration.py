"""Calibration of a confidence head: a temperature and a bias for each slot, so that a product of its probabilities is
the share of chains that get so far.

DSpark (arXiv 2607.05147, section 4) fits temperatures alone, from left to right. They cannot shift a probability, which
the head needs: it learns how probably rejection sampling accepts a draft, and drafts are accepted greedily or with
shared noise. So each slot has two numbers, as Platt (1999) has, fitted by the likelihood of the product up to it.

Letters: N blocks, K slots.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from slipstream.models.drafts.dflash import DFlash
from slipstream.models.drafts.heads.confidence import ConfidenceConfig, ConfidenceHead

FIELDS = ("confidence_temperatures", "confidence_biases")
NUM_BINS = 15
STRENGTH = 30.0  # of the prior that the head is right: precision of both numbers around 0
MOST_STEPS = 60


class Calibration(NamedTuple):
    """A slot's probability is sigmoid(logit / temperature + bias)."""

    temperatures: Tensor  # (K,) fp32, positive
    biases: Tensor  # (K,) fp32

    @classmethod
    def none(cls, num_slots: int) -> Self:
        return cls(torch.ones(num_slots), torch.zeros(num_slots))

    def padded(self, num_slots: int) -> "Calibration":
        """With the last slot's numbers for further ones."""
        missing = num_slots - len(self.temperatures)
        return Calibration(*(torch.cat((x, x[-1:].expand(missing))) for x in self))


@dataclass(frozen=True, slots=True)
class Confidences:
    """A head's logits of drafted chains, and how they fared. On the host."""

    logits: Tensor  # (N, K) before calibration
    accepted: Tensor  # (N,) int64 leading tokens that the text has, too
    counts: Tensor  # (N, K) bool: the text goes on so far

    @classmethod
    def joined(cls, parts: "list[Confidences]") -> "Confidences":
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in ("logits", "accepted", "counts")))

    def of(self, rows: slice) -> "Confidences":
        return Confidences(self.logits[rows], self.accepted[rows], self.counts[rows])

    def survival(self, calibration: Calibration) -> Tensor:
        """(N, K) probability that all slots up to each are accepted."""
        temperatures, biases = calibration
        return torch.sigmoid(self.logits / temperatures + biases).cumprod(dim=1)

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


def chain_error(confidences: Confidences, calibration: Calibration) -> float:
    """The calibration error of all chains' survival, over all slots that count."""
    counts = confidences.counts
    return calibration_error(confidences.survival(calibration)[counts], confidences.survived[counts])


def fit_calibration(confidences: Confidences) -> Calibration:
    """The numbers of each slot, from left to right: those with the largest likelihood of the product up to it. With few
    chains they stay near 1 and 0."""
    columns = list[Tensor]()
    before = torch.ones(len(confidences.logits), dtype=torch.float64)
    for slot, logits in enumerate(confidences.logits.double().unbind(dim=1)):
        counts = confidences.counts[:, slot]
        numbers = _fit_slot(logits[counts], before[counts], confidences.survived[counts, slot])
        columns.append(numbers)
        before = before * _probabilities(logits, numbers)
    log_temperatures, biases = torch.stack(columns, dim=1).float()
    return Calibration(log_temperatures.exp(), biases)


class Calibrator:
    """Calibrates the confidence head of a draft in every evaluation."""

    def __init__(self, draft: DFlash, head: ConfidenceHead) -> None:
        self.draft = draft
        self.head = head
        # Of the evaluation at hand: number of a batch's first row, and what the head said there.
        self.parts: list[tuple[int, Confidences]] = []

    def add(self, number: int, hidden: Tensor, previous: Tensor, accepted: Tensor, counts: Tensor) -> None:
        """Asks the head at states (N, K, H), after target ids (N, K), of drafted chains that fared as `accepted` (N,)
        and `counts` (N, K) say. `number`: of the first row of their batch."""
        logits = self.head(hidden, previous).float()
        self.parts.append((number, Confidences(*(x.cpu() for x in (logits, accepted, counts)))))  # sync

    def end(self, gather: Callable[[list[Any]], list[Any]]) -> dict[str, float]:
        """Gives the draft what fits all chains. The metrics `confidence_error` and `confidence_error_before` are
        measured on their second half, with what fits the first half. Chains are in the order of their rows, however
        many processes share them."""
        parts = gather(self.parts)
        self.parts = []
        if not parts:
            return {}
        confidences = Confidences.joined([part for _, part in sorted(parts, key=lambda part: part[0])])
        half = len(confidences.accepted) // 2
        none = Calibration.none(confidences.logits.shape[1])
        second_half = confidences.of(slice(half, None))
        fitted = fit_calibration(confidences).padded(self.draft.config.num_proposals)
        self.set(dict(zip(FIELDS, (numbers.tolist() for numbers in fitted), strict=True)))
        error = chain_error(second_half, fit_calibration(confidences.of(slice(0, half))))
        return {"confidence_error": error, "confidence_error_before": chain_error(second_half, none)}

    def fields(self) -> dict[str, list[float]]:
        """The fitted fields of config.json; none before the first evaluation."""
        values = {name: list(getattr(self.head.config, name)) for name in FIELDS}
        return {name: numbers for name, numbers in values.items() if numbers}

    def set(self, fields: Mapping[str, list[float]]) -> None:
        self.head.config = ConfidenceConfig(**{name: tuple(numbers) for name, numbers in fields.items()})
        self.draft.config = self.draft.config.with_head(self.head.config)


def _fit_slot(logits: Tensor, before: Tensor, outcomes: Tensor) -> Tensor:
    """(2,) logarithm of the temperature, and bias, of logits (M,) after products `before` (M,); outcomes (M,) bool."""
    numbers = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([numbers], max_iter=MOST_STEPS, line_search_fn="strong_wolfe")
    targets = outcomes.double()

    def loss() -> Tensor:
        optimizer.zero_grad()
        products = (before * _probabilities(logits, numbers)).clamp(1e-6, 1 - 1e-6)
        entropy = torch.nn.functional.binary_cross_entropy(products, targets, reduction="sum")
        total = entropy + STRENGTH / 2 * numbers.square().sum()
        total.backward()
        return total

    with torch.enable_grad():
        optimizer.step(loss)
    return numbers.detach()


def _probabilities(logits: Tensor, numbers: Tensor) -> Tensor:
    return torch.sigmoid(logits / numbers[0].exp() + numbers[1])
