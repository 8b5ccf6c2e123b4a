"""Steps of gated delta nets on a GPU: convolution, then a matrix for each value head that forgets and learns.

    S <- e^g S;  u = beta (v - S^T k);  S <- S + k u^T;  o = S^T q

with k and q of norm 1, and q / sqrt(DK) (Yang et al., "Gated Delta Networks", arXiv 2412.06464, equation 10). States
are fp32. Both sums over keys are of the state before the step, so neither waits for the other, with k and q as the
convolution puts them out. Their norms are in factors, five of each row and value head (`_put_factors`):

    w = w_v v - w_k S^T k;   o = o_q S^T q + o_w w;   S <- a S + k w^T,   where a = e^g

Requests walk their nodes (walks.py), and ends of prompts go from token to token, both in the loop of `_walk`;
whole blocks of prompts go by products (delta_blocks.py).
Letters: T rows, B decoding requests, M chunks of prompts, R slots, W nodes, E entries, HK key heads of DK numbers, HV
value heads of DV, C = 2 HK DK + HV DV channels: queries, keys, values.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.launch import pdl_options
from slipstream.kernels.recurrent.delta_blocks import BETA, EPSILON, FACTORS, GATE, Sizes, absorb_blocks
from slipstream.kernels.recurrent.walks import (
    BLOCK_TOKENS,
    EMIT,
    LEAF,
    NOTHING,
    NUM_COLUMNS,
    RESTART,
    ROW,
    STATE,
    TAPS,
    PassPlan,
)

BLOCK_VALUES = 32  # columns of a state that a program, of one warp, steps
VECTOR = 4  # of them that a lane steps, for a part of the keys: on Hopper in 240 registers, none of them spilled
LANES = 32
BLOCK_ROWS = 8  # that a program of the convolution takes at once; of a request as many as it may have, if that is less
BLOCK_HEADS = 1  # of which it takes the queries and keys, or as many values
CONV_WARPS = 4  # or one a row: then a lane has as many numbers of a head, whatever the rows, so sums have one order
# Factors of a row and value head, beside g and beta
DECAY = tl.constexpr(2)
VALUE = tl.constexpr(3)
KEY = tl.constexpr(4)
QUERY = tl.constexpr(5)
WRITE = tl.constexpr(6)


class States(NamedTuple):
    """A layer's states: after the committed tokens but those of the last pass."""

    inputs: Tensor  # (E, 3, C) fp32, of the convolution: those of the last three tokens
    memory: Tensor  # (E, HV, DK, DV) fp32


class Records(NamedTuple):
    """Records of each row of a pass (T, ...), or of each node of a slot's last one (R, W, ...)."""

    inputs: Tensor  # (..., C) before the convolution
    gates: Tensor  # (..., 2 HV) b and a: beta = sigmoid(b), g = -exp(A_log) softplus(a + dt_bias)


class Weights(NamedTuple):
    """Weights of a layer that its steps read."""

    conv: Tensor  # (C, 4)
    A_log: Tensor  # (HV,) fp32
    dt_bias: Tensor  # (HV,) fp32


class Buffers(NamedTuple):
    """Tensors that the convolution reads and writes."""

    channels: Tensor  # (T + B W, C) its outputs
    factors: Tensor  # (T + B W, HV, FACTORS) fp32
    outputs: Tensor  # (T, HV, DV) of the layer; zeros in unused rows
    rows: Records  # (T, ...)
    stored: Records  # (R, W, ...)
    state_inputs: Tensor  # (E, 3, C)


def delta_net(rows: Records, stored: Records, states: States, weights: Weights, sizes: Sizes, plan: PassPlan) -> Tensor:
    """Takes the rows of a pass through the layer; returns outputs (T, HV, DV), zeros in unused rows.

    Updates `states`, and stores the nodes' records for the next pass. Two launches, and three more for blocks of
    prompts; the reference is the layer's own step (models/layers/delta_net.py).
    """
    layout, walks, columns, blocks, num_decoding, is_old = plan
    num_keys, num_values, key_dim, value_dim = sizes
    num_rows, num_channels = rows.inputs.shape
    num_segments = len(layout.segment_slots)
    device = rows.inputs.device
    num_buffer = len(walks.sources)
    assert all(x.stride(-1) == 1 for x in rows)
    assert all(x.is_contiguous() for x in (*stored, *states))
    assert BLOCK_ROWS >= TAPS - 1, "the rows after a chunk's first ones read no state"
    channels = torch.empty(num_buffer, num_channels, dtype=rows.inputs.dtype, device=device)
    factors = torch.empty(num_buffer, num_values, FACTORS.value, device=device)
    outputs = torch.empty(num_rows, num_values, value_dim, dtype=rows.inputs.dtype, device=device)
    if num_rows == 0 or num_segments == 0:
        return outputs.zero_()
    shape = {"KEY_HEADS": num_keys, "VALUE_HEADS": num_values, "DK": key_dim, "DV": value_dim}
    keys = triton.next_power_of_2(key_dim)
    block = min(BLOCK_HEADS, triton.next_power_of_2(num_keys))
    num_programs = triton.cdiv(num_keys, block) + triton.cdiv(num_values * value_dim, 2 * block * keys)
    request_rows = min(BLOCK_ROWS, triton.next_power_of_2(2 * triton.cdiv(num_rows, num_segments)))  # and replayed ones
    _convolve[(num_segments + triton.cdiv(num_rows, BLOCK_ROWS), num_programs)](
        Buffers(channels, factors, outputs, rows, stored, states.inputs), weights, layout, walks, columns,
        rows.inputs.stride(0), rows.gates.stride(0), num_rows, num_decoding, num_segments, stored.inputs.shape[1],
        EPSILON, key_dim**-0.5, **shape, HEADS=block, KEYS=keys,
        GROUPS=triton.next_power_of_2(num_values // num_keys), ROWS=BLOCK_ROWS, REQUEST_ROWS=request_rows,
        TAPS=TAPS, STATE=STATE, NOTHING=NOTHING, ALONE=num_decoding == num_segments == 1, IS_OLD=is_old,
        num_warps=min(CONV_WARPS, request_rows), **pdl_options(device),
    )  # fmt: skip
    absorb_blocks(outputs, channels, factors, states.memory, sizes, plan)
    block = min(BLOCK_VALUES, triton.next_power_of_2(value_dim))
    _step_states[(num_segments, num_values, triton.cdiv(value_dim, block))](
        outputs, channels, factors, states.memory, layout, walks, columns, blocks, num_decoding, walks.steps.shape[1],
        **shape, KEYS=keys, VALUES=block, PARTS=min(LANES, LANES * VECTOR // block, keys), ROW=ROW,
        RESTART=RESTART, LEAF=LEAF, EMIT=EMIT, TOKENS=BLOCK_TOKENS, BRANCHES=layout.ancestors is not None,
        IS_OLD=is_old, num_warps=1, **pdl_options(device),
    )  # fmt: skip
    return outputs


@triton.jit(do_not_specialize=["num_rows", "num_decoding", "num_segments"])
def _convolve(
    buffers, weights, layout, walks, columns, x_stride, gate_stride, num_rows, num_decoding, num_segments, num_nodes,
    epsilon, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr,
    KEYS: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, REQUEST_ROWS: tl.constexpr, TAPS: tl.constexpr,
    STATE: tl.constexpr, NOTHING: tl.constexpr, ALONE: tl.constexpr, IS_OLD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A request, a chunk's first rows and its state, REQUEST_ROWS at a time, or ROWS rows of the pass, of which it
    takes what a chunk has left (axis 0); queries and keys of HEADS heads, or as many values (axis 1).

    A program of a request or of a chunk alone reads its channels of the segment's records and state, and writes them
    after that: no other row has a source there. So one launch can do both.
    """
    if ALONE:  # a request's kernel, which takes 5 to 15 % less time
        num_decoding = 1
        num_segments = 1
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if not IS_OLD:
            tl.extra.cuda.gdc_wait()
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * DK + VALUE_HEADS * DV
    KEY_BLOCKS: tl.constexpr = (KEY_HEADS + HEADS - 1) // HEADS
    program = tl.program_id(0)
    block = tl.program_id(1)
    head = (block * HEADS + tl.arange(0, HEADS))[None, :, None, None]
    part = tl.arange(0, 2)[None, None, :, None]  # queries and keys
    dim = tl.arange(0, KEYS)[None, None, None, :]
    channel = 2 * KEY_HEADS * DK + (head - KEY_BLOCKS * HEADS) * 2 * KEYS + part * KEYS + dim
    exists = channel < CHANNELS
    if block < KEY_BLOCKS:
        channel = part * KEY_HEADS * DK + head * DK + dim
        exists = (head < KEY_HEADS) & (dim < DK) & (part >= 0)
    if program < num_segments:
        start = tl.load(layout.starts + program)
        size = tl.load(layout.starts + program + 1) - start
        num_replayed = 0
        first = num_rows + program * num_nodes
        if program < num_decoding:
            num_replayed = tl.load(walks.replayed + program)
        count = tl.where(program < num_decoding, num_replayed + size, tl.minimum(size, ROWS))
        for tile in range(0, count, REQUEST_ROWS):
            place = tile + tl.arange(0, REQUEST_ROWS)
            row = tl.where(place < num_replayed, first + place, start + place - num_replayed)
            _convolve_rows(
                buffers, weights, walks, row, place < count, channel, exists, block, x_stride, gate_stride, epsilon,
                scale, True, KEY_HEADS, VALUE_HEADS, DK, DV, HEADS, KEYS, GROUPS, REQUEST_ROWS, TAPS, STATE, NOTHING,
                PDL,
            )  # fmt: skip
        if size > 0:
            _keep(
                buffers, layout, walks, columns, program, start, size, channel, exists, block, x_stride, gate_stride,
                num_decoding, num_nodes, KEY_HEADS, VALUE_HEADS, CHANNELS, HEADS, GROUPS, REQUEST_ROWS, TAPS, STATE,
                NOTHING,
            )  # fmt: skip
    else:
        row = (program - num_segments) * ROWS + tl.arange(0, ROWS)
        end = tl.load(layout.starts + num_segments)
        is_rest = (row >= tl.load(layout.starts + num_decoding)) & (row < end)
        is_rest &= tl.load(layout.nodes + row, mask=is_rest, other=0) >= ROWS
        if tl.max(is_rest.to(tl.int32), axis=0) == 1:
            _convolve_rows(
                buffers, weights, walks, row, is_rest, channel, exists, block, x_stride, gate_stride, epsilon, scale,
                False, KEY_HEADS, VALUE_HEADS, DK, DV, HEADS, KEYS, GROUPS, ROWS, TAPS, STATE, NOTHING, PDL,
            )  # fmt: skip
        if PDL:
            tl.extra.cuda.gdc_wait()
        if (block >= KEY_BLOCKS) & ((program - num_segments + 1) * ROWS > end):
            is_unused = ((row >= end) & (row < num_rows))[:, None, None, None] & exists
            place = row.to(tl.int64)[:, None, None, None] * (VALUE_HEADS * DV) + channel - 2 * KEY_HEADS * DK
            zeros = tl.zeros(is_unused.shape, buffers.outputs.dtype.element_ty)
            tl.store(buffers.outputs + place, zeros, mask=is_unused)


@triton.jit
def _inputs(
    buffers, source, channel, exists, x_stride,
    CHANNELS: tl.constexpr, STATE: tl.constexpr, NOTHING: tl.constexpr, HAS_PAST: tl.constexpr,
):  # fmt: skip
    """Channels of the sources (n,) in fp32, (n, heads, 2, dims); without past ones all are rows of the pass."""
    source = source.to(tl.int64)[:, None, None, None]
    if HAS_PAST:
        row = buffers.rows.inputs + source * x_stride
        record = buffers.stored.inputs + (-1 - source) * CHANNELS
        is_token = (source < STATE) & (source != NOTHING)
        value = tl.load(tl.where(source >= 0, row, record) + channel, mask=is_token & exists, other=0.0)
        past = buffers.state_inputs + (source - STATE) * CHANNELS + channel
        return value.to(tl.float32) + tl.load(past, mask=(source >= STATE) & exists, other=0.0)
    else:
        value = tl.load(buffers.rows.inputs + source * x_stride + channel, mask=(source >= 0) & exists, other=0.0)
        return value.to(tl.float32)


@triton.jit
def _convolve_rows(
    buffers, weights, walks, row, is_used, channel, exists, block, x_stride, gate_stride, epsilon, scale,
    HAS_PAST: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, TAPS: tl.constexpr,
    STATE: tl.constexpr, NOTHING: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of the buffer, (ROWS,). Without a past they are of chunks, and their sources the rows before them. Sources
    and weights are read before the kernel before this one has ended."""
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * DK + VALUE_HEADS * DV
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    # Value heads that share the program's keys; their gates are on the way while it convolves.
    key_head = block * HEADS + tl.arange(0, HEADS)[:, None]
    group = tl.arange(0, GROUPS)[None, :]
    head = key_head * GROUP + group
    has_head = (key_head < KEY_HEADS) & (group < GROUP)
    origin = tl.load(walks.sources + row * TAPS, mask=is_used, other=0).to(tl.int64) if HAS_PAST else row.to(tl.int64)
    taps = ()
    sources = ()
    for column in tl.static_range(TAPS):
        tap = tl.load(weights.conv + channel * TAPS + TAPS - 1 - column, mask=exists, other=0.0).to(tl.float32)
        source = tl.where(is_used, row - column, NOTHING)
        if HAS_PAST:
            source = tl.load(walks.sources + row * TAPS + column, mask=is_used, other=NOTHING)
        taps = taps + (tap,)  # type: ignore[assignment]
        sources = sources + (source,)  # type: ignore[assignment]
    if PDL:
        tl.extra.cuda.gdc_wait()
    record = buffers.stored.gates + (-1 - origin) * (2 * VALUE_HEADS)
    gates = tl.where(origin >= 0, buffers.rows.gates + origin * gate_stride, record)[:, None, None] + head[None, :, :]
    has_gate = is_used[:, None, None] & has_head[None, :, :]
    b = tl.load(gates, mask=has_gate, other=0.0)
    a = tl.load(gates + VALUE_HEADS, mask=has_gate, other=0.0)
    total = tl.zeros((ROWS, HEADS, 2, KEYS), tl.float32)
    for column in tl.static_range(TAPS):
        x = _inputs(buffers, sources[column], channel, exists, x_stride, CHANNELS, STATE, NOTHING, HAS_PAST)
        total = tl.fma(tl.broadcast_to(taps[column], total.shape), x, total)
    result = (total / (1 + tl.exp(-total))).to(buffers.channels.dtype.element_ty)
    inside = is_used[:, None, None, None] & exists
    tl.store(buffers.channels + row.to(tl.int64)[:, None, None, None] * CHANNELS + channel, result, mask=inside)
    if block < (KEY_HEADS + HEADS - 1) // HEADS:
        place = buffers.factors + (row.to(tl.int64)[:, None, None] * VALUE_HEADS + head[None, :, :]) * FACTORS
        A_log = tl.load(weights.A_log + head, mask=has_head, other=0.0)[None, :, :]
        dt_bias = tl.load(weights.dt_bias + head, mask=has_head, other=0.0)[None, :, :]
        _put_factors(place, has_gate, result.to(tl.float32), b, a, A_log, dt_bias, epsilon, scale)


@triton.jit
def _put_factors(place, exists, x, b, a, A_log, dt_bias, epsilon, scale):
    """Writes factors (ROWS, HEADS, GROUPS) at `place`, of the value heads that share queries and keys x (ROWS, HEADS,
    2, DK)."""
    is_query = (tl.arange(0, 2) == 0)[None, None, :, None]
    q = tl.sum(tl.where(is_query, x, 0.0), axis=2)
    k = tl.sum(tl.where(is_query, 0.0, x), axis=2)
    q_norm = (tl.rsqrt(tl.sum(q * q, axis=2) + epsilon) * scale)[:, :, None]
    k_norm = tl.rsqrt(tl.sum(k * k, axis=2) + epsilon)[:, :, None]
    product = tl.sum(k * q, axis=2)[:, :, None]
    a = a.to(tl.float32) + dt_bias
    gate = -tl.exp(A_log) * tl.where(a > 20, a, tl.log(1 + tl.exp(tl.minimum(a, 20.0))))
    beta = (1 / (1 + tl.exp(-b.to(tl.float32)))).to(b.dtype).to(tl.float32)  # rounded as transformers rounds it
    decay = tl.exp(gate)
    tl.store(place + GATE, gate, mask=exists)
    tl.store(place + BETA, beta, mask=exists)
    tl.store(place + DECAY, decay, mask=exists)
    tl.store(place + VALUE, k_norm * beta, mask=exists)
    tl.store(place + KEY, k_norm * k_norm * beta * decay, mask=exists)
    tl.store(place + QUERY, q_norm * decay, mask=exists)
    tl.store(place + WRITE, q_norm * product, mask=exists)


@triton.jit
def _keep(
    buffers, layout, walks, columns, segment, start, size, channel, exists, block, x_stride, gate_stride, num_decoding,
    num_nodes,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, CHANNELS: tl.constexpr, HEADS: tl.constexpr,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, TAPS: tl.constexpr, STATE: tl.constexpr, NOTHING: tl.constexpr,
):  # fmt: skip
    """The last inputs of a request or a chunk go to its state, a request's nodes to its records."""
    sources = walks.sources + TAPS * start.to(tl.int64)
    entry = tl.load(columns.entries + segment * NUM_COLUMNS)
    if segment < num_decoding:
        # What the root reads before itself is what the state's inputs are after the replay.
        _keep_inputs(buffers, sources + 1, entry, channel, exists, x_stride, CHANNELS, STATE, NOTHING)
        slot = tl.load(layout.segment_slots + segment)
        GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
        group = tl.arange(0, 2 * GROUPS)[None, :]  # a number b and a number a of each value head
        key_head = block * HEADS + tl.arange(0, HEADS)[:, None]
        gate = (key_head * GROUP + group % GROUPS + group // GROUPS * VALUE_HEADS)[None, :, :]
        has_gate = ((key_head < KEY_HEADS) & (group % GROUPS < GROUP))[None, :, :]
        for first in range(0, size, ROWS):
            node = first + tl.arange(0, ROWS)
            row = (start + node).to(tl.int64)
            record = slot * num_nodes + node
            inside = (node < size)[:, None, None, None] & exists
            place = row[:, None, None, None] * x_stride + channel
            value = tl.load(buffers.rows.inputs + place, mask=inside, other=0.0)
            tl.store(buffers.stored.inputs + record[:, None, None, None] * CHANNELS + channel, value, mask=inside)
            inside = (node < size)[:, None, None] & has_gate
            value = tl.load(buffers.rows.gates + row[:, None, None] * gate_stride + gate, mask=inside, other=0.0)
            place = record[:, None, None] * (2 * VALUE_HEADS) + gate
            tl.store(buffers.stored.gates + place, value, mask=inside)
    else:
        position = tl.load(columns.positions + segment * NUM_COLUMNS)
        mark = position - tl.load(layout.segment_lengths + segment)
        if (mark > 0) & (mark <= size):
            snapshot = tl.load(columns.snapshots + segment * NUM_COLUMNS)
            last = sources + (mark - 1) * TAPS
            _keep_inputs(buffers, last, snapshot, channel, exists, x_stride, CHANNELS, STATE, NOTHING)
        last = sources + (size - 1) * TAPS
        _keep_inputs(buffers, last, entry, channel, exists, x_stride, CHANNELS, STATE, NOTHING)


@triton.jit
def _keep_inputs(
    buffers, sources, entry, channel, exists, x_stride,
    CHANNELS: tl.constexpr, STATE: tl.constexpr, NOTHING: tl.constexpr,
):  # fmt: skip
    """The inputs of three sources, the newest first, go to the state of `entry`, which may be among them."""
    age = tl.arange(0, 4)
    source = tl.load(sources + age, mask=age < 3, other=NOTHING)
    value = _inputs(buffers, source, channel, exists, x_stride, CHANNELS, STATE, NOTHING, True)
    tl.debug_barrier()  # all of the program have read before one writes
    place = buffers.state_inputs + (3 * entry + 2 - age)[:, None, None, None] * CHANNELS + channel
    tl.store(place, value, mask=(age < 3)[:, None, None, None] & exists)


@triton.jit
def _load_row(
    channels, factors, row, head, key, value, has_key, has_value,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """q and k, as `key` is, v, as `value` is, and the factors of a row of the buffer, all fp32."""
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * DK + VALUE_HEADS * DV
    place = channels + row.to(tl.int64) * CHANNELS
    key_place = place + (head // (VALUE_HEADS // KEY_HEADS)) * DK + key
    q = tl.load(key_place, mask=has_key, other=0.0).to(tl.float32)
    k = tl.load(key_place + KEY_HEADS * DK, mask=has_key, other=0.0).to(tl.float32)
    v = tl.load(place + 2 * KEY_HEADS * DK + head * DV + value, mask=has_value, other=0.0).to(tl.float32)
    factor = factors + (row.to(tl.int64) * VALUE_HEADS + head) * FACTORS
    decay = tl.load(factor + DECAY)
    w_v = tl.load(factor + VALUE)
    w_k = tl.load(factor + KEY)
    o_q = tl.load(factor + QUERY)
    o_w = tl.load(factor + WRITE)
    return q, k, v, decay, w_v, w_k, o_q, o_w


@triton.jit(do_not_specialize=["num_decoding"])
def _step_states(
    outputs, channels, factors, memory, layout, walks, columns, blocks, num_decoding, longest,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, PARTS: tl.constexpr, ROW: tl.constexpr, RESTART: tl.constexpr,
    LEAF: tl.constexpr, EMIT: tl.constexpr, TOKENS: tl.constexpr, BRANCHES: tl.constexpr, IS_OLD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A request or a chunk after its blocks (axis 0), a value head (axis 1), VALUES columns of its state (axis 2)."""
    segment = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if (not IS_OLD) | (segment >= num_decoding):
            tl.extra.cuda.gdc_wait()
    start = tl.load(layout.starts + segment)
    count = tl.load(layout.starts + segment + 1) - start
    # A request writes its state after what it replays, a chunk after its last row.
    mark = -1
    is_decoding = segment < num_decoding
    num_done = 0
    entry = tl.load(columns.entries + segment * NUM_COLUMNS)
    source = entry
    steps = walks.steps + segment * longest  # there is room for two
    code = tl.load(steps, mask=is_decoding, other=0)
    following = tl.load(steps + 1, mask=is_decoding, other=0)
    if is_decoding:
        count = tl.load(walks.counts + segment)
        mark = tl.load(walks.replayed + segment)
    else:
        chunk = segment - num_decoding
        num_done = (tl.load(blocks.starts + chunk + 1) - tl.load(blocks.starts + chunk)) * TOKENS
        start += num_done
        count -= num_done
        if num_done == 0:
            source = tl.load(columns.sources + segment * NUM_COLUMNS)
    has_begun = is_decoding | (num_done > 0) | (tl.load(layout.segment_lengths + segment) > 0)
    if count > 0:
        _walk(
            outputs, channels, factors, memory, steps, code, following, start, count, mark, source, entry,
            is_decoding, has_begun, KEY_HEADS, VALUE_HEADS, DK, DV, KEYS, VALUES, PARTS, ROW, RESTART, LEAF,
            EMIT, BRANCHES, PDL,
        )  # fmt: skip
    if PDL:  # not to end before the kernel before
        tl.extra.cuda.gdc_wait()


@triton.jit
def _walk(
    outputs, channels, factors, memory, steps, code, following, start, count, mark, source, entry, is_decoding,
    has_begun,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, PARTS: tl.constexpr, ROW: tl.constexpr, RESTART: tl.constexpr,
    LEAF: tl.constexpr, EMIT: tl.constexpr, BRANCHES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The state is (keys of a part, PARTS, VALUES): a lane has one part and VECTOR columns, so most of a sum over keys
    stays in its registers. It is loaded as a matrix, in which neighbouring rows are of neighbouring parts: versions of
    Triton hand lanes the dims of larger tiles in other orders. Rows are loaded a step ahead."""
    LENGTH: tl.constexpr = KEYS // PARTS
    head = tl.program_id(1)
    key = tl.arange(0, PARTS)[:, None] * LENGTH + tl.arange(0, LENGTH)[None, :]
    has_key = key < DK
    row = tl.arange(0, KEYS)[:, None]
    column = tl.arange(0, VALUES)
    value = tl.program_id(2) * VALUES + column
    width = VALUES  # known to the compiler, so that whole tiles need no masks
    if DV % VALUES != 0:
        width = DV - tl.program_id(2) * VALUES
    has_value = column < width
    inside = (row % PARTS * LENGTH + row // PARTS < DK) & has_value
    SIZE: tl.constexpr = VALUE_HEADS * DK * DV  # of a state
    tile = memory + head * DK * DV + row % PARTS * (LENGTH * DV) + row // PARTS * DV + value
    code = tl.where(is_decoding, code, start | EMIT)
    following = tl.where(count == 1, code, tl.where(is_decoding, following, (start + 1) | EMIT))
    is_known = tl.where(has_begun, inside, False)
    state = tl.reshape(tl.load(tile + source * SIZE, mask=is_known, other=0.0), (LENGTH, PARTS, VALUES))
    if PDL:  # states of requests are older than the kernel before
        tl.extra.cuda.gdc_wait()
    q, k, v, decay, w_v, w_k, o_q, o_w = _load_row(
        channels, factors, code & ROW, head, key, value, has_key, has_value, KEY_HEADS, VALUE_HEADS, DK, DV
    )
    for step in range(count):
        index = tl.minimum(step + 2, count - 1)
        later = tl.load(steps + index, mask=is_decoding, other=(start + index) | EMIT)
        next_q, next_k, next_v, next_decay, next_w_v, next_w_k, next_o_q, next_o_w = _load_row(
            channels, factors, following & ROW, head, key, value, has_key, has_value, KEY_HEADS, VALUE_HEADS, DK, DV
        )
        if (step == mark) & (mark > 0):
            tl.store(tile + entry * SIZE, tl.reshape(state, (KEYS, VALUES)), mask=inside)
        if BRANCHES:  # noqa: SIM102  `and` would compile both sides
            if code & RESTART != 0:
                tl.debug_barrier()  # the state may just have been written; and makes this a branch, no selection
                state = tl.reshape(tl.load(tile + entry * SIZE, mask=inside, other=0.0), (LENGTH, PARTS, VALUES))
        recalled = tl.sum(tl.sum(state * tl.trans(k)[:, :, None], axis=0), axis=0)
        w = tl.fma(-w_k, recalled, w_v * v)
        if code & EMIT != 0:
            answer = tl.sum(tl.sum(state * tl.trans(q)[:, :, None], axis=0), axis=0)
            place = outputs + ((code & ROW).to(tl.int64) * VALUE_HEADS + head) * DV + value
            tl.store(place, tl.fma(o_w, w, o_q * answer).to(outputs.dtype.element_ty), mask=has_value)
        if code & LEAF == 0:
            state = tl.fma(tl.trans(k)[:, :, None], w, state * decay)
        code = following
        following = later
        q = next_q
        k = next_k
        v = next_v
        decay = next_decay
        w_v = next_w_v
        w_k = next_w_k
        o_q = next_o_q
        o_w = next_o_w
    if not is_decoding:
        tl.store(tile + entry * SIZE, tl.reshape(state, (KEYS, VALUES)), mask=inside)
