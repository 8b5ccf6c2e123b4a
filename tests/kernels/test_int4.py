"""Linear layers with 4-bit weights against their formula in fp64, and the bits of a row among others."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.gemm import int4
from slipstream.kernels.gemm.activation import silu_mul
from slipstream.kernels.gemm.int4 import Int4Weight, int4_linear, pack_codes, unpack_words
from slipstream.kernels.gemm.mxfp4 import dequantize_mxfp4, pack_mxfp4, unpack_mxfp4
from slipstream.tests.kernels.triton_runs import DEVICES, TOLERANCES, cover, poisoned, replayed

DTYPES = [torch.float16, torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
SHAPES = [(1, 128, 4096), (5, 66, 328), (70, 66, 2048), (130, 66, 2056)]
LLAMA = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
ROWS = [1, 2, 7, 16, 33, 64, 65, 100, 128, 200, 300, 513, 1024]


def layer(
    outputs: int, inputs: int, group: int, symmetric: bool, device: str, dtype: torch.dtype = torch.float16
) -> tuple[Int4Weight, Tensor]:
    """The weight as stored and in fp64; scales make products about 1 in size."""
    generator = torch.Generator(device).manual_seed(inputs)
    groups = -(-inputs // group)
    codes = torch.randint(16, (outputs, inputs), generator=generator, device=device)
    scales = (0.5 + torch.rand(outputs, groups, generator=generator, device=device)).mul(0.2 * inputs**-0.5).to(dtype)
    zeros = torch.randint(17, (outputs, groups), generator=generator, device=device)
    spread = torch.arange(inputs, device=device) // group
    value = (codes - (8 if symmetric else zeros[:, spread])).double() * scales.double()[:, spread]
    kept = None if symmetric else zeros.to(torch.uint8)
    return Int4Weight(pack_codes(codes), scales, kept, group, inputs), value


def test_codes_lie_in_planes() -> None:
    """Against a loop; inputs beyond the last are 8, a zero weight."""
    codes = torch.randint(16, (3, 328), dtype=torch.int64)
    words = pack_codes(codes)
    assert (words.shape, words.dtype) == ((3, 64), torch.int32)
    for column in range(512):
        chunk, rest = divmod(column, 256)
        plane, place = divmod(rest, 32)
        pair, half = divmod(place, 2)
        word = words[:, 32 * chunk + 2 * pair + plane // 4].long()
        found = word >> 16 * half + 4 * (plane % 4) & 15
        assert torch.equal(found, codes[:, column] if column < 328 else torch.full((3,), 8))
    assert torch.equal(unpack_words(words, 328).long(), codes)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("shape", "group", "symmetric", "dtype"), cover(SHAPES, [128, 32, 64, 512], [False, True], DTYPES)
)
def test_products_are_those_of_their_formula(
    shape: tuple[int, int, int], group: int, symmetric: bool, dtype: torch.dtype, device: str
) -> None:
    rows, outputs, inputs = shape
    weight, value = layer(outputs, inputs, group, symmetric, device)
    x = torch.randn(rows, inputs + 8, device=device).to(dtype)[:, :inputs]
    bias = torch.randn(outputs, device=device).to(dtype)
    for run in (int4_linear.reference, int4_linear.triton):
        with poisoned():
            out, gated = run(x, weight, bias), run(x, weight, None, True)
        expected, tolerance = x.double() @ value.t(), TOLERANCES[dtype]
        torch.testing.assert_close(out.double(), expected + bias.double(), atol=tolerance, rtol=tolerance)
        gate, up = expected.chunk(2, dim=-1)
        torch.testing.assert_close(gated.double(), F.silu(gate) * up, atol=2 * tolerance, rtol=2 * tolerance)
        assert out.dtype == gated.dtype == dtype
        assert run(x[:0], weight, bias).shape == (0, outputs)


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_does_not_depend_on_few_others(device: str) -> None:
    weight, _ = layer(64, 2048, 128, False, device)
    x = torch.randn(16, 2048, device=device).half()
    assert int4.choose_int4_tiling(64, 2048).split == 2
    for gated in (False, True):
        out = int4_linear.triton(x, weight, None, gated)
        for rows in (1, 5, 16):
            assert torch.equal(int4_linear.triton(x[:rows], weight, None, gated), out[:rows])
    assert torch.equal(out, silu_mul.triton(int4._launch(x, weight, None, False, None, split=1)))


def test_mxfp4_blocks() -> None:
    """Against the definition of e2m1 and of the scales."""
    codes = torch.arange(16).repeat(2, 6)  # (2, 96)
    blocks = pack_mxfp4(codes)
    assert blocks.shape == (2, 3, 16)
    assert blocks[0, 0].tolist() == [(2 * place & 15) | (2 * place + 1 & 15) << 4 for place in range(16)]
    assert torch.equal(unpack_mxfp4(blocks).long(), codes)
    scales = torch.tensor([[127, 120, 130], [1, 200, 126]], dtype=torch.uint8)
    found = dequantize_mxfp4(blocks, scales, torch.bfloat16)
    assert found.dtype == torch.bfloat16
    for row in range(2):
        for column in range(96):
            code = int(codes[row, column])
            exponent, fraction = code >> 1 & 3, code & 1
            value = (1 + fraction / 2) * 2.0 ** (exponent - 1) if exponent else fraction / 2
            expected = (-value if code & 8 else value) * 2.0 ** (int(scales[row, column // 32]) - 127)
            assert float(found[row, column]) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("shape", [*LLAMA, (1152, 896)])
@torch.inference_mode()
def test_a_row_has_the_same_bits_among_any_others(shape: tuple[int, int], symmetric: bool) -> None:
    for dtype, group in ((torch.bfloat16, 128), (torch.float16, 32)):
        weight, value = layer(*shape, group, symmetric, "cuda", dtype)
        x = torch.randn(ROWS[-1], shape[1], device="cuda").to(dtype)
        for gated in (False, True):
            whole = int4_linear(x, weight, None, gated)
            expected = x[:40].double() @ value.t()
            gate, up = expected.chunk(2, dim=-1)
            expected = F.silu(gate) * up if gated else expected
            torch.testing.assert_close(whole[:40].double(), expected, atol=3e-2, rtol=3e-2)
            for count in ROWS:
                start = (ROWS[-1] - count) // 3
                found = int4_linear(x[start : start + count], weight, None, gated)
                assert torch.equal(found, whole[start : start + count]), (dtype, gated, count)


@pytest.mark.gpu
@torch.inference_mode()
def test_a_graph_replays_a_chain() -> None:
    """Each kernel starts while the one before it runs, and reads what that one writes."""
    down, gate_up = (layer(*shape, 128, False, "cuda", torch.bfloat16)[0] for shape in (LLAMA[3], LLAMA[2]))
    x = torch.randn(4, 4096, device="cuda").bfloat16()

    def chain(x: Tensor, pause: bool = False) -> Tensor:
        for _ in range(8):
            for weight, gated in ((gate_up, True), (down, False)):
                x = F.rms_norm(int4_linear(x, weight, None, gated), (weight.words.shape[0] // (1 + gated),))
                if pause:
                    torch.cuda.synchronize()
        return x

    expected = chain(x, pause=True)
    assert expected.isfinite().all()
    assert torch.equal(replayed(lambda: chain(x)), expected)
