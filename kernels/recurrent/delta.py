"""Steps of gated delta nets on a GPU: convolution, then a matrix for each value head that forgets and learns.

    S <- e^g S;  u = beta (v - S^T k);  S <- S + k u^T;  o = S^T q

with k and q of norm 1, and q / sqrt(DK) (Yang et al., "Gated Delta Networks", arXiv 2412.06464, equation 10). States
are fp32. Requests walk their nodes (walks.py), and ends of prompts go from token to token, both in the arithmetic of
`_step`; whole blocks of prompts go by products (delta_blocks.py).
Letters: T rows, B decoding requests, M chunks of prompts, R slots, W nodes, E entries, HK key heads of DK numbers, HV
value heads of DV, C = 2 HK DK + HV DV channels: queries, keys, values.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.launch import pdl_options, wait_for_inputs
from slipstream.kernels.recurrent.delta_blocks import EPSILON, Sizes, absorb_blocks
from slipstream.kernels.recurrent.walks import (
    BLOCK_TOKENS,
    EMIT,
    NOTHING,
    NUM_COLUMNS,
    RESTART,
    ROW,
    STATE,
    TAPS,
    PassPlan,
)

BLOCK_CHANNELS = 1024  # of a program of the convolution
BLOCK_VALUES = 16  # columns of a state that a program steps
WARPS = 1


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


def delta_net(rows: Records, stored: Records, states: States, weights: Weights, sizes: Sizes, plan: PassPlan) -> Tensor:
    """Takes the rows of a pass through the layer; returns outputs (T, HV, DV), zeros in unused rows.

    Updates `states`, and stores the nodes' records for the next pass. Three launches, and three more for blocks of
    prompts; the reference is the layer's own step (models/layers/delta_net.py).
    """
    layout, walks, columns, blocks, num_decoding = plan
    num_rows, num_channels = rows.inputs.shape
    num_nodes = stored.inputs.shape[1]
    num_segments = len(layout.segment_slots)
    device = rows.inputs.device
    num_buffer = len(walks.sources)
    assert all(x.stride(-1) == 1 for x in rows)
    assert all(x.is_contiguous() for x in (*stored, *states))
    channels = torch.empty(num_buffer, num_channels, dtype=rows.inputs.dtype, device=device)
    gates = torch.empty(num_buffer, 2, sizes.num_values, device=device)
    outputs = torch.empty(num_rows, sizes.num_values, sizes.value_dim, dtype=rows.inputs.dtype, device=device)
    if num_rows == 0 or num_segments == 0:
        return outputs.zero_()
    heads = triton.next_power_of_2(sizes.num_values)
    channel_blocks = triton.cdiv(num_channels, BLOCK_CHANNELS)
    shared = {"BLOCK": BLOCK_CHANNELS, "HEADS": heads, "STATE": STATE, "NOTHING": NOTHING, **pdl_options(device)}
    _convolve[(num_buffer, channel_blocks + 1)](
        channels, gates, outputs, rows, stored, states.inputs, weights, walks, rows.inputs.stride(0),
        rows.gates.stride(0), num_rows, num_channels, sizes.num_values * sizes.value_dim, sizes.num_values,
        TAPS=TAPS, num_warps=4, **shared,
    )  # fmt: skip
    absorb_blocks(outputs, channels, gates, states.memory, sizes, plan)
    block = min(BLOCK_VALUES, triton.next_power_of_2(sizes.value_dim))
    _step_states[(num_segments, sizes.num_values, triton.cdiv(sizes.value_dim, block))](
        outputs, channels, gates, states.memory, layout, walks, columns, blocks, num_decoding, walks.steps.shape[1],
        EPSILON, sizes.key_dim**-0.5, KEY_HEADS=sizes.num_keys, VALUE_HEADS=sizes.num_values, DK=sizes.key_dim,
        DV=sizes.value_dim, KEYS=triton.next_power_of_2(sizes.key_dim), VALUES=block, ROW=ROW, RESTART=RESTART,
        EMIT=EMIT, TOKENS=BLOCK_TOKENS, num_warps=WARPS, **pdl_options(device),
    )  # fmt: skip
    _keep[(num_segments, channel_blocks + 1)](
        rows, stored, states.inputs, layout, walks, columns, rows.inputs.stride(0),
        rows.gates.stride(0), num_decoding, num_nodes, num_channels, sizes.num_values, TAPS=TAPS, num_warps=4, **shared,
    )  # fmt: skip
    return outputs


@triton.jit
def _input(
    rows, stored, state_inputs, source, channel, exists, x_stride, num_channels,
    STATE: tl.constexpr, NOTHING: tl.constexpr,
):  # fmt: skip
    """A row's or an earlier one's channels, fp32."""
    value = tl.zeros(channel.shape, tl.float32)
    if source >= STATE:
        value = tl.load(state_inputs + (source - STATE).to(tl.int64) * num_channels + channel, mask=exists, other=0.0)
    elif source >= 0:
        value = tl.load(rows.inputs + source.to(tl.int64) * x_stride + channel, mask=exists, other=0.0).to(tl.float32)
    elif source != NOTHING:
        record = (-1 - source).to(tl.int64)
        value = tl.load(stored.inputs + record * num_channels + channel, mask=exists, other=0.0).to(tl.float32)
    return value


@triton.jit
def _convolve(
    channels, gates, outputs, rows, stored, state_inputs, weights, walks, x_stride, gate_stride, num_rows,
    num_channels, num_outputs, num_heads,
    TAPS: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, STATE: tl.constexpr, NOTHING: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A row of the buffer (axis 0), and a block of its channels, or its gates (axis 1). Unused rows put out zeros."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(walks.sources + row * TAPS)
    if source != NOTHING:
        if tl.program_id(1) == 0:
            _read_gates(gates, rows, stored, weights, row, source, gate_stride, num_heads, HEADS)
        else:
            channel = (tl.program_id(1) - 1) * BLOCK + tl.arange(0, BLOCK)
            exists = channel < num_channels
            total = tl.zeros((BLOCK,), tl.float32)
            for column in tl.static_range(TAPS):
                tap = tl.load(weights.conv + channel * TAPS + TAPS - 1 - column, mask=exists, other=0.0).to(tl.float32)
                before = tl.load(walks.sources + row * TAPS + column)
                total += tap * _input(
                    rows, stored, state_inputs, before, channel, exists, x_stride, num_channels, STATE, NOTHING
                )
            total = total / (1 + tl.exp(-total))
            tl.store(channels + row * num_channels + channel, total.to(channels.dtype.element_ty), mask=exists)
    elif row < num_rows:
        column = (tl.program_id(1) - 1) * BLOCK + tl.arange(0, BLOCK)
        zeros = tl.zeros((BLOCK,), outputs.dtype.element_ty)
        tl.store(outputs + row * num_outputs + column, zeros, mask=(column >= 0) & (column < num_outputs))


@triton.jit
def _read_gates(gates, rows, stored, weights, row, source, stride, num_heads, HEADS: tl.constexpr):
    """g and beta of a row of the pass, or of a record."""
    head = tl.arange(0, HEADS)
    has_head = head < num_heads
    place = stored.gates + (-1 - source).to(tl.int64) * 2 * num_heads + head
    if source >= 0:
        place = rows.gates + source.to(tl.int64) * stride + head
    b = tl.load(place, mask=has_head, other=0.0)
    a = tl.load(place + num_heads, mask=has_head, other=0.0).to(tl.float32)
    a += tl.load(weights.dt_bias + head, mask=has_head, other=0.0)
    rate = tl.exp(tl.load(weights.A_log + head, mask=has_head, other=0.0))
    softplus = tl.where(a > 20, a, tl.log(1 + tl.exp(tl.minimum(a, 20.0))))
    beta = (1 / (1 + tl.exp(-b.to(tl.float32)))).to(b.dtype).to(tl.float32)  # rounded as transformers rounds it
    place = gates + row * 2 * num_heads + head
    tl.store(place, -rate * softplus, mask=has_head)
    tl.store(place + num_heads, beta, mask=has_head)


@triton.jit
def _step(
    state, channels, gates, row, head, key, value, has_key, has_value, epsilon, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """A row of the buffer: state (DK, columns) -> the state after it, and its output."""
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * DK + VALUE_HEADS * DV
    place = channels + row.to(tl.int64) * CHANNELS
    key_place = place + (head // (VALUE_HEADS // KEY_HEADS)) * DK + key
    q = tl.load(key_place, mask=has_key, other=0.0).to(tl.float32)
    k = tl.load(key_place + KEY_HEADS * DK, mask=has_key, other=0.0).to(tl.float32)
    v = tl.load(place + 2 * KEY_HEADS * DK + head * DV + value, mask=has_value, other=0.0).to(tl.float32)
    gate = gates + row.to(tl.int64) * 2 * VALUE_HEADS + head
    k *= tl.rsqrt(tl.sum(k * k, axis=0) + epsilon)
    q *= tl.rsqrt(tl.sum(q * q, axis=0) + epsilon) * scale
    state *= tl.exp(tl.load(gate))
    correction = tl.load(gate + VALUE_HEADS) * (v - tl.sum(state * k[:, None], axis=0))
    state += k[:, None] * correction[None, :]
    return state, tl.sum(state * q[:, None], axis=0)


@triton.jit
def _step_states(
    outputs, channels, gates, memory, layout, walks, columns, blocks, num_decoding, longest, epsilon, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, ROW: tl.constexpr, RESTART: tl.constexpr, EMIT: tl.constexpr, TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A request or a chunk after its blocks (axis 0), a value head (axis 1), VALUES columns of its state (axis 2)."""
    wait_for_inputs(PDL)
    segment = tl.program_id(0)
    head = tl.program_id(1)
    key = tl.arange(0, KEYS)
    has_key = key < DK
    value = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    has_value = value < DV
    inside = has_key[:, None] & has_value[None, :]
    tile = memory + head * DK * DV + key[:, None] * DV + value[None, :]
    SIZE: tl.constexpr = VALUE_HEADS * DK * DV  # of a state
    is_decoding = segment < num_decoding
    start = tl.load(layout.starts + segment)
    size = tl.load(layout.starts + segment + 1) - start
    # A request writes its state after what it replays, a chunk after its last row.
    count = size
    source = 0
    mark = -1
    has_begun = tl.load(layout.segment_lengths + segment) > 0
    if is_decoding:
        count = tl.load(walks.counts + segment)
        source = tl.load(columns.entries + segment * NUM_COLUMNS).to(tl.int32)
        mark = tl.load(walks.replayed + segment)
        has_begun = True
    else:
        chunk = segment - num_decoding
        num_done = (tl.load(blocks.starts + chunk + 1) - tl.load(blocks.starts + chunk)) * TOKENS
        start += num_done
        count -= num_done
        source = tl.load(columns.sources + segment * NUM_COLUMNS).to(tl.int32)
        if num_done > 0:
            source = tl.load(columns.entries + segment * NUM_COLUMNS).to(tl.int32)
            has_begun = True
    state = tl.load(tile + source.to(tl.int64) * SIZE, mask=inside, other=0.0)
    state = tl.where(has_begun, state, 0.0)
    base = tl.zeros_like(state)  # not `state`: Triton carries names of one value through a loop as one
    for index in range(count):
        code = start + index | EMIT
        if is_decoding:
            code = tl.load(walks.steps + segment * longest + index)
            if index == mark:
                tl.store(tile + source.to(tl.int64) * SIZE, state, mask=inside)
                base = state
        state = tl.where(code & RESTART != 0, base, state)
        row = code & ROW
        state, output = _step(
            state, channels, gates, row, head, key, value, has_key, has_value, epsilon, scale,
            KEY_HEADS, VALUE_HEADS, DK, DV,
        )  # fmt: skip
        if code & EMIT != 0:
            place = outputs + (row.to(tl.int64) * VALUE_HEADS + head) * DV + value
            tl.store(place, output.to(outputs.dtype.element_ty), mask=has_value)
    if (segment >= num_decoding) & (count > 0):
        entry = tl.load(columns.entries + segment * NUM_COLUMNS)
        tl.store(tile + entry * SIZE, state, mask=inside)


@triton.jit
def _keep(
    rows, stored, state_inputs, layout, walks, columns, x_stride, gate_stride, num_decoding, num_nodes,
    num_channels, num_heads,
    TAPS: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, STATE: tl.constexpr, NOTHING: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A request or a chunk (axis 0): its last inputs go to its state, a request's nodes to its records; a block of
    channels, or the gates (axis 1)."""
    wait_for_inputs(PDL)
    segment = tl.program_id(0)
    start = tl.load(layout.starts + segment)
    size = tl.load(layout.starts + segment + 1) - start
    slot = tl.load(layout.segment_slots + segment)
    entry = tl.load(columns.entries + segment * NUM_COLUMNS)
    if size > 0:
        channel = (tl.program_id(1) - 1) * BLOCK + tl.arange(0, BLOCK)
        exists = (channel >= 0) & (channel < num_channels)
        if segment < num_decoding:
            if tl.program_id(1) == 0:
                _keep_gates(rows, stored, start, size, slot * num_nodes, gate_stride, num_heads, HEADS)
            else:
                # What the root reads before itself is what the state's inputs are after the replay.
                _keep_inputs(
                    rows, stored, state_inputs, walks, start, 1, entry, channel, exists, x_stride, num_channels, TAPS,
                    STATE, NOTHING,
                )  # fmt: skip
                for node in range(size):
                    value = tl.load(rows.inputs + (start + node).to(tl.int64) * x_stride + channel, mask=exists)
                    tl.store(stored.inputs + (slot * num_nodes + node) * num_channels + channel, value, mask=exists)
        elif tl.program_id(1) > 0:
            position = tl.load(columns.positions + segment * NUM_COLUMNS)
            mark = position - tl.load(layout.segment_lengths + segment)
            if (mark > 0) & (mark <= size):
                snapshot = tl.load(columns.snapshots + segment * NUM_COLUMNS)
                _keep_inputs(
                    rows, stored, state_inputs, walks, start + mark.to(tl.int32) - 1, 0, snapshot, channel, exists,
                    x_stride, num_channels, TAPS, STATE, NOTHING,
                )  # fmt: skip
            _keep_inputs(
                rows, stored, state_inputs, walks, start + size - 1, 0, entry, channel, exists, x_stride,
                num_channels, TAPS, STATE, NOTHING,
            )  # fmt: skip


@triton.jit
def _keep_gates(rows, stored, start, size, first, stride, num_heads, HEADS: tl.constexpr):
    gate = tl.arange(0, 2 * HEADS)
    exists = gate < 2 * num_heads
    for node in range(size):
        value = tl.load(rows.gates + (start + node).to(tl.int64) * stride + gate, mask=exists)
        tl.store(stored.gates + (first + node) * 2 * num_heads + gate, value, mask=exists)


@triton.jit
def _keep_inputs(
    rows, stored, state_inputs, walks, row, skipped, entry, channel, exists, x_stride, num_channels,
    TAPS: tl.constexpr, STATE: tl.constexpr, NOTHING: tl.constexpr,
):  # fmt: skip
    """Three inputs up to `row`, or, skipped 1, before it, to the state of `entry`, which may be among their sources."""
    sources = walks.sources + row.to(tl.int64) * TAPS + skipped
    newest = _input(rows, stored, state_inputs, tl.load(sources), channel, exists, x_stride, num_channels, STATE,
                    NOTHING)  # fmt: skip
    middle = _input(rows, stored, state_inputs, tl.load(sources + 1), channel, exists, x_stride, num_channels, STATE,
                    NOTHING)  # fmt: skip
    oldest = _input(rows, stored, state_inputs, tl.load(sources + 2), channel, exists, x_stride, num_channels, STATE,
                    NOTHING)  # fmt: skip
    place = state_inputs + entry.to(tl.int64) * 3 * num_channels + channel
    tl.store(place, oldest, mask=exists)
    tl.store(place + num_channels, middle, mask=exists)
    tl.store(place + 2 * num_channels, newest, mask=exists)
