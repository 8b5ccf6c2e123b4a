"""The kernel of `linear_few_rows`: weights stream through shared memory into the tensor cores.

The weights are the left operand of the product and the few rows, padded to ROWS, the right one. The next kernel may
start once the last tile is loaded: earlier, its programs would only take room.
"""

import triton
import triton.language as tl

from slipstream.kernels.grid_sync import is_last_done


@triton.jit(do_not_specialize=["num_rows", "num_outputs"])
def linear_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, partial_ptr, counters_ptr,
    x_stride, weight_stride, num_rows, num_outputs, num_inputs,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, SPLIT: tl.constexpr, GATED: tl.constexpr,
    EVEN: tl.constexpr, PDL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """OUTPUTS features (axis 0) of all rows from one part of the inputs (axis 1).

    Gated: silu of them, times those that lie num_outputs further on in the weights.
    """
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    weights = weight_ptr + tl.minimum(outputs, num_outputs - 1)[:, None].to(tl.int64) * weight_stride
    up_weights = weights + num_outputs.to(tl.int64) * weight_stride
    tiles_each = tl.cdiv(tl.cdiv(num_inputs, DEPTH), SPLIT)
    first = tl.program_id(1) * tiles_each
    last = tl.minimum(first + tiles_each, tl.cdiv(num_inputs, DEPTH))
    if PDL:
        tl.extra.cuda.gdc_wait()

    row = tl.arange(0, ROWS)
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    up = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for step in range(first, last):
        k = step * DEPTH + tl.arange(0, DEPTH)[None, :]
        inside = (row < num_rows)[:, None] if EVEN else (row < num_rows)[:, None] & (k < num_inputs)
        x = tl.load(x_ptr + row[:, None] * x_stride + k, mask=inside, other=0.0)
        acc = tl.dot(_load(weights + k, k, num_inputs, EVEN), tl.trans(x), acc, input_precision=PRECISION)
        if GATED:
            up = tl.dot(_load(up_weights + k, k, num_inputs, EVEN), tl.trans(x), up, input_precision=PRECISION)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()

    cells = row[:, None] * num_outputs + outputs[None, :]
    valid = (row < num_rows)[:, None] & (outputs < num_outputs)[None, :]
    result = tl.trans(acc)  # (ROWS, OUTPUTS)
    if SPLIT > 1:
        result, valid = _merge(result, valid, partial_ptr, counters_ptr, num_rows, ROWS, OUTPUTS, SPLIT)
    if bias_ptr is not None:
        result += tl.load(bias_ptr + outputs, mask=outputs < num_outputs, other=0.0).to(tl.float32)[None, :]
    rounded = result.to(out_ptr.dtype.element_ty)
    if GATED:
        rounded = _silu_mul(rounded, tl.trans(up).to(rounded.dtype))
    tl.store(out_ptr + cells, rounded, mask=valid)


@triton.jit
def _load(weights, k, num_inputs, EVEN: tl.constexpr):
    if EVEN:
        tile = tl.load(weights)
    else:
        tile = tl.load(weights, mask=k < num_inputs, other=0.0)
    return tile


@triton.jit
def _silu_mul(gate, up):
    """Rounded as the kernel of kernels/activation.py rounds."""
    gate32 = gate.to(tl.float32)
    silu = (gate32 / (1.0 + tl.exp(-gate32))).to(gate.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _merge(
    result, valid, partial_ptr, counters_ptr, num_rows,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Stores a part's result; the last part to arrive gets all of them added up in order, others no valid row."""
    row, output = tl.arange(0, ROWS)[:, None], tl.arange(0, OUTPUTS)[None, :]
    tile = tl.program_id(0)
    cells = partial_ptr + (tile * SPLIT * ROWS + row) * OUTPUTS + output
    tl.store(cells + tl.program_id(1) * ROWS * OUTPUTS, result, mask=row < num_rows)
    is_last = is_last_done(counters_ptr + tile, SPLIT)
    merging = row < tl.where(is_last, num_rows, 0)
    result = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for part in tl.static_range(SPLIT):
        result += tl.load(cells + part * ROWS * OUTPUTS, mask=merging, other=0.0, cache_modifier=".cg")
    return result, valid & merging
