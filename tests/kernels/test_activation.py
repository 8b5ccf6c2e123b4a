"""The gated activation against its formula in fp64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from slipstream.kernels.activation import silu_mul, silu_mul_reference, silu_mul_triton
from slipstream.tests.kernels.triton_runs import DEVICES, TOLERANCES, poisoned, replayed

REAL = [(1, 14336), (32, 14336), (8192, 14336), (5, 12288), (3, 11008)]
SHAPES = [(1, 16), (3, 1000), (2, 2100), *(pytest.param(shape, marks=pytest.mark.gpu) for shape in REAL)]


def random(rows: int, size: int, dtype: torch.dtype, device: str) -> Tensor:
    wide = torch.randn(rows, 2 * size + 16, generator=torch.Generator().manual_seed(rows)) * 4
    return wide.to(device, dtype)[:, : 2 * size]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", [silu_mul_reference, silu_mul_triton])
def test_silu_mul(kernel: Callable[[Tensor], Tensor], shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    gate_up = random(*shape, dtype, device)
    with poisoned():
        out = kernel(gate_up)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert out.dtype == dtype
    expected = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("device", DEVICES)
def test_extremes_leading_dims_and_no_rows(device: str) -> None:
    gate = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4], device=device)
    torch.testing.assert_close(
        silu_mul_triton(torch.cat((gate, torch.full_like(gate, 2.0)))[None])[0],
        torch.tensor([0.0, 0.0, 0.0, 200.0, 2e4], device=device),
    )
    gate_up = random(6, 40, torch.float32, device).reshape(2, 3, 80)
    torch.testing.assert_close(silu_mul_triton(gate_up), silu_mul_reference(gate_up))
    assert silu_mul_triton(gate_up[:0]).shape == (0, 3, 40)


def test_gradients_pass() -> None:
    gate_up = torch.randn(3, 8, requires_grad=True)
    silu_mul(gate_up).sum().backward()
    assert gate_up.grad is not None


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 32, 2048])
def test_a_graph_replays_it(rows: int) -> None:
    gate_up = random(rows, 14336, torch.bfloat16, "cuda")
    assert torch.equal(replayed(lambda: silu_mul_triton(gate_up)), silu_mul_triton(gate_up))
