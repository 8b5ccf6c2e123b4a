"""Compiles kernels that are written in Gluon for a Hopper GPU that need not be there, and prints the bytes of shared
memory that each takes, by name, as JSON. A process of its own, since tests on the CPU interpret kernels."""

import json
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from slipstream.kernels.gemm import int4_weight, pipelined_int4, streamed_fp8, streamed_int4, streamed_linear
from slipstream.kernels.gemm import wide_int4 as wide
from slipstream.kernels.gemm.fp8 import E4M3, QuantizedRows
from slipstream.kernels.gemm.int4_weight import Int4Weight
from slipstream.kernels.gemm.streamed_fp8 import FP8Matrix
from slipstream.kernels.gemm.tiling import Wide, choose_fp8_tiling, choose_int4_tiling, choose_tiling
from slipstream.kernels.kv.rope import Rotation
from slipstream.tests.kernels.compile_ahead_run import Hopper

MODULES = (int4_weight, pipelined_int4, streamed_fp8, streamed_int4, streamed_linear, wide)
REPLACED: dict[str, Callable[..., Any]] = {
    "is_packed": lambda _: True,
    "programs_of": lambda _: 132,
    "pdl_options": lambda _: {"PDL": True, "launch_pdl": True},
}
ROWS = 8


def zeros(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(size, dtype=dtype)


def rotation() -> Rotation:
    """A rotation of heads of 128 dims, 4 of keys."""
    angles = zeros(16, 128).float()
    indices = zeros(ROWS, dtype=torch.int64)
    cache = zeros(16, 4, 128)
    return Rotation(angles, angles, indices, indices, cache, cache)


def matrix_of_8_bits(outputs: int, inputs: int) -> FP8Matrix:
    return FP8Matrix(zeros(outputs, inputs, dtype=E4M3), zeros(outputs).float())


def matrix_of_4_bits(outputs: int, inputs: int, has_zeros: bool) -> Int4Weight:
    words = zeros(outputs, int4_weight.num_words(inputs), dtype=torch.int32)
    num_pairs = int4_weight.num_pairs(inputs, 128)
    scales = zeros(num_pairs, outputs, 2)
    zero_points = zeros(num_pairs, outputs, 2, dtype=torch.int16) if has_zeros else None
    return Int4Weight(words, scales, zero_points, 128, inputs)


def linear_16_bits():
    x = zeros(ROWS, 1024)
    weight = zeros(1024, 1024)
    streamed_linear.streamed_linear(x, weight, None, choose_tiling(1024, 1024), x.dtype)


def gated_16_bits():
    x = zeros(32, 576)
    tiling = choose_tiling(1536, 576, gated=True)
    for outputs, is_early in ((3072, True), (12288, False)):
        weight = zeros(outputs, 576)
        streamed_linear.streamed_linear(x, weight, None, tiling, x.dtype, activation="gelu_tanh", is_early=is_early)


def heads_fp8():
    x = matrix_of_8_bits(ROWS, 4096)
    weight = matrix_of_8_bits(2048, 4096)
    tiling = choose_fp8_tiling(2048, 4096, False, ROWS)
    scales = x.scales, weight.scales
    streamed_linear.streamed_linear(x.codes, weight.codes, None, tiling, torch.bfloat16, scales, rotation())


def linear_fp8_blocks():
    x = zeros(32, 4096, dtype=E4M3)
    weight = zeros(4096, 4096, dtype=E4M3)
    scales = zeros(32, 32).float(), zeros(32, 32).float()
    tiling = choose_fp8_tiling(4096, 4096, False, 32, True)
    streamed_linear.streamed_linear(x, weight, None, tiling, torch.bfloat16, scales)


def mlp_fp8():
    x = QuantizedRows(*matrix_of_8_bits(ROWS, 512), torch.bfloat16)
    streamed_fp8.fp8_mlp(x, matrix_of_8_bits(2048, 512), matrix_of_8_bits(512, 1024))


def linear_4_bits():
    x = zeros(ROWS, 4096)
    weight = matrix_of_4_bits(512, 4096, False)
    streamed_int4.streamed_int4_linear(x, weight, None, choose_int4_tiling(512, 4096))


def heads_4_bits_ring():
    x = zeros(ROWS, 4096)
    weight = matrix_of_4_bits(2048, 4096, True)
    tiling = choose_int4_tiling(2048, 4096)
    pipelined_int4.pipelined_int4_linear(x, weight, None, tiling, rotation=rotation())


def gated_4_bits_ring():
    x = zeros(ROWS, 1024)
    weight = matrix_of_4_bits(512, 1024, False)
    pipelined_int4.pipelined_int4_linear(x, weight, None, choose_int4_tiling(512, 1024, True), gated=True)


def linear_4_bits_wide():
    x = zeros(128, 4096)
    weight = matrix_of_4_bits(512, 4096, True)
    wide.wide_int4_linear(x, weight, None, choose_int4_tiling(512, 4096), False, Wide(128, 1))


def gated_4_bits_wide():
    x = zeros(128, 1024)
    weight = matrix_of_4_bits(512, 1024, False)
    wide.wide_int4_linear(x, weight, None, choose_int4_tiling(512, 1024, True), True, Wide(128, 2))


PRODUCTS = (
    linear_16_bits, gated_16_bits, heads_fp8, linear_fp8_blocks, mlp_fp8, linear_4_bits, heads_4_bits_ring,
    gated_4_bits_ring, linear_4_bits_wide, gated_4_bits_wide,
)  # fmt: skip


def main():
    triton.runtime.driver.set_active(Hopper())
    for module in MODULES:
        for name, replacement in REPLACED.items():
            if hasattr(module, name):
                setattr(module, name, replacement)
    run = JITFunction.run
    compiled = []

    def compile_only(kernel, *args, grid, warmup, **options):  # noqa: ARG001
        compiled.append(run(kernel, *args, grid=grid, warmup=True, **options))

    JITFunction.run = compile_only
    sizes = {}
    for product in PRODUCTS:
        product()
        sizes[product.__name__] = compiled[0].metadata.shared
        compiled.clear()
    print(json.dumps(sizes))


if __name__ == "__main__":
    main()
