"""The losses of block drafts, by the names that their weights have as options, and those of the heads that join slots.

    ce, kl, tv, l1, lk, lk_lambda   over the vocabulary, of a slot's own logits, or with the Markov head's bias of the
                                    text's token before (kernels/cross_entropy.py); l1 is 2 tv
    selector_ce, selector_tv        of the selector's scores over a slot's candidates, after the text's token before:
                                    against the text, and against the target's distribution over the same candidates
    scorer_ce, scorer_hinge, scorer_regret   of LiLiCorr's scores: against the text; the margin by which the best other
                                    candidate should fall short of it; by how much the target prefers the text to what
                                    the scores choose
    confidence                      binary cross-entropy of the confidence head against the overlap sum min(p, q), by
                                    which the target accepts what the draft samples

In training, the text's token takes the place of the weakest of the selector's candidates where it is not among them.
Letters: M slots, B blocks of K slots, k candidates of each.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.cross_entropy import Mix

MARGIN = 2.0  # of scorer_hinge, in scores


def mix_of(weights: Mapping[str, float]) -> Mix:
    """The losses over the vocabulary."""
    tv = weights["tv"] + 2 * weights["l1"]
    return Mix(weights["ce"], weights["kl"], tv, weights["lk"], weights["lk_lambda"])


def reads_teacher(weights: Mapping[str, float]) -> bool:
    """Whether they read the target's distribution."""
    head_weights = (weights[name] for name in ("selector_tv", "confidence", "scorer_regret"))
    return mix_of(weights).reads_teacher or any(head_weights)


class Candidates(NamedTuple):
    rows: Tensor  # (M, k) rows of the head
    places: Tensor  # (M,) where the label is among them


def with_labels(rows: Tensor, labels: Tensor) -> Candidates:
    """rows (M, k), best first; labels (M,): a label that is missing takes the last place."""
    matches = rows == labels.unsqueeze(1)
    has_label = matches.any(dim=1)
    places = torch.where(has_label, matches.long().argmax(dim=1), rows.shape[1] - 1)
    last = torch.where(has_label, rows[:, -1], labels)
    return Candidates(torch.cat((rows[:, :-1], last.unsqueeze(1)), dim=1), places)


def selector_losses(scores: Tensor, places: Tensor, teacher: Tensor | None) -> dict[str, Tensor]:
    """scores (M, k), places (M,) of the labels, teacher (M, k) the target's logits -> losses (M,) by name."""
    scores = scores.float()
    losses = {"selector_ce": F.cross_entropy(scores, places, reduction="none")}
    if teacher is not None:
        overlap = torch.minimum(scores.softmax(dim=-1), teacher.float().softmax(dim=-1)).sum(dim=-1)
        losses["selector_tv"] = 1 - overlap
    return losses


class ScorerSlots(NamedTuple):
    """Slots of whole blocks."""

    scores: Tensor  # (B, K, k) of a slot's candidates after the text's token before
    places: Tensor  # (B, K) where the text's token is among them
    inside: Tensor  # (B, K) bool: the text's tokens up to this one are all among the candidates


def scorer_slots(start: Tensor, edges: Tensor, rows: Tensor, labels: Tensor) -> ScorerSlots:
    """start (B, k), edges (B, K - 1, k, k), candidates' rows (B, K, k), labels (B, K) rows."""
    matches = rows == labels.unsqueeze(2)
    places = matches.long().argmax(dim=2)
    inside = matches.any(dim=2).long().cumprod(dim=1).bool()
    before = places[:, :-1, None, None].expand(-1, -1, 1, rows.shape[2])
    scores = torch.cat((start.unsqueeze(1), edges.gather(2, before).squeeze(2)), dim=1)
    return ScorerSlots(scores.float(), places, inside)


def scorer_losses(slots: ScorerSlots, teacher: Tensor | None) -> dict[str, Tensor]:
    """`teacher` (B, K, k): the target's logits of the candidates -> losses (B, K) by name, 0 outside the prefix
    (LiLiCorr, arXiv 2608.20530)."""
    scores = slots.scores
    gold = slots.places.unsqueeze(2)
    gold_scores = scores.gather(2, gold).squeeze(2)
    if scores.shape[2] > 1:
        best_others = scores.scatter(2, gold, -torch.inf).amax(dim=2)
    else:
        best_others = gold_scores - MARGIN
    losses = {
        "scorer_ce": scores.logsumexp(dim=2) - gold_scores,
        "scorer_hinge": F.relu(MARGIN + best_others - gold_scores),
    }
    if teacher is not None:
        regret = F.relu(teacher.gather(2, gold) - teacher)
        losses["scorer_regret"] = (scores.softmax(dim=2) * regret).sum(dim=2)
    return {name: loss * slots.inside for name, loss in losses.items()}
