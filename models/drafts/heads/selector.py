"""DFlash 2's candidate selector: a score for every pair of neighbouring candidates.

Losses, over a slot's candidates after the text's token before:

    selector_ce   cross-entropy against the text
    selector_tv   total variation to the target's distribution over the same candidates

The text's token takes the place of the weakest candidate where it is not among them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.kernels.speculation.lattice import Factors
from slipstream.models.drafts.heads.base import FactoredHead, Head, HeadLosses, TokenLosses, TrainedSlots
from slipstream.models.drafts.heads.config import BlockSizes, HeadConfig, check_candidates, check_rank
from slipstream.models.layers.linear import Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectorConfig(HeadConfig):
    option = "selector_rank"
    field = "selector_rank"
    joins = True
    architecture = "DFlash2DraftModel"
    projector = "dflash2"

    selector_rank: int
    selector_top_k: int = 16  # candidates of a slot

    @property
    def num_candidates(self) -> int:
        return self.selector_top_k

    def check(self, sizes: BlockSizes) -> None:
        check_rank("selector_rank", self.selector_rank)
        check_candidates(self.selector_top_k, sizes)


class CandidateSelector(FactoredHead):
    """Scores a candidate b after a predecessor a at a slot with state h, `*` elementwise:

        score(a, b) = logit(b) + < A[a] * (W h), C[b] >

    Predecessors are target ids, since any token may be the anchor; successors are the draft's.
    """

    Config = SelectorConfig
    name = "candidate_selector"
    by_token = ("successor_codebook",)
    trains_candidates = True
    is_taught = True
    loss_weights = {"ce": 0.1, "selector_ce": 0.1, "selector_tv": 0.9}

    def __init__(self, config: SelectorConfig, sizes: BlockSizes, heads: Sequence[Head]) -> None:
        super().__init__(config, sizes, heads)
        rank = config.selector_rank
        self.predecessor_codebook = nn.Parameter(torch.randn(sizes.vocab_size, rank))  # A
        self.successor_codebook = nn.Parameter(torch.zeros(sizes.num_tokens, rank))  # C
        self.hidden_projection = Linear(sizes.hidden_size, rank)  # W

    def features(self, hidden: Tensor, previous: Tensor) -> Tensor:
        return F.embedding(previous, self.predecessor_codebook) * self.hidden_projection(hidden)

    def factors(self) -> Factors:
        return Factors(self.predecessor_codebook, self.successor_codebook)

    def slots(self, hidden: Tensor) -> Tensor:
        return self.hidden_projection(hidden)

    def loss(self, slots: TrainedSlots, tokens: TokenLosses, weights: Mapping[str, float]) -> HeadLosses:
        assert tokens.candidates is not None
        rows, places = with_labels(tokens.candidates, slots.labels)
        scores = self(slots.states, slots.logits(rows), slots.previous.unsqueeze(1), rows).squeeze(1).float()
        probabilities = scores.softmax(dim=-1)
        teacher = slots.teacher(rows)
        losses = {
            "selector_ce": F.cross_entropy(scores, places, reduction="none"),
            "selector_tv": 1 - torch.minimum(probabilities, teacher.float().softmax(dim=-1)).sum(dim=-1),
        }
        overlaps = None
        if "confidence" in weights:
            target = (teacher - slots.normalisers().unsqueeze(1)).exp()
            overlaps = torch.minimum(target, probabilities.detach()).sum(dim=-1)
        slot_weights = slots.gather(tokens.weights)
        return HeadLosses({name: (values, slot_weights) for name, values in losses.items()}, overlaps)


class LabelledCandidates(NamedTuple):
    rows: Tensor  # (M, k) rows of the head
    places: Tensor  # (M,) where the label is among them


def with_labels(rows: Tensor, labels: Tensor) -> LabelledCandidates:
    """rows (M, k), best first; labels (M,): a label that is missing takes the last place."""
    matches = rows == labels.unsqueeze(1)
    has_label = matches.any(dim=1)
    places = torch.where(has_label, matches.long().argmax(dim=1), rows.shape[1] - 1)
    last = torch.where(has_label, rows[:, -1], labels)
    return LabelledCandidates(torch.cat((rows[:, :-1], last.unsqueeze(1)), dim=1), places)
