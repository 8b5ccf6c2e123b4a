"""The few-row path of linear layers equals torch's."""

import pytest
import torch
from torch.nn import functional as F

from slipstream.kernels.gemm import linear as module
from slipstream.kernels.gemm.linear import FEW_ROWS, linear
from slipstream.tests.pairwise import grouped


@grouped()
@pytest.mark.parametrize("rows", [0, 1, 2, FEW_ROWS, FEW_ROWS + 1, 40])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_linear_equals_torch(rows, with_bias, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(module, "TRANSPOSED", range(1, FEW_ROWS + 1))
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((rows, 24), (10, 24), (10,)))
    expected = F.linear(x, weight, bias if with_bias else None)
    out = linear(x, weight, bias if with_bias else None)
    assert out.is_contiguous()
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shape", [(24,), (1, 24), (2, 3, 24), (1, 1, 24), (4, 5, 24), (0, 3, 24)])
def test_leading_dims_are_kept(shape):
    x = torch.randn(shape)
    weight = torch.randn(10, 24)
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("trained", [False, True])
def test_gradients_equal_torch(trained):
    """A frozen layer passes the gradient on to its input; a trained one gets its own."""
    x = torch.randn(3, 24, dtype=torch.float64)
    weight = torch.randn(10, 24, dtype=torch.float64)
    gradients = []
    for function in (linear, F.linear):
        own_x = x.clone().requires_grad_()
        own_weight = weight.clone().requires_grad_(trained)
        function(own_x, own_weight).square().sum().backward()
        gradients.append((own_x.grad, own_weight.grad))
    torch.testing.assert_close(*gradients)
