"""Soft caps of logits against their formula in fp64."""

import pytest
import torch

from slipstream.kernels.sampling.softcap import softcap
from slipstream.tests.kernels.triton_runs import TOLERANCES, each_device, replayed
from slipstream.tests.pairwise import grouped, rotating

SHAPES = [(1, 16), (3, 1000), (2, 5000), pytest.param((64, 262208), marks=pytest.mark.gpu)]


@grouped()
@each_device
@pytest.mark.parametrize("kernel", [softcap.reference, softcap.triton])
@pytest.mark.parametrize(("shape", "dtype"), rotating(SHAPES, TOLERANCES))
def test_softcap(kernel, shape, dtype, device):
    logits = (40 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(device, dtype)
    expected = 30 * torch.tanh(logits.double() / 30)
    capped = kernel(logits.clone(), 30.0)
    assert (capped.dtype, capped.shape) == (dtype, shape)
    torch.testing.assert_close(capped.double(), expected, atol=30 * TOLERANCES[dtype] / 2, rtol=0)
    alone = kernel(logits[-1:].clone(), 30.0)
    assert torch.equal(alone, capped[-1:]), "a row does not depend on the others"


@each_device
def test_extremes_and_no_rows(device):
    logits = torch.tensor([[-torch.inf, -1e30, 0.0, 1e30, torch.inf]], device=device)
    expected = torch.tensor([[-5.0, -5.0, 0.0, 5.0, 5.0]], device=device)
    torch.testing.assert_close(softcap.triton(logits, 5.0), expected)
    assert softcap.triton(torch.full((1, 3), torch.nan, device=device), 5.0).isnan().all(), "sampling names the error"
    assert softcap.triton(torch.empty(0, 7, device=device), 5.0).shape == (0, 7)


@pytest.mark.gpu
@torch.inference_mode()
def test_replays_equal_eager_calls():
    logits = 40 * torch.randn(8, 262208, device="cuda").bfloat16()
    assert torch.equal(replayed(lambda: softcap(logits.clone(), 30.0)), softcap(logits.clone(), 30.0))
