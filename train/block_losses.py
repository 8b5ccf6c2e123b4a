"""The losses of block drafts over the vocabulary, and the weights of all by name.

    ce, kl, tv, l1, lk, lk_lambda   of a slot's own logits, or of those with the bias of a head that joins slots, after
                                    the text's token before (kernels/cross_entropy.py); l1 is 2 tv

The losses of heads are described where they are (models/drafts/heads/).
"""

from collections.abc import Mapping, Sequence

from slipstream.kernels.cross_entropy import Mix
from slipstream.models.drafts.heads.base import Head
from slipstream.models.drafts.heads.table import HEADS

VOCABULARY = ("ce", "kl", "tv", "l1", "lk", "lk_lambda")
NO_LOSSES = dict.fromkeys((*VOCABULARY, *(name for head in HEADS for name in head.loss_names)), 0.0)


def loss_weights(heads: Sequence[Head]) -> dict[str, float]:
    """Weights of the losses of a draft with these heads: those that did best (docs/dflash.md, "Losses")."""
    weights = {"ce": 1.0}
    for head in heads:
        weights |= head.loss_weights
    return weights


def mix_of(weights: Mapping[str, float]) -> Mix:
    """The losses over the vocabulary."""
    tv = weights["tv"] + 2 * weights["l1"]
    return Mix(weights["ce"], weights["kl"], tv, weights["lk"], weights["lk_lambda"])


def reads_teacher(weights: Mapping[str, float], heads: Sequence[Head]) -> bool:
    """Whether they read the target's distribution."""
    return mix_of(weights).reads_teacher or any(weights[name] for head in heads for name in head.taught_losses)
