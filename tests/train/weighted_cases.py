"""Losses of weighted tokens against sums of losses without weights, for any draft in training."""

from collections.abc import Callable, Sequence
from itertools import cycle

import torch

from slipstream.tests.train.conftest import Document, documents
from slipstream.tests.train.runs import assert_same_gradients
from slipstream.train.batches import Batch, collate
from slipstream.train.training import DraftTraining

WEIGHTS = (2.0, 0.5, 1.0, 0.0, 3.0)  # of the answers, in turn
Weighted = list[list[tuple[list[int], list[float]]]]


def with_weights(rows: Sequence[Sequence[Document]], weights: Callable[[], float]) -> Weighted:
    """`rows` with a weight for each answer, a run of supervised tokens."""

    def weigh(mask):
        weighted = []
        weight = 0.0
        for index, is_supervised in enumerate(mask):
            if is_supervised and (index == 0 or not mask[index - 1]):
                weight = weights()
            weighted.append(weight if is_supervised else 0.0)
        return weighted

    return [[(tokens, weigh(mask)) for tokens, mask in row] for row in rows]


def check_weights(training: DraftTraining, max_length: int, seed: int = 0):
    """A loss with weights is the sum over weights of the losses that supervise the answers of this weight alone. A
    weight of 2 is the row twice. Evaluations read no weights."""
    rows = documents(seed)
    numbers = cycle(WEIGHTS)
    weighted = with_weights(rows, lambda: next(numbers))
    total = torch.zeros(())
    for weight in sorted(set(WEIGHTS) - {0.0}):
        part = [[(tokens, [w == weight for w in weights]) for tokens, weights in row] for row in weighted]
        total = total + weight * training.loss(collate(part, max_length))[0]
    batch = collate(weighted, max_length)
    assert batch.weights is not None
    assert_same_gradients(training.loss(batch)[0], total, training.draft)
    twice = collate([rows[0], rows[0], *rows[1:]], max_length)
    single = collate([*with_weights(rows[:1], lambda: 2.0), *rows[1:]], max_length)
    assert single.total_weight == twice.total_weight == twice.num_supervised > single.num_supervised
    assert_same_gradients(training.loss(single)[0], training.loss(twice)[0], training.draft)
    with torch.no_grad():
        assert walked(training, collate(rows, max_length)) == walked(training, collate(doubled(rows), max_length))


def doubled(rows: Sequence[Sequence[Document]]) -> Weighted:
    return with_weights(rows, lambda: 2.0)


def walked(training: DraftTraining, batch: Batch) -> dict[str, list[float]]:
    return {name: value.tolist() for name, value in training.evaluate(batch).items()}
