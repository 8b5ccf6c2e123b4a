"""Weights of block slots and losses through the frozen head, against loops and autograd's own formulas."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.train import losses as head_loss
from slipstream.train.blocks import default_gamma, dpace_weights
from slipstream.train.losses import best_rows, head_losses, regression_losses


@pytest.mark.parametrize(
    ("size", "gamma"), [(2, 1.0), (4, 2.0), (8, 4.0), (9, 4.5), (10, 5.0), (13, 6.0), (16, 7.0), (32, 37 / 3)]
)
def test_gamma_follows_the_block_size(size, gamma):
    assert default_gamma(size) == pytest.approx(gamma)


def naive_dpace(losses: Tensor, in_vocabulary: Tensor, counts: Tensor, alpha: float = 0.5) -> list[float]:
    """One block, by the formulas of arXiv 2605.18810; a slot that cannot be drafted has confidence 0."""
    num_slots = len(losses)
    survival = []
    product = 1.0
    for slot in range(num_slots):
        confidence = float(torch.exp(-losses[slot])) if in_vocabulary[slot] else 0.0
        product *= (1 - alpha) * confidence + alpha
        survival.append(product if counts[slot] else 0.0)
    return [sum(survival[slot:]) if in_vocabulary[slot] else 0.0 for slot in range(num_slots)]


def test_dpace_weights_equal_the_loops():
    generator = torch.Generator().manual_seed(0)
    losses = 3 * torch.rand(20, 7, generator=generator, requires_grad=True)
    counts = torch.arange(7) < torch.randint(0, 8, (20, 1), generator=generator)
    in_vocabulary = counts & (torch.rand(20, 7, generator=generator) < 0.7)
    weights = dpace_weights(losses, in_vocabulary, counts)
    expected = [naive_dpace(*block) for block in zip(losses.detach(), in_vocabulary, counts, strict=True)]
    torch.testing.assert_close(weights, torch.tensor(expected))
    assert not weights.requires_grad
    assert not weights.isnan().any()


def test_dpace_survives_losses_that_were_not_computed():
    nothing = torch.zeros(1, 3, dtype=torch.bool)
    assert dpace_weights(torch.full((1, 3), torch.nan), nothing, nothing).tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("logits_at_once", [1, 150, 10**6])  # one row, three rows of 50, all
def test_losses_and_gradients_are_autograds_for_any_chunk(logits_at_once, monkeypatch):
    monkeypatch.setattr(head_loss, "LOGITS_AT_ONCE", logits_at_once)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(10, 16, generator=generator, requires_grad=True)
    head = torch.randn(50, 16, generator=generator)
    labels = torch.randint(50, (10,), generator=generator)
    weights = torch.rand(10, generator=generator)
    expected = F.cross_entropy(states @ head.t(), labels, reduction="none")
    (expected_gradient,) = torch.autograd.grad((weights * expected).sum(), states)
    losses, best = head_losses(states, head, labels)
    (gradient,) = torch.autograd.grad((weights * losses).sum(), states)
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(gradient, expected_gradient)
    assert torch.equal(best, (states @ head.t()).argmax(dim=-1))
    assert torch.equal(best, best_rows(states.detach(), head))


def test_losses_and_gradients_from_logits_in_bf16():
    """Logits are rounded where the head's dtype is bf16, and losses are of the rounded ones; the gradient is rounded,
    too, before it meets the head."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(10, 16, generator=generator).requires_grad_()
    head = torch.randn(50, 16, generator=generator).bfloat16()
    labels = torch.randint(50, (10,), generator=generator)
    logits = (states.detach().bfloat16() @ head.t()).double().requires_grad_()
    expected = F.cross_entropy(logits, labels, reduction="none")
    (of_logits,) = torch.autograd.grad(expected.sum(), logits)
    losses, best = head_losses(states, head, labels)
    (gradient,) = torch.autograd.grad(losses.sum(), states)
    assert (losses.dtype, gradient.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(losses.double(), expected)
    torch.testing.assert_close(gradient.double(), of_logits @ head.double(), rtol=2**-6, atol=2**-6)
    assert torch.equal(best, logits.argmax(dim=-1))


def test_the_best_row_is_the_first_of_those_that_rounding_makes_equal():
    head = torch.zeros(20, 4, dtype=torch.bfloat16)
    head[7] = 1.0
    head[11] = torch.tensor([1.0, 1.0, 1.0, 1.0078125])  # logits of 4 and 4.0078125, which bf16 rounds to 4
    states = torch.ones(3, 4)
    assert best_rows(states, head).tolist() == [7, 7, 7]
    assert head_losses(states, head, torch.zeros(3, dtype=torch.int64))[1].tolist() == [7, 7, 7]


def test_without_gradients_none_is_made():
    states = torch.randn(4, 8)
    head = torch.randn(20, 8)
    losses, _ = head_losses(states, head, torch.arange(4))
    assert not losses.requires_grad
    torch.testing.assert_close(losses, F.cross_entropy(states @ head.t(), torch.arange(4), reduction="none"))


def test_nothing_to_predict_is_a_loss_of_zero_with_a_gradient():
    """A batch whose answers lie outside the draft vocabulary still takes part in every collective."""
    states = torch.randn(0, 8, requires_grad=True)
    losses, _ = head_losses(states, torch.randn(20, 8), torch.zeros(0, dtype=torch.int64))
    losses.sum().backward()
    assert states.grad is not None


def test_regression_is_smooth_l1():
    states = torch.tensor([[0.5, 3.0]])
    aux_states = torch.zeros(1, 2)
    assert regression_losses(states, aux_states).tolist() == [pytest.approx((0.125 + 2.5) / 2)]
