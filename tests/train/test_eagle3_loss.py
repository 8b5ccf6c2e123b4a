"""Loss, mask, metrics and the simulated walk against naive loops over documents, tokens and steps."""

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss
from transformers import PreTrainedModel

from slipstream.tests.naive_eagle3 import NaiveEagle3
from slipstream.tests.pairwise import some_of
from slipstream.tests.random_targets import target_aux_states
from slipstream.tests.train.conftest import Document, documents, make_eagle3
from slipstream.tests.train.naive_terms import terms_of
from slipstream.tests.train.naive_walk import check_walk
from slipstream.tests.train.runs import assert_same_gradients
from slipstream.tests.train.weighted_cases import check_weights
from slipstream.train.batches import collate
from slipstream.train.eagle3 import DraftOptions, Eagle3Training

STEPS = 4
DECAY = 0.6
DEPTH = 3
Distance = Callable[[Tensor, Tensor], Tensor]


FORMULAS: dict[str, Distance] = {  # of the target's p and the draft's q, (Vd,) fp32
    "soft_ce": lambda p, q: -(p * q.log()).sum(),
    "forward_kl": lambda p, q: (p * (p / q).log()).sum(),
    "reverse_kl": lambda p, q: (q * (q / p).log()).sum(),
    "tv": lambda p, q: 0.5 * (p - q).abs().sum(),
    "lk": lambda p, q: -torch.minimum(p, q).sum().log(),
}


def naive_terms(
    training: Eagle3Training,
    model: PreTrainedModel,
    ids: Tensor,
    document: Document,
    distance: Distance = FORMULAS["soft_ce"],
) -> Iterator[tuple[int, Tensor | None, bool]]:
    """Per counting (row, step) of one document: step, distance (or None outside the vocabulary), agreement."""
    tokens = torch.tensor(document[0])
    naive = NaiveEagle3(training.draft, model.get_input_embeddings().weight)
    states = naive.chains(target_aux_states(model, tokens, training.draft.config.aux_layers), tokens, STEPS)
    with torch.no_grad():
        target_logits = model(input_ids=tokens[None]).logits[0]  # (S, V)
    for term in terms_of(naive, states, target_logits, ids, document[1], STEPS):
        loss = distance(term.teacher[ids].softmax(dim=0), term.logits.softmax(dim=0))
        yield term.step, loss if term.is_known else None, term.agrees


def test_a_batch_may_hold_fewer_rows_than_steps(training, target_model, token_map):
    document = (list(range(20, 32)), [False] * 9 + [True] * 3)  # two rows ask
    terms = naive_terms(training, target_model, token_map.ids, document)
    expected = sum((DECAY**step * loss for step, loss, _ in terms if loss is not None), torch.zeros(()))
    loss, metrics = training.loss(collate([[document]], 64))
    torch.testing.assert_close(loss, expected.float())
    assert [int(metrics[f"accept_rate_{step}"][1]) for step in range(STEPS)] == [2, 1, 0, 0]


def test_rows_that_do_not_count_get_no_gradient(training):
    batch = collate(documents(0), 64)
    logits = []
    training.draft.lm_head.register_forward_hook(lambda _m, _i, output: logits.append(output))
    rows, _, _, final = training.read(batch, STEPS)
    in_vocabulary = training.draft.t2d[training.target.logits(final[rows.asking + 1], training.target_ids)[1]]
    loss, _ = training.loss(batch)
    for step, gradient in enumerate(torch.autograd.grad(loss, logits)):
        has_gradient = gradient.abs().sum(dim=-1) > 0
        assert torch.equal(has_gradient, rows.counts[step, : len(gradient)] & in_vocabulary[step:])


@pytest.mark.parametrize("fields", [{}, {"num_layers": 2}], ids=str)
def test_tokens_have_weights(target_model, token_map, fields):
    training = make_eagle3(target_model, token_map.ids, **fields)
    training.state_weight = 0.5
    check_weights(training, 64)


def test_the_walk_equals_a_server_that_runs_the_chain(training, target_model):
    naive = NaiveEagle3(training.draft, target_model.get_input_embeddings().weight)
    check_walk(training, naive, target_model, 0, DEPTH)


def test_a_walk_without_a_round_has_no_length(training):
    """An answer of one token comes from the prompt's pass alone."""
    document = ([3, 4, 5, 6, 7], [False, True, False, True, True])
    metrics = training.evaluate(collate([[document]], 64))
    assert metrics["accept_length"].tolist() == [1, 1]


@pytest.mark.parametrize("kind", some_of(FORMULAS, ["soft_ce", "lk"]))
def test_loss_gradient_and_metrics_equal_the_loops(kind, training, target_model, token_map):
    training.options = DraftOptions(ttt_steps=STEPS, loss=kind)
    check_batch(training, target_model, token_map.ids, FORMULAS[kind])


@pytest.mark.parametrize("norm_output", some_of([False, True], [True]))
def test_states_are_taught_too(target_model, token_map, norm_output):
    """At every counting (row, step), whether or not the draft's vocabulary has the target's best token."""
    training = make_eagle3(target_model, token_map.ids, norm_output=norm_output)
    rows = documents(1)
    training.state_weight = 2.5
    loss, metrics = training.loss(collate(rows, 64))
    naive = NaiveEagle3(training.draft, target_model.get_input_embeddings().weight)
    expected = torch.zeros(())
    sums = [0.0] * STEPS
    for tokens, mask in (document for row in rows for document in row):
        for step, term, _ in naive_terms(training, target_model, token_map.ids, (tokens, mask)):
            expected = expected + training.options.ttt_decay**step * (0.0 if term is None else term)
        states = naive.chains(
            target_aux_states(target_model, torch.tensor(tokens), training.draft.config.aux_layers),
            torch.tensor(tokens),
            STEPS,
        )
        with torch.no_grad():
            final = target_model(input_ids=torch.tensor(tokens)[None], output_hidden_states=True).hidden_states[-1][0]
        for t, step in itertools.product(range(len(tokens)), range(STEPS)):
            if all([*mask[t + 1 : t + 3 + step], t + 2 + step < len(mask)]):
                read = naive.head_input(states[t, step])
                term = smooth_l1_loss(read, final[t + 1 + step].double())
                expected = expected + 2.5 * training.options.ttt_decay**step * term
                sums[step] += float(term.detach())
    assert_same_gradients(loss, expected, training.draft)
    state_losses = [float(metrics[f"state_loss_{step}"][0]) for step in range(STEPS)]
    assert state_losses == pytest.approx(sums, rel=1e-4)


def test_flags_of_eagle_3_1_are_trained(flagged_training, target_model, token_map):
    check_batch(flagged_training, target_model, token_map.ids, FORMULAS["soft_ce"])
    naive = NaiveEagle3(flagged_training.draft, target_model.get_input_embeddings().weight)
    check_walk(flagged_training, naive, target_model, 1, DEPTH)


def check_batch(training: Eagle3Training, target_model: PreTrainedModel, ids: Tensor, distance: Distance):
    """Loss, gradients and metrics against the loops."""
    rows = documents(1)
    terms = [
        term
        for row in rows
        for document in row
        for term in naive_terms(training, target_model, ids, document, distance)
    ]
    expected = torch.zeros(())
    for step, term, _ in terms:
        expected = expected + (0.0 if term is None else training.options.ttt_decay**step * term)
    loss, metrics = training.loss(collate(rows, 64))
    assert_same_gradients(loss, expected, training.draft)
    for step in range(STEPS):
        agreements = [agrees for s, _, agrees in terms if s == step]
        assert metrics[f"accept_rate_{step}"].tolist() == [sum(agreements), len(agreements)]
    assert any(term is None for _, term, _ in terms)
