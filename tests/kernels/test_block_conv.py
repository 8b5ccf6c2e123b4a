"""The convolution of a block against a loop over rows, taps and channels."""

import pytest
import torch

from slipstream.kernels.block_conv import block_conv
from slipstream.tests.kernels.triton_runs import DEVICES, TOLERANCES, cover, poisoned


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("run", ["reference", "triton"])
@pytest.mark.parametrize(
    ("shape", "block", "dtype"), cover([(6, 48, 16, 2), (8, 24, 8, 3)], [1, 2], [torch.float32, torch.bfloat16])
)
def test_the_formula(shape: tuple[int, ...], block: int, dtype: torch.dtype, run: str, device: str) -> None:
    T, H, group, taps = shape
    generator = torch.Generator().manual_seed(H)
    x = torch.randn(T, H, generator=generator).to(dtype)
    both = (torch.randn(T, 2, taps, H // group, generator=generator) / 4).to(dtype)
    base = torch.randn(taps, H, generator=generator).to(dtype)
    expected = torch.zeros(T, H, dtype=torch.float64)
    for i in range(T):
        for t in range(min(taps, i % block + 1)):
            kernel = base[t].double() + both[i, 1, t].double().repeat_interleave(group)
            expected[i] += kernel * x[i - t].double()
    delta = both.to(device)[:, 1]  # one side of a projection
    with poisoned():
        found = getattr(block_conv, run)(x.to(device), delta, base.to(device), block)
    torch.testing.assert_close(found.double().cpu(), expected, atol=3 * TOLERANCES[dtype], rtol=2 * TOLERANCES[dtype])
