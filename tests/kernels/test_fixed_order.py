"""Products of many rows: their formula in fp64, and the bits of the same rows among any others."""

from typing import get_args

import pytest
import torch

from slipstream.kernels.gemm import fixed_order
from slipstream.kernels.gemm.activation import Activation
from slipstream.kernels.gemm.fixed_order import (
    FixedOrder,
    has_equal_parts,
    linear_by_parts,
    linear_many_rows_triton,
    sum_parts_triton,
    usual_part,
)
from slipstream.kernels.gemm.small_m import linear_few_rows_triton
from slipstream.kernels.gemm.tiling import Tiling, part_inputs
from slipstream.tests.kernels.test_small_m_gemm import check, random
from slipstream.tests.kernels.triton_runs import each_device, poisoned
from slipstream.tests.pairwise import grouped

TILES = [(16, 32), (32, 16), (32, 32)]
# O, I: q, k and v, the attention's output, gate and up, down and head of Llama-3.1-8B; o and down are cut in two
LLAMA = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]
ROWS = [1, 2, 7, 16, 31, 33, 64, 65, 100, 128, 129, 200, 256, 300, 513, 1024, 1500, 2048]


@each_device
@pytest.mark.parametrize("shape", [(1, 24, 64), (33, 40, 128), (70, 65, 192), (40, 16, 2048)])
def test_products_are_those_of_their_formula(shape, device):
    dtype = torch.float16
    x, weight, bias = random(*shape, dtype, device)
    for own_bias in (None, bias):
        for tile, part in zip(
            TILES if device == "cpu" else [(64, 128), (128, 64), None], (None, 128, 512), strict=True
        ):
            with poisoned():
                out = linear_many_rows_triton(x, weight, own_bias, tile, part)
            added = 0 if own_bias is None else own_bias.double()
            check(out, x.double() @ weight.double().t() + added, dtype)


@each_device
@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 33, 70), (4, 5, 513)])
def test_parts_are_summed_in_their_order(shape, device):
    parts = torch.randn(shape, device=device)
    bias = torch.randn(shape[2], device=device, dtype=torch.float16)
    outputs = torch.rand(shape[2], device=device)
    rows = torch.rand((), device=device).expand(shape[1])
    with poisoned():
        out = sum_parts_triton(parts, bias, torch.float16)
        scaled = sum_parts_triton(parts, None, torch.float32, (outputs, rows))
    total = torch.zeros_like(parts[0])
    for part in parts:
        total = total + part
    assert torch.equal(out, (total + bias.float()).half())
    assert torch.equal(scaled, total * outputs * rows[:, None])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [shape for shape in LLAMA if shape[0] == 4096])
@torch.inference_mode()
def test_the_library_sums_parts_like_us(shape):
    """So that they are not left out unnoticed."""
    x, weight, _ = random(512, *shape, torch.bfloat16, "cuda")
    assert has_equal_parts(weight)
    for rows, part in ((320, None), (512, None), (512, shape[1] // 4)):
        out = linear_by_parts(x[:rows], weight, part=part)
        assert torch.equal(out, linear_many_rows_triton(x[:rows], weight, part=part))


def test_usual_parts_are_those_of_few_rows():
    for shape, part in (((6144, 4096), 4096), ((4096, 14336), 7168), ((64, 4224), 1152), ((64, 4232), 1152)):
        weight = torch.empty(shape, device="meta")
        assert (usual_part(weight), usual_part(weight, gated=True)) == (part, shape[1])
        assert has_equal_parts(weight) == (shape == (4096, 14336))
    assert has_equal_parts(weight, 2116)


@grouped()
@pytest.mark.parametrize("num_inputs", [128, 2048, 4096, 4224, 14336])
@pytest.mark.parametrize("split", [1, 2, 4])
def test_parts_are_the_same_for_every_depth(num_inputs, split):
    parts = {part_inputs(num_inputs, Tiling(64, depth, split)) for depth in (32, 64, 128)}
    assert len(parts) == 1 or num_inputs < 128 * split
    assert all((split - 1) * part < num_inputs <= split * part for part in parts) or num_inputs < 128 * split


@pytest.mark.parametrize(
    ("capability", "memory", "dtype", "reason"),
    [
        ((9, 0), 227, torch.bfloat16, ""),
        ((10, 0), 227, torch.float16, ""),
        ((9, 0), 227, torch.float32, "weights are torch.float32, not of 16 bits"),
        ((8, 0), 163, torch.bfloat16, "the kernels need compute capability 9.0, which A GPU has not"),
        ((12, 0), 99, torch.bfloat16, "the kernels need 200 KB of shared memory for a program, which A GPU has not"),
    ],
)
def test_gpus_that_lack_something_are_told(capability, memory, dtype, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A GPU")
    monkeypatch.setattr(fixed_order, "shared_memory", lambda _: memory << 10)
    assert FixedOrder.fault(torch.device("cuda"), dtype) == reason


@pytest.mark.gpu
@grouped("dtype")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [*LLAMA, (1000, 2560), (2560, 9728), (896, 4864), (1152, 896)])
@torch.inference_mode()
def test_a_row_has_the_same_bits_among_any_others(shape, dtype):
    x, weight, bias = random(ROWS[-1], *shape, dtype, "cuda")
    for own_bias in (None, bias) if shape[0] < 128256 else (None,):
        order = FixedOrder()
        order.check(weight, own_bias, ROWS[::2])
        expected = linear_many_rows_triton(x, weight, own_bias)
        for rows in ROWS:
            for start in {0, (ROWS[-1] - rows) // 3, ROWS[-1] - rows}:
                out = order.linear(x[start : start + rows], weight, own_bias)
                assert torch.equal(out, expected[start : start + rows]), (rows, start)
        few = linear_few_rows_triton(x[5:25], weight, own_bias)
        assert torch.equal(few, expected[5:25])
    order.check(weight, None, (256, 300), gated=True)
    for activation in get_args(Activation):
        gated = order.gated_linear(x[:300], weight, activation)
        for rows in (1, 20, 33, 65, 128, 129, 200, 256):
            assert torch.equal(order.gated_linear(x[:rows], weight, activation), gated[:rows]), rows
