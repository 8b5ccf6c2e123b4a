"""Gated delta nets over prompts, a block of 64 tokens at a time, by matrix products.

In a block with inclusive sums G of the gates g, D_ij = e^(G_i - G_j), and A the strictly lower part of
beta (K K^T) o D, all tokens' corrections follow from the state S before the block at once:

    T = (I + A)^-1;   W = T (beta e^G K);   U = T (beta V);   u = U - W S
    O = e^G Q S + ((Q K^T) o D) u;   S <- e^(G_C) S + K^T (e^(G_C - G) u)

(Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", arXiv 2406.06484, with the
gates of arXiv 2412.06464.) T, W and U need no state, and O none but that before its block. So one launch prepares all
blocks side by side, one goes from block to block with two products each, and one puts out all blocks.

Blocks lie on multiples of 64 tokens of a text and are whole, and programs are the same for every pass: a text's bits
depend neither on other texts nor on how its prompt is cut. States and the sums in products are fp32; what goes into
products has the channels' type.
Letters as in delta.py; N blocks of 64 tokens.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.launch import pdl_options, wait_for_inputs
from slipstream.kernels.recurrent.walks import BLOCK_TOKENS, NUM_COLUMNS, PassPlan

EPSILON = 1e-6  # under the root of the norms of k and q
PART = 16  # tokens of the parts by which a block's system is solved
BLOCK_COLUMNS = 64  # columns of a state that a program carries from block to block
LEAST_DIM = 16  # of a product
FACTORS = tl.constexpr(8)  # that a row has of each value head: a sector of memory, not all in use
GATE = tl.constexpr(0)
BETA = tl.constexpr(1)


class Sizes(NamedTuple):
    """Sizes of a layer."""

    num_keys: int  # HK
    num_values: int  # HV, a multiple of HK
    key_dim: int  # DK
    value_dim: int  # DV


class Work(NamedTuple):
    """Intermediates of all blocks, in the channels' type but for sums. Dims are powers of two; zeros fill them up."""

    keys: Tensor  # (N, HK, 64, DK) of norm 1
    sums: Tensor  # (N, HV, 64) fp32 G
    reads: Tensor  # (N, HV, 64, DK) W
    corrections: Tensor  # (N, HV, 64, DV) U, then u
    states: Tensor  # (N, HV, DK, DV) before each block


def absorb_block(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Returns states after a block, and its outputs (..., 64, DV): states (..., DK, DV), q and k (..., 64, DK) of norm
    1, v (..., 64, DV), g and beta (..., 64), all fp32. The reference of the kernels."""
    sums = g.cumsum(-1)
    growth = sums.exp()[..., None]
    decay = (sums[..., :, None] - sums[..., None, :]).tril().exp().tril()
    system = (beta[..., None] * (k @ k.mT) * decay).tril(-1)  # the solver takes ones on the diagonal
    target = beta[..., None] * (v - growth * (k @ state))
    corrections = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
    outputs = growth * (q @ state) + (q @ k.mT * decay) @ corrections
    rest = (sums[..., -1:] - sums).exp()[..., None]
    return growth[..., -1:, :] * state + k.mT @ (rest * corrections), outputs * q.shape[-1] ** -0.5


def absorb_blocks(
    outputs: Tensor, channels: Tensor, factors: Tensor, memory: Tensor, sizes: Sizes, plan: PassPlan
) -> None:
    """Takes all whole blocks of a pass's prompts into states `memory` (E, HV, DK, DV), and writes their rows of outputs
    (T, HV, DV). channels (T, C) after the convolution; factors (T, HV, FACTORS), of which it reads g and beta."""
    num_blocks = len(plan.blocks.rows)
    if num_blocks == 0:
        return
    assert outputs.is_contiguous()
    num_keys, num_values, key_dim, value_dim = sizes
    keys = max(triton.next_power_of_2(key_dim), LEAST_DIM)
    values = max(triton.next_power_of_2(value_dim), LEAST_DIM)
    device = outputs.device

    def empty(num_heads: int, *dims: int, dtype: torch.dtype = channels.dtype) -> Tensor:
        return torch.empty(num_blocks, num_heads, *dims, dtype=dtype, device=device)

    work = Work(
        keys=empty(num_keys, BLOCK_TOKENS, keys),
        sums=empty(num_values, BLOCK_TOKENS, dtype=torch.float32),
        reads=empty(num_values, BLOCK_TOKENS, keys),
        corrections=empty(num_values, BLOCK_TOKENS, values),
        states=empty(num_values, keys, values),
    )
    is_exact = channels.dtype == torch.float32
    shape = {"KEY_HEADS": num_keys, "VALUE_HEADS": num_values, "KEYS": keys, "VALUES": values, "TOKENS": BLOCK_TOKENS}
    dims = {"DK": key_dim, "DV": value_dim}
    products = {"PRECISION": "ieee" if is_exact else "tf32", **pdl_options(device)}
    _prepare_blocks[(num_blocks, num_values)](
        work, channels, factors, plan.blocks, EPSILON, **shape, **dims, PART=PART, num_warps=4, **products
    )
    columns = min(values, BLOCK_COLUMNS)
    num_chunks = len(plan.layout.segment_slots) - plan.num_decoding
    _carry_states[(num_chunks, num_values, triton.cdiv(value_dim, columns))](
        work, memory, plan.layout, plan.columns, plan.blocks, plan.num_decoding, **shape, **dims, COLUMNS=columns,
        num_warps=4, num_stages=3, **products,
    )  # fmt: skip
    _read_blocks[(num_blocks, num_values)](
        outputs, work, channels, plan.blocks, EPSILON, key_dim**-0.5, **shape, **dims, num_warps=4, **products
    )


@triton.jit
def _normed_rows(channels, first, start, epsilon, ROWS: tl.constexpr, CHANNELS: tl.constexpr, DIM: tl.constexpr,
                 DIMS: tl.constexpr):  # fmt: skip
    """Channels from `start` on of ROWS rows, of norm 1, in the channels' type."""
    row = (first + tl.arange(0, ROWS)).to(tl.int64)
    dim = tl.arange(0, DIMS)
    x = tl.load(channels + row[:, None] * CHANNELS + start + dim[None, :], mask=(dim < DIM)[None, :], other=0.0)
    x = x.to(tl.float32)
    return (x * tl.rsqrt(tl.sum(x * x, axis=1) + epsilon)[:, None]).to(channels.dtype.element_ty)


@triton.jit
def _inverse(system, TOKENS: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr):
    """(I + system)^-1 of a strictly lower system: of parts on the diagonal row by row, side by side, then of all by
    products, in which parts below the diagonal vanish after three."""
    PARTS: tl.constexpr = TOKENS // PART
    part = tl.arange(0, PARTS)
    place = tl.arange(0, PART)
    is_diagonal = (part[:, None] == part[None, :])[:, None, :, None]
    parts = tl.reshape(system, (PARTS, PART, PARTS, PART))
    diagonal = -tl.sum(tl.where(is_diagonal, parts, 0.0), axis=2)
    inverse = diagonal * 1.0  # Triton carries names of one value through a loop as one
    for index in range(1, PART):
        is_row = (place == index)[None, :, None]
        row = tl.sum(tl.where(is_row, diagonal, 0.0), axis=1)
        row += tl.sum(row[:, :, None] * inverse, axis=1)
        inverse = tl.where(is_row, row[:, None, :], inverse)
    inverse += tl.where((place[:, None] == place[None, :])[None, :, :], 1.0, 0.0)
    solved = tl.where(is_diagonal, inverse[:, :, None, :], 0.0)
    solved = tl.reshape(solved, (TOKENS, TOKENS))
    token = tl.arange(0, TOKENS)
    below = tl.where((token // PART)[:, None] > (token // PART)[None, :], system, 0.0)
    step = tl.dot(solved, below, input_precision=PRECISION)
    two_steps = tl.dot(step, step, input_precision=PRECISION)
    paths = two_steps - step - tl.dot(step, two_steps, input_precision=PRECISION)
    return solved + tl.dot(paths, solved, input_precision=PRECISION)


@triton.jit
def _prepare_blocks(
    work, channels, factors, blocks, epsilon,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, TOKENS: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A block (axis 0) and a value head (axis 1)."""
    wait_for_inputs(PDL)
    block = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first = tl.load(blocks.rows + block)
    if first >= 0:
        GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
        CHANNELS: tl.constexpr = 2 * KEY_HEADS * DK + VALUE_HEADS * DV
        token = tl.arange(0, TOKENS)
        key = tl.arange(0, KEYS)
        value = tl.arange(0, VALUES)
        row = (first + token).to(tl.int64)
        start = (KEY_HEADS + head // GROUP) * DK
        k = _normed_rows(channels, first, start, epsilon, TOKENS, CHANNELS, DK, KEYS)
        if head % GROUP == 0:
            place = (block * KEY_HEADS + head // GROUP) * TOKENS * KEYS
            tl.store(work.keys + place + token[:, None] * KEYS + key[None, :], k)
        factor = factors + (row * VALUE_HEADS + head) * FACTORS
        sums = tl.cumsum(tl.load(factor + GATE), axis=0)
        beta = tl.load(factor + BETA)
        place = block * VALUE_HEADS + head
        tl.store(work.sums + place * TOKENS + token, sums)
        is_later = token[:, None] > token[None, :]
        decay = tl.exp(tl.where(is_later, sums[:, None] - sums[None, :], 0.0))
        system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * decay * beta[:, None]
        inverse = _inverse(tl.where(is_later, system, 0.0), TOKENS, PART, PRECISION) * beta[None, :]
        v_place = channels + row[:, None] * CHANNELS + 2 * KEY_HEADS * DK + head * DV + value[None, :]
        v = tl.load(v_place, mask=(value < DV)[None, :], other=0.0)
        corrections = tl.dot(inverse.to(v.dtype), v, input_precision=PRECISION)
        cells = token[:, None] * VALUES + value[None, :]
        tl.store(work.corrections + place * TOKENS * VALUES + cells, corrections.to(v.dtype))
        reads = tl.dot((inverse * tl.exp(sums)[None, :]).to(k.dtype), k, input_precision=PRECISION)
        tl.store(work.reads + place * TOKENS * KEYS + token[:, None] * KEYS + key[None, :], reads.to(k.dtype))


@triton.jit(do_not_specialize=["num_decoding"])
def _carry_states(
    work, memory, layout, columns, blocks, num_decoding,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A chunk (axis 0), a value head (axis 1), and COLUMNS of its state (axis 2)."""
    wait_for_inputs(PDL)
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(blocks.starts + chunk)
    end = tl.load(blocks.starts + chunk + 1)
    if first < end:
        GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
        SIZE: tl.constexpr = VALUE_HEADS * DK * DV  # of a state
        token = tl.arange(0, TOKENS)
        key = tl.arange(0, KEYS)
        value = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (key < DK)[:, None] & (value < DV)[None, :]
        tile = memory + head * DK * DV + key[:, None] * DV + value[None, :]
        segment = num_decoding + chunk
        length = tl.load(layout.segment_lengths + segment)
        mark = first + ((tl.load(columns.positions + segment * NUM_COLUMNS) - length) // TOKENS).to(tl.int32)
        source = tl.load(columns.sources + segment * NUM_COLUMNS)
        state = tl.load(tile + source * SIZE, mask=inside, other=0.0)
        state = tl.where(length > 0, state, 0.0)
        for block in range(first, end):
            place = (block * VALUE_HEADS + head).to(tl.int64)
            key_place = (block * KEY_HEADS + head // GROUP).to(tl.int64) * TOKENS * KEYS
            stored_state = state.to(work.states.dtype.element_ty)
            tl.store(work.states + place * KEYS * VALUES + key[:, None] * VALUES + value[None, :], stored_state)
            reads = tl.load(work.reads + place * TOKENS * KEYS + token[:, None] * KEYS + key[None, :])
            k = tl.load(work.keys + key_place + token[:, None] * KEYS + key[None, :])
            cells = work.corrections + place * TOKENS * VALUES + token[:, None] * VALUES + value[None, :]
            sums = tl.load(work.sums + place * TOKENS + token)
            last = tl.load(work.sums + place * TOKENS + TOKENS - 1)
            corrections = tl.load(cells).to(tl.float32) - tl.dot(reads, stored_state, input_precision=PRECISION)
            tl.store(cells, corrections.to(k.dtype))
            rest = (corrections * tl.exp(last - sums)[:, None]).to(k.dtype)
            state = tl.dot(tl.trans(k), rest, state * tl.exp(last), input_precision=PRECISION)
            if block + 1 == mark:
                snapshot = tl.load(columns.snapshots + segment * NUM_COLUMNS)
                tl.store(tile + snapshot * SIZE, state, mask=inside)
        entry = tl.load(columns.entries + segment * NUM_COLUMNS)
        tl.store(tile + entry * SIZE, state, mask=inside)


@triton.jit
def _read_blocks(
    outputs, work, channels, blocks, epsilon, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, TOKENS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A block (axis 0) and a value head (axis 1)."""
    wait_for_inputs(PDL)
    block = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first = tl.load(blocks.rows + block)
    if first >= 0:
        GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
        CHANNELS: tl.constexpr = 2 * KEY_HEADS * DK + VALUE_HEADS * DV
        token = tl.arange(0, TOKENS)
        key = tl.arange(0, KEYS)
        value = tl.arange(0, VALUES)
        place = block * VALUE_HEADS + head
        q = _normed_rows(channels, first, head // GROUP * DK, epsilon, TOKENS, CHANNELS, DK, KEYS)
        key_place = (block * KEY_HEADS + head // GROUP) * TOKENS * KEYS
        k = tl.load(work.keys + key_place + token[:, None] * KEYS + key[None, :])
        state = tl.load(work.states + place * KEYS * VALUES + key[:, None] * VALUES + value[None, :])
        sums = tl.load(work.sums + place * TOKENS + token)
        is_seen = token[:, None] >= token[None, :]
        decay = tl.exp(tl.where(is_seen, sums[:, None] - sums[None, :], 0.0))
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay
        scores = tl.where(is_seen, scores, 0.0).to(k.dtype)
        corrections = tl.load(work.corrections + place * TOKENS * VALUES + token[:, None] * VALUES + value[None, :])
        result = tl.dot(q, state, input_precision=PRECISION) * tl.exp(sums)[:, None]
        result = tl.dot(scores, corrections, result, input_precision=PRECISION) * scale
        row = (first + token).to(tl.int64)
        cells = outputs + (row[:, None] * VALUE_HEADS + head) * DV + value[None, :]
        tl.store(cells, result.to(outputs.dtype.element_ty), mask=(value < DV)[None, :])
