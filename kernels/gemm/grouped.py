"""The chosen experts of a mixture: gated MLPs of each token, and the weighted sum of their outputs.

Two launches for few tokens, three for many: gate and up with the activation, and the down projection, whose last
programs sum the outputs of each token (for many tokens a kernel of its own does). Rows are gathered where they are
read. A row's bits depend on its own experts alone: a product adds its inputs in their order in every tile
(kernels/gemm/fixed_order.py), outputs are rounded once and added in fp32, the best expert's first. Few tokens read only
the experts that they hit; grids have room for the most blocks of pairs that there can be, and programs beyond the last
block end at once.
Letters: T tokens, H hidden, E experts, k experts of a token, I intermediate, P = T * k pairs of a token and an expert.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.gemm.linear import linear
from slipstream.kernels.gemm.router import Routing
from slipstream.kernels.grid_sync import done_counters, is_last_done
from slipstream.kernels.launch import Op, pdl_options, shared_memory, wait_for_inputs

FUSED_ROWS = 32  # tokens up to which the down projection sums the outputs
SUM_ROWS = 4  # tokens of a program that sums them for more


class Clamped(NamedTuple):
    """The gated activation (u + 1) * g * sigmoid(alpha * g), where g is the gate cut off at `limit` and u is up, cut
    off at both sides."""

    alpha: float
    limit: float


class ExpertWeights(NamedTuple):
    """Of all experts of a layer."""

    gate_up: Tensor  # (E, 2 * I, H), gate before up
    down: Tensor  # (E, H, I)
    gate_up_bias: Tensor | None = None  # (E, 2 * I)
    down_bias: Tensor | None = None  # (E, H)
    clamped: Clamped | None = None  # None: silu(gate) * up


class Shared(NamedTuple):
    """An MLP's output that is added to the experts', times the sigmoid of a gate."""

    output: Tensor  # (T, H)
    gate: Tensor  # (T, 1)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is tiled, by the rows of a block. `outputs`: features of a program, of a gated product half of them
    gates and half ups."""

    outputs: int
    depth: int
    stages: int
    warps: int = 4

    def options(self) -> dict[str, int]:
        sizes = {"OUTPUTS": self.outputs, "DEPTH": self.depth}
        return sizes | {"num_stages": self.stages, "num_warps": self.warps}


TILINGS = {
    16: Tiling(outputs=64, depth=128, stages=5),
    32: Tiling(outputs=64, depth=128, stages=4),
    64: Tiling(outputs=128, depth=64, stages=4),
    128: Tiling(outputs=128, depth=64, stages=4, warps=8),
}


@Op
def mix_experts(x: Tensor, routing: Routing, weights: ExpertWeights, shared: Shared | None = None) -> Tensor:
    """x (T, H) -> (T, H): the outputs of each token's experts by its weights, and `shared`.

    An expert is (activation(x @ gate_up.T)) @ down.T. Expert by expert, so few tokens read few of them.
    """
    top_k = routing.experts.shape[1]
    flat = routing.experts.flatten()
    outputs = x.new_empty(len(flat), x.shape[1])
    for expert in flat.unique().tolist():  # sync
        pairs = (flat == expert).nonzero().flatten()
        biases = [None if bias is None else bias[expert] for bias in (weights.gate_up_bias, weights.down_bias)]
        hidden = linear(x[pairs // top_k], weights.gate_up[expert], biases[0])
        outputs[pairs] = linear(activate(hidden, weights.clamped), weights.down[expert], biases[1])
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for index, output in enumerate(outputs.view(-1, top_k, x.shape[1]).unbind(dim=1)):
        total = total + routing.weights[:, index, None] * output.float()
    if shared is not None:
        total = total + shared.gate.float().sigmoid() * shared.output.float()
    return total.to(x.dtype)


def activate(gate_up: Tensor, clamped: Clamped | None) -> Tensor:
    """gate_up (..., 2 * I), gate before up -> (..., I)."""
    gate, up = gate_up.chunk(2, dim=-1)
    if clamped is None:
        return F.silu(gate) * up
    gate, up = gate.clamp(max=clamped.limit), up.clamp(-clamped.limit, clamped.limit)
    return (up + 1) * (gate * torch.sigmoid(clamped.alpha * gate))


@mix_experts.kernel()
def mix_experts_triton(
    x: Tensor, routing: Routing, weights: ExpertWeights, shared: Shared | None = None, tiling: Tiling | None = None
) -> Tensor:
    num_rows, size = x.shape
    out = torch.empty(num_rows, size, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    assert weights.gate_up.is_contiguous()
    assert weights.down.is_contiguous()
    assert shared is None or (shared.output.is_contiguous() and shared.gate.is_contiguous())
    intermediate, top_k = weights.down.shape[2], routing.experts.shape[1]
    blocks, num_pairs = routing.blocks, num_rows * top_k
    block_rows = 16 if blocks is None else blocks.rows
    most_blocks = num_pairs if blocks is None else len(blocks.first)
    listed = (routing.experts, *((None,) * 4 if blocks is None else blocks[1:]))
    options = {"TOP_K": top_k, "ROWS": block_rows, "PRECISION": "ieee", **pdl_options(x.device)}
    gated, plain = (tiling or choose_tiling(block_rows, inputs, x) for inputs in (size, intermediate))
    clamped = weights.clamped or Clamped(0.0, 0.0)
    hidden = torch.empty(num_pairs, intermediate, dtype=x.dtype, device=x.device)
    gated_experts_kernel[(most_blocks * triton.cdiv(intermediate, gated.outputs // 2),)](
        x, weights.gate_up, weights.gate_up_bias, hidden, *listed, x.stride(0), num_rows, size, intermediate,
        CLAMPED=weights.clamped is not None, ALPHA=clamped.alpha, LIMIT=clamped.limit,
        EVEN=size % gated.depth == 0, **gated.options(), **options,
    )  # fmt: skip
    outputs = torch.empty(num_pairs, size, dtype=x.dtype, device=x.device)
    given = (routing.weights, *(shared or (None, None)), out)
    is_fused = num_rows <= FUSED_ROWS
    down_experts_kernel[(most_blocks * triton.cdiv(size, plain.outputs),)](
        hidden, weights.down, weights.down_bias, outputs, *listed, *given, done_counters(x.device),
        num_rows, intermediate, size, FUSED=is_fused, EVEN=intermediate % plain.depth == 0, **plain.options(),
        **options,
    )  # fmt: skip
    if not is_fused:
        columns = min(512, triton.next_power_of_2(size))
        sum_outputs_kernel[(triton.cdiv(num_rows, SUM_ROWS), triton.cdiv(size, columns))](
            outputs, *given, num_rows, size,
            TOP_K=top_k, ROWS=SUM_ROWS, COLUMNS=columns, num_warps=4, **pdl_options(x.device),
        )  # fmt: skip
    return out


def choose_tiling(block_rows: int, num_inputs: int, x: Tensor) -> Tiling:
    """Of tiles that the inputs fill, and as many stages as the device has room for."""
    tiling = TILINGS[block_rows]
    if num_inputs % tiling.depth and num_inputs % 64 == 0:
        tiling = replace(tiling, depth=64, stages=tiling.stages * tiling.depth // 64)
    stage = (tiling.outputs + block_rows) * tiling.depth * x.element_size()
    return replace(tiling, stages=max(1, min(tiling.stages, (shared_memory(x.device) - 4096) // stage)))


@triton.jit(do_not_specialize=["num_rows"])
def gated_experts_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, experts_ptr, pairs_ptr, first_ptr, sizes_ptr, num_blocks_ptr,
    x_stride, num_rows, num_inputs, size,
    TOP_K: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block's rows of x times OUTPUTS rows of its expert's weights: half of them gates, half the ups beside them."""
    HALF: tl.constexpr = OUTPUTS // 2
    tiles = tl.cdiv(size, HALF)
    block, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    if PDL:
        tl.extra.cuda.gdc_wait()
    if num_blocks_ptr is not None:  # noqa: SIM102
        if block >= tl.load(num_blocks_ptr):
            return
    expert, pair, valid = _block(block, experts_ptr, pairs_ptr, first_ptr, sizes_ptr, num_rows, ROWS)
    both = tl.arange(0, OUTPUTS)
    feature = both // HALF * size + tl.minimum(tile * HALF + both % HALF, size - 1)
    weights = weight_ptr + (expert.to(tl.int64) * 2 * size + feature)[:, None] * num_inputs
    rows = x_ptr + (pair // TOP_K).to(tl.int64)[:, None] * x_stride
    acc = _multiply(weights, rows, valid, num_inputs, OUTPUTS, ROWS, DEPTH, EVEN, PRECISION)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    gate, up = tl.split(tl.permute(tl.reshape(acc, (2, HALF, ROWS)), (2, 1, 0)))  # (ROWS, HALF) each
    output = tile * HALF + tl.arange(0, HALF)
    if bias_ptr is not None:
        biases = bias_ptr + expert.to(tl.int64) * 2 * size + output
        gate += tl.load(biases, mask=output < size, other=0.0).to(tl.float32)[None, :]
        up += tl.load(biases + size, mask=output < size, other=0.0).to(tl.float32)[None, :]
    dtype = out_ptr.dtype.element_ty
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    if CLAMPED:
        gate, up = tl.minimum(gate, LIMIT), tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        gated = (up + 1.0) * (gate / (1.0 + tl.exp(-ALPHA * gate)))
    else:  # rounded as the kernel of kernels/gemm/activation.py rounds
        gated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
    cells = out_ptr + pair.to(tl.int64)[:, None] * size + output[None, :]
    tl.store(cells, gated.to(dtype), mask=valid[:, None] & (output < size)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def down_experts_kernel(
    x_ptr, weight_ptr, bias_ptr, outputs_ptr, experts_ptr, pairs_ptr, first_ptr, sizes_ptr, num_blocks_ptr,
    weights_ptr, shared_ptr, gates_ptr, out_ptr, counters_ptr, num_rows, num_inputs, size,
    TOP_K: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, FUSED: tl.constexpr,
    EVEN: tl.constexpr, PDL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block's rows of x (P, I) times OUTPUTS features of its expert; FUSED: the last block's program sums them."""
    tiles = tl.cdiv(size, OUTPUTS)
    block, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    if PDL:
        tl.extra.cuda.gdc_wait()
    num_blocks = num_rows * TOP_K
    if num_blocks_ptr is not None:
        num_blocks = tl.load(num_blocks_ptr)
        if block >= num_blocks:
            return
    expert, pair, valid = _block(block, experts_ptr, pairs_ptr, first_ptr, sizes_ptr, num_rows, ROWS)
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    feature = expert.to(tl.int64) * size + tl.minimum(output, size - 1)
    rows = x_ptr + pair.to(tl.int64)[:, None] * num_inputs
    acc = _multiply(
        weight_ptr + feature[:, None] * num_inputs, rows, valid, num_inputs, OUTPUTS, ROWS, DEPTH, EVEN, PRECISION
    )
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    result = tl.trans(acc)
    if bias_ptr is not None:
        result += tl.load(bias_ptr + feature).to(tl.float32)[None, :]
    cells = outputs_ptr + pair.to(tl.int64)[:, None] * size + output[None, :]
    tl.store(cells, result.to(outputs_ptr.dtype.element_ty), mask=valid[:, None] & (output < size)[None, :])
    if FUSED:  # noqa: SIM102
        if is_last_done(counters_ptr + tile, num_blocks):
            for start in range(0, num_rows, 16):
                _sum_outputs(
                    outputs_ptr, weights_ptr, shared_ptr, gates_ptr, out_ptr, start + tl.arange(0, 16), output,
                    num_rows, size, TOP_K,
                )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def sum_outputs_kernel(
    outputs_ptr, weights_ptr, shared_ptr, gates_ptr, out_ptr, num_rows, size,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    _sum_outputs(outputs_ptr, weights_ptr, shared_ptr, gates_ptr, out_ptr, row, column, num_rows, size, TOP_K)


@triton.jit
def _block(block, experts_ptr, pairs_ptr, first_ptr, sizes_ptr, num_rows, ROWS: tl.constexpr):
    """The expert of a block, its pairs (ROWS,) and which of these there are."""
    place = tl.arange(0, ROWS)
    if pairs_ptr is None:
        expert, pair, valid = tl.load(experts_ptr + block), block + 0 * place, place == 0
    else:
        first = tl.load(first_ptr + block)
        valid = place < tl.load(sizes_ptr + block)
        expert, pair = first // num_rows, tl.load(pairs_ptr + first + place, mask=valid, other=0)
    return expert, pair, valid


@triton.jit
def _multiply(
    weights, rows, valid, num_inputs,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Weights (OUTPUTS, I) by rows (ROWS, I) -> (OUTPUTS, ROWS) fp32: the few rows are the right operand, as in
    kernels/gemm/small_m.py. Rows that are not valid are zeros."""
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in range(0, num_inputs, DEPTH):
        k = start + tl.arange(0, DEPTH)[None, :]
        if EVEN:
            weight, x = tl.load(weights + k), tl.load(rows + k, mask=valid[:, None], other=0.0)
        else:
            weight = tl.load(weights + k, mask=k < num_inputs, other=0.0)
            x = tl.load(rows + k, mask=valid[:, None] & (k < num_inputs), other=0.0)
        acc = tl.dot(weight, tl.trans(x), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _sum_outputs(
    outputs_ptr, weights_ptr, shared_ptr, gates_ptr, out_ptr, row, column, num_rows, size, TOP_K: tl.constexpr
):
    """The outputs of each row's pairs in their order; by one program, so that a row is added in one way."""
    inside = (row < num_rows)[:, None] & (column < size)[None, :]
    total = tl.zeros((row.shape[0], column.shape[0]), tl.float32)
    for index in tl.static_range(TOP_K):
        pair = row.to(tl.int64) * TOP_K + index
        weight = tl.load(weights_ptr + pair, mask=row < num_rows, other=0.0)
        cells = outputs_ptr + pair[:, None] * size + column[None, :]
        output = tl.load(cells, mask=inside, other=0.0, cache_modifier=".cg")
        total += weight[:, None] * output.to(tl.float32)
    cells = row.to(tl.int64)[:, None] * size + column[None, :]
    if shared_ptr is not None:
        gate = tl.load(gates_ptr + row, mask=row < num_rows, other=0.0).to(tl.float32)
        shared = tl.load(shared_ptr + cells, mask=inside, other=0.0).to(tl.float32)
        total += (1.0 / (1.0 + tl.exp(-gate)))[:, None] * shared
    tl.store(out_ptr + cells, total.to(out_ptr.dtype.element_ty), mask=inside)
