"""Products whose weights come before their rows, against those of the usual kernels, bit by bit."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from slipstream.kernels.gemm import fp8, int4, small_m
from slipstream.kernels.gemm.fixed_order import FixedOrder
from slipstream.kernels.gemm.streamed_int4 import streamed_int4_linear, streams_int4
from slipstream.kernels.gemm.streamed_linear import streamed_linear, streams_linear
from slipstream.kernels.gemm.tiling import choose_tiling
from slipstream.kernels.grid_sync import done_counters
from slipstream.kernels.kv.rope import Rotation
from slipstream.tests.kernels import test_fp8, test_int4
from slipstream.tests.kernels.triton_runs import replayed

ROWS = [1, 2, 5, 8, 9, 16, 17, 32]
PLAIN = [(4096, 4096), (2880, 4096), (2048, 8192), (1024, 512), (5120, 2880)]  # O, I
HEADS = [(6144, 4096, 32, 128), (5120, 2880, 64, 64), (4608, 3584, 28, 128)]  # O, I, query heads, dims
Product = Callable[[Tensor, Rotation | None], Tensor]


class Both(NamedTuple):
    streamed: Product
    usual: Product
    most_rows: int


def of_16_bits(shape: tuple[int, int], bias: Tensor | None) -> Both:
    weight = torch.randn(shape, device="cuda").bfloat16()

    def streamed(x: Tensor, rotation: Rotation | None) -> Tensor:
        tiling = choose_tiling(*shape, num_rows=len(x))
        assert streams_linear(x, weight, tiling, rotation)
        return streamed_linear(x, weight, bias, tiling, x.dtype, None, rotation)

    return Both(streamed, lambda x, r: small_m.linear_few_rows_triton(x, weight, bias, rotation=r), 32)


def of_fp8(shape: tuple[int, int], bias: Tensor | None) -> Both:
    weight, scales = test_fp8.layer(*shape, False, "cuda")

    def streamed(x: Tensor, rotation: Rotation | None) -> Tensor:
        rows, tiling = fp8.quantize_rows(x), fp8.choose_fp8_tiling(*shape, False, len(x))
        assert streams_linear(rows.codes, weight, tiling, rotation)
        return streamed_linear(rows.codes, weight, bias, tiling, x.dtype, (rows.scales, scales), rotation)

    def usual(x: Tensor, rotation: Rotation | None) -> Tensor:
        return fp8.fp8_linear_triton(fp8.quantize_rows(x), weight, scales, bias, few=True, rotation=rotation)

    return Both(streamed, usual, 32)


def of_4_bits(shape: tuple[int, int], bias: Tensor | None, group: int = 128, symmetric: bool = True) -> Both:
    weight, _ = test_int4.layer(*shape, group, symmetric, "cuda", torch.bfloat16)
    order = FixedOrder()

    def streamed(x: Tensor, rotation: Rotation | None) -> Tensor:
        tiling = int4.choose_int4_tiling(*shape, False, len(x))
        assert streams_int4(x, weight, tiling, rotation)
        return streamed_int4_linear(x, weight, bias, tiling, rotation)

    usual = lambda x, r: int4.int4_linear_triton(x, weight, bias, False, order, rotation=r)  # noqa: E731
    return Both(streamed, usual, 16)


FORMATS = {
    "16 bits": of_16_bits,
    "FP8": of_fp8,
    "4 bits": of_4_bits,
    "4 bits, groups of 32, zeros": partial(of_4_bits, group=32, symmetric=False),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", PLAIN)
@torch.inference_mode()
def test_bits_are_those_of_the_usual_products(shape: tuple[int, int], name: str) -> None:
    if "4 bits" in name and shape[1] % 256:
        pytest.skip("parts of whole chunks")
    for bias in (None, torch.randn(shape[0], device="cuda").bfloat16()):
        both = FORMATS[name](shape, bias)
        x = torch.randn(both.most_rows, shape[1], device="cuda").bfloat16()
        for rows in (rows for rows in ROWS if rows <= both.most_rows):
            expected = both.usual(x[:rows], None)
            for _ in range(2):
                assert torch.equal(both.streamed(x[:rows], None), expected), rows
    assert not done_counters(x.device).any()


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", HEADS)
@torch.inference_mode()
def test_heads_are_rotated_and_stored(shape: tuple[int, int, int, int], name: str) -> None:
    outputs, inputs, heads, dim = shape
    if "4 bits" in name and inputs % 256:
        pytest.skip("parts of whole chunks")
    kv_heads = (outputs // dim - heads) // 2
    both = FORMATS[name]((outputs, inputs), torch.randn(outputs, device="cuda").bfloat16())
    x = torch.randn(both.most_rows, inputs, device="cuda").bfloat16()
    angles = torch.rand(500, dim // 2, device="cuda").repeat(1, 2) * 6
    positions, slots = (torch.randperm(size, device="cuda")[: both.most_rows] for size in (500, 90))
    for rows in (rows for rows in ROWS if rows <= both.most_rows):
        found = []
        for run in (both.usual, both.streamed, both.streamed):
            keys, values = (torch.zeros(90, kv_heads, dim, device="cuda", dtype=x.dtype) for _ in range(2))
            where = positions[:rows].contiguous(), slots[:rows].contiguous(), keys, values
            found.append((run(x[:rows], Rotation(angles.cos(), angles.sin(), *where)), keys, values))
        for other in found[1:]:
            for one, two in zip(found[0], other, strict=True):
                assert torch.equal(one, two), rows


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@torch.inference_mode()
def test_a_graph_replays_a_chain(name: str) -> None:
    """Each kernel's weights are read while the one before it runs, and its rows once that has written them."""
    both = FORMATS[name]((4096, 4096), None)

    def chain(one: Product, x: Tensor) -> Tensor:
        for _ in range(8):
            x = torch.nn.functional.rms_norm(x + one(x, None), (4096,))
        return x

    for rows in (1, both.most_rows):
        x = torch.randn(rows, 4096, device="cuda").bfloat16()
        expected = chain(both.usual, x)
        assert expected.isfinite().all()
        assert torch.equal(replayed(partial(chain, both.streamed, x)), expected)
    torch.cuda.synchronize()
    assert not done_counters(x.device).any()
