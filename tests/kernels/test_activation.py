"""Gated activations against their formulas in fp64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from slipstream.kernels.gemm.activation import gelu_tanh_mul, sigmoid_mul, silu_mul
from slipstream.tests.kernels.triton_runs import TOLERANCES, each_device, poisoned, replayed
from slipstream.tests.pairwise import grouped, rotating

Kernel = Callable[[Tensor], Tensor]
KERNELS = [silu_mul.reference, silu_mul.triton]
REAL = [(1, 14336), (32, 14336), (8192, 14336), (5, 12288), (3, 11008)]
SHAPES = [(1, 16), (3, 1000), (2, 2100), *(pytest.param(shape, marks=pytest.mark.gpu) for shape in REAL)]


def random(rows: int, size: int, dtype: torch.dtype, device: str) -> Tensor:
    wide = torch.randn(rows, 2 * size + 16, generator=torch.Generator().manual_seed(rows)) * 4
    return wide.to(device, dtype)[:, : 2 * size]


def silu(gate: Tensor) -> Tensor:
    return gate / (1 + torch.exp(-gate))


def gelu_tanh(gate: Tensor) -> Tensor:
    return gate / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)))


@grouped()
@each_device
@pytest.mark.parametrize(("activation", "op"), [(silu, silu_mul), (gelu_tanh, gelu_tanh_mul)])
@pytest.mark.parametrize("run", ["reference", "triton"])
@pytest.mark.parametrize(("shape", "dtype"), rotating(SHAPES, TOLERANCES))
def test_the_formula(activation, op, run, shape, dtype, device):
    gate_up = random(*shape, dtype, device)
    with poisoned():
        out = getattr(op, run)(gate_up)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), activation(gate) * up, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@grouped()
@each_device
@pytest.mark.parametrize("run", ["reference", "triton"])
@pytest.mark.parametrize(("shape", "dtype"), rotating(SHAPES, TOLERANCES))
def test_gates_of_attention(run, shape, dtype, device):
    """Gates in strided rows, as beside queries; in any leading dims."""
    gate, x = random(*shape, dtype, device).chunk(2, dim=-1)
    x = x.contiguous()
    with poisoned():
        out = getattr(sigmoid_mul, run)(gate, x)
    expected = x.double() / (1 + torch.exp(-gate.double()))
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    assert torch.equal(getattr(sigmoid_mul, run)(gate[None], x[None]), out[None])
    assert getattr(sigmoid_mul, run)(gate[:0], x[:0]).shape == (0, shape[1])


@each_device
@pytest.mark.parametrize("op", [silu_mul, gelu_tanh_mul])
def test_extremes(op, device):
    gate = torch.tensor([-1e6, -100.0, -0.0, 100.0, 1e6], device=device)
    expected = torch.tensor([0.0, 0.0, 0.0, 200.0, 2e6], device=device)
    torch.testing.assert_close(op.triton(torch.cat((gate, torch.full_like(gate, 2.0)))[None])[0], expected)


@each_device
def test_leading_dims_and_no_rows(device):
    gate_up = random(6, 40, torch.float32, device).reshape(2, 3, 80)
    torch.testing.assert_close(silu_mul.triton(gate_up), silu_mul.reference(gate_up))
    assert silu_mul.triton(gate_up[:0]).shape == (0, 3, 40)


def gradient(run: Kernel, gate_up: Tensor, upstream: Tensor) -> Tensor:
    leaf = gate_up.detach().requires_grad_()
    return torch.autograd.grad(run(leaf), leaf, upstream)[0]


@grouped()
@each_device
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("shape", "dtype"), rotating([*SHAPES, (2, 1), (3, 1025)], TOLERANCES))
def test_gradients(kernel, shape, dtype, device):
    """Upstream gradients in strided rows, one that is constant, and one stored by columns."""
    gate_up = random(*shape, dtype, device)
    towards = random(*shape, dtype, device)[:, : shape[1]] / 4
    tolerance = TOLERANCES[dtype]
    for upstream in (towards, towards[:1, :1].expand(shape), towards.t().contiguous().t()):
        expected = gradient(silu_mul.reference, gate_up.double(), upstream.double())
        with poisoned():
            grads = gradient(kernel, gate_up, upstream)
        assert grads.dtype == dtype
        torch.testing.assert_close(grads.double(), expected, atol=tolerance, rtol=tolerance)


@each_device
def test_gradients_of_extremes_leading_dims_and_no_rows(device):
    gate = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4], device=device)
    grads = gradient(silu_mul.triton, torch.cat((gate, torch.full_like(gate, 2.0))), torch.ones_like(gate))
    torch.testing.assert_close(grads[:5], torch.tensor([0.0, 0.0, 1.0, 2.0, 2.0], device=device))
    torch.testing.assert_close(grads[5:], torch.tensor([0.0, 0.0, 0.0, 100.0, 1e4], device=device))
    gate_up = random(6, 40, torch.float32, device).reshape(2, 3, 80)
    upstream = random(6, 20, torch.float32, device).view(2, 3, 40)
    for part in (slice(None), slice(0, 0)):
        grads = gradient(silu_mul.triton, gate_up[part], upstream[part])
        torch.testing.assert_close(grads, gradient(silu_mul.reference, gate_up[part], upstream[part]))


@each_device
def test_only_what_needs_gradients_keeps_anything(device):
    gate_up = random(3, 40, torch.bfloat16, device)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        frozen = silu_mul.triton(gate_up)
        assert not frozen.requires_grad
        assert saved == []
        learning = silu_mul.triton(gate_up.detach().requires_grad_())
    assert [x.data_ptr() for x in saved] == [gate_up.data_ptr()]
    with torch.no_grad():
        assert torch.equal(silu_mul.triton(gate_up), frozen)
    assert torch.equal(learning, frozen)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def test_training_and_serving_compute_the_same(device):
    gate_up = random(5, 1000, torch.bfloat16, device)
    learning = silu_mul(gate_up.detach().requires_grad_())
    assert learning.requires_grad
    with torch.no_grad():
        assert torch.equal(silu_mul(gate_up), learning)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 32, 2048])
def test_a_graph_replays_it(rows):
    gate_up = random(rows, 14336, torch.bfloat16, "cuda")
    assert torch.equal(replayed(lambda: silu_mul.triton(gate_up)), silu_mul.triton(gate_up))
