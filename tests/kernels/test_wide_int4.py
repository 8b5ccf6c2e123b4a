"""Products of many rows with 4-bit weights that are decoded on their way, against those of the usual kernel and of
dequantised weights, bit by bit; and which are taken."""

from functools import partial

import pytest
import torch
from torch import Tensor

from slipstream.kernels.gemm import int4
from slipstream.kernels.gemm.activation import silu_mul
from slipstream.kernels.gemm.choose import FEW_ROWS, WIDE_ROWS
from slipstream.kernels.gemm.fixed_order import FixedOrder, linear_many_rows_triton
from slipstream.kernels.gemm.int4_weight import Int4Weight, dequantize
from slipstream.kernels.gemm.tiling import Wide, choose_int4_tiling
from slipstream.kernels.gemm.wide_int4 import wide_int4_linear
from slipstream.tests.kernels import test_int4
from slipstream.tests.kernels.test_pipelined_int4 import FORMATS, chain, shape_of, usual
from slipstream.tests.kernels.triton_runs import replayed
from slipstream.tests.pairwise import grouped

# O, I, gated, and how they are multiplied: gates and ups, of many steps and of one; in two parts, in eight of which one
# is smaller, in one.
PRODUCTS = [
    (1536, 1024, True, (Wide(32, 2), Wide(64, 2), Wide(128, 2))),
    (256, 256, True, (Wide(64, 2),)),
    (1024, 2048, False, (Wide(32, 1), Wide(64, 2), Wide(128, 1))),
    (1024, 7936, False, (Wide(128, 2),)),
    (768, 512, False, (Wide(64, 1), Wide(128, 2))),
]
ROWS = {32: (17, 32), 64: (33, 64), 128: (65, 128, 129, 300)}
LLAMA_8B = {"gate_up": (28672, 4096, True), "down": (4096, 14336, False), "o": (4096, 4096, False)}


def wide_linear(x: Tensor, weight: Int4Weight, bias: Tensor | None, gated: bool, wide: Wide) -> Tensor:
    return wide_int4_linear(x, weight, bias, choose_int4_tiling(*shape_of(weight), gated), gated, wide)


def expected_of(x: Tensor, weight: Int4Weight, bias: Tensor | None, gated: bool) -> Tensor:
    if len(x) <= FEW_ROWS:
        return usual(x, weight, bias, gated)
    part = weight.num_inputs if gated else int4.part_of(weight)
    out = linear_many_rows_triton(x, dequantize(weight, x.dtype), bias, part=part)
    return silu_mul(out) if gated else out


@pytest.mark.gpu
@grouped()
@pytest.mark.parametrize(("group", "symmetric", "dtype"), FORMATS)
@pytest.mark.parametrize(("outputs", "inputs", "gated", "ways"), PRODUCTS)
@torch.inference_mode()
def test_bits_are_those_of_the_usual_products(outputs, inputs, gated, ways, group, symmetric, dtype):
    weight, _ = test_int4.layer(outputs, inputs, group, symmetric, "cuda", dtype)
    x = torch.randn(300, inputs, device="cuda").to(dtype)
    bias = None if gated else torch.randn(outputs, device="cuda").to(dtype)
    for wide in ways:
        for rows in ROWS[wide.rows]:
            expected = expected_of(x[:rows], weight, bias, gated)
            assert expected.isfinite().all()
            for _ in range(2):
                assert torch.equal(wide_linear(x[:rows], weight, bias, gated, wide), expected), (wide, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LLAMA_8B)
@torch.inference_mode()
def test_layers_of_an_8b_llama_take_it(name):
    """Up to prompts of WIDE_ROWS tokens, in a fixed order; beside other rows a row has the same bits."""
    outputs, inputs, gated = LLAMA_8B[name]
    weight, _ = test_int4.layer(outputs, inputs, 128, True, "cuda", torch.bfloat16)
    x = torch.randn(WIDE_ROWS, inputs, device="cuda").bfloat16()
    expected = expected_of(x, weight, None, gated)
    for rows in (1, 33, 100, 500, WIDE_ROWS):
        assert rows < 33 or not int4.dequantizes(weight, rows, gated)
        out = int4.int4_linear_triton(x[:rows], weight, None, gated, FixedOrder())
        assert torch.equal(out, expected[:rows]), rows


@pytest.mark.gpu
@torch.inference_mode()
def test_a_graph_replays_a_chain():
    """Each kernel's first weights are read while the one before it runs, and its rows once that has written them."""
    (gate_up, _), (down, _) = (
        test_int4.layer(*shape, 128, True, "cuda", torch.bfloat16) for shape in ((8192, 2048), (2048, 4096))
    )
    for rows, wide in ((50, Wide(64, 2)), (200, Wide(128, 2))):
        x = torch.randn(rows, 2048, device="cuda").bfloat16()
        expected = chain(expected_of, gate_up, down, x)
        assert expected.isfinite().all()
        run = partial(wide_linear, wide=wide)
        assert torch.equal(replayed(partial(chain, run, gate_up, down, x)), expected)


def test_rings_fit_into_shared_memory():
    ways = [Wide(rows, tiles) for rows in (32, 64, 128) for tiles in (1, 2)]
    assert [wide.slots for wide in ways] == [4, 4, 4, 3, 2, 2]
