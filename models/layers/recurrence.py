"""Layers with recurrent state. Such a layer computes records of every row by itself (projections), and says with `step`
how a record changes a state. Who calls the network keeps the states: serving by replay (serve/runner/recurrence.py),
training over whole documents.

One step function serves prompts, nodes and replays, so a text's states do not depend on how it was computed.
Letters: n states, S tokens of each.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from slipstream.kernels.recurrent.walks import PassPlan
from slipstream.models.targets.config import RecurrentSpec

State = dict[str, Tensor]  # (n, *shape) fp32 by the names of `RecurrentSpec.state_shapes`
Record = dict[str, Tensor]  # (n, *shape) by those of `record_shapes`, and what else an output depends on


class RecurrentLayer(NamedTuple):
    """The layer that asks."""

    id: int  # its place among the network's layers with recurrent state
    spec: RecurrentSpec
    step: Callable[[State, Record], State]
    """States before tokens, and of their records what `record_shapes` names -> states after them. Changes nothing in
    place; a row depends on no other."""
    read: Callable[[State, State, Record], Tensor]
    """States before and after tokens, and their records -> outputs (n, ...)."""
    run: Callable[[Record, Record, State, PassPlan], Tensor]
    """Takes the rows of a pass (T, ...) through kernels, where `has_kernels` of its spec says that there are some, with
    the records of slots (R, W, ...) and all states (E, ...), which it updates. Returns outputs (T, ...)."""


class RecurrentMixer(nn.Module):
    """Base of the modules. A subclass has `forward(x, attention, mask)`, which calls `attention.recur`, `step` and
    `read`."""

    reader = None  # no single projection reads its input

    def __init__(self, spec: RecurrentSpec, id: int) -> None:
        super().__init__()
        self.spec = spec
        self.id = id

    @property
    def layer(self) -> RecurrentLayer:
        return RecurrentLayer(self.id, self.spec, self.step, self.read, self.run)

    def step(self, state: State, record: Record) -> State:
        """See RecurrentLayer."""
        raise NotImplementedError

    def read(self, before: State, after: State, record: Record) -> Tensor:
        """See RecurrentLayer."""
        raise NotImplementedError

    def run(self, rows: Record, stored: Record, states: State, plan: PassPlan) -> Tensor:
        """See RecurrentLayer."""
        raise NotImplementedError


class Scan(NamedTuple):
    """The results of `scan`."""

    state: State  # after the last token of each
    snapshot: State  # after the tokens that `marks` counts
    outputs: Tensor  # (n, S, ...); arbitrary after the last token


def scan(layer: RecurrentLayer, state: State, records: Record, counts: Tensor, marks: Tensor) -> Scan:
    """Takes n states through their first counts (n,) of S tokens, records (n, S, ...). The snapshot is the state after
    marks (n,) tokens, at most as many as counted; arbitrary for 0."""
    snapshot = state
    outputs = []
    for index in range(next(iter(records.values())).shape[1]):
        record = {name: values[:, index] for name, values in records.items()}
        after = layer.step(state, record)
        outputs.append(layer.read(state, after, record))
        state = select(index < counts, after, state)
        snapshot = select(index < marks, after, snapshot)
    return Scan(state, snapshot, torch.stack(outputs, dim=1))


def select(is_new: Tensor, new: State, old: State) -> State:
    """The new states where is_new (n,) holds."""
    return {name: torch.where(is_new.view(-1, *[1] * (x.dim() - 1)), new[name], x) for name, x in old.items()}


def zero_state(shapes: Mapping[str, tuple[int, ...]], count: int, device: torch.device) -> State:
    """The states of `count` empty texts."""
    return {name: torch.zeros(count, *shape, device=device) for name, shape in shapes.items()}
