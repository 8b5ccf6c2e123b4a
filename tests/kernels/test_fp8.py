"""Linear layers in FP8 against their formula in fp64, and the bits of a row among others."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.gemm import fp8
from slipstream.kernels.gemm.activation import sigmoid_mul, silu_mul
from slipstream.kernels.gemm.choose import device_of, library_takes
from slipstream.kernels.gemm.fp8 import (
    InputScales,
    QuantizedRows,
    fp8_linear,
    library_linear,
    quantize_rows,
    quantized_rms_norm,
    quantized_sigmoid_mul,
    quantized_silu_mul,
)
from slipstream.kernels.gemm.tiling import choose_split
from slipstream.kernels.norm import Branch, Increment
from slipstream.tests.kernels.triton_runs import check_chain, each_device, poisoned
from slipstream.tests.pairwise import grouped, rotating

SHAPES = [(1, 256, 272), (3, 320, 128), (8, 128, 4096), (70, 70, 512)]
LLAMA = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
ROWS = [1, 2, 7, 16, 33, 64, 65, 100, 128, 200, 300, 513, 1024]
by_row_and_block = pytest.mark.parametrize("by_block", [False, True])


def layer(outputs: int, inputs: int, blocks: bool, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator, device=device) * inputs**-0.5
    codes, scales = fp8.quantize_weight(weight)
    if blocks:
        grid = -(-outputs // 128), -(-inputs // 128)
        scales = scales[0] * (0.5 + torch.rand(grid, generator=generator, device=device))
    return codes, scales


def rows_of(count: int, inputs: int, blocks: bool, device: str) -> QuantizedRows:
    generator = torch.Generator(device).manual_seed(count)
    x = torch.randn(count, inputs, generator=generator, device=device)
    return quantize_rows.reference(x, InputScales(by_block=blocks))


def formula(x: QuantizedRows, weight: Tensor, scales: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    """Element by element, in fp64."""
    codes = x.codes.double()
    inputs = weight.shape[1]
    if scales.dim() == 2:
        block = torch.arange(inputs, device=weight.device) // 128
        codes = codes * x.scales.double().t()[:, block]
        spread = scales.double()[torch.arange(len(weight), device=weight.device) // 128][:, block]
        out = codes @ (weight.double() * spread).t()
    else:
        out = (codes * x.scales.double()[:, None]) @ (weight.double() * scales.double()[:, None]).t()
    out = out if bias is None else out + bias.double()
    gate, up = out.chunk(2, dim=-1)
    return F.silu(gate) * up if gated else out


def many_rows(x: fp8.QuantizedRows, weight: Tensor, scales: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    """The product by the kernel of many rows."""
    out = fp8._many_rows(x, weight, scales, bias, 1 if gated else choose_split(*weight.shape))
    return silu_mul(out) if gated else out


@grouped()
@each_device
@pytest.mark.parametrize(("shape", "blocks", "few"), rotating(SHAPES, [False, True], [True, False]))
def test_products_are_those_of_their_formula(shape, blocks, few, device):
    rows, outputs, inputs = shape
    weight, scales = layer(outputs, inputs, blocks, device)
    generator = torch.Generator(device).manual_seed(rows)
    x = rows_of(rows, inputs, blocks, device)
    bias = torch.randn(outputs, generator=generator, device=device)
    magnitude = formula(x._replace(codes=x.codes.float().abs()), weight.float().abs(), scales, None, gated=False)
    for gated in (False, outputs % 256 == 0):
        own_bias = None if gated else bias
        expected = formula(x, weight, scales, own_bias, gated)
        for run in (fp8_linear.reference, fp8_linear.triton if few and rows <= 64 else many_rows):
            with poisoned():
                out = run(x, weight, scales, own_bias, gated)
            allowed = (2e-3 if device == "cuda" else 1e-5) + 1e-3 * expected.abs()
            if device == "cuda" and not gated:  # tensor cores cut off what is below 2^-14 of what they add it to
                allowed += 2**-14 * magnitude
            assert ((out.double() - expected).abs() <= allowed).all()


@each_device
@by_row_and_block
def test_inputs_are_quantised_by_row(by_block, device):
    """Codes times powers of two come back: the interpreter does not round to e4m3 as GPUs do."""
    generator = torch.Generator(device).manual_seed(0)
    codes = torch.randn(5, 272, generator=generator, device=device).mul(60).clamp(-448, 448).to(fp8.E4M3)
    codes[:, ::128] = 448.0
    codes[:, 256:] = 448.0
    codes[2] = 0.0
    blocks = torch.arange(272, device=device) // 128 if by_block else torch.zeros(272, dtype=torch.int64, device=device)
    scales = 2.0 ** torch.randint(-9, 9, (5, int(blocks.max()) + 1), generator=generator, device=device)
    x = torch.cat((codes.float() * scales[:, blocks], torch.full((5, 8), 1e9, device=device)), dim=1)[:, :272]
    for run in (quantize_rows.reference, quantize_rows.triton):
        with poisoned():
            rows = run(x, InputScales(by_block=by_block))
        assert torch.equal(rows.codes.float(), codes.float())
        largest = (codes.float() * scales[:, blocks]).abs()
        expected = torch.stack([largest[:, blocks == index].amax(1) / 448 for index in range(scales.shape[1])])
        assert torch.equal(rows.scales, (expected if by_block else expected[0]).clamp(min=1e-12))
        static = run(8 * codes.float(), InputScales(torch.tensor(4.0, device=device)))  # half of them are too large
        assert torch.equal(static.codes.float(), (2 * codes.float()).clamp(-448, 448))
        assert torch.equal(static.scales, torch.full((5,), 4.0, device=device))


@each_device
@torch.inference_mode()
def test_what_a_static_scale_cannot_reach_becomes_the_largest_code(device):
    x = torch.tensor([[torch.inf, -torch.inf, 1e30, -1e30, 0.0] * 16] * 2, device=device)
    for run in (quantize_rows.reference, quantize_rows.triton):
        codes = run(x, InputScales(torch.tensor(0.013, device=device))).codes.float()
        assert codes[1, :5].tolist() == [448.0, -448.0, 448.0, -448.0, 0.0]


@each_device
def test_no_rows_and_the_dispatch(device):
    weight, scales = layer(256, 128, False, device)
    assert fp8_linear.triton(rows_of(3, 128, False, device)._replace(
        codes=torch.empty(0, 128, dtype=fp8.E4M3, device=device)
    ), weight, scales).shape == (0, 256)  # fmt: skip
    assert not fp8.runs_kernels(torch.zeros(1, 128), 128)


@pytest.mark.gpu
@grouped("blocks")
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("shape", [*LLAMA, (2048, 1536), (1152, 896)])
@torch.inference_mode()
def test_a_row_has_the_same_bits_among_any_others(shape, blocks):
    """Whichever kernel computes it, and after its inputs were quantised beside any others."""
    weight, scales = layer(*shape, blocks, "cuda")
    x = torch.randn(ROWS[-1], shape[1], device="cuda").bfloat16()
    for gated in (False, True):
        together = fp8_linear(quantize_rows(x, InputScales(by_block=blocks)), weight, scales, None, gated)
        expected = formula(quantize_rows(x[:40], InputScales(by_block=blocks)), weight, scales, None, gated)
        torch.testing.assert_close(together[:40].double(), expected, atol=2e-2, rtol=2e-2)
        for count in ROWS:
            start = (ROWS[-1] - count) // 3
            inputs = quantize_rows(x[start : start + count], InputScales(by_block=blocks))
            out = fp8_linear(inputs, weight, scales, None, gated)
            assert torch.equal(out, together[start : start + count]), (gated, count)


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("shape", LLAMA)
@torch.inference_mode()
def test_the_library_adds_like_our_kernels(shape, blocks):
    """So that it is not left out unnoticed."""
    weight, scales = layer(*shape, blocks, "cuda")
    split = choose_split(*shape)
    for count in (132 if blocks else 128, 512):
        x = quantize_rows(torch.randn(count, shape[1], device="cuda").bfloat16(), InputScales(by_block=blocks))
        assert library_takes(fp8.fp8_product(x, weight, scales), device_of(weight), split)
        for bias in (None, torch.randn(shape[0], device="cuda").bfloat16()):
            ours = fp8_linear(x, weight, scales, bias)
            assert torch.equal(library_linear(x, weight, scales, bias, split), ours)
    unaligned = quantize_rows(torch.randn(130, shape[1], device="cuda").bfloat16(), InputScales(by_block=blocks))
    is_taken = library_takes(fp8.fp8_product(unaligned, weight, scales), device_of(weight), split)
    assert is_taken != blocks  # block scales of 130 rows are not aligned to 16 bytes


@pytest.mark.gpu
@torch.inference_mode()
def test_sums_of_the_tensor_cores_alone_are_a_little_less_exact():
    weight, scales = layer(4096, 14336, False, "cuda")
    x = quantize_rows(torch.randn(512, 14336, device="cuda").bfloat16())
    expected = (x.codes.double() @ weight.double().t()) * x.scales[:, None] * scales
    errors = [
        float((library_linear(x, weight, scales, fast=fast) - expected).norm() / expected.norm())
        for fast in (False, True)
    ]
    assert errors[0] < errors[1] < 0.005


@pytest.mark.gpu
@torch.inference_mode()
def test_inputs_are_quantised_as_on_the_cpu():
    x = torch.randn(33, 4096).bfloat16()
    for static, by_block in ((None, False), (None, True), (torch.tensor(0.013), False)):
        expected = quantize_rows.reference(x, InputScales(static, by_block))
        rows = quantize_rows(x.cuda(), InputScales(None if static is None else static.cuda(), by_block))
        assert torch.equal(rows.codes.cpu().float(), expected.codes.float())
        assert torch.equal(rows.scales.cpu(), expected.scales)


@pytest.mark.gpu
@torch.inference_mode()
def test_a_graph_replays_a_chain():
    down = layer(4096, 14336, False, "cuda")
    gate_up = layer(28672, 4096, False, "cuda")
    check_chain(
        [
            lambda x: fp8_linear(quantize_rows(x), *gate_up, None, True),
            lambda x: fp8_linear(quantize_rows(x), *down, None, False),
        ],
        torch.randn(4, 4096, device="cuda").bfloat16(),
    )


def test_gated_products_round_as_the_two_kernels():
    weight, scales = layer(256, 128, False, "cpu")
    x = rows_of(5, 128, False, "cpu")._replace(dtype=torch.float16)
    if torch.cuda.is_available():
        weight = weight.cuda()
        scales = scales.cuda()
        x = QuantizedRows(x.codes.cuda(), x.scales.cuda(), x.dtype)
    apart = silu_mul.triton(fp8_linear.triton(x, weight, scales))
    assert torch.equal(fp8_linear.triton(x, weight, scales, None, True), apart)


@each_device
@pytest.mark.parametrize("input_format", [(None, False), (None, True), (0.03125, False)])
def test_norms_quantise_their_output(input_format, device):
    """As norm and quantisation apart; in fp32 on the CPU, where the interpreter rounds to e4m3 in its own way."""
    residual, delta = (torch.randn(6, 400, device=device)[:, :272] for _ in range(2))
    weight = 1 + torch.rand(272, device=device)
    out = torch.empty(6, 600, device=device)[:, :272]
    scales = InputScales(
        None if input_format[0] is None else torch.tensor(input_format[0], device=device), input_format[1]
    )
    branch = Branch(delta, weight, 0.5)
    for addend in (None, delta, Increment(branch, branch, (weight, 0.25), torch.full((1,), 0.7, device=device))):
        given_out = None if addend is None else out
        rows, summed = quantized_rms_norm.triton(residual, addend, weight, 1e-5, scales, given_out, keeps_rows=True)
        expected, total = quantized_rms_norm.reference(residual, addend, weight, 1e-5, scales, keeps_rows=True)
        alone = quantized_rms_norm.triton(residual, addend, weight, 1e-5, scales, given_out)[0]
        assert alone.rows is None
        assert torch.equal(alone.codes.view(torch.uint8), rows.codes.view(torch.uint8))
        torch.testing.assert_close(rows.rows, expected.rows)
        torch.testing.assert_close(summed, total, **({} if isinstance(addend, Increment) else {"atol": 0, "rtol": 0}))
        assert addend is None or summed.data_ptr() == out.data_ptr()
        torch.testing.assert_close(rows.scales, expected.scales)
        exact = quantize_rows.triton(F.rms_norm(summed, weight.shape, weight, 1e-5), scales)
        same = (rows.codes.float() == exact.codes.float()).float().mean()
        assert same > 0.99, "but for sums in another order"


@each_device
@by_row_and_block
def test_gated_activations_are_quantised_in_one_kernel(by_block, device):
    gate_up = torch.randn(7, 2 * 272 + 16, device=device).half()[:, : 2 * 272]
    for static in (None, torch.tensor(0.01, device=device)):
        scales = InputScales(static, by_block)
        fused = quantized_silu_mul.triton(gate_up, scales)
        apart = quantize_rows.triton(silu_mul.triton(gate_up), scales)
        assert torch.equal(fused.codes.float(), apart.codes.float())
        assert torch.equal(fused.scales, apart.scales)
        expected = quantized_silu_mul.reference(gate_up, scales)
        torch.testing.assert_close(fused.scales, expected.scales, atol=0, rtol=2e-3)


@each_device
@by_row_and_block
def test_gates_of_attention_are_quantised_in_one_kernel(by_block, device):
    """The gate stands beside queries, keys and values."""
    gate = torch.randn(7, 3 * 272, device=device).half()[:, 272 : 2 * 272]
    x = torch.randn(7, 272, device=device).half()
    for static in (None, torch.tensor(0.01, device=device)):
        scales = InputScales(static, by_block)
        fused = quantized_sigmoid_mul.triton(gate, x, scales)
        apart = quantize_rows.triton(sigmoid_mul.triton(gate, x), scales)
        assert torch.equal(fused.codes.float(), apart.codes.float())
        assert torch.equal(fused.scales, apart.scales)
        expected = quantized_sigmoid_mul.reference(gate, x, scales)
        torch.testing.assert_close(fused.scales, expected.scales, atol=0, rtol=2e-3)
