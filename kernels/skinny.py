"""Linear layers of few rows on a GPU: what a decode or verify pass spends its time on, bound by reading the weights.

Faster than the library there because one kernel does what takes it two (a split sum and its reduction, a projection
and its gate), and because it follows the kernel before it without a gap (kernels/launch.py). A row's result depends
neither on how many rows there are nor on the run: the inputs are added up in the same order.
Letters: M rows, I inputs, O outputs.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.activation import silu_mul_reference
from slipstream.kernels.grid_sync import done_counters
from slipstream.kernels.launch import pdl_options, use_triton
from slipstream.kernels.skinny_kernel import linear_kernel

MAX_ROWS = 32
MAX_GATED_ROWS = 128  # beyond MAX_ROWS the library's products are as fast, but the gate costs it a kernel
PROGRAMS = 132  # multiprocessors of an H100 or H200, each with as many loads on their way as its shared memory holds
MAX_OUTPUTS = 64 * PROGRAMS  # beyond it the library reads plain products as fast (docs/benchmarks.md)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut. A tile of 64 outputs is the least that `wgmma` takes, and 16 KB of weights fill it."""

    outputs: int
    """Output features of one program; of a gated product, as many gates and as many ups."""
    depth: int
    """Inputs that it loads at a time."""
    split: int
    """Programs that share the inputs of one tile of outputs."""
    stages: int = 4
    """Tiles in shared memory."""
    warps: int = 4


def choose_tiling(num_outputs: int, num_inputs: int, gated: bool = False, num_rows: int = 1) -> Tiling:
    """The tiling of (O, I) weights of 16 bits. All numbers of rows add the inputs up alike, so that they round alike.

    The best of those that bench/linear.py --tune tries on an H200.
    """
    if gated:
        if num_rows > 64:
            return Tiling(outputs=128, depth=64, split=1, warps=8)
        # Either way there is room for two programs on a multiprocessor.
        return Tiling(outputs=64, depth=64, split=1, stages=4 if num_rows <= MAX_ROWS else 3)
    if num_outputs > MAX_OUTPUTS:
        return Tiling(outputs=128, depth=64, split=1, stages=3)
    split = 1
    while triton.cdiv(num_outputs, 64) * 2 * split <= PROGRAMS and num_inputs >= 1024 * 2 * split:
        split *= 2
    return Tiling(outputs=64, depth=128, split=split, stages=6)


def linear_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (M, I) @ weight (O, I).T + bias (O,) -> (M, O) for M up to MAX_ROWS; summed in fp32, rounded once."""
    run = linear_few_rows_triton if use_triton(x) else linear_few_rows_reference
    return run(x, weight, bias)


def linear_few_rows_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


def linear_few_rows_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, tiling: Tiling | None = None
) -> Tensor:
    num_outputs, num_inputs = weight.shape
    return _launch(x, weight, bias, num_outputs, tiling or choose_tiling(num_outputs, num_inputs), gated=False)


def gated_linear_few_rows(x: Tensor, gate_up_weight: Tensor) -> Tensor:
    """silu_mul(x (M, I) @ gate_up_weight (2 * O, I).T) -> (M, O) for M up to MAX_GATED_ROWS, rounded twice."""
    run = gated_linear_few_rows_triton if use_triton(x) else gated_linear_few_rows_reference
    return run(x, gate_up_weight)


def gated_linear_few_rows_reference(x: Tensor, gate_up_weight: Tensor) -> Tensor:
    return silu_mul_reference(F.linear(x, gate_up_weight))


def gated_linear_few_rows_triton(x: Tensor, gate_up_weight: Tensor, tiling: Tiling | None = None) -> Tensor:
    num_outputs, num_inputs = gate_up_weight.shape[0] // 2, gate_up_weight.shape[1]
    tiling = tiling or choose_tiling(num_outputs, num_inputs, gated=True, num_rows=len(x))
    return _launch(x, gate_up_weight, None, num_outputs, tiling, gated=True)


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, num_outputs: int, tiling: Tiling, gated: bool) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, num_inputs = x.shape
    assert num_rows <= (MAX_GATED_ROWS if gated else MAX_ROWS)
    assert weight.stride(1) == 1
    assert bias is None or bias.is_contiguous()
    assert not (gated and tiling.split > 1)
    out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    rows, tiles = max(triton.next_power_of_2(num_rows), 16), triton.cdiv(num_outputs, tiling.outputs)
    partial, counters = _scratch(x.device, tiles * tiling.split * tiling.outputs * rows, tiling.split)
    linear_kernel[(tiles, tiling.split)](
        x, weight, bias, out, partial, counters, x.stride(0), weight.stride(0), num_rows, num_outputs, num_inputs,
        ROWS=rows, GATED=gated, EVEN=num_inputs % tiling.depth == 0, PRECISION="ieee", **_options(x, tiling),
    )  # fmt: skip
    return out


def _scratch(device: torch.device, size: int, split: int) -> tuple[Tensor | None, Tensor | None]:
    if split == 1:
        return None, None
    return torch.empty(size, dtype=torch.float32, device=device), done_counters(device)


def _options(x: Tensor, tiling: Tiling) -> dict[str, Any]:
    return {
        "OUTPUTS": tiling.outputs,
        "DEPTH": tiling.depth,
        "SPLIT": tiling.split,
        "num_stages": tiling.stages,
        "num_warps": tiling.warps,
        **pdl_options(x.device),
    }
