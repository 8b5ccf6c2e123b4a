"""Products of few rows with 4-bit weights that copy them into a ring, against the usual kernel, bit by bit."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from slipstream.kernels.gemm import int4, pipelined_int4
from slipstream.kernels.gemm.choose import choose, device_of
from slipstream.kernels.gemm.int4_weight import Int4Weight
from slipstream.kernels.gemm.pipelined_int4 import MOST_ROWS, choose_pipeline
from slipstream.kernels.gemm.tiling import choose_int4_tiling, own_parts
from slipstream.kernels.grid_sync import done_counters
from slipstream.kernels.kv.rope import Rotation
from slipstream.tests.kernels import test_int4
from slipstream.tests.kernels.test_streamed_linear import ProductPair, check_heads
from slipstream.tests.kernels.triton_runs import replayed
from slipstream.tests.pairwise import grouped

ROWS = [1, 2, 5, 8]
# O, I, gated: gates and ups, of many steps and of one; in eight parts, four of which one is smaller, four, two and one.
PRODUCTS = [
    (28672, 4096, True),
    (128, 256, True),
    (4096, 14336, False),
    (1024, 7936, False),
    (6144, 4096, False),
    (10240, 8192, False),
    (1088, 768, False),
]
# O, I, query heads, dims; in four, two and one part.
HEADS = [(6144, 4096, 32, 128), (10240, 8192, 64, 128), (17408, 512, 256, 64)]
# Inputs of a group, whether without zeros.
FORMATS = [
    (128, True, torch.bfloat16),
    (32, False, torch.bfloat16),
    (128, True, torch.float16),
    (64, False, torch.float16),
]


def usual(x: Tensor, weight: Int4Weight, bias: Tensor | None, gated: bool, rotation: Rotation | None = None) -> Tensor:
    """By the kernel of any number of rows: of a given tiling."""
    tiling = choose_int4_tiling(*shape_of(weight), gated, len(x))
    return int4.int4_linear_triton(x, weight, bias, gated, tiling=tiling, rotation=rotation)


def pipelined(
    x: Tensor, weight: Int4Weight, bias: Tensor | None, gated: bool, rotation: Rotation | None = None
) -> Tensor:
    kind = "gated" if gated else "plain" if rotation is None else "rotated"
    kernel = choose(int4.int4_product(x, weight, kind, True, rotation), device_of(x)).kernel
    if kernel == "int4 streamed":  # which comes first
        tiling = choose_int4_tiling(*shape_of(weight), gated, len(x))
        return pipelined_int4.pipelined_int4_linear(x, weight, bias, tiling, gated, rotation)
    assert kernel == "int4 pipelined"
    return int4.int4_linear_triton(x, weight, bias, gated, rotation=rotation)


def shape_of(weight: Int4Weight) -> tuple[int, int]:
    return len(weight.words), weight.num_inputs


@pytest.mark.gpu
@grouped("dtype")
@pytest.mark.parametrize(("group", "symmetric", "dtype"), FORMATS)
@pytest.mark.parametrize(("outputs", "inputs", "gated"), PRODUCTS)
@torch.inference_mode()
def test_bits_are_those_of_the_usual_products(outputs, inputs, gated, group, symmetric, dtype):
    weight, _ = test_int4.layer(outputs, inputs, group, symmetric, "cuda", dtype)
    x = torch.randn(MOST_ROWS, inputs, device="cuda").to(dtype)
    for bias in (None,) if gated else (None, torch.randn(outputs, device="cuda").to(dtype)):
        for rows in ROWS:
            expected = usual(x[:rows], weight, bias, gated)
            for _ in range(2):
                assert torch.equal(pipelined(x[:rows], weight, bias, gated), expected), rows
    assert not done_counters(x.device).any()


@pytest.mark.gpu
@grouped()
@pytest.mark.parametrize(("group", "symmetric", "dtype"), FORMATS)
@pytest.mark.parametrize("shape", HEADS)
@torch.inference_mode()
def test_heads_are_rotated_and_stored(shape, group, symmetric, dtype):
    outputs, inputs = shape[:2]
    weight, _ = test_int4.layer(outputs, inputs, group, symmetric, "cuda", dtype)
    x, bias = (torch.randn(*size, device="cuda").to(dtype) for size in ((MOST_ROWS, inputs), (outputs,)))
    runs = (lambda x, rotation, run=run: run(x, weight, bias, False, rotation) for run in (pipelined, usual))
    check_heads(ProductPair(*runs, MOST_ROWS, dtype), shape, x)


def chain(run: Callable[..., Tensor], gate_up: Int4Weight, down: Int4Weight, x: Tensor) -> Tensor:
    """Eight gated MLPs after each other, by `run`."""
    for _ in range(8):
        hidden = run(x, gate_up, None, True)
        x = torch.nn.functional.rms_norm(x + run(hidden, down, None, False), (down.words.shape[0],))
    return x


@pytest.mark.gpu
@torch.inference_mode()
def test_a_graph_replays_a_chain():
    """Each kernel's first weights are read while the one before it runs, and its rows once that has written them."""
    (gate_up, _), (down, _) = (
        test_int4.layer(*shape, 128, True, "cuda", torch.bfloat16) for shape in ((8192, 2048), (2048, 4096))
    )
    for rows in (1, MOST_ROWS):
        x = torch.randn(rows, 2048, device="cuda").bfloat16()
        expected = chain(usual, gate_up, down, x)
        assert expected.isfinite().all()
        assert torch.equal(replayed(partial(chain, pipelined, gate_up, down, x)), expected)
    torch.cuda.synchronize()
    assert not done_counters(x.device).any()


def test_rings_fill_the_same_memory():
    """Whatever number of parts a program sums."""
    shapes = [shape for *shape, gated in PRODUCTS if not gated]
    parts = [own_parts(MOST_ROWS, inputs, choose_int4_tiling(outputs, inputs)) for outputs, inputs in shapes]
    assert parts == [1, 1, 4, 2, 1]
    assert [choose_pipeline(False, num_parts).slots * num_parts for num_parts in (2, 4)] == [8, 8]
