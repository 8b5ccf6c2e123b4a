"""Products whose inputs are cut into leaves: the bits of their reference, on one rank and on several."""

import pytest
import torch

from slipstream.kernels.collectives.tree import add_along_tree
from slipstream.kernels.gemm import fp8
from slipstream.kernels.gemm.choose import Device, Product, choose
from slipstream.kernels.gemm.fixed_order import DEPTH, linear_many_rows_triton, sum_parts_triton
from slipstream.kernels.gemm.fp8 import InputScales, fp8_leaf_linear, quantize_leaves, quantize_weight
from slipstream.kernels.gemm.int4 import int4_leaf_linear
from slipstream.kernels.gemm.int4_weight import Int4Weight
from slipstream.kernels.gemm.leaves import leaf_linear, leaf_sums, leaves_of_rank
from slipstream.kernels.gemm.small_m import linear_few_rows_triton
from slipstream.kernels.gemm.tiling import Tiling
from slipstream.tests.kernels.test_int4 import layer
from slipstream.tests.kernels.test_small_m_gemm import random
from slipstream.tests.kernels.triton_runs import each_device, poisoned
from slipstream.tests.user_errors import user_error


def leaf_tiling(split: int, leaves: int, depth: int = 16) -> Tiling:
    return Tiling(16, depth, split, leaves=leaves)


@pytest.mark.parametrize("split", [1, 2, 4, 8])
@each_device
def test_programs_share_out_leaves_in_any_way(split, device):
    x, weight, bias = random(5, 24, 256, torch.float16, device)
    for own_bias in (None, bias):
        with poisoned():
            out = linear_few_rows_triton(x, weight, own_bias, leaf_tiling(split, 8), dtype=torch.float32)
        assert torch.equal(out, linear_few_rows_triton(x, weight, own_bias, leaf_tiling(1, 8), dtype=torch.float32))
        torch.testing.assert_close(out, leaf_linear(x, weight, 8, own_bias), atol=1e-5, rtol=1e-5)
    rounded = linear_few_rows_triton(x, weight, bias, leaf_tiling(split, 8))
    assert torch.equal(rounded, out.half())


@pytest.mark.parametrize("world", [2, 4])
@each_device
def test_ranks_add_up_to_one(world, device):
    x, weight, _ = random(3, 24, 256, torch.float16, device)
    leaves = leaves_of_rank(256, world)
    partials = [
        linear_few_rows_triton(rows, part.contiguous(), None, leaf_tiling(1, leaves), dtype=torch.float32)
        for rows, part in zip(x.chunk(world, 1), weight.chunk(world, 1), strict=True)
    ]
    assert torch.equal(
        add_along_tree(partials), linear_few_rows_triton(x, weight, None, leaf_tiling(2, 4), dtype=torch.float32)
    )


def test_inputs_that_are_not_cut_are_refused():
    assert [leaves_of_rank(4096, world) for world in (1, 2, 4)] == [4, 2, 1]
    assert leaves_of_rank(4096, 8, leaves=8) == 1
    for world in (3, 8):
        with user_error(f"{world} ranks do not share 4 leaves of sums"):
            leaves_of_rank(4096, world)
    with user_error("320 inputs are not cut into 4 leaves of a multiple of 64"):
        leaves_of_rank(320, 2)


@each_device
@pytest.mark.parametrize("leaves", [1, 2, 4, 8])
def test_many_rows_have_the_bits_of_few(leaves, device):
    x, weight, bias = random(20, 24, 64 * leaves, torch.float16, device)
    few = linear_few_rows_triton(x[:5], weight, bias, leaf_tiling(1, leaves, DEPTH))
    with poisoned():
        many = linear_many_rows_triton(x, weight, bias, tile=(16, 32) if device == "cpu" else None, leaves=leaves)
    assert torch.equal(many[:5], few)
    sums = leaf_sums(x, weight, leaves)
    out = sum_parts_triton(sums, bias, torch.float32, tree=True)
    assert torch.equal(out, add_along_tree(sums.unbind()) + bias.float())
    torch.testing.assert_close(many.float(), out, atol=2e-3, rtol=2e-3)


def test_the_table_keeps_the_leaves():
    """Every number of rows cuts the inputs into the same leaves, whatever the kernel."""
    device = Device()
    for shape in ((4096, 4096), (4096, 14336), (5120, 6144), (2048, 4096), (4096, 1024), (64, 768)):
        for leaves in (1, 2, 4, 8):
            kernels = set()
            for rows in (1, 8, 9, 64, 128, 129, 4096):
                if shape[1] % (64 * leaves):
                    continue
                choice = choose(Product("16 bits", rows, *shape, is_exact=True, leaves=leaves), device)
                kernels.add(choice.kernel)
                assert choice.tiling.leaves == leaves
                assert shape[1] // leaves % choice.tiling.depth == 0
                assert leaves % choice.tiling.split == 0
                assert choice.kernel != "streamed" or choice.tiling.split <= 2
            assert kernels <= {"streamed", "few rows", "many rows"}


@each_device
@pytest.mark.parametrize("kind", ["row", "static", "blocks"])
def test_fp8_ranks_add_up_to_one(kind, device):
    """For any number of rows, and however programs share out the leaves."""
    x, weight, _ = random(20, 128, 1024, torch.float16, device)
    codes, scales = quantize_weight(weight)
    if kind == "blocks":
        scales = torch.rand(1, 8, device=device) + 0.5
    static = torch.tensor(0.01, device=device) if kind == "static" else None
    input_scales = InputScales(static, kind == "blocks")
    rows = quantize_leaves(x, input_scales, 4)
    assert kind != "row" or rows.scales.shape == (4, 20)
    expected = fp8_leaf_linear.reference(rows, codes, scales, 4, dtype=torch.float32)
    few = quantize_leaves(x[:5], input_scales, 4)
    tilings = [Tiling(64, 128, split, stages=4, leaves=4) for split in (1, 2, 4)]
    with poisoned():
        outs = [fp8_leaf_linear.triton(few, codes, scales, 4, None, torch.float32, tiling) for tiling in tilings]
    spread = expected.std()  # inputs of FP8 are added with fewer bits than those of the reference
    torch.testing.assert_close(outs[0] / spread, expected[:5] / spread, atol=1e-3, rtol=1e-3)
    assert torch.equal(outs[1], outs[0])
    assert torch.equal(outs[2], outs[0])
    many = fp8._many_rows(rows, codes, scales, None, 4, (16, 64), leaves=4, dtype=torch.float32)  # noqa: SLF001
    assert torch.equal(many[:5], outs[0])
    for world in (2, 4):
        partials = []
        for own_x, own_codes, own_scales in zip(
            x.chunk(world, 1),
            codes.chunk(world, 1),
            scales.chunk(world, 1) if kind == "blocks" else [scales] * world,
            strict=True,
        ):
            own_rows = quantize_leaves(own_x, input_scales, 4 // world)
            part = own_codes.contiguous()
            sums = fp8._many_rows(  # noqa: SLF001
                own_rows, part, own_scales.contiguous(), None, 4 // world, (16, 64), 4 // world, torch.float32
            )
            partials.append(sums)
        assert torch.equal(add_along_tree(partials), many)


@each_device
@pytest.mark.parametrize("rows", [5, 20])
@pytest.mark.parametrize("symmetric", [True, False])
def test_4_bit_ranks_add_up_to_one(rows, symmetric, device):
    weight, exact = layer(64, 1024, 128, symmetric, device, torch.float16)
    x = random(rows, 1, 1024, torch.float16, device)[0]
    expected = leaf_linear(x, exact, 4)
    torch.testing.assert_close(int4_leaf_linear.reference(x, weight, 4, dtype=torch.float32), expected)
    with poisoned():
        outs = [
            int4_leaf_linear.triton(x, weight, 4, dtype=torch.float32, tiling=Tiling(64, 256, split, 3, leaves=4))
            for split in (1, 2, 4)
        ]
    torch.testing.assert_close(outs[0], expected, atol=1e-3, rtol=1e-3)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    partials = []
    for rank, rank_x in enumerate(x.chunk(2, 1)):
        units = [None if part is None else part.chunk(2)[rank].contiguous() for part in (weight.scales, weight.zeros)]
        part = Int4Weight(weight.words.chunk(2, 1)[rank].contiguous(), units[0], units[1], 128, 512)
        partials.append(int4_leaf_linear.triton(rank_x, part, 2, dtype=torch.float32))
    assert torch.equal(add_along_tree(partials), outs[0])
