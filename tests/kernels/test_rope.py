"""Rotary embedding and the KV write against complex numbers in fp64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from slipstream.kernels.norm import HeadNorms
from slipstream.kernels.rope import (
    rotate_and_store,
    rotate_and_store_reference,
    rotate_and_store_triton,
    rotate_reference,
    rotate_triton,
    store,
)
from slipstream.tests.kernels.triton_runs import DEVICES, poisoned

MAX_LEN, THETA, EPS = 300, 100.0, 1e-6
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # one rounding
CASES = [  # T, Q, G, D
    (1, 32, 8, 128),
    (3, 4, 1, 64),
    (5, 6, 2, 8),
    (2, 28, 4, 128),
    (7, 1, 1, 96),
    (2, 8, 8, 256),
]


class Scene:
    """Views of one fused tensor, and a cache whose every value is a sentinel."""

    def __init__(self, case: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
        T, Q, G, D = case
        generator = torch.Generator().manual_seed(T)
        wide = torch.randn(T, (Q + 2 * G) * D + 16, generator=generator)  # tokens do not lie next to each other
        fused = wide.to(device, dtype)[:, : (Q + 2 * G) * D]
        self.q, self.k, self.v = fused.unflatten(1, (-1, D)).split([Q, G, G], dim=1)
        frequencies = THETA ** (-torch.arange(D // 2, dtype=torch.float64) * 2 / D)
        self.angles = torch.outer(torch.arange(MAX_LEN).double(), frequencies)  # (P, D / 2)
        tables = (self.angles.cos(), self.angles.sin())
        self.cos, self.sin = (torch.cat((table, table), dim=1).float().to(device) for table in tables)
        self.positions = torch.randint(MAX_LEN, (T,), generator=generator).to(device)
        self.slots = torch.randperm(4 * T, generator=generator)[:T].to(device)
        self.keys, self.values = torch.full((2, 4 * T, G, D), 7.0, dtype=dtype, device=device)

    def arguments(self) -> tuple[Tensor, ...]:
        return (self.q, self.k, self.v, self.cos, self.sin, self.positions, self.slots, self.keys, self.values)

    def norms(self) -> HeadNorms:
        q, k = 1 + 0.3 * torch.randn(2, self.q.shape[-1], generator=torch.Generator().manual_seed(2)).to(self.q)
        return HeadNorms(q, k, EPS)

    def turned(self, x: Tensor, sign: float = 1.0) -> Tensor:
        """x (T, heads, D) as complex numbers (x[i], x[i + D / 2]), each turned by its angle times `sign`, in fp64."""
        turn = torch.polar(torch.ones_like(self.angles), sign * self.angles)[self.positions.cpu(), None]
        result = torch.complex(*x.double().cpu().chunk(2, dim=-1)) * turn
        return torch.cat((result.real, result.imag), dim=-1)

    def check_cache(self) -> None:
        check(self.keys[self.slots], self.turned(self.k))
        assert torch.equal(self.values[self.slots], self.v)
        untouched = torch.ones(len(self.keys), dtype=torch.bool, device=self.slots.device)
        untouched[self.slots] = False
        assert (self.keys[untouched] == 7).all()
        assert (self.values[untouched] == 7).all()


def check(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.double().cpu(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("case", [*CASES, pytest.param((8192, 32, 8, 128), marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kernel", [rotate_and_store_reference, rotate_and_store_triton])
def test_equals_complex_numbers(
    kernel: Callable[..., Tensor], case: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    scene = Scene(case, dtype, device)
    out = kernel(*scene.arguments())
    assert out.dtype == dtype
    assert out.is_contiguous()
    check(out, scene.turned(scene.q))
    scene.check_cache()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("case", [*CASES, pytest.param((8192, 32, 8, 128), marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kernel", [rotate_and_store_reference, rotate_and_store_triton])
def test_heads_are_normed_before_they_turn(
    kernel: Callable[..., Tensor], case: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    """Against fp64, rounded once in between, as a norm of its own would round."""
    scene = Scene(case, dtype, device)
    norms = scene.norms()
    before = scene.k.clone()

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        scale = (x.double().square().mean(dim=-1, keepdim=True) + EPS).rsqrt()
        return (x.double() * scale * weight.double()).to(dtype)

    out = kernel(*scene.arguments(), norms)
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]  # two roundings
    turned = scene.turned(normed(scene.q, norms.q)), scene.turned(normed(before, norms.k))
    for actual, expected in zip((out, scene.keys[scene.slots]), turned, strict=True):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double().cpu(), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(scene.k, before), "the projection itself stays"
    assert torch.equal(scene.values[scene.slots], scene.v)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kernel", [rotate_and_store_reference, rotate_and_store_triton])
def test_store_writes_what_rotate_and_store_writes(
    kernel: Callable[..., Tensor], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.kernels.rope.rotate_and_store", kernel)
    scene = Scene((3, 4, 2, 64), torch.float32, device)
    store(*scene.arguments()[1:])
    scene.check_cache()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", [rotate_reference, rotate_triton])
def test_alone_it_turns_forth_and_its_gradient_back(
    kernel: Callable[..., Tensor], case: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    scene = Scene(case, torch.float32, device)
    leaf = scene.q.detach().requires_grad_()
    upstream = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    with poisoned():
        out = kernel(leaf, scene.cos, scene.sin, scene.positions, dtype)
        (gradient,) = torch.autograd.grad(out, leaf, upstream.transpose(1, 2).contiguous().transpose(1, 2))
    assert (out.dtype, gradient.dtype) == (dtype, torch.float32)
    check(out.detach(), scene.turned(leaf.detach()))
    torch.testing.assert_close(gradient.double().cpu(), scene.turned(upstream, -1.0), atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@torch.inference_mode()
def test_replays_write_what_eager_calls_write() -> None:
    scene = Scene((4, 32, 8, 128), torch.bfloat16, "cuda")
    expected = rotate_and_store(*scene.arguments())
    keys = scene.keys[scene.slots]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rotate_and_store(*scene.arguments())
    for tensor in (out, scene.keys):
        tensor.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, expected)
    assert torch.equal(scene.keys[scene.slots], keys)
