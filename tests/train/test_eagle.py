"""EAGLE's training against plain loops over documents, tokens and steps."""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.models.drafts.eagle import Eagle
from slipstream.tests.naive_eagle import NaiveEagle
from slipstream.tests.random_targets import shared_weights
from slipstream.tests.train.conftest import documents, random_parts
from slipstream.tests.train.naive_terms import check_chain_loss
from slipstream.tests.train.naive_walk import check_walk
from slipstream.tests.train.runs import assert_same_gradients
from slipstream.tests.train.weighted_cases import check_weights
from slipstream.train import losses
from slipstream.train.batches import collate
from slipstream.train.eagle import DraftOptions, EagleTraining, document_lengths

DEPTH = 3
MAX_LENGTH = 64
SEVERAL_STEPS = {"ttt_steps": 3, "token_weight": 2.0}


def make_training(
    target: PreTrainedModel,
    ids: Tensor | None = None,
    ttt_steps: int = 1,
    token_weight: float = 0.1,
    noise_spread: float = 0.0,
) -> EagleTraining:
    training = EagleTraining(*random_parts(Eagle, target, ids), DraftOptions(ttt_steps=ttt_steps), DEPTH, seed=5)
    training.token_weight = token_weight
    training.noise_spread = noise_spread
    return training


@pytest.mark.parametrize(
    ("reduced", "options", "logits_at_once"),
    [(False, {}, 500), (True, {}, 10**6), (True, SEVERAL_STEPS, 500), (False, SEVERAL_STEPS, 10**6)],
)
def test_loss_gradient_and_metrics_equal_the_loops(
    target_model, token_map, options, reduced, logits_at_once, monkeypatch
):
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", logits_at_once)
    training = make_training(target_model, token_map.ids if reduced else None, **options)
    naive = NaiveEagle(training.draft, *shared_weights(target_model))
    weights = {"token_weight": training.token_weight, "state_weight": 1.0}
    loss, expected = check_chain_loss(training, target_model, naive, documents(1), **weights)
    assert_same_gradients(loss, expected, training.draft)


def test_tokens_have_weights(target_model, token_map):
    check_weights(make_training(target_model, token_map.ids, **SEVERAL_STEPS), MAX_LENGTH)


def test_the_walk_equals_a_server_that_runs_the_chain(target_model):
    training = make_training(target_model)
    naive = NaiveEagle(training.draft, *shared_weights(target_model))
    check_walk(training, naive, target_model, 0, DEPTH)


def test_noise_spreads_by_the_documents_length(target_model):
    batch = collate([[([1] * 32, [True] * 32), ([2] * 16, [True] * 16)], [([3] * 48, [True] * 48)]], 64)
    assert document_lengths(batch.documents)[0, :48].tolist() == [32.0] * 32 + [16.0] * 16
    noise = make_training(target_model, noise_spread=0.2).noise(batch)
    for row, part, length in ((0, slice(0, 32), 32), (0, slice(32, 48), 16), (1, slice(0, 48), 48)):
        spread = 0.2 * 512 / length
        values = noise[row, part]
        assert values.abs().max() <= spread / 2
        assert values.abs().mean() == pytest.approx(spread / 4, rel=0.1)  # uniform
        assert abs(float(values.mean())) < 0.1 * spread


def test_noise_is_a_row_of_the_runs_own(target_model):
    """Neither the other rows of a batch nor how often it is asked for matter; the seed does."""
    training = make_training(target_model, noise_spread=0.2)
    rows = documents(4)
    batch = collate(rows, MAX_LENGTH, 7)
    second = collate(rows[1:2], MAX_LENGTH, 8)
    width = second.tokens.shape[1]
    assert torch.equal(training.noise(batch)[1, :width], training.noise(second)[0])
    assert not torch.equal(training.noise(batch)[0, :9], training.noise(batch)[1, :9])
    training.seed = 6
    assert not torch.equal(
        training.noise(batch)[1, :width], make_training(target_model, noise_spread=0.2).noise(second)[0]
    )


def test_noise_reaches_the_loss_only(target_model):
    calm, noisy = (make_training(target_model, noise_spread=spread) for spread in (0.0, 0.5))
    batch = collate(documents(0), MAX_LENGTH)
    assert calm.loss(batch)[0] != noisy.loss(batch)[0]
    assert {name: x.tolist() for name, x in calm.evaluate(batch).items()} == {
        name: x.tolist() for name, x in noisy.evaluate(batch).items()
    }
