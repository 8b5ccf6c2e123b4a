"""The chosen experts of a mixture: gated MLPs of each token, and the weighted sum of their outputs.

Two launches for few tokens, three for many: gate and up with the activation, and the down projection, whose last
programs sum the outputs of each token (for many tokens a kernel of its own does; the down projection of 16-bit weights
then has one with large tiles, too, which the tensor memory accelerator loads, and FP8 experts have both:
kernels/gemm/grouped_fp8.py). Rows are gathered where they are read. A row's bits depend on its own experts alone: a
product adds its inputs in their order in every tile (kernels/gemm/expert_weights.py), outputs are rounded once and
added in fp32, the best expert's first, or in leaves. Few tokens read only the experts that they hit; grids have room
for the most blocks of pairs that there can be, and programs beyond the last block end at once. Up to 32 tokens a block
of 16-bit weights has all pairs of its expert, since what two blocks read costs nearly as much from the cache. FP8
experts take two launches more, which quantise the inputs of each product. (In the product each program would do it
again, which takes three times as long.) Programs of MXFP4 wait for one another's steps more than for memory: the down
projection of few tokens has twice the programs, each with half of the inputs, and blocks of few pairs have tiles of 8
rows.
Letters: T tokens, H hidden, E experts, k experts of a token, I intermediate, P = T * k pairs of a token and an expert.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
import yaml
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from slipstream.kernels.collectives.tree import add_along_tree
from slipstream.kernels.gemm import fp8, grouped_fp8
from slipstream.kernels.gemm.activation import activate as activate_gate
from slipstream.kernels.gemm.choose import SUMMED_ROWS, Product, choose, device_of
from slipstream.kernels.gemm.choose import Format as ProductFormat
from slipstream.kernels.gemm.expert_weights import (
    CHUNKS,
    WEIGHT_BITS,
    ExpertMatrix,
    Format,
    FP8Weight,
    constants,
    format_of,
    multiply,
    multiply_expert,
    num_inputs_of,
    pointers,
)
from slipstream.kernels.gemm.fp8 import QuantizedRows
from slipstream.kernels.gemm.leaves import end_leaf, end_tree, new_branches
from slipstream.kernels.gemm.router import Routing
from slipstream.kernels.gemm.tiling import PROGRAMS
from slipstream.kernels.grid_sync import done_counters, is_last_done
from slipstream.kernels.launch import Op, pdl_options, prefetch_lines, shared_memory, use_triton, wait_for_inputs
from slipstream.kernels.tiles import load_fp32

SUM_ROWS = 4  # tokens of a program that sums them for more
ALL_ROWS = 32  # of a block that has all pairs of an expert, where tokens are as few: no weight is read twice
FEW_ROWS = 16  # of its tile, if it has as few pairs: most blocks have, and more stages of such a tile fit
FEW_INPUTS = 768  # of which whole tiles have more programs of fewer stages
SPLIT_INPUTS = 2048  # of the down projection in MXFP4, from which two parts of them are added for any number of rows


class Clamped(NamedTuple):
    """The gated activation (u + 1) * g * sigmoid(alpha * g), where g is the gate cut off at `limit` and u is up, cut
    off at both sides."""

    alpha: float
    limit: float


class ExpertWeights(NamedTuple):
    """Weights of all experts of a layer."""

    gate_up: ExpertMatrix  # (E, 2 * I, H), gate before up
    down: ExpertMatrix  # (E, H, I)
    gate_up_bias: Tensor | None = None  # (E, 2 * I)
    down_bias: Tensor | None = None  # (E, H)
    activation: Clamped | Literal["gelu_tanh"] | None = None  # None: silu(gate) * up


class Leaves(NamedTuple):
    """Groups of experts, each of which gives a sum; these are added along a tree that ranks share (leaves.py)."""

    num_groups: int
    size: int  # experts of a group


class Shared(NamedTuple):
    """An MLP's output that is added to the experts', times the sigmoid of a gate where there is one."""

    output: Tensor  # (T, H)
    gate: Tensor | None = None  # (T, 1)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is tiled, by the rows of a block. `outputs`: features of a program, of a gated product half of them
    gates and half ups."""

    outputs: int
    depth: int
    stages: int
    warps: int = 4

    def options(self) -> dict[str, int]:
        sizes = {"OUTPUTS": self.outputs, "STAGES": self.stages}
        return sizes | {"num_stages": self.stages, "num_warps": self.warps}


LARGE = Tiling(outputs=256, depth=64, stages=3, warps=8)
TILINGS: dict[Format, dict[int, Tiling]] = {
    format: {rows: Tiling(**sizes) for rows, sizes in tilings.items()}
    for format, tilings in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).items()
}
# FP8 weights of so few inputs that a program has few steps, most of whose time is starting and ending.
SHORT_INPUTS = 1024
SHORT_ROW = Tiling(outputs=64, depth=128, stages=4)
SHORT = Tiling(outputs=128, depth=128, stages=4, warps=8)


@Op
def mix_experts(
    x: Tensor | QuantizedRows,
    routing: Routing,
    weights: ExpertWeights,
    shared: Shared | None = None,
    *,
    leaves: Leaves | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x (T, H) -> (T, H) in `dtype`, or x's: the outputs of each token's experts by its weights, and `shared`, which
    the first of `leaves` has. Without leaves all experts are here.

    An expert is (activation(x @ gate_up.T)) @ down.T. Expert by expert, so few tokens read few of them. For FP8 experts
    x may come quantised, with its rows.
    """
    x = plain_rows(x)
    top_k = routing.experts.shape[1]
    flat = routing.experts.flatten()
    outputs = x.new_zeros(len(flat), x.shape[1])
    for expert in flat[flat >= 0].unique().tolist():  # sync
        pairs = (flat == expert).nonzero().flatten()
        biases = [None if bias is None else bias[expert] for bias in (weights.gate_up_bias, weights.down_bias)]
        hidden = multiply_expert(x[pairs // top_k], weights.gate_up, expert, biases[0])
        outputs[pairs] = multiply_expert(activate(hidden, weights.activation), weights.down, expert, biases[1])
    sums = []
    for leaf in range(1 if leaves is None else leaves.num_groups):
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for index, output in enumerate(outputs.view(-1, top_k, x.shape[1]).unbind(dim=1)):
            is_here = leaves is None or routing.experts[:, index, None] // leaves.size == leaf
            total = total + routing.weights[:, index, None] * is_here * output.float()
        if shared is not None and leaf == 0:
            factor = 1.0 if shared.gate is None else shared.gate.float().sigmoid()
            total = total + factor * shared.output.float()
        sums.append(total)
    return add_along_tree(sums).to(dtype or x.dtype)


def activate(gate_up: Tensor, activation: Clamped | Literal["gelu_tanh"] | None) -> Tensor:
    """gate_up (..., 2 * I), gate before up -> (..., I)."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation is None:
        return F.silu(gate) * up
    if activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    gate = gate.clamp(max=activation.limit)
    up = up.clamp(-activation.limit, activation.limit)
    return (up + 1) * (gate * torch.sigmoid(activation.alpha * gate))


def plain_rows(x: Tensor | QuantizedRows) -> Tensor:
    """x as it was before it was quantised."""
    if isinstance(x, Tensor):
        return x
    assert x.rows is not None
    return x.rows


def use_expert_kernels(x: Tensor | QuantizedRows, *_: Any, **__: Any) -> bool:
    """As `use_triton`, but not under autocast, where weights may have another dtype than rows."""
    rows = plain_rows(x)
    return use_triton(rows) and not torch.is_autocast_enabled(rows.device.type)


@mix_experts.kernel(when=use_expert_kernels)
def mix_experts_triton(
    x: Tensor | QuantizedRows,
    routing: Routing,
    weights: ExpertWeights,
    shared: Shared | None = None,
    tiling: Tiling | None = None,
    *,
    leaves: Leaves | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    inputs = x
    x = plain_rows(x)
    num_rows, size = x.shape
    out = torch.empty(num_rows, size, dtype=dtype or x.dtype, device=x.device)
    if num_rows == 0:
        return out
    assert all(tensor is None or tensor.is_contiguous() for tensor in shared or ())
    intermediate = num_inputs_of(weights.down)
    top_k = routing.experts.shape[1]
    blocks = routing.blocks
    num_pairs = num_rows * top_k
    block_rows = 1 if blocks is None else blocks.rows
    kernel = "experts" if tiling else choose(experts_product(x, block_rows, weights), device_of(x)).kernel
    if kernel == "experts, fp8 blocks":
        assert isinstance(weights.gate_up, FP8Weight)
        assert isinstance(weights.down, FP8Weight)
        assert blocks is not None
        rows = fp8.quantize_rows(inputs, weights.gate_up.inputs) if isinstance(inputs, Tensor) else inputs
        pair_outputs = grouped_fp8.expert_outputs(rows, blocks, weights.gate_up, weights.down, top_k)
        _sum_all(pair_outputs, routing, shared, leaves, out)
        return out
    tile_rows = max(block_rows, least_rows(format_of(weights.gate_up)))
    most_blocks = num_pairs if blocks is None else len(blocks.first)
    pairs, first, sizes, num_blocks = (None,) * 4 if blocks is None else blocks[1:]
    is_fused = num_rows <= SUMMED_ROWS
    few = FEW_ROWS if is_fused and tile_rows == ALL_ROWS and format_of(weights.down) == "plain" else 0
    options = {"TOP_K": top_k, "ROWS": tile_rows, "FEW": few, "PRECISION": "ieee", **pdl_options(x.device)}
    gated, plain = (tiling or choose_tiling(block_rows, matrix, x) for matrix in weights[:2])
    few_gated, few_plain = (tiling or choose_tiling(few or block_rows, matrix, x) for matrix in weights[:2])
    clamped = weights.activation if isinstance(weights.activation, Clamped) else None
    limits = clamped or Clamped(0.0, 0.0)
    in_blocks = kernel == "experts, large tiles"
    num_hidden = most_blocks * block_rows if in_blocks else num_pairs
    hidden = torch.empty(num_hidden, intermediate, dtype=x.dtype, device=x.device)
    gated_experts_kernel[(most_blocks * triton.cdiv(intermediate, gated.outputs // 2),)](
        *_inputs(inputs, weights.gate_up), *pointers(weights.gate_up), weights.gate_up_bias, hidden,
        routing.experts, pairs, first, sizes, num_blocks, num_rows, size, intermediate,
        CLAMPED=clamped is not None, ALPHA=limits.alpha, LIMIT=limits.limit, IN_BLOCKS=in_blocks,
        GELU=weights.activation == "gelu_tanh", FEW_STAGES=few_gated.stages,
        **gated.options(), **options, **constants(weights.gate_up, x, gated.depth),
    )  # fmt: skip
    outputs = torch.empty(num_pairs, size, dtype=x.dtype, device=x.device)
    if in_blocks:
        _down_large(hidden, block_rows, weights, outputs, (pairs, first, sizes, num_blocks), num_rows)
    else:
        split = 2 if format_of(weights.down) == "mxfp4" and intermediate >= SPLIT_INPUTS else 1
        parts = split if blocks is None and is_fused else 1  # side by side
        partial = torch.empty(parts, num_pairs, size, dtype=torch.float32, device=x.device) if parts > 1 else None
        down_experts_kernel[(most_blocks * triton.cdiv(size, plain.outputs), parts)](
            *_inputs(hidden, weights.down), *pointers(weights.down), weights.down_bias, outputs, partial,
            routing.experts, pairs, first, sizes, num_blocks, routing.weights, *(shared or (None, None)), out,
            done_counters(x.device), num_rows, intermediate, size, FUSED=is_fused, SPLIT=split, PARTS=parts,
            FEW_STAGES=few_plain.stages, **leaf_constants(leaves), **plain.options(), **options,
            **constants(weights.down, x, plain.depth),
        )  # fmt: skip
    if not is_fused:
        _sum_all(outputs, routing, shared, leaves, out)
    return out


def leaf_constants(leaves: Leaves | None) -> dict[str, int]:
    """The experts of a leaf, 0 where there are none, and the levels of the tree."""
    count, size = leaves or (1, 0)
    return {"LEAF": size, "LEVELS": count.bit_length() - 1}


def experts_product(x: Tensor, block_rows: int, weights: ExpertWeights) -> Product:
    """Describes experts to choose.py: by the down projection, where the two differ in format."""
    format = format_of(weights.down)
    is_one_format = isinstance(weights.gate_up, FP8Weight) == isinstance(weights.down, FP8Weight)
    is_plain = is_one_format and all(extra is None for extra in weights[2:])
    num_rows, hidden = x.shape
    size = num_inputs_of(weights.down)
    format_name: ProductFormat = "16 bits" if format == "plain" else format
    return Product(
        format_name, num_rows, hidden, hidden, "experts", True, x.dtype, size=size, block_rows=block_rows,
        is_plain=is_plain,
    )  # fmt: skip


def _sum_all(outputs: Tensor, routing: Routing, shared: Shared | None, leaves: Leaves | None, out: Tensor) -> None:
    """Sums outputs (P, H) of pairs, times their weights, and `shared` to `out`."""
    num_rows, size = out.shape
    columns = min(512, triton.next_power_of_2(size))
    sum_outputs_kernel[(triton.cdiv(num_rows, SUM_ROWS), triton.cdiv(size, columns))](
        outputs, *routing[:2], *(shared or (None, None)), out, num_rows, size, TOP_K=len(outputs) // num_rows,
        ROWS=SUM_ROWS, COLUMNS=columns, **leaf_constants(leaves), num_warps=4, **pdl_options(outputs.device),
    )  # fmt: skip


def least_rows(format: Format) -> int:
    """Rows of the smallest tile. Tiles of 8 rows were tried for MXFP4 alone: rows have the same bits in them."""
    return min(rows for rows in TILINGS[format] if rows > 1)


def least_block_rows(format: Format, num_rows: int) -> int:
    """Rows of the smallest blocks of pairs of so many tokens."""
    return ALL_ROWS if format == "plain" and FEW_ROWS < num_rows <= SUMMED_ROWS else least_rows(format)


def _inputs(x: Tensor | QuantizedRows, matrix: ExpertMatrix) -> tuple[Tensor, int, Tensor | None, int, int]:
    """Rows as the product with `matrix` takes them, their stride, and scales with their strides (`multiply`)."""
    if not isinstance(matrix, FP8Weight):
        x = plain_rows(x)
        x = x if x.stride(1) == 1 else x.contiguous()
        return x, x.stride(0), None, 0, 0
    codes, scales, *_ = fp8.quantize_rows(x, matrix.inputs) if isinstance(x, Tensor) else x
    return codes, codes.stride(0), scales, *fp8.scale_strides(scales)


def choose_tiling(block_rows: int, matrix: ExpertMatrix, x: Tensor) -> Tiling:
    """Chooses tiles that the inputs fill, and as many stages as the device has room for."""
    format = format_of(matrix)
    num_inputs = num_inputs_of(matrix)
    tiling = TILINGS[format].get(block_rows) or TILINGS[format][least_rows(format)]
    if isinstance(matrix, FP8Weight) and num_inputs <= SHORT_INPUTS and block_rows <= 32:
        tiling = SHORT_ROW if block_rows == 1 else SHORT
    if format not in CHUNKS and num_inputs % tiling.depth and num_inputs % 64 == 0:
        tiling = replace(tiling, depth=64)
    if format == "plain":  # few steps: a multiprocessor has more programs then
        if 1 < block_rows <= ALL_ROWS and num_inputs <= FEW_INPUTS and num_inputs % tiling.depth == 0:
            tiling = replace(tiling, depth=64, stages=3)
        tiling = replace(tiling, stages=min(tiling.stages, max(num_inputs // tiling.depth - 1, 2)))
    bits = WEIGHT_BITS.get(format, 8 * x.element_size())
    row_bytes = 1 if isinstance(matrix, FP8Weight) else x.element_size()
    stage = tiling.depth * (tiling.outputs * bits // 8 + block_rows * row_bytes)
    return replace(tiling, stages=max(1, min(tiling.stages, (shared_memory(x.device) - 4096) // stage)))


def _down_large(
    hidden: Tensor,
    block_rows: int,
    weights: ExpertWeights,
    outputs: Tensor,
    listed: tuple[Tensor | None, ...],
    num_rows: int,
) -> None:
    """hidden (blocks * block_rows, I) -> outputs (P, H); `listed`: the blocks."""
    _, size = outputs.shape
    intermediate = hidden.shape[1]
    matrix = weights.down
    assert isinstance(matrix, Tensor)
    describe: Any = TensorDescriptor.from_tensor
    x_desc = describe(hidden, [block_rows, LARGE.depth])
    weight_desc = describe(matrix.view(-1, intermediate), [LARGE.outputs, LARGE.depth])
    down_large_kernel[(PROGRAMS,)](
        x_desc, weight_desc, weights.down_bias, outputs, *listed, num_rows, intermediate, size,
        ROWS=block_rows, OUTPUTS=LARGE.outputs, DEPTH=LARGE.depth, PRECISION="ieee",
        num_stages=LARGE.stages, num_warps=LARGE.warps, **pdl_options(hidden.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "block_stride", "row_stride"])
def gated_experts_kernel(
    x_ptr, x_stride, x_scale_ptr, block_stride, row_stride, weight_ptr, weight_scale_ptr, zeros_ptr, bias_ptr, out_ptr,
    experts_ptr, pairs_ptr, first_ptr, sizes_ptr, num_blocks_ptr, num_rows, num_inputs, size, IN_BLOCKS: tl.constexpr,
    TOP_K: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, FEW: tl.constexpr, FEW_STAGES: tl.constexpr,
    CLAMPED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, GELU: tl.constexpr, FORMAT: tl.constexpr,
    DEPTH: tl.constexpr, STAGES: tl.constexpr, UNIT: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block's rows of x times OUTPUTS rows of its expert's weights: half of them gates, half the ups beside them.
    IN_BLOCKS: what it stores lies block by block, not pair by pair. FEW: rows of the tile of a block that has as few
    pairs."""
    tiles = tl.cdiv(size, OUTPUTS // 2)
    block = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    if PDL:
        tl.extra.cuda.gdc_wait()
    first, count = _load_block(block, first_ptr, sizes_ptr)
    if num_blocks_ptr is not None:  # noqa: SIM102
        if block >= tl.load(num_blocks_ptr):
            return
    if FEW > 0 and count <= FEW:
        _gated_tile(
            x_ptr, x_stride, x_scale_ptr, block_stride, row_stride, weight_ptr, weight_scale_ptr, zeros_ptr, bias_ptr,
            out_ptr, experts_ptr, pairs_ptr, block, tile, first, count, num_rows, num_inputs, size, IN_BLOCKS, TOP_K,
            OUTPUTS, FEW, CLAMPED, ALPHA, LIMIT, GELU, FORMAT, DEPTH, FEW_STAGES, UNIT, PACKED, EVEN, PDL, PRECISION,
        )  # fmt: skip
    else:
        _gated_tile(
            x_ptr, x_stride, x_scale_ptr, block_stride, row_stride, weight_ptr, weight_scale_ptr, zeros_ptr, bias_ptr,
            out_ptr, experts_ptr, pairs_ptr, block, tile, first, count, num_rows, num_inputs, size, IN_BLOCKS, TOP_K,
            OUTPUTS, ROWS, CLAMPED, ALPHA, LIMIT, GELU, FORMAT, DEPTH, STAGES, UNIT, PACKED, EVEN, PDL, PRECISION,
        )  # fmt: skip


@triton.jit
def _gated_tile(
    x_ptr, x_stride, x_scale_ptr, block_stride, row_stride, weight_ptr, weight_scale_ptr, zeros_ptr, bias_ptr, out_ptr,
    experts_ptr, pairs_ptr, block, tile, first, count, num_rows, num_inputs, size, IN_BLOCKS: tl.constexpr,
    TOP_K: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, CLAMPED: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, GELU: tl.constexpr, FORMAT: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    UNIT: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = OUTPUTS // 2
    expert, pair, valid = _block(block, first, count, experts_ptr, pairs_ptr, num_rows, ROWS)
    place = tl.arange(0, OUTPUTS)
    feature = place // HALF * size + tl.minimum(tile * HALF + place % HALF, size - 1)
    if bias_ptr is not None:  # to load it here makes Triton 3.6 compile misaligned accesses for tall tiles of MXFP4
        prefetch_lines(bias_ptr + expert.to(tl.int64) * 2 * size + feature)
    acc = multiply(
        weight_ptr, weight_scale_ptr, zeros_ptr, expert, feature, 2 * size, x_ptr, pair // TOP_K, x_stride, x_scale_ptr,
        block_stride, row_stride, valid, num_inputs, 0, 1,
        OUTPUTS, ROWS, FORMAT, DEPTH, STAGES, UNIT, PACKED, EVEN, PRECISION,
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    gate, up = tl.split(tl.permute(tl.reshape(acc, (2, HALF, ROWS)), (2, 1, 0)))  # (ROWS, HALF) each
    output = tile * HALF + tl.arange(0, HALF)
    if bias_ptr is not None:
        biases = bias_ptr + expert.to(tl.int64) * 2 * size + output
        gate += load_fp32(biases, output < size)[None, :]
        up += load_fp32(biases + size, output < size)[None, :]
    dtype = out_ptr.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    if CLAMPED:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        gated = (up + 1.0) * (gate / (1.0 + tl.exp(-ALPHA * gate)))
    else:  # rounded as the kernel of kernels/gemm/activation.py rounds
        gated = activate_gate(gate, GELU).to(dtype).to(tl.float32) * up
    row = block * ROWS + tl.arange(0, ROWS) if IN_BLOCKS else pair
    cells = out_ptr + row.to(tl.int64)[:, None] * size + output[None, :]
    tl.store(cells, gated.to(dtype), mask=valid[:, None] & (output < size)[None, :])


@triton.jit(do_not_specialize=["num_rows", "block_stride", "row_stride"])
def down_experts_kernel(
    x_ptr, x_stride, x_scale_ptr, block_stride, row_stride, weight_ptr, weight_scale_ptr, zeros_ptr, bias_ptr,
    outputs_ptr, partial_ptr, experts_ptr, pairs_ptr, first_ptr, sizes_ptr, num_blocks_ptr,
    weights_ptr, shared_ptr, gates_ptr, out_ptr, counters_ptr, num_rows, num_inputs, size,
    TOP_K: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, FEW: tl.constexpr, FEW_STAGES: tl.constexpr,
    FUSED: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr, LEAF: tl.constexpr, LEVELS: tl.constexpr,
    FORMAT: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, UNIT: tl.constexpr, PACKED: tl.constexpr,
    EVEN: tl.constexpr, PDL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block's rows of x (P, I) times OUTPUTS features of its expert; FUSED: the last block's program sums them.

    The inputs are cut into SPLIT parts: PARTS are added by programs side by side (axis 1), or one after another."""
    tiles = tl.cdiv(size, OUTPUTS)
    block = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    if PDL:
        tl.extra.cuda.gdc_wait()
    first, count = _load_block(block, first_ptr, sizes_ptr)
    num_blocks = num_rows * TOP_K
    if num_blocks_ptr is not None:
        num_blocks = tl.load(num_blocks_ptr)
        if LEAF > 0:  # a rank without a pair has a block of none, whose programs store the sums
            first = tl.where(num_blocks > 0, first, 0)
            count = tl.where(num_blocks > 0, count, 0)
            num_blocks = tl.maximum(num_blocks, 1)
        if block >= num_blocks:
            return
    if FEW > 0 and count <= FEW:
        _down_tile(
            x_ptr, x_stride, x_scale_ptr, block_stride, row_stride, weight_ptr, weight_scale_ptr, zeros_ptr, bias_ptr,
            outputs_ptr, partial_ptr, experts_ptr, pairs_ptr, block, tile, first, count, num_rows, num_inputs, size,
            TOP_K, OUTPUTS, FEW, SPLIT, PARTS, FORMAT, DEPTH, FEW_STAGES, UNIT, PACKED, EVEN, PDL, PRECISION,
        )  # fmt: skip
    else:
        _down_tile(
            x_ptr, x_stride, x_scale_ptr, block_stride, row_stride, weight_ptr, weight_scale_ptr, zeros_ptr, bias_ptr,
            outputs_ptr, partial_ptr, experts_ptr, pairs_ptr, block, tile, first, count, num_rows, num_inputs, size,
            TOP_K, OUTPUTS, ROWS, SPLIT, PARTS, FORMAT, DEPTH, STAGES, UNIT, PACKED, EVEN, PDL, PRECISION,
        )  # fmt: skip
    if FUSED:  # noqa: SIM102
        if is_last_done(counters_ptr + tile, num_blocks * PARTS):
            output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
            for start in range(0, num_rows, 16):
                _sum_outputs(
                    outputs_ptr, partial_ptr, bias_ptr, experts_ptr, weights_ptr, shared_ptr, gates_ptr, out_ptr,
                    start + tl.arange(0, 16), output, num_rows, size, TOP_K, PARTS, LEAF, LEVELS,
                )  # fmt: skip


@triton.jit
def _down_tile(
    x_ptr, x_stride, x_scale_ptr, block_stride, row_stride, weight_ptr, weight_scale_ptr, zeros_ptr, bias_ptr,
    outputs_ptr, partial_ptr, experts_ptr, pairs_ptr, block, tile, first, count, num_rows, num_inputs, size,
    TOP_K: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr,
    FORMAT: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, UNIT: tl.constexpr, PACKED: tl.constexpr,
    EVEN: tl.constexpr, PDL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    expert, pair, valid = _block(block, first, count, experts_ptr, pairs_ptr, num_rows, ROWS)
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    feature = tl.minimum(output, size - 1)
    if bias_ptr is not None:
        prefetch_lines(bias_ptr + expert.to(tl.int64) * size + feature)
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for index in tl.static_range(SPLIT // PARTS):
        acc += multiply(
            weight_ptr, weight_scale_ptr, zeros_ptr, expert, feature, size, x_ptr, pair, x_stride, x_scale_ptr,
            block_stride, row_stride, valid, num_inputs, tl.program_id(1) + index, SPLIT, OUTPUTS, ROWS, FORMAT, DEPTH,
            STAGES, UNIT, PACKED, EVEN, PRECISION,
        )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    result = tl.trans(acc)
    cells = pair.to(tl.int64)[:, None] * size + output[None, :]
    inside = valid[:, None] & (output < size)[None, :]
    if PARTS > 1:
        tl.store(partial_ptr + tl.program_id(1).to(tl.int64) * num_rows * TOP_K * size + cells, result, mask=inside)
    else:
        if bias_ptr is not None:
            result += tl.load(bias_ptr + expert.to(tl.int64) * size + feature).to(tl.float32)[None, :]
        tl.store(outputs_ptr + cells, result.to(outputs_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def down_large_kernel(
    x_desc, weight_desc, bias_ptr, outputs_ptr, pairs_ptr, first_ptr, sizes_ptr, num_blocks_ptr,
    num_rows, num_inputs, size,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `down_experts_kernel`, in 16 bits. x (blocks * ROWS, I); weights (E * size, I). A program's tiles are one loop
    over the inputs of all: it loads those of the next tile while it stores the outputs of this one."""
    wait_for_inputs(PDL)
    tiles = tl.cdiv(size, OUTPUTS)
    place = tl.arange(0, ROWS)
    for index in tl.range(tl.program_id(0), tl.load(num_blocks_ptr) * tiles, tl.num_programs(0), flatten=True):
        block = index // tiles
        tile = index % tiles
        first = tl.load(first_ptr + block)
        count = tl.load(sizes_ptr + block)
        expert = first // num_rows
        acc = tl.zeros((ROWS, OUTPUTS), tl.float32)
        for k in range(0, num_inputs, DEPTH):
            x = x_desc.load([block * ROWS, k])
            weight = weight_desc.load([expert * size + tile * OUTPUTS, k])
            acc = tl.dot(x, tl.trans(weight), acc, input_precision=PRECISION)
        output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
        if bias_ptr is not None:
            biases = bias_ptr + expert.to(tl.int64) * size + output
            acc += load_fp32(biases, output < size)[None, :]
        pair = tl.load(pairs_ptr + first + tl.minimum(place, count - 1))
        cells = outputs_ptr + pair.to(tl.int64)[:, None] * size + output[None, :]
        inside = (place < count)[:, None] & (output < size)[None, :]
        tl.store(cells, acc.to(outputs_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def sum_outputs_kernel(
    outputs_ptr, experts_ptr, weights_ptr, shared_ptr, gates_ptr, out_ptr, num_rows, size, TOP_K: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LEAF: tl.constexpr, LEVELS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    _sum_outputs(
        outputs_ptr, None, None, experts_ptr, weights_ptr, shared_ptr, gates_ptr, out_ptr, row, column, num_rows, size,
        TOP_K, 1, LEAF, LEVELS,
    )  # fmt: skip


@triton.jit
def _load_block(block, first_ptr, sizes_ptr):
    """Where a block's pairs begin and how many they are: anything beyond the last block, and where none are listed. Not
    to be waited for before it is known whether there is such a block."""
    first = block * 0
    count = block * 0
    if first_ptr is not None:
        first = tl.load(first_ptr + block)
        count = tl.load(sizes_ptr + block)
    return first, count


@triton.jit
def _block(block, first, count, experts_ptr, pairs_ptr, num_rows, ROWS: tl.constexpr):
    """The expert of a block, its pairs (ROWS,) and which of these there are."""
    place = tl.arange(0, ROWS)
    if pairs_ptr is None:
        expert = tl.load(experts_ptr + block)
        pair = block + 0 * place
        valid = place == 0
    else:
        valid = place < count
        expert = first // num_rows
        pair = tl.load(pairs_ptr + first + place, mask=valid, other=0)
    return expert, pair, valid


@triton.jit
def _sum_outputs(
    outputs_ptr, partial_ptr, bias_ptr, experts_ptr, weights_ptr, shared_ptr, gates_ptr, out_ptr, row, column,
    num_rows, size, TOP_K: tl.constexpr, PARTS: tl.constexpr, LEAF: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """The outputs of each row's pairs in their order; by one program, so that a row is added in one way. PARTS: outputs
    are sums of parts, without biases. LEAF: so many experts have a sum of their own; other ranks' have none."""
    total = tl.zeros((row.shape[0], column.shape[0]), tl.float32)
    branches = new_branches(total, LEVELS)
    for leaf in tl.static_range(1 << LEVELS):
        total = _sum_leaf(
            outputs_ptr, partial_ptr, bias_ptr, experts_ptr, weights_ptr, row, column, num_rows, size, leaf, TOP_K,
            PARTS, LEAF,
        )  # fmt: skip
        if leaf == 0 and shared_ptr is not None:
            inside = (row < num_rows)[:, None] & (column < size)[None, :]
            shared = load_fp32(shared_ptr + row.to(tl.int64)[:, None] * size + column[None, :], inside)
            if gates_ptr is not None:
                gate = load_fp32(gates_ptr + row, row < num_rows)
                shared *= (1.0 / (1.0 + tl.exp(-gate)))[:, None]
            total += shared
        if leaf < (1 << LEVELS) - 1:
            branches = end_leaf(total, branches, leaf, LEVELS)
    total = end_tree(total, branches, LEVELS)
    cells = out_ptr + row.to(tl.int64)[:, None] * size + column[None, :]
    inside = (row < num_rows)[:, None] & (column < size)[None, :]
    tl.store(cells, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _sum_leaf(
    outputs_ptr, partial_ptr, bias_ptr, experts_ptr, weights_ptr, row, column, num_rows, size, leaf: tl.constexpr,
    TOP_K: tl.constexpr, PARTS: tl.constexpr, LEAF: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((row.shape[0], column.shape[0]), tl.float32)
    for index in tl.static_range(TOP_K):
        pair = row.to(tl.int64) * TOP_K + index
        is_here = row < num_rows
        if LEAF > 0:
            expert = tl.load(experts_ptr + pair, mask=is_here, other=-1)
            is_here = (expert >= leaf * LEAF) & (expert < (leaf + 1) * LEAF)
        inside = is_here[:, None] & (column < size)[None, :]
        weight = tl.load(weights_ptr + pair, mask=is_here, other=0.0)
        cells = pair[:, None] * size + column[None, :]
        if PARTS > 1:
            output = tl.zeros(total.shape, tl.float32)
            for part in tl.static_range(PARTS):
                parts = partial_ptr + part * num_rows.to(tl.int64) * TOP_K * size + cells
                output += tl.load(parts, mask=inside, other=0.0, cache_modifier=".cg")
            if bias_ptr is not None:
                expert = tl.load(experts_ptr + pair, mask=is_here, other=0).to(tl.int64)
                biases = bias_ptr + expert[:, None] * size + column[None, :]
                output += load_fp32(biases, inside)
            output = output.to(outputs_ptr.dtype.element_ty)
        else:
            output = tl.load(outputs_ptr + cells, mask=inside, other=0.0, cache_modifier=".cg")
        total += weight[:, None] * output.to(tl.float32)
    return total
