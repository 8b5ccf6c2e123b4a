"""Losses of drafts that predict token after token: loops over documents, rows and steps, one by one."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.tests.naive_eagle3 import NaiveEagle3
from slipstream.tests.random_targets import target_states
from slipstream.tests.train.conftest import Document
from slipstream.train.batches import collate


def overlap(p: Tensor, q: Tensor) -> Tensor:
    return torch.minimum(p, q).sum()


def divergence(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum()


def hybrid(p: Tensor, q: Tensor) -> Tensor:
    share = torch.exp(-3 * overlap(p, q)).detach()
    return share * divergence(p, q) + (1 - share) * (1 - overlap(p, q))


FORMULAS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # of the target's p and the draft's q, (Vd,) fp64
    "soft_ce": lambda p, q: -(p * q.log()).sum(),
    "forward_kl": divergence,
    "reverse_kl": lambda p, q: divergence(q, p),
    "tv": lambda p, q: 1 - overlap(p, q),
    "lk": lambda p, q: -overlap(p, q).log(),
    "lk_lambda": hybrid,
}


class Term(NamedTuple):
    """A row and step that count."""

    step: int
    p: Tensor  # the target's distribution over the draft's vocabulary, (Vd,)
    q: Tensor  # the draft's
    state_distance: Tensor
    is_known: bool  # whether the target's best token is in the vocabulary
    agrees: bool


def terms_of(training: Any, target: PreTrainedModel, naive: NaiveEagle3, document: Document) -> Iterator[Term]:
    tokens = torch.tensor(document[0])
    mask = document[1]
    ids = naive.target_ids
    states_by_id = target_states(target, tokens)
    final = states_by_id[-1].double()
    with torch.no_grad():
        teachers = target(input_ids=tokens[None]).logits[0].double()  # (S, V)
    aux_states = torch.cat([states_by_id[layer] for layer in training.draft.config.aux_layers], dim=-1)
    steps = training.options.ttt_steps
    states = naive.chains(aux_states, tokens, steps)
    for t in range(len(mask)):
        for step in range(steps):
            place = t + 1 + step  # of the text's token that predicts the same
            if place + 1 >= len(mask) or not all(mask[t + 1 : place + 2]):
                continue
            logits = naive.logits(states[t, step]).double()
            gap = (naive.head_input(states[t, step]) - final[place]).abs()
            distance = torch.where(gap < 1, 0.5 * gap**2, gap - 0.5).mean()  # SmoothL1, as EAGLE has it
            best = int(teachers[place].argmax())
            agrees = int(ids[logits.argmax()]) == best
            p = teachers[place][ids].softmax(0)
            yield Term(step, p, logits.softmax(0), distance, best in ids.tolist(), agrees)


def check_chain_loss(
    training: Any,
    target: PreTrainedModel,
    naive: NaiveEagle3,
    rows: list[list[Document]],
    *,
    kind: str = "soft_ce",
    token_weight: float = 1.0,
    state_weight: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Compares the metrics of a batch of `rows` with the loops'; returns its loss and the one to be expected."""
    terms = [term for row in rows for document in row for term in terms_of(training, target, naive, document)]
    expected = torch.zeros(())
    for term in terms:
        loss = state_weight * term.state_distance
        if term.is_known:
            loss = loss + token_weight * FORMULAS[kind](term.p, term.q)
        expected = expected + training.options.ttt_decay**term.step * loss
    loss, metrics = training.loss(collate(rows, 64))
    for step in range(training.options.ttt_steps):
        of_step = [term for term in terms if term.step == step]
        assert metrics[f"accept_rate_{step}"].tolist() == [sum(term.agrees for term in of_step), len(of_step)]
        for name in {f"feature_loss_{step}", f"state_loss_{step}"} & metrics.keys():
            distances = sum(float(term.state_distance.detach()) for term in of_step)
            assert metrics[name].tolist() == pytest.approx([distances, len(of_step)], rel=1e-4)
    is_reduced = len(naive.target_ids) < target.config.vocab_size
    assert all(term.is_known for term in terms) == (not is_reduced)
    return loss, expected
