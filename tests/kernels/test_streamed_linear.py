"""Products whose weights come before their rows, against the usual kernels, bit by bit; and which are taken."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from slipstream.kernels.gemm import fp8, int4, small_m, streamed, streamed_int4
from slipstream.kernels.gemm.int4_weight import Int4Weight, num_pairs, num_words
from slipstream.kernels.gemm.streamed_int4 import streams_int4
from slipstream.kernels.gemm.streamed_linear import MOST_ROWS, streams_linear
from slipstream.kernels.gemm.tiling import Tiling, choose_tiling
from slipstream.kernels.grid_sync import done_counters
from slipstream.kernels.kv.rope import Rotation
from slipstream.tests.kernels import test_fp8, test_int4
from slipstream.tests.kernels.triton_runs import replayed
from slipstream.tests.pairwise import grouped

ROWS = [1, 2, 5, 8, 9, 16, 17, 32]
# O, I; in 16 bits and FP8 in two parts, two, four, one, one and four.
PLAIN = [(4096, 4096), (2880, 4096), (2048, 8192), (1024, 512), (5120, 2880), (2048, 4096)]
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

    def streamed(x: Tensor, rotation: Rotation | None) -> Tensor:
        assert streams_linear(x, weight, choose_tiling(*shape, num_rows=len(x)), rotation)
        return small_m.linear_few_rows_triton(x, weight, own_bias, rotation=rotation)

    def usual(x: Tensor, rotation: Rotation | None) -> Tensor:
        return small_m.linear_few_rows_triton(x, weight, own_bias, choose_tiling(*shape, num_rows=len(x)), rotation)

    return ProductPair(streamed, usual, MOST_ROWS[dtype], dtype)


def of_fp8(shape: tuple[int, int], bias: Tensor | None) -> ProductPair:
    weight, scales = test_fp8.layer(*shape, False, "cuda")

    def streamed(x: Tensor, rotation: Rotation | None) -> Tensor:
        rows = fp8.quantize_rows(x)
        assert streams_linear(rows.codes, weight, fp8.choose_fp8_tiling(*shape, False, len(x)), rotation)
        return fp8.fp8_linear_triton(rows, weight, scales, bias, rotation=rotation)

    def usual(x: Tensor, rotation: Rotation | None) -> Tensor:
        tiling = fp8.choose_fp8_tiling(*shape, False, len(x))
        return fp8.fp8_linear_triton(fp8.quantize_rows(x), weight, scales, bias, tiling=tiling, rotation=rotation)

    return ProductPair(streamed, usual, MOST_ROWS[fp8.E4M3])


def of_4_bits(shape: tuple[int, int], bias: Tensor | None, group: int = 128, symmetric: bool = True) -> ProductPair:
    weight, _ = test_int4.layer(*shape, group, symmetric, "cuda", torch.bfloat16)

    def streamed(x: Tensor, _: Rotation | None) -> Tensor:
        assert streams_int4(x, weight, int4.choose_int4_tiling(*shape, num_rows=len(x)))
        return int4.int4_linear_triton(x, weight, bias)

    def usual(x: Tensor, _: Rotation | None) -> Tensor:
        return int4.int4_linear_triton(x, weight, bias, tiling=int4.choose_int4_tiling(*shape, num_rows=len(x)))

    return ProductPair(streamed, usual, streamed_int4.MOST_ROWS)


WITH_HEADS = {"bf16": of_16_bits, "fp16": partial(of_16_bits, dtype=torch.float16), "FP8": of_fp8}
FORMATS: dict[str, Callable[..., ProductPair]] = {
    **WITH_HEADS,
    "4 bits": of_4_bits,
    "4 bits, groups of 32, zeros": partial(of_4_bits, group=32, symmetric=False),
}


# 4-bit products have whole chunks, and programs that are resident at once.
PRODUCTS = [(shape, name) for shape in PLAIN for name in FORMATS if "4 bits" not in name or shape != (5120, 2880)]


@pytest.mark.gpu
@grouped()
@pytest.mark.parametrize(("shape", "name"), PRODUCTS)
@torch.inference_mode()
def test_bits_are_those_of_the_usual_products(shape: tuple[int, int], name: str) -> None:
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
@pytest.mark.parametrize("name", WITH_HEADS)
@pytest.mark.parametrize("shape", HEADS)
@torch.inference_mode()
def test_heads_are_rotated_and_stored(shape: tuple[int, int, int, int], name: str) -> None:
    pair = FORMATS[name](shape[:2], torch.randn(shape[0], device="cuda").bfloat16())
    check_heads(pair, shape, torch.randn(pair.most_rows, shape[1], device="cuda").to(pair.dtype))


def check_heads(pair: ProductPair, shape: tuple[int, int, int, int], x: Tensor) -> None:
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
def test_a_graph_replays_a_chain(name: str) -> None:
    """Each kernel's weights are read while the one before it runs, and its rows once that has written them."""
    pair = FORMATS[name]((4096, 4096), None)

    def chain(product: Product, x: Tensor) -> Tensor:
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


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that asks which GPU it runs on sees an H200."""
    monkeypatch.setattr(streamed, "use_triton", lambda _: True)
    monkeypatch.setattr(streamed, "is_hopper", lambda _: True)
    for module in (streamed, streamed_int4):
        monkeypatch.setattr(module, "programs_of", lambda _: 132)


def takes(x: Tensor, weight: Tensor, rotation: Rotation | None = None) -> bool:
    return streams_linear(x, weight, choose_tiling(*weight.shape, num_rows=len(x)), rotation)


def heads(dim: int, scales: Tensor | None = None) -> Rotation:
    table = torch.zeros(8, dim)
    index = torch.zeros(1, dtype=torch.int64)
    cache = torch.zeros(4, 1, dim)
    return Rotation(table, table, index, index, cache, cache, scales)


@pytest.mark.parametrize(("dtype", "max_rows"), [(torch.bfloat16, 8), (torch.float16, 8), (fp8.E4M3, 32)])
@pytest.mark.usefixtures("hopper")
def test_which_products_are_taken(dtype: torch.dtype, max_rows: int) -> None:
    weight = torch.zeros(256, 4096, dtype=dtype)
    x = torch.zeros(max_rows + 1, 4096, dtype=dtype)
    for rows in (1, max_rows):
        assert takes(x[:rows], weight)
        assert takes(x[:rows], weight, heads(128))
    assert not takes(x, weight)
    assert not takes(x[:0], weight)
    assert not takes(x[:1].float(), weight)
    assert not takes(x[:1].float(), weight.float())
    assert not takes(x[:1], weight[:250])
    assert not takes(x[:1], weight, heads(32)), "a tile has two heads"
    assert not takes(x[:1], weight, heads(128, torch.ones(2, 1))), "a cache in FP8"
    beside = torch.zeros(1, 4104, dtype=dtype)[:, 4 : 4 + 4096]
    assert not takes(beside, weight), "rows that begin within 16 bytes"
    large = torch.empty((64 << 20) // (4096 * dtype.itemsize) + 64, 4096, dtype=dtype, device="meta")
    assert takes(x[:1].to("meta"), large[:-64])
    assert not takes(x[:1].to("meta"), large)


def test_none_is_taken_elsewhere() -> None:
    assert not takes(torch.zeros(1, 4096).bfloat16(), torch.zeros(256, 4096).bfloat16())


def empty_weight(outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> Int4Weight:
    words = torch.empty(outputs, num_words(inputs), dtype=torch.int32, device="meta")
    return Int4Weight(words, torch.empty(num_pairs(inputs, 128), outputs, 2, dtype=dtype), None, 128, inputs)


@pytest.mark.usefixtures("hopper")
def test_which_products_of_4_bits_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output projection of an 8B Llama is taken."""
    monkeypatch.setattr(streamed_int4, "is_packed", lambda _: True)

    def takes(weight: Int4Weight, rows: int = 1, dtype: torch.dtype = torch.bfloat16) -> bool:
        tiling = int4.choose_int4_tiling(len(weight.words), weight.num_inputs, num_rows=rows)
        return streams_int4(torch.zeros(rows, weight.num_inputs, dtype=dtype), weight, tiling)

    projection = empty_weight(4096, 4096)
    assert all(takes(projection, rows) for rows in (1, 8, 9, 16))
    assert not takes(projection, 17)
    assert not takes(empty_weight(4096, 4096, torch.float16), dtype=torch.float16)
    for shape in ((6144, 4096), (4096, 14336), (4000, 4096), (2880, 2880), (2048, 8448)):
        assert not takes(empty_weight(*shape)), shape
    assert takes(empty_weight(2048, 8192)), "eight parts"
    monkeypatch.setattr(streamed_int4, "programs_of", lambda _: 66)
    assert not takes(projection)


def test_a_tiling_is_one_of_the_usual_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where callers give none, the streamed kernel takes all products that it supports."""
    x = torch.randn(2, 256).half()
    weight = torch.randn(64, 256).half() / 16
    rows = fp8.quantize_rows(x)
    codes = fp8.quantize_weight(weight)
    packed, _ = test_int4.layer(64, 256, 128, True, "cpu", torch.float16)
    products: list[Callable[[Tiling | None], Tensor]] = [
        lambda tiling: small_m.linear_few_rows_triton(x, weight, None, tiling),
        lambda tiling: fp8.fp8_linear_triton(rows, *codes, tiling=tiling),
        lambda tiling: int4.int4_linear_triton(x, packed, tiling=tiling),
    ]
    expected = [product(None) for product in products]
    marked = torch.zeros(())
    for module, name in ((small_m, "streams_linear"), (fp8, "streams_linear"), (int4, "streams_int4")):
        monkeypatch.setattr(module, name, lambda *_: True)
    for module, name in ((small_m, "streamed_linear"), (fp8, "streamed_linear"), (int4, "streamed_int4_linear")):
        monkeypatch.setattr(module, name, lambda *_, **__: marked)
    tilings = choose_tiling(64, 256), fp8.choose_fp8_tiling(64, 256, False, 2), int4.choose_int4_tiling(64, 256)
    for product, tiling, usual in zip(products, tilings, expected, strict=True):
        assert product(None) is marked
        torch.testing.assert_close(product(tiling), usual)
    assert fp8.fp8_linear_triton(rows, *codes, gated=True) is not marked
    assert int4.int4_linear_triton(x, packed, gated=True) is not marked
