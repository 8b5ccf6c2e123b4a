"""The convolution of a block against a loop over rows, taps and channels, and its gradient against autograd's."""

import pytest
import torch

from slipstream.kernels.block_conv import block_conv
from slipstream.tests.kernels.triton_runs import TOLERANCES, each_device, poisoned
from slipstream.tests.pairwise import grouped, rotating


@grouped()
@each_device
@pytest.mark.parametrize("run", ["reference", "triton"])
@pytest.mark.parametrize(
    ("shape", "block", "dtype"), rotating([(6, 48, 16, 2), (8, 24, 8, 3)], [1, 2], [torch.float32, torch.bfloat16])
)
def test_the_formula(shape, block, dtype, run, device):
    T, H, group, taps = shape
    generator = torch.Generator().manual_seed(H)
    x = torch.randn(T, H, generator=generator).to(dtype)
    sides = (torch.randn(T, 2, taps, H // group, generator=generator) / 4).to(dtype)
    base = torch.randn(taps, H, generator=generator).to(dtype)
    expected = torch.zeros(T, H, dtype=torch.float64)
    for i in range(T):
        for t in range(min(taps, i % block + 1)):
            kernel = base[t].double() + sides[i, 1, t].double().repeat_interleave(group)
            expected[i] += kernel * x[i - t].double()
    delta = sides.to(device)[:, 1]  # one side of a projection
    with poisoned(), torch.no_grad():
        out = getattr(block_conv, run)(x.to(device), delta, base.to(device), block)
    torch.testing.assert_close(out.double().cpu(), expected, atol=3 * TOLERANCES[dtype], rtol=2 * TOLERANCES[dtype])


@grouped()
@each_device
@pytest.mark.parametrize(
    ("shape", "block", "dtype"),
    rotating([(130, 48, 16, 2), (8, 1040, 8, 3), (0, 48, 16, 2)], [2, 1, 8], [torch.float32, torch.bfloat16]),
)
def test_its_gradient(shape, block, dtype, device):
    T, H, group, taps = shape
    T -= T % block
    generator = torch.Generator().manual_seed(H)
    x, towards = torch.randn(2, T, H, generator=generator).to(device, dtype)
    sides = (torch.randn(T, 2, taps, H // group, generator=generator) / 4).to(device, dtype)
    base = torch.randn(taps, H, generator=generator).to(device)
    exact_leaves = [x.double().requires_grad_() for x in (x, sides, base)]
    block_conv.reference(exact_leaves[0], exact_leaves[1][:, 1], exact_leaves[2], block).backward(towards.double())
    leaves = [x.clone().requires_grad_() for x in (x, sides, base)]
    with poisoned():
        block_conv.triton(leaves[0], leaves[1][:, 1], leaves[2], block).backward(towards.t().contiguous().t())
    for leaf, exact in zip(leaves, exact_leaves, strict=True):
        assert exact.grad is not None
        assert leaf.grad.dtype == leaf.dtype
        tolerance = {"atol": 30 * TOLERANCES[torch.float32], "rtol": TOLERANCES[dtype]}
        torch.testing.assert_close(leaf.grad.double(), exact.grad, **tolerance)
