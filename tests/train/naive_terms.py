"""Rows and steps of a document that count in the loss of a draft which predicts token after token, one by one."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.tests.naive_eagle3 import NaiveEagle3


class Term(NamedTuple):
    step: int
    place: int  # of the text's token that predicts the same
    state: Tensor  # the draft's, (H,)
    logits: Tensor  # the draft's, (Vd,)
    teacher: Tensor  # the target's logits, (V,)
    is_known: bool  # whether the target's best token is in the vocabulary
    agrees: bool


def terms_of(
    naive: NaiveEagle3, states: Tensor, teachers: Tensor, ids: Tensor, mask: list[bool], steps: int
) -> Iterator[Term]:
    """states: (S, steps, H); teachers: (S, V); ids: the draft's vocabulary."""
    for t in range(len(mask)):
        for step in range(steps):
            place = t + 1 + step
            if place + 1 >= len(mask) or not all(mask[t + 1 : place + 2]):
                continue
            state = states[t, step]
            logits = naive.logits(state)
            best = int(teachers[place].argmax())
            agrees = int(ids[logits.argmax()]) == best
            yield Term(step, place, state, logits, teachers[place], best in ids.tolist(), agrees)


def state_distance(state: Tensor, target_state: Tensor) -> Tensor:
    """SmoothL1, as EAGLE has it."""
    gap = (state - target_state).abs()
    return torch.where(gap < 1, 0.5 * gap**2, gap - 0.5).mean()
