"""Linear layers of few rows on a GPU: most of the time of a decode or verify pass, bound by reading the weights.

Faster than the library because one kernel does the work of two (a split sum and its reduction, a projection and its
gate) and starts without a gap after the previous kernel (kernels/launch.py). A row's result depends neither on the
number of rows nor on the run: inputs are summed in a fixed order.
Letters: M rows, I inputs, O outputs.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.gemm.activation import Activation, activate
from slipstream.kernels.gemm.leaves import end_leaf, end_tree, load_tree, new_branches
from slipstream.kernels.gemm.tiling import Heads, Tiling, choose_tiling, part_inputs
from slipstream.kernels.grid_sync import done_counters, is_last_done
from slipstream.kernels.kv.rope import Rotation, head_outputs, load_angles, store_heads
from slipstream.kernels.launch import pdl_options, prefetch
from slipstream.kernels.tiles import load_fp32, load_inputs, load_weights

MAX_ROWS = 128
# Bytes of each output's weights that a program reads into the L2 cache while the kernel before is at work, the fastest
# of five numbers: more of them, and for more rows those of 16-bit weights, delay what that kernel still reads.
AHEAD = 512
AHEAD_ROWS = 16


def inputs_ahead(weight: Tensor, part: int, ahead: int = AHEAD) -> int:
    """Counts the inputs, of `part`, whose weights are prefetched, `ahead` bytes of each output at most: whole pairs of
    16 bytes, as `prefetch` asks for them; none where rows are not aligned."""
    size = weight.element_size()
    num_inputs = weight.shape[1]
    if num_inputs * size % 16 or weight.stride(0) * size % 16:
        return 0
    return min(part, num_inputs, ahead // size) * size // 32 * 32 // size


def linear_few_rows_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    tiling: Tiling | None = None,
    rotation: Rotation | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x (M, I) @ weight (O, I).T + bias (O,) -> (M, O) for M up to MAX_ROWS; summed in fp32, rounded once to `dtype`,
    by default that of x, and stored in `out`, if given. With a `rotation`, of heads of queries, keys and values: the
    queries, rotated (M, Q * D)."""
    tiling = tiling or choose_tiling(len(weight), weight.shape[1], num_rows=len(x))
    return _launch(x, weight, bias, len(weight), tiling, gated=False, rotation=rotation, dtype=dtype, out=out)


def gated_linear_few_rows_triton(
    x: Tensor,
    gate_up_weight: Tensor,
    tiling: Tiling | None = None,
    activation: Activation = "silu",
    *,
    is_early: bool = False,
) -> Tensor:
    """activation_mul(x (M, I) @ gate_up_weight (2 * O, I).T) -> (M, O) for M up to MAX_ROWS, rounded twice. is_early: x
    is older than the kernel before, which waits before it lets this one start: the two run side by side."""
    num_outputs = gate_up_weight.shape[0] // 2
    num_inputs = gate_up_weight.shape[1]
    tiling = tiling or choose_tiling(num_outputs, num_inputs, gated=True, num_rows=len(x))
    gelu = activation == "gelu_tanh"
    return _launch(x, gate_up_weight, None, num_outputs, tiling, gated=True, gelu=gelu, is_early=is_early)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    num_outputs: int,
    tiling: Tiling,
    gated: bool,
    gelu: bool = False,
    rotation: Rotation | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    is_early: bool = False,
) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, num_inputs = x.shape
    assert num_rows <= MAX_ROWS
    assert weight.stride(1) == 1
    assert bias is None or bias.is_contiguous()
    assert not (gated and tiling.split > 1)
    heads = Heads.of(rotation, num_outputs, tiling)
    if out is None:
        out = torch.empty(num_rows, heads.num_outputs, dtype=dtype or x.dtype, device=x.device)
    assert out.is_contiguous()
    if num_rows == 0:
        return out
    rows = max(triton.next_power_of_2(num_rows), tiling.least_rows)
    tiles = triton.cdiv(num_outputs, tiling.outputs)
    partial, counters = scratch(x.device, tiles * tiling.split * tiling.outputs * rows, tiling.split)
    linear_kernel[(tiles, tiling.split)](
        x, weight, bias, out, partial, counters, x.stride(0), weight.stride(0), num_rows, num_outputs, num_inputs,
        part_inputs(num_inputs, tiling), *heads.arguments, D=heads.head_dim,
        ROWS=rows, GATED=gated, GELU=gelu, EARLY=is_early, EVEN=num_inputs % tiling.depth == 0, PRECISION="ieee",
        AHEAD=inputs_ahead(weight, part_inputs(num_inputs, tiling)) if num_rows <= AHEAD_ROWS else 0,
        **_options(x, tiling),
    )  # fmt: skip
    return out


def scratch(device: torch.device, size: int, split: int) -> tuple[Tensor | None, Tensor | None]:
    if split == 1:
        return None, None
    return torch.empty(size, dtype=torch.float32, device=device), done_counters(device)


def _options(x: Tensor, tiling: Tiling) -> dict[str, Any]:
    return {
        "OUTPUTS": tiling.outputs,
        "DEPTH": tiling.depth,
        "SPLIT": tiling.split,
        "LEVELS": tiling.levels,
        "TREE": tiling.leaves > 0,
        "num_stages": tiling.stages,
        "num_warps": tiling.warps,
        **pdl_options(x.device),
    }


@triton.jit(do_not_specialize=["num_rows", "num_outputs"])
def linear_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, partial_ptr, counters_ptr,
    x_stride, weight_stride, num_rows, num_outputs, num_inputs, part,
    cos_ptr, sin_ptr, positions_ptr, slots_ptr, keys_ptr, values_ptr, kv_scales_ptr, Q, G, D: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, SPLIT: tl.constexpr, GATED: tl.constexpr,
    GELU: tl.constexpr, EARLY: tl.constexpr, EVEN: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
    PRECISION: tl.constexpr, LEVELS: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """OUTPUTS features (axis 0) of all rows from one part of the inputs (axis 1).

    Gated: silu or gelu of them times the features num_outputs further on. With heads of D dims, these are rotated and
    stored (kernels/kv/rope.py). The weights, streamed through shared memory,
    are the left operand of the product and the few rows, padded to ROWS, the right one. The next kernel may start once
    the last tile is loaded: earlier, its programs would only occupy multiprocessors.
    """
    outputs = head_outputs(tl.program_id(0), OUTPUTS, D)
    weights = weight_ptr + tl.minimum(outputs, num_outputs - 1)[:, None].to(tl.int64) * weight_stride
    up_weights = weights + num_outputs.to(tl.int64) * weight_stride
    first = tl.program_id(1) * (part // DEPTH)
    last = tl.minimum(first + part // DEPTH, tl.cdiv(num_inputs, DEPTH))
    bias = None
    if bias_ptr is not None:  # no kernel writes it, and after the products it would be waited for
        bias = load_fp32(bias_ptr + outputs, outputs < num_outputs)
    if PDL:
        start = tl.minimum(first * DEPTH, num_inputs - AHEAD)
        prefetch(weights, start, AHEAD)
        if GATED:
            prefetch(up_weights, start, AHEAD)
        if not EARLY:
            tl.extra.cuda.gdc_wait()

    row = tl.arange(0, ROWS)
    angles = load_angles(cos_ptr, sin_ptr, positions_ptr, slots_ptr, row, num_rows, tl.program_id(0), OUTPUTS, D)
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    up = tl.zeros((OUTPUTS, ROWS), tl.float32)
    branches = new_branches(acc, LEVELS)
    leaf_steps = part // DEPTH >> LEVELS
    for step in range(first, last):
        k = step * DEPTH + tl.arange(0, DEPTH)[None, :]
        x = load_inputs(x_ptr + row[:, None] * x_stride, k, row, num_rows, num_inputs, EVEN)
        acc = tl.dot(load_weights(weights + k, k, num_inputs, EVEN), tl.trans(x), acc, input_precision=PRECISION)
        if GATED:
            up = tl.dot(load_weights(up_weights + k, k, num_inputs, EVEN), tl.trans(x), up, input_precision=PRECISION)
        if LEVELS > 0:
            ended = step + 1 - first
            if (ended % leaf_steps == 0) & (step + 1 < last):
                branches = end_leaf(acc, branches, ended // leaf_steps - 1, LEVELS)
                acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    acc = end_tree(acc, branches, LEVELS)
    if PDL:
        if EARLY:  # the memory of `out` may have been read by the kernel before
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    valid = (row < num_rows)[:, None]
    result = tl.trans(acc)  # (ROWS, OUTPUTS)
    if SPLIT > 1:
        result, valid = merge_parts(result, valid, partial_ptr, counters_ptr, num_rows, ROWS, OUTPUTS, SPLIT, TREE)
    if bias is not None:
        result += bias[None, :]
    rounded = result.to(out_ptr.dtype.element_ty)
    if GATED:
        rounded = round_activation_mul(rounded, tl.trans(up).to(rounded.dtype), GELU)
    store_outputs(
        rounded, angles, valid, row, outputs, num_outputs, tl.program_id(0), out_ptr, keys_ptr, values_ptr,
        kv_scales_ptr, Q, G, D,
    )  # fmt: skip


@triton.jit
def store_outputs(
    rounded, angles, valid, row, outputs, num_outputs, tile, out_ptr, keys_ptr, values_ptr, kv_scales_ptr, Q, G,
    D: tl.constexpr,
):  # fmt: skip
    """rounded (ROWS, OUTPUTS) to out (M, num_outputs), or as `store_heads` where heads have D dims."""
    if D > 0:
        store_heads(
            rounded, angles, valid, row[:, None], tile, out_ptr, keys_ptr, values_ptr, kv_scales_ptr, Q, G, D
        )  # fmt: skip
    else:
        cells = row[:, None] * num_outputs + outputs[None, :]
        tl.store(out_ptr + cells, rounded, mask=valid & (outputs < num_outputs)[None, :])


@triton.jit
def round_silu_mul(gate, up):
    return round_activation_mul(gate, up, False)


@triton.jit
def round_activation_mul(gate, up, GELU: tl.constexpr):
    """Rounded as the kernel of kernels/gemm/activation.py rounds."""
    activated = activate(gate.to(tl.float32), GELU).to(gate.dtype)
    return (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def merge_parts(
    result, valid, partial_ptr, counters_ptr, num_rows,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SPLIT: tl.constexpr, TREE: tl.constexpr = False,
):  # fmt: skip
    """Stores a part's result; the last program to finish gets the sum in order, or along a tree, the others no valid
    rows (ROWS, 1)."""
    row = tl.arange(0, ROWS)[:, None]
    output = tl.arange(0, OUTPUTS)[None, :]
    tile = tl.program_id(0)
    cells = partial_ptr + (tile * SPLIT * ROWS + row) * OUTPUTS + output
    tl.store(cells + tl.program_id(1) * ROWS * OUTPUTS, result, mask=row < num_rows)
    is_last = is_last_done(counters_ptr + tile, SPLIT)
    merging = row < tl.where(is_last, num_rows, 0)
    if TREE:
        result = load_tree(cells, ROWS * OUTPUTS, merging, 0, SPLIT)
    else:
        result = tl.zeros((ROWS, OUTPUTS), tl.float32)
        for part in tl.static_range(SPLIT):
            result += tl.load(cells + part * ROWS * OUTPUTS, mask=merging, other=0.0, cache_modifier=".cg")
    return result, valid & merging
