"""States of layers with recurrent state: kept per sequence, replayed from records, walked along trees.

A group keeps one fp32 state per sequence, that after its committed tokens but those of its last round. Of that round's
nodes it has raw records. The next pass first replays the accepted ones with the layer's own step function, writes the
state once, and then walks its own nodes, each from its parent's state, which it only reads. So a rejected node costs
nothing, and prompts, chains, trees and plain decoding share one arithmetic.

The host names states by the columns that a request has in the page table of the group: see `StateTable` in
serve/engine/kv_states.py. Entry 0 is the dump entry.
Letters: E entries, R request slots, W nodes that a slot stores, B decoding requests, N most nodes of one, M chunks, S
most tokens of one, T rows of the pass.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.kv.rope import Rotation
from slipstream.kernels.launch import use_triton
from slipstream.kernels.recurrent.walks import Columns, PassPlan, plan_blocks, plan_walks
from slipstream.kernels.speculation.ragged import Layout, Verified
from slipstream.models.layers.attention import Attention, AttentionLayer, Mask
from slipstream.models.layers.recurrence import Record, RecurrentMixer, State, scan, select, zero_state
from slipstream.models.targets.config import RecurrentSpec
from slipstream.serve.runner.batch import HostShape
from slipstream.serve.runner.request_state import RequestState

NUM_COLUMNS = len(Columns._fields)  # of a request in the group's page table
SOURCE, ENTRY = range(2)


def state_bytes(specs: Sequence[RecurrentSpec]) -> int:
    """Bytes of an entry: a state of each layer."""
    return 4 * sum(math.prod(shape) for spec in specs for shape in spec.state_shapes.values())


def record_bytes(specs: Sequence[RecurrentSpec], dtype: torch.dtype, num_slots: int, width: int) -> int:
    """Bytes of the records of all slots, each of `width` nodes, and of what is replayed."""
    size = sum(math.prod(shape) for spec in specs for shape in spec.record_shapes.values())
    return num_slots * width * (size * dtype.itemsize + 4) if specs else 0


class RecurrentStates:
    """All that the device keeps of a target's recurrent layers."""

    def __init__(
        self,
        specs: Sequence[RecurrentSpec],
        group: int,
        num_entries: int,
        state: RequestState,
        dtype: torch.dtype,
    ) -> None:
        """group: whose page table names the entries; dtype: the model's."""
        self.group = group
        self.state = state
        self.have_kernels = all(spec.has_kernels for spec in specs)
        device = state.device
        slots, width = state.stored.tokens.shape
        self.layers = [zero_state(spec.state_shapes, num_entries, device) for spec in specs]  # (E, *shape) of each
        self.records: list[Record] = [
            {
                name: torch.zeros(slots, width, *shape, dtype=dtype, device=device)
                for name, shape in spec.record_shapes.items()
            }
            for spec in specs
        ]  # (R, W, *shape) of each
        # (R, W) int32: the nodes of the last round to replay, in order; -1: no more
        self.replays = torch.full((slots, width), -1, dtype=torch.int32, device=device)

    def columns(self, slots: Tensor) -> Columns:
        """Returns the columns of request slots (n,)."""
        return Columns(*self.state.pages[self.group, slots, :NUM_COLUMNS].unbind(1))

    def kernel_plan(self, layout: Layout, num_requests: int) -> PassPlan:
        """Plans a pass for the kernels of all layers."""
        columns = self.columns(layout.segment_slots)
        walks = plan_walks(layout, self.replays, columns, num_requests)
        blocks = plan_blocks(layout, columns, num_requests)
        return PassPlan(layout, walks, columns, blocks, num_requests, is_old=True)  # the tokens' embedding comes after

    def commit(self, layout: Layout, verified: Verified, num_requests: int) -> None:
        """Marks the records of accepted nodes to be replayed by the next pass of their requests."""
        self.replays[layout.segment_slots[:num_requests]] = verified.nodes
        self.replays.index_fill_(0, layout.segment_slots[num_requests:], -1)  # a chunk has written its state itself


@dataclass(frozen=True, slots=True)
class NodeWalk:
    """The nodes of a pass's decoding requests."""

    slots: Tensor  # (B,) int64
    entries: Tensor  # (B,) int64
    replays: Tensor  # (B, W) int64 as in RecurrentStates
    rows: Tensor  # (B, N) int64; T where a request has no such node
    parents: Tensor | None  # (B, N) int64, of the root -1; None: chains

    @classmethod
    def of(
        cls, states: RecurrentStates, layout: Layout, count: int, most_nodes: int, *, are_chains: bool
    ) -> "NodeWalk":
        starts = layout.starts.long()
        num_rows = len(layout.nodes)
        slots = layout.segment_slots[:count]
        nodes = torch.arange(most_nodes, device=slots.device)
        rows = starts[:count, None] + nodes
        rows = torch.where(rows < starts[1 : count + 1, None], rows, num_rows)
        parents = None if are_chains else layout.parents[rows.clamp(max=num_rows - 1)].long()
        return cls(slots, states.columns(slots).entries, states.replays[slots].long(), rows, parents)

    def run(self, state: State, stored: Record, records: Record, layer: RecurrentMixer) -> Tensor:
        """state: the layer's, (E, ...); stored (R, W, ...); records (T, ...) of the pass -> outputs (B, N, ...)."""
        current = {name: values[self.entries] for name, values in state.items()}
        for replay in self.replays.unbind(1):
            nodes = replay.clamp(min=0)
            after = layer.step(current, {name: values[self.slots, nodes] for name, values in stored.items()})
            current = select(replay >= 0, after, current)
        for name, values in current.items():
            state[name].index_copy_(0, self.entries, values)
        num_rows = len(next(iter(records.values())))
        rows = self.rows.clamp(max=num_rows - 1)
        nodes_records = {name: values[rows] for name, values in records.items()}  # (B, N, ...)
        for name, values in stored.items():
            values[self.slots, : rows.shape[1]] = nodes_records[name].to(values.dtype)
        return self._walk(current, nodes_records, layer)

    def _walk(self, state: State, records: Record, layer: RecurrentMixer) -> Tensor:
        """Takes the committed states (B, ...) along the nodes; returns their outputs (B, N, ...)."""
        B, N = self.rows.shape
        requests = torch.arange(B, device=self.rows.device)
        # Of trees: the states before the root, then after each node, (B, 1 + N, ...).
        history = (
            {} if self.parents is None else {name: x.new_zeros(B, 1 + N, *x.shape[1:]) for name, x in state.items()}
        )
        outputs = []
        for node in range(N):
            for name, values in history.items():
                values[:, node] = state[name]
            if self.parents is not None:
                places = self.parents[:, node] + 1
                state = {name: values[requests, places] for name, values in history.items()}
            record = {name: values[:, node] for name, values in records.items()}
            after = layer.step(state, record)
            outputs.append(layer.read(state, after, record))
            state = after
        return torch.stack(outputs, dim=1)


@dataclass(frozen=True, slots=True)
class ChunkScan:
    """The chunks of prompts of a pass."""

    starts: Tensor  # (M,) int64 tokens before
    counts: Tensor  # (M,) int64
    columns: Columns  # (M,) each
    rows: Tensor  # (M, S) int64; T where a chunk has no such token
    most_steps: int | None  # as `scan` takes it

    @classmethod
    def of(
        cls, states: RecurrentStates, layout: Layout, count: int, most_tokens: int, *, is_captured: bool
    ) -> "ChunkScan":
        """The chunks after `count` decoding requests."""
        ends = layout.starts[count + 1 :].long()
        first_rows = layout.starts[count:-1].long()
        num_rows = len(layout.nodes)
        rows = first_rows[:, None] + torch.arange(most_tokens, device=ends.device)
        rows = torch.where(rows < ends[:, None], rows, num_rows)
        columns = states.columns(layout.segment_slots[count:])
        most_steps = most_tokens if is_captured else None
        return cls(layout.segment_lengths[count:], ends - first_rows, columns, rows, most_steps)

    def run(self, state: State, records: Record, layer: RecurrentMixer) -> Tensor:
        """state: the layer's, (E, ...); records (T, ...) of the pass -> outputs (M, S, ...)."""
        sources = {name: values[self.columns.sources] for name, values in state.items()}
        before = select(
            self.starts > 0, sources, zero_state(layer.spec.state_shapes, len(self.starts), self.rows.device)
        )
        num_rows = len(next(iter(records.values())))
        rows = self.rows.clamp(max=num_rows - 1)
        texts = {name: values[rows] for name, values in records.items()}
        prompts = torch.where(self.columns.prompts > 0, self.columns.prompts - self.starts, self.counts)
        marks = self.columns.positions - self.starts
        result = scan(layer, before, texts, self.counts, prompts, marks, self.most_steps)
        for name, values in state.items():
            values.index_copy_(0, self.columns.snapshots, result.snapshot[name])
            values.index_copy_(0, self.columns.entries, result.state[name])
        return result.outputs


@dataclass(frozen=True, slots=True)
class MixedAttention(Attention):
    """Attention of a pass, and states, for a target with recurrent layers."""

    attention: Attention
    states: RecurrentStates
    nodes: NodeWalk | None
    chunks: ChunkScan | None
    kernel_plan: PassPlan | None = None  # in place of nodes and chunks, where all layers have kernels

    @classmethod
    def plan(
        cls,
        attention: Attention,
        states: RecurrentStates,
        layout: Layout,
        num_requests: int,
        host: HostShape | None,
        *,
        are_chains: bool,
    ) -> "MixedAttention":
        """`host`: sizes of a pass that is not captured; a captured one has room for the most nodes and tokens."""
        most_nodes = states.replays.shape[1] if host is None else max(host.counts, default=0)
        most_tokens = (
            len(layout.nodes) if host is None else max((len(chunk.tokens) for chunk in host.chunks), default=0)
        )
        has_chunks = len(layout.segment_slots) > num_requests
        if states.have_kernels and use_triton(layout.starts):
            return cls(attention, states, None, None, states.kernel_plan(layout, num_requests))
        return cls(
            attention,
            states,
            NodeWalk.of(states, layout, num_requests, most_nodes, are_chains=are_chains) if num_requests else None,
            ChunkScan.of(states, layout, num_requests, most_tokens, is_captured=host is None) if has_chunks else None,
        )

    def recur(self, records: Record, layer: RecurrentMixer) -> Tensor:
        """records (T, ...) -> outputs (T, ...); zeros of rows that nobody uses."""
        state = self.states.layers[layer.id]
        if self.kernel_plan is not None:
            return layer.run(records, self.states.records[layer.id], state, self.kernel_plan)
        parts = []
        if self.nodes is not None:
            outputs = self.nodes.run(state, self.states.records[layer.id], records, layer)
            parts.append((self.nodes.rows, outputs))
        if self.chunks is not None:
            parts.append((self.chunks.rows, self.chunks.run(state, records, layer)))
        num_rows = len(next(iter(records.values())))
        outputs = parts[0][1]
        rows = outputs.new_zeros(num_rows + 1, *outputs.shape[2:])  # one more, for what has no row
        for places, values in parts:
            rows.index_copy_(0, places.flatten(), values.flatten(0, 1))
        return rows[:num_rows]

    def rotation(self, layer: AttentionLayer) -> Rotation | None:
        return self.attention.rotation(layer)

    def attend_stored(self, q: Tensor, layer: AttentionLayer, mask: Mask) -> Tensor:
        return self.attention.attend_stored(q, layer, mask)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, mask: Mask) -> Tensor:
        return self.attention.attend(q, k, v, layer, mask)

    def write(self, k: Tensor, v: Tensor, layer: AttentionLayer) -> None:
        self.attention.write(k, v, layer)
