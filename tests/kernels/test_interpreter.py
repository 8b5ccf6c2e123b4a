"""Products of the patched interpreter do not depend on the processor, nor on how a kernel cuts them into tiles."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.tests.interpreter import matmul_in_order

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU")


@triton.jit
def matmul_kernel(left_ptr, right_ptr, out_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """(64, 32) @ (32, 64), a tile of the product for each program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    left = tl.load(left_ptr + row[:, None] * DEPTH + depth[None, :])
    right = tl.load(right_ptr + depth[:, None] * 64 + column[None, :])
    tl.store(out_ptr + row[:, None] * 64 + column[None, :], tl.dot(left, right, input_precision="ieee"))


def product(left: Tensor, right: Tensor, rows: int, columns: int) -> Tensor:
    out = torch.empty(64, 64)
    matmul_kernel[64 // rows, 64 // columns](left, right, out, rows, columns, 32)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn])
def test_tiles_of_any_size_give_equal_bits(dtype):
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(64, 32, generator=generator).to(dtype)
    right = torch.randn(32, 64, generator=generator).to(dtype)
    expected = product(left, right, 64, 64)
    torch.testing.assert_close(expected.double(), left.double() @ right.double(), atol=1e-5, rtol=1e-5)
    for rows, columns in ((1, 64), (64, 1), (16, 32), (32, 16)):
        assert torch.equal(product(left, right, rows, columns), expected)


def test_terms_are_added_from_first_to_last():
    """In fp32 the order shows: 1 is lost beside 2 ** 24 unless the large terms cancel first."""
    large = 2.0**24
    left = np.array([[large, -large, 1.0], [large, 1.0, -large]], np.float32)
    right = np.ones((3, 1), np.float32)
    assert matmul_in_order(left, right, np.dtype(np.float32)).tolist() == [[1.0], [0.0]]
