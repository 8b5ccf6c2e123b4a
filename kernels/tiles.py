"""Loads of tiles, and the places of tiles in a product's outputs, as several kernels have them."""

import triton
import triton.language as tl


@triton.jit
def load_fp32(cells, mask):
    """Numbers at `cells`, pointers, in fp32, 0 outside `mask`."""
    return tl.load(cells, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_inputs(rows_ptr, k, row, num_rows, num_inputs, EVEN: tl.constexpr):
    """Inputs k (1, DEPTH) of rows (ROWS,), which begin at `rows_ptr` (ROWS, 1); EVEN: no tile of inputs is cut."""
    inside = (row < num_rows)[:, None] if EVEN else (row < num_rows)[:, None] & (k < num_inputs)
    return tl.load(rows_ptr + k, mask=inside, other=0.0)


@triton.jit
def load_weights(weights, k, num_inputs, EVEN: tl.constexpr):
    """Weights at `weights`, pointers, of inputs k."""
    if EVEN:
        tile = tl.load(weights)
    else:
        tile = tl.load(weights, mask=k < num_inputs, other=0.0)
    return tile


@triton.jit
def tile_of_program(num_rows, num_outputs, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, GROUP: tl.constexpr):
    """The first row and output of the program's tile. Programs that run at a time share GROUP tiles of weights, which
    stay in the L2 cache."""
    row_tiles = tl.cdiv(num_rows, ROWS)
    output_tiles = tl.cdiv(num_outputs, OUTPUTS)
    program = tl.program_id(0)
    group = program // (GROUP * row_tiles)
    within = program % (GROUP * row_tiles)
    width = tl.minimum(output_tiles - group * GROUP, GROUP)
    return within // width * ROWS, (group * GROUP + within % width) * OUTPUTS


@triton.jit
def store_tile(result, bias_ptr, out_ptr, rows, outputs, num_rows, num_outputs):
    """result (ROWS, OUTPUTS) fp32, plus the bias, if any, to out (num_rows, num_outputs)."""
    if bias_ptr is not None:
        result += load_fp32(bias_ptr + outputs, outputs < num_outputs)[None, :]
    inside = (rows < num_rows)[:, None] & (outputs < num_outputs)[None, :]
    cells = out_ptr + rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    tl.store(cells, result.to(out_ptr.dtype.element_ty), mask=inside)
