"""Norms against their formula in fp64."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from slipstream.kernels.norm import (
    Branch,
    HeadNorms,
    Increment,
    add_rms_norm,
    grow_and_norm,
    norm_heads,
    rms_norm,
    rms_norm_gated,
    rms_norm_pair,
    rms_norm_parts,
)
from slipstream.tests.kernels.triton_runs import TOLERANCES, each_device, poisoned, replayed
from slipstream.tests.pairwise import grouped, rotating

EPS = 1e-5
REAL = [(1, 4096), (32, 4096), (8192, 4096), (7, 8192), (3, 5120), (4096, 1000), (64, 64)]
SHAPES = [(1, 64), (3, 80), (5, 1000), *(pytest.param(shape, marks=pytest.mark.gpu) for shape in REAL)]


def normed(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def random(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int, scale: float = 3.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(device, dtype)


def random_rows(shape: tuple[int, int], dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """Strided rows."""
    return random((shape[0], shape[1] + 16), dtype, device, seed)[:, : shape[1]]


def check(actual: Tensor, expected: Tensor, dtype: torch.dtype):
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@grouped()
@each_device
@pytest.mark.parametrize("kernel", [rms_norm.reference, rms_norm.triton])
@pytest.mark.parametrize(("shape", "dtype"), rotating(SHAPES, TOLERANCES))
def test_rms_norm(kernel, shape, dtype, device):
    x = random_rows(shape, dtype, device, 0)
    weight = random(shape[1:], dtype, device, 1)
    with poisoned():
        check(kernel(x, weight, EPS), normed(x, weight), dtype)


@grouped()
@each_device
@pytest.mark.parametrize("kernel", [rms_norm_gated.reference, rms_norm_gated.triton])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    rotating([(1, 3, 16), (5, 6, 80), pytest.param((33, 48, 128), marks=pytest.mark.gpu)], TOLERANCES),
)
def test_rms_norm_gated(kernel, shape, dtype, device):
    rows, heads, size = shape
    x = random(shape, dtype, device, 0)
    gate = random_rows((rows, heads * size), dtype, device, 1)
    weight = random((size,), dtype, device, 2, scale=1.0)
    with poisoned():
        actual = kernel(x, gate, weight, EPS)
    expected = normed(x, weight).flatten(1) * torch.nn.functional.silu(gate.double())
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, atol=4 * TOLERANCES[dtype], rtol=2 * TOLERANCES[dtype])


@grouped("dtype")
@each_device
@pytest.mark.parametrize("kernel", [add_rms_norm.reference, add_rms_norm.triton])
@pytest.mark.parametrize(("with_out", "shape", "dtype"), rotating([True, False], SHAPES, TOLERANCES))
def test_add_rms_norm(kernel, with_out, shape, dtype, device):
    residual = random_rows(shape, dtype, device, 0)
    delta = random(shape, dtype, device, 1)
    weight = random(shape[1:], dtype, device, 2)
    before, out, after = torch.full((shape[0], 3 * shape[1]), torch.nan, dtype=dtype, device=device).chunk(3, dim=1)
    with poisoned():
        result, summed = kernel(residual, delta, weight, EPS, out if with_out else None)
    is_cut = device == "cpu" and dtype == torch.bfloat16  # the interpreter drops the lower bits instead of rounding
    torch.testing.assert_close(summed, residual + delta, rtol=2**-7 if is_cut else 0, atol=0)
    check(result, normed(summed, weight), dtype)
    if with_out:
        assert torch.equal(out, summed)
        assert before.isnan().all()
        assert after.isnan().all()


def random_increment(shape: tuple[int, int], parts: str, dtype: torch.dtype, device: str) -> Increment:
    """parts: "+" a second branch, "o" a norm of the sum, "*" a factor. Weights are in fp32, as Gemma's: their product
    with a row is what is rounded; one is in `dtype`."""
    branches = [
        Branch(random_rows(shape, dtype, device, 1), random(shape[1:], torch.float32, device, 2), 0.5),
        Branch(random(shape, dtype, device, 3), random(shape[1:], dtype, device, 4), EPS),
    ]
    outer = (random(shape[1:], torch.float32, device, 5), 0.25) if "o" in parts else None
    factor = torch.full((1,), 0.37, dtype=dtype, device=device) if "*" in parts else None
    return Increment(branches[0], branches[1] if "+" in parts else None, outer, factor)


@grouped("dtype")
@each_device
@pytest.mark.parametrize("kernel", [grow_and_norm.reference, grow_and_norm.triton])
@pytest.mark.parametrize(
    ("shape", "dtype", "parts", "count", "with_out"),
    rotating(SHAPES, TOLERANCES, ["", "+", "o", "*", "+o*"], [0, 1, 2, 3], [False, True]),
)
def test_grow_and_norm(kernel, shape, dtype, parts, count, with_out, device):
    residual = random_rows(shape, dtype, device, 0)
    increment = random_increment(shape, parts, dtype, device)
    weights = [random(shape[1:], (dtype, torch.float32)[index % 2], device, 6 + index) for index in range(count)]
    before, out, after = torch.full((shape[0], 3 * shape[1]), torch.nan, dtype=dtype, device=device).chunk(3, dim=1)
    with poisoned():
        results, summed = kernel(residual, increment, weights, EPS, out if with_out else None)
    first, second, outer, factor = increment
    expected = normed(*first) + (0 if second is None else normed(*second))
    expected = residual.double() + (expected if outer is None else normed(expected, *outer))
    expected = expected if factor is None else expected * factor.double()
    tolerance = 8 * TOLERANCES[dtype]  # rounded several times, and large numbers may cancel
    torch.testing.assert_close(summed.double(), expected, atol=tolerance, rtol=tolerance)
    assert summed.dtype == dtype
    assert len(results) == count
    for result, weight in zip(results, weights, strict=True):
        check(result, normed(summed, weight), dtype)
    if with_out:
        assert torch.equal(out, summed)
        assert before.isnan().all()
        assert after.isnan().all()


@grouped()
@each_device
@pytest.mark.parametrize(
    ("shape", "parts", "dtype"),
    rotating(
        [(3, 80), (5, 1000), *(pytest.param(shape, marks=pytest.mark.gpu) for shape in [(1, 2816), (32, 6656)])],
        ["", "+", "o", "*", "+o*"],
        [torch.bfloat16, torch.float16],
    ),
)
def test_one_kernel_gives_the_bits_of_several(shape, parts, dtype, device):
    residual = random(shape, dtype, device, 0)
    increment = random_increment(shape, parts, dtype, device)
    weight = random(shape[1:], torch.float32, device, 6)
    first, second, outer, factor = increment
    delta = rms_norm.triton(*first)
    delta = delta if second is None else delta + rms_norm.triton(*second)
    delta = delta if outer is None else rms_norm.triton(delta, *outer)
    (result, _), summed = grow_and_norm.triton(residual, increment, [weight, weight], EPS)
    expected, total = add_rms_norm.triton(residual, delta, weight, EPS)
    if factor is not None:
        total = total * factor
        expected = rms_norm.triton(total, weight, EPS)
    if device == "cpu":  # where the interpreter drops the lower bits, and torch rounds
        torch.testing.assert_close(summed, total, atol=0.1, rtol=0.02)
        check(result, normed(summed, weight), dtype)
    else:
        assert torch.equal(summed, total)
        assert torch.equal(result, expected)


@grouped()
@each_device
@pytest.mark.parametrize("kernel", [rms_norm_pair.reference, rms_norm_pair.triton])
@pytest.mark.parametrize(("shape", "dtype"), rotating(SHAPES, TOLERANCES))
def test_rms_norm_pair(kernel, shape, dtype, device):
    first = random(shape, dtype, device, 0)
    second = random_rows(shape, dtype, device, 1)
    weights = random(shape[1:], dtype, device, 2), random(shape[1:], dtype, device, 3)
    with poisoned():
        out = kernel(first, second, weights, EPS)
    check(out, torch.cat((normed(first, weights[0]), normed(second, weights[1])), dim=-1), dtype)


@grouped()
@each_device
@pytest.mark.parametrize("kernel", [rms_norm_parts.reference, rms_norm_parts.triton])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_rms_norm_parts(kernel, dtype, device):
    x = random_rows((5, 192), dtype, device, 0)
    weights = random((3, 64), dtype, device, 1)
    expected = [normed(part, weight) for part, weight in zip(x.chunk(3, dim=-1), weights, strict=True)]
    check(kernel(x, weights.unbind(), EPS), torch.cat(expected, dim=-1), dtype)
    check(kernel(x.view(5, 1, 192), weights.unbind(), EPS)[:, 0], torch.cat(expected, dim=-1), dtype)


@each_device
def test_leading_dims_no_rows_and_mixed_dtypes(device):
    x = random((2, 3, 64), torch.bfloat16, device, 0)
    weight = random((64,), torch.float32, device, 1)
    delta = random((2, 3, 64), torch.float32, device, 2)
    check(rms_norm.triton(x, weight, EPS), normed(x, weight), torch.bfloat16)
    result, summed = add_rms_norm.triton(x, delta, weight, EPS)
    assert torch.equal(summed, x + delta)
    check(result, normed(summed, weight), torch.float32)
    check(rms_norm.triton(delta.transpose(0, 1), weight, EPS), normed(delta.transpose(0, 1), weight), torch.float32)
    assert rms_norm.triton(x[:0], weight, EPS).shape == (0, 3, 64)
    assert rms_norm_pair.triton(x[:0], x[:0], (weight, weight), EPS).shape == (0, 3, 128)


@each_device
def test_a_row_does_not_depend_on_the_others(device):
    x = random((40, 256), torch.float32, device, 0)
    weight = random((256,), torch.float32, device, 1)
    together = rms_norm.triton(x, weight, EPS)
    assert torch.equal(torch.cat([rms_norm.triton(row, weight, EPS) for row in x.split(1)]), together)
    delta = random((40, 256), torch.float32, device, 2)

    def grown(rows):
        branch = Branch(delta[rows], weight, EPS)
        return grow_and_norm.triton(x[rows], Increment(branch, branch, (weight, EPS)), [weight], EPS)

    (result,), summed = grown(slice(None))
    for row in range(0, 40, 7):
        alone = grown(slice(row, row + 1))
        assert torch.equal(alone[0][0], result[row : row + 1])
        assert torch.equal(alone[1], summed[row : row + 1])


@pytest.fixture
def warns_always() -> Iterator[None]:
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


@pytest.mark.filterwarnings("error:Mismatch dtype between input and weight")  # torch's, where it cannot fuse
@pytest.mark.usefixtures("warns_always")
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
@pytest.mark.parametrize("autocast", [False, True])
def test_under_autograd_fp32_weights_leave_the_dtype_as_it_is(autocast, device):
    """As under autocast: results have the inputs' dtype, and the weights' gradients are fp32."""
    x, y = (random((6, 64), torch.bfloat16, device, seed).requires_grad_() for seed in (0, 1))
    weights = [random((64,), torch.float32, device, seed).requires_grad_() for seed in (2, 3)]
    heads = [random((16,), torch.float32, device, seed).requires_grad_() for seed in (4, 5)]
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        added, summed = add_rms_norm(x, y, weights[0], EPS)
        q, k, v = norm_heads(*x.unflatten(1, (4, 16)).split((2, 1, 1), dim=1), HeadNorms(*heads, EPS, v=heads[0]))
        parts = rms_norm_parts(x, [*heads, *heads], EPS)
        results = [
            rms_norm(x, weights[0], EPS),
            added,
            rms_norm_pair(x, y, (weights[0], weights[1]), EPS),
            parts,
            q,
            k,
            v,
        ]
    by_head = x.unflatten(1, (4, 16))
    expected = [
        normed(x, weights[0]),
        normed(summed, weights[0]),
        torch.cat((normed(x, weights[0]), normed(y, weights[1])), dim=-1),
        normed(by_head, torch.stack([*heads, *heads])).flatten(1),
        normed(by_head[:, :2], heads[0]),
        normed(by_head[:, 2:3], heads[1]),
        normed(by_head[:, 3:], heads[0]),
    ]
    leaves = [x, y, *weights, *heads]
    for actual, exact in zip(results, expected, strict=True):
        check(actual, exact, torch.bfloat16)
    gradients = torch.autograd.grad(sum(result.float().sum() for result in results), leaves)
    exact_gradients = torch.autograd.grad(sum(exact.sum() for exact in expected), leaves)
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16] * 2 + [torch.float32] * 4
    for gradient, exact in zip(gradients, exact_gradients, strict=True):
        assert (gradient.double() - exact.double()).norm() <= 0.02 * exact.double().norm()


@each_device
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_of_a_residual_that_grows(autocast, device):
    """All tensors that an increment reads have them, by several norms of the sum."""
    residual, x, y = (random((6, 64), torch.bfloat16, device, seed).requires_grad_() for seed in range(3))
    gains = [random((64,), torch.float32, device, seed).requires_grad_() for seed in range(3, 8)]
    factor = torch.full((1,), 0.37, dtype=torch.bfloat16, device=device).requires_grad_()
    increment = Increment(Branch(x, gains[0], 0.5), Branch(y, gains[1], EPS), (gains[2], 0.25), factor)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        results, summed = grow_and_norm(residual, increment, gains[3:], EPS)
    delta = normed(normed(x, gains[0], 0.5) + normed(y, gains[1]), gains[2], 0.25)
    exact = (residual.double() + delta) * factor.double()
    weights = random((2, 6, 64), torch.float32, device, 8)
    loss = sum((result * weight).sum() for result, weight in zip(results, weights, strict=True)) + summed.sum()
    exact_loss = sum((normed(exact, gain) * weight).sum() for gain, weight in zip(gains[3:], weights, strict=True))
    leaves = [residual, x, y, factor, *gains]
    gradients = torch.autograd.grad(loss, leaves)
    exact_gradients = torch.autograd.grad(exact_loss + exact.sum(), leaves)
    assert {result.dtype for result in (*results, summed)} == {torch.bfloat16}
    for gradient, expected, leaf in zip(gradients, exact_gradients, leaves, strict=True):
        assert gradient.dtype == leaf.dtype
        assert (gradient.double() - expected.double()).norm() <= 0.03 * expected.double().norm()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 32, 2048])
def test_a_graph_replays_the_norms(rows):
    x, delta, weight = (random(shape, torch.bfloat16, "cuda", 0) for shape in ((rows, 4096), (rows, 4096), (4096,)))

    def run():
        normed, summed = add_rms_norm.triton(x, delta, weight, EPS)
        return [rms_norm.triton(summed, weight, EPS), rms_norm_pair.triton(normed, summed, (weight, weight), EPS)]

    for actual, expected in zip(replayed(run), run(), strict=True):
        assert torch.equal(actual, expected)
