"""The losses of block drafts over the vocabulary, and the weights of all, by the names that these have as options.

    ce, kl, tv, l1, lk, lk_lambda   of a slot's own logits, or of those with the bias of a head that joins slots, after
                                    the text's token before (kernels/cross_entropy.py); l1 is 2 tv

The losses of heads are described where they are (models/drafts/heads/).
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields

from slipstream.kernels.cross_entropy import Mix
from slipstream.models.drafts.heads.base import Head
from slipstream.models.drafts.heads.table import HEADS
from slipstream.train.dflash_options import LossWeights

VOCABULARY = ("ce", "kl", "tv", "l1", "lk", "lk_lambda")


def loss_weights(options: LossWeights, heads: Sequence[Head]) -> dict[str, float]:
    """The weights of all losses, by name, for a draft with these heads. Raises ValueError for a loss of a head that it
    lacks, and for a head that no loss trains."""
    options_by_name = {weight.name: getattr(options, weight.name) for weight in fields(options)}
    if all(value is None for value in options_by_name.values()):
        options_by_name |= default_weights(heads)
    weights = {name: value or 0.0 for name, value in options_by_name.items()}
    kinds = [type(head) for head in heads]
    for kind in HEADS:
        option = kind.Config.option
        positive = [name for name in kind.loss_names if weights[name]]
        if positive and kind not in kinds:
            raise ValueError(f"draft.losses.{positive[0]} is {weights[positive[0]]}, but the draft has no {option}")
        if kind.loss_names and not positive and kind in kinds:
            raise ValueError(
                f"draft.{option} adds a head that no loss trains; give draft.losses."
                f"{' or draft.losses.'.join(kind.loss_names)}"
            )
    if not any(weights[name] for name in VOCABULARY):
        raise ValueError(f"draft.losses has no loss of the draft's logits; give one of {', '.join(VOCABULARY)}")
    return weights


def default_weights(heads: Sequence[Head]) -> dict[str, float]:
    """Weights for a draft with these heads, those that did best (docs/dflash.md, "Losses")."""
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
