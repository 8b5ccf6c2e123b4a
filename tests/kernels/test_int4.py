"""Linear layers with 4-bit weights against their formula in fp64 and the layer of 16 bits that they stand for."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.gemm import int4
from slipstream.kernels.gemm.activation import silu_mul
from slipstream.kernels.gemm.fixed_order import FixedOrder, linear_many_rows_triton
from slipstream.kernels.gemm.int4 import int4_linear
from slipstream.kernels.gemm.int4_weight import Int4Weight, dequantize, pack_codes, pack_units, unpack_words
from slipstream.kernels.gemm.mxfp4 import unpack_mxfp4
from slipstream.kernels.gemm.tiling import SMALL_ROWS, choose_int4_tiling
from slipstream.tests.kernels.mxfp4_files import dequantize_mxfp4, pack_mxfp4
from slipstream.tests.kernels.triton_runs import TOLERANCES, check_chain, each_device, poisoned
from slipstream.tests.pairwise import grouped, rotating

DTYPES = [torch.float16, torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
SHAPES = [(1, 32, 4096), (5, 66, 328), (7, 34, 2056), (70, 66, 2048), (130, 34, 2056)]
LLAMA = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
ROWS = [1, 2, 7, 8, 9, 16, 33, 64, 65, 100, 128, 129, 200, 300, 513, 1024]


def layer(
    outputs: int, inputs: int, group: int, symmetric: bool, device: str, dtype: torch.dtype
) -> tuple[Int4Weight, Tensor]:
    """The weight as stored and what it means in `dtype`; scales make products about 1 in size."""
    generator = torch.Generator(device).manual_seed(inputs)
    groups = -(-inputs // group)
    codes = torch.randint(16, (outputs, inputs), generator=generator, device=device)
    scales = (0.5 + torch.rand(outputs, groups, generator=generator, device=device)).mul(0.2 * inputs**-0.5).to(dtype)
    zeros = torch.randint(17, (outputs, groups), generator=generator, device=device)
    spread = torch.arange(inputs, device=device) // group
    exact = (codes - (8 if symmetric else zeros[:, spread])).double() * scales.double()[:, spread]
    units = [pack_units(values, group, inputs) for values in (scales, zeros.to(torch.int16))]
    return Int4Weight(pack_codes(codes), units[0], None if symmetric else units[1], group, inputs), exact.to(dtype)


def test_codes_lie_in_planes():
    """Against a loop; inputs beyond the last are 8, a zero weight."""
    codes = torch.randint(16, (3, 328), dtype=torch.int64)
    words = pack_codes(codes)
    assert (words.shape, words.dtype) == ((3, 64), torch.int32)
    for column in range(512):
        chunk, rest = divmod(column, 256)
        plane, place = divmod(rest, 32)
        pair, half = divmod(place, 2)
        word = words[:, 32 * chunk + 2 * pair + plane // 4].long()
        code = word >> 16 * half + 4 * (plane % 4) & 15
        assert torch.equal(code, codes[:, column] if column < 328 else torch.full((3,), 8))
    assert torch.equal(unpack_words(words, 328).long(), codes)


@pytest.mark.parametrize(("group", "inputs"), [(32, 328), (64, 64), (128, 520), (512, 1100)])
def test_units_lie_in_pairs(group, inputs):
    """Against a loop."""
    groups = torch.arange(3 * -(-inputs // group)).view(3, -1)
    units = pack_units(groups, group, inputs)
    size = min(group, 128)
    assert units.shape == (-(-inputs // 256) * 256 // size // 2, 3, 2)
    for column in range(inputs):
        pair, place = divmod(column // size, 2)
        assert torch.equal(units[pair, :, place], groups[:, column // group])


@grouped("dtype")
@each_device
@pytest.mark.parametrize(
    ("shape", "group", "symmetric", "dtype"), rotating(SHAPES, [128, 32, 64, 512], [False, True], DTYPES)
)
def test_weights_are_rounded_once_and_products_are_those_of_their_formula(shape, group, symmetric, dtype, device):
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("the kernels of a GPU take 16 bits")
    rows, outputs, inputs = shape
    weight, value = layer(outputs, inputs, group, symmetric, device, dtype)
    for run in (dequantize.reference, dequantize.triton):
        with poisoned():
            assert torch.equal(run(weight, dtype), value)
    x = torch.randn(rows, inputs + 8, device=device).to(dtype)[:, :inputs]
    bias = torch.randn(outputs, device=device).to(dtype)
    for run in (int4_linear.reference, int4_linear.triton):
        for order in (None, FixedOrder()):
            with poisoned():
                out = run(x, weight, bias, False, order)
                gated = run(x, weight, None, True, order)
            expected = x.double() @ value.double().t()
            tolerance = TOLERANCES[dtype]
            torch.testing.assert_close(out.double(), expected + bias.double(), atol=tolerance, rtol=tolerance)
            gate, up = expected.chunk(2, dim=-1)
            torch.testing.assert_close(gated.double(), F.silu(gate) * up, atol=2 * tolerance, rtol=2 * tolerance)
            assert out.dtype == gated.dtype == dtype
            assert run(x[:0], weight, bias).shape == (0, outputs)


@each_device
@pytest.mark.parametrize(("inputs", "group", "symmetric"), [(328, 128, False), (2056, 32, True), (2048, 64, False)])
def test_small_tiles(inputs, group, symmetric, device):
    weight, value = layer(72, inputs, group, symmetric, device, torch.float16)
    x = torch.randn(5, inputs, device=device).half()
    for gated in (False, True):
        tiling = choose_int4_tiling(72, inputs, gated)
        assert tiling.least_rows == SMALL_ROWS
        with poisoned():
            out = int4_linear.triton(x, weight, None, gated, tiling=tiling)
        gate, up = (x.double() @ value.double().t()).chunk(2, dim=-1)
        expected = F.silu(gate) * up if gated else torch.cat((gate, up), dim=-1)
        tolerance = 2 * TOLERANCES[torch.float16]
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@each_device
def test_a_row_does_not_depend_on_few_others(device):
    weight, _ = layer(64, 2048, 128, False, device, torch.float16)
    x = torch.randn(16, 2048, device=device).half()
    assert int4.part_of(weight) == 1024
    for gated in (False, True):
        out = int4_linear.triton(x, weight, None, gated, FixedOrder())
        for rows in (1, 5, 9):
            assert torch.equal(int4_linear.triton(x[:rows], weight, None, gated, FixedOrder()), out[:rows])


def test_mxfp4_blocks():
    """Against the definition of e2m1 and of the scales."""
    codes = torch.arange(16).repeat(2, 6)  # (2, 96)
    blocks = pack_mxfp4(codes)
    assert blocks.shape == (2, 3, 16)
    assert blocks[0, 0].tolist() == [(2 * place & 15) | (2 * place + 1 & 15) << 4 for place in range(16)]
    assert torch.equal(unpack_mxfp4(blocks).long(), codes)
    scales = torch.tensor([[127, 120, 130], [1, 200, 126]], dtype=torch.uint8)
    values = dequantize_mxfp4(blocks, scales, torch.bfloat16)
    assert values.dtype == torch.bfloat16
    for row in range(2):
        for column in range(96):
            code = int(codes[row, column])
            exponent = code >> 1 & 3
            fraction = code & 1
            value = (1 + fraction / 2) * 2.0 ** (exponent - 1) if exponent else fraction / 2
            expected = (-value if code & 8 else value) * 2.0 ** (int(scales[row, column // 32]) - 127)
            assert float(values[row, column]) == expected


@pytest.mark.gpu
@grouped("symmetric")
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("shape", [*LLAMA, (1152, 896), (520, 4232)])
@torch.inference_mode()
def test_rows_have_the_bits_of_a_layer_of_16_bits(shape, symmetric):
    """Among any others; with and without the library where it adds alike."""
    for dtype, group in ((torch.bfloat16, 128), (torch.float16, 32), (torch.bfloat16, 64)):
        weight, value = layer(*shape, group, symmetric, "cuda", dtype)
        assert torch.equal(dequantize(weight, dtype), value)
        x, bias = (torch.randn(size, device="cuda").to(dtype) for size in ((ROWS[-1], shape[1]), (shape[0],)))
        part = int4.part_of(weight)
        order = FixedOrder()
        order.check(value, bias, ROWS[::2], part=part)
        order.check(value, None, ROWS[::2], gated=True)
        expected = linear_many_rows_triton(x, value, bias, part=part)
        gated = silu_mul(linear_many_rows_triton(x, value, part=shape[1]))
        for count in ROWS:
            rows = slice((ROWS[-1] - count) // 3, (ROWS[-1] - count) // 3 + count)
            assert torch.equal(int4_linear(x[rows], weight, bias, False, order), expected[rows]), (dtype, count)
            assert torch.equal(int4_linear(x[rows], weight, None, True, order), gated[rows]), (dtype, count)


@pytest.mark.gpu
@torch.inference_mode()
def test_a_graph_replays_a_chain():
    down, gate_up = (layer(*shape, 128, False, "cuda", torch.bfloat16)[0] for shape in (LLAMA[3], LLAMA[2]))
    check_chain(
        [
            lambda x: F.rms_norm(int4_linear(x, gate_up, None, True), LLAMA[3][1:]),
            lambda x: F.rms_norm(int4_linear(x, down, None, False), LLAMA[3][:1]),
        ],
        torch.randn(4, 4096, device="cuda").bfloat16(),
    )
