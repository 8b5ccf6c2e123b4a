"""Loss, mask, metrics and the simulated walk against naive loops over documents, tokens and steps."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from slipstream.tests.naive_eagle3 import NaiveEagle3
from slipstream.tests.pairwise import some_of
from slipstream.tests.train.conftest import documents, make_eagle3
from slipstream.tests.train.naive_terms import FORMULAS, check_chain_loss
from slipstream.tests.train.naive_walk import check_walk
from slipstream.tests.train.runs import assert_same_gradients
from slipstream.tests.train.weighted_cases import check_weights
from slipstream.train.batches import collate
from slipstream.train.eagle3 import DraftOptions, Eagle3Training

STEPS = 4
DECAY = 0.6
DEPTH = 3


def test_a_batch_may_hold_fewer_rows_than_steps(training, target_model):
    document = (list(range(20, 32)), [False] * 9 + [True] * 3)  # two rows ask
    loss, expected = check_chain_loss(training, target_model, naive_of(training, target_model), [[document]])
    torch.testing.assert_close(loss, expected.float())


def naive_of(training: Eagle3Training, target: PreTrainedModel) -> NaiveEagle3:
    return NaiveEagle3(training.draft, target.get_input_embeddings().weight)


@pytest.mark.parametrize("fields", [{}, {"num_layers": 2}], ids=str)
def test_tokens_have_weights(target_model, token_map, fields):
    training = make_eagle3(target_model, token_map.ids, **fields)
    training.state_weight = 0.5
    check_weights(training, 64)


def test_the_walk_equals_a_server_that_runs_the_chain(training, target_model):
    check_walk(training, naive_of(training, target_model), target_model, 0, DEPTH)


def test_a_walk_without_a_round_has_no_length(training):
    """An answer of one token comes from the prompt's pass alone."""
    document = ([3, 4, 5, 6, 7], [False, True, False, True, True])
    metrics = training.evaluate(collate([[document]], 64))
    assert metrics["accept_length"].tolist() == [1, 1]


@pytest.mark.parametrize("kind", some_of(FORMULAS, ["lk"]))
def test_loss_gradient_and_metrics_equal_the_loops(kind, training, target_model):
    training.options = DraftOptions(ttt_steps=STEPS, loss=kind)
    check_loss(training, target_model, kind=kind)


def check_loss(training: Eagle3Training, target: PreTrainedModel, **options: Any):
    loss, expected = check_chain_loss(training, target, naive_of(training, target), documents(1), **options)
    assert_same_gradients(loss, expected, training.draft)


@pytest.mark.parametrize("norm_output", some_of([False, True], [True]))
def test_states_are_taught_too(target_model, token_map, norm_output):
    """At every counting (row, step), whether or not the draft's vocabulary has the target's best token."""
    training = make_eagle3(target_model, token_map.ids, norm_output=norm_output)
    training.state_weight = 2.5
    check_loss(training, target_model, state_weight=2.5)


def test_flags_of_eagle_3_1_are_trained(flagged_training, target_model):
    check_loss(flagged_training, target_model)
    check_walk(flagged_training, naive_of(flagged_training, target_model), target_model, 1, DEPTH)
