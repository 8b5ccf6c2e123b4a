"""Products whose weights come before their rows, against the usual kernels, bit by bit."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from slipstream.kernels.gemm import fp8, int4, small_m
from slipstream.kernels.gemm.choose import (
    STREAMED_GATED_ROWS,
    STREAMED_INT4_ROWS,
    STREAMED_ROWS,
    Choice,
    choose,
    device_of,
    product_of,
)
from slipstream.kernels.gemm.linear import few_rows, gated_few_rows
from slipstream.kernels.gemm.tiling import choose_fp8_tiling, choose_int4_tiling, choose_tiling
from slipstream.kernels.grid_sync import done_counters
from slipstream.kernels.kv.rope import Rotation
from slipstream.tests.kernels import test_fp8, test_int4
from slipstream.tests.kernels.triton_runs import replayed
from slipstream.tests.pairwise import grouped

ROWS = [1, 2, 5, 8, 9, 16, 17, 32]
# O, I; in two parts, two, four, one, one, four, and four of 16 bits.
PLAIN = [(4096, 4096), (2880, 4096), (2048, 8192), (1024, 512), (5120, 2880), (2048, 4096), (576, 1536)]
# O, I, query heads, dims; the last ones in two and four parts.
HEADS = [
    (6144, 4096, 32, 128),
    (5120, 2880, 64, 64),
    (4608, 3584, 28, 128),
    (3072, 4096, 16, 128),
    (2048, 4096, 24, 64),
]
Product = Callable[[Tensor, Rotation | None], Tensor]


class ProductPair(NamedTuple):
    """A product by the streamed kernel, as callers get it, and by the usual one."""

    streamed: Product
    usual: Product
    most_rows: int
    dtype: torch.dtype = torch.bfloat16


def of_16_bits(shape: tuple[int, int], bias: Tensor | None, dtype: torch.dtype = torch.bfloat16) -> ProductPair:
    weight = torch.randn(shape, device="cuda").to(dtype)
    own_bias = None if bias is None else bias.to(dtype)

    def streamed(x, rotation):
        kind = "plain" if rotation is None else "rotated"
        choice = choose(product_of(x, weight, kind, is_exact=True, rotation=rotation), device_of(x))
        assert choice.kernel == "streamed"
        return few_rows(choice, x, weight, own_bias, rotation)

    def usual(x, rotation):
        return small_m.linear_few_rows_triton(x, weight, own_bias, choose_tiling(*shape, num_rows=len(x)), rotation)

    return ProductPair(streamed, usual, STREAMED_ROWS["16 bits"], dtype)


def of_fp8(shape: tuple[int, int], bias: Tensor | None, *, by_block: bool = False) -> ProductPair:
    weight, scales = test_fp8.layer(*shape, by_block, "cuda")
    quantize = partial(fp8.quantize_rows, input_scales=fp8.InputScales(by_block=by_block))

    def streamed(x, rotation):
        rows = quantize(x)
        kind = "plain" if rotation is None else "rotated"
        assert choose(fp8.fp8_product(rows, weight, scales, kind, rotation), device_of(x)).kernel == "streamed"
        return fp8.fp8_linear_triton(rows, weight, scales, bias, rotation=rotation)

    def usual(x, rotation):
        tiling = choose_fp8_tiling(*shape, False, len(x), by_block)
        return fp8.fp8_linear_triton(quantize(x), weight, scales, bias, tiling=tiling, rotation=rotation)

    return ProductPair(streamed, usual, STREAMED_ROWS["fp8"])


def of_4_bits(shape: tuple[int, int], bias: Tensor | None, group: int = 128, symmetric: bool = True) -> ProductPair:
    weight, _ = test_int4.layer(*shape, group, symmetric, "cuda", torch.bfloat16)

    def streamed(x, _):
        assert choose(int4.int4_product(x, weight, "plain", True), device_of(x)).kernel == "int4 streamed"
        return int4.int4_linear_triton(x, weight, bias)

    def usual(x, _):
        return int4.int4_linear_triton(x, weight, bias, tiling=choose_int4_tiling(*shape, num_rows=len(x)))

    return ProductPair(streamed, usual, STREAMED_INT4_ROWS)


WITH_HEADS = {
    "bf16": of_16_bits,
    "fp16": partial(of_16_bits, dtype=torch.float16),
    "FP8": of_fp8,
    "FP8 blocks": partial(of_fp8, by_block=True),
}
FORMATS: dict[str, Callable[..., ProductPair]] = {
    **WITH_HEADS,
    "4 bits": of_4_bits,
    "4 bits, groups of 32, zeros": partial(of_4_bits, group=32, symmetric=False),
}


# Products in 4 bits and in FP8 by block have whole chunks, and programs that are resident at once.
PRODUCTS = [
    (shape, name) for shape in PLAIN for name in FORMATS if name in ("bf16", "fp16", "FP8") or shape != (5120, 2880)
]


@pytest.mark.gpu
@grouped()
@pytest.mark.parametrize(("shape", "name"), PRODUCTS)
@torch.inference_mode()
def test_bits_are_those_of_the_usual_products(shape, name):
    for bias in (None, torch.randn(shape[0], device="cuda").bfloat16()):
        pair = FORMATS[name](shape, bias)
        x = torch.randn(pair.most_rows, shape[1], device="cuda").to(pair.dtype)
        for rows in (rows for rows in ROWS if rows <= pair.most_rows):
            expected = pair.usual(x[:rows], None)
            for _ in range(2):
                assert torch.equal(pair.streamed(x[:rows], None), expected), rows
    assert not done_counters(x.device).any()


@pytest.mark.gpu
@grouped()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("activation", "shape"), [("silu", (3072, 576)), ("gelu_tanh", (4224, 2816)), ("silu", (16384, 2048))]
)
@torch.inference_mode()
def test_gates_have_the_bits_of_the_usual_kernel(activation, shape, dtype):
    weight = (torch.randn(shape, device="cuda") / shape[1] ** 0.5).to(dtype)
    x = torch.randn(STREAMED_GATED_ROWS, shape[1], device="cuda").to(dtype)
    tiling = choose_tiling(shape[0] // 2, shape[1], gated=True)
    for rows in ROWS:
        choice = choose(product_of(x[:rows], weight, "gated", is_exact=True), device_of(x))
        assert choice.kernel == "streamed"
        expected = small_m.gated_linear_few_rows_triton(x[:rows], weight, tiling, activation)
        for is_early in (False, True):
            assert torch.equal(gated_few_rows(choice, x[:rows], weight, activation, is_early), expected), rows


@pytest.mark.gpu
@grouped()
@pytest.mark.parametrize(
    ("shape", "name"), [(x, name) for x in HEADS for name in WITH_HEADS if name != "FP8 blocks" or x[1] % 256 == 0]
)
@torch.inference_mode()
def test_heads_are_rotated_and_stored(shape, name):
    pair = FORMATS[name](shape[:2], torch.randn(shape[0], device="cuda").bfloat16())
    check_heads(pair, shape, torch.randn(pair.most_rows, shape[1], device="cuda").to(pair.dtype))


def check_heads(pair: ProductPair, shape: tuple[int, int, int, int], x: Tensor):
    """For rows x (most_rows, I), queries, keys and values are those of the usual product."""
    outputs, _, heads, dim = shape
    kv_heads = (outputs // dim - heads) // 2
    angles = torch.rand(500, dim // 2, device=x.device).repeat(1, 2) * 6
    positions, slots = (torch.randperm(size, device=x.device)[: pair.most_rows] for size in (500, 90))
    for rows in (rows for rows in ROWS if rows <= pair.most_rows):
        results = []
        for run in (pair.usual, pair.streamed, pair.streamed):
            keys, values = (torch.zeros(90, kv_heads, dim, device=x.device, dtype=x.dtype) for _ in range(2))
            rotation = Rotation(
                angles.cos(), angles.sin(), positions[:rows].contiguous(), slots[:rows].contiguous(), keys, values
            )
            results.append((run(x[:rows], rotation), keys, values))
        for other in results[1:]:
            for value, expected in zip(results[0], other, strict=True):
                assert torch.equal(value, expected), rows


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@torch.inference_mode()
def test_a_graph_replays_a_chain(name):
    """Each kernel's weights are read while the one before it runs, and its rows once that has written them."""
    pair = FORMATS[name]((4096, 4096), None)

    def chain(product, x):
        for _ in range(8):
            x = torch.nn.functional.rms_norm(x + product(x, None), (4096,))
        return x

    for rows in (1, pair.most_rows):
        x = torch.randn(rows, 4096, device="cuda").to(pair.dtype)
        expected = chain(pair.usual, x)
        assert expected.isfinite().all()
        assert torch.equal(replayed(partial(chain, pair.streamed, x)), expected)
    torch.cuda.synchronize()
    assert not done_counters(x.device).any()


def test_a_tiling_is_one_of_the_usual_kernel(monkeypatch):
    x = torch.randn(2, 256).half()
    weight = torch.randn(64, 256).half() / 16
    rows = fp8.quantize_rows(x)
    codes = fp8.quantize_weight(weight)
    packed, _ = test_int4.layer(64, 256, 128, True, "cpu", torch.float16)
    products = [
        lambda tiling: fp8.fp8_linear_triton(rows, *codes, tiling=tiling),
        lambda tiling: int4.int4_linear_triton(x, packed, tiling=tiling),
    ]
    expected = [product(None) for product in products]
    tilings = choose_fp8_tiling(64, 256, False, 2), choose_int4_tiling(64, 256)
    marked = torch.zeros(())
    for module, kernel, name in ((fp8, "streamed", "streamed_linear"), (int4, "int4 streamed", "streamed_int4_linear")):
        monkeypatch.setattr(module, "choose", lambda *_, kernel=kernel: Choice(kernel, tilings[0]))
        monkeypatch.setattr(module, name, lambda *_, **__: marked)
    for product, tiling, usual in zip(products, tilings, expected, strict=True):
        assert product(None) is marked
        torch.testing.assert_close(product(tiling), usual)
