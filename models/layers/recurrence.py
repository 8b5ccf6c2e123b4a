"""Layers with recurrent state. Such a layer computes records of every row by itself (projections), and says with `step`
how a record changes a state. Who calls the network keeps the states: serving by replay (serve/runner/recurrence.py),
training over whole documents.

One step function serves nodes, replays and ends of prompts. Whole blocks of prompts, on a grid from the first token on,
may be computed in another form. So a text's states depend on where its prompt ends, and on nothing else of how they
were computed.
Letters: n states, S tokens of each, G tokens of a block.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from slipstream.kernels.recurrent.walks import PassPlan
from slipstream.models.targets.config import RecurrentSpec

State = dict[str, Tensor]  # (n, *shape) fp32 by the names of `RecurrentSpec.state_shapes`
Record = dict[str, Tensor]  # (n, *shape) by those of `record_shapes`, and what else an output depends on


class RecurrentMixer(nn.Module):
    """Base of the modules. A subclass has `forward(x, attention, mask)`, which calls `attention.recur`, `step` and
    `read`."""

    reader = None  # no single projection reads its input

    def __init__(self, spec: RecurrentSpec, id: int) -> None:
        """`id`: its place among the network's layers with recurrent state."""
        super().__init__()
        self.spec = spec
        self.id = id

    def step(self, state: State, record: Record) -> State:
        """States before tokens, and of their records what `record_shapes` names -> states after them. Changes nothing
        in place; a row depends on no other."""
        raise NotImplementedError

    def read(self, before: State, after: State, record: Record) -> Tensor:
        """States before and after tokens, and their records -> outputs (n, ...)."""
        raise NotImplementedError

    def absorb(self, state: State, record: Record) -> tuple[State, Tensor]:
        """States before a block, and its records (n, G, ...), of as many tokens as the spec's `grid` says -> states
        after it, outputs (n, G, ...). Goes token by token; a subclass may have a faster form."""
        outputs = []
        for index in range(self.spec.grid):
            token = {name: values[:, index] for name, values in record.items()}
            after = self.step(state, token)
            outputs.append(self.read(state, after, token))
            state = after
        return state, torch.stack(outputs, dim=1)

    def run(self, rows: Record, stored: Record, states: State, plan: PassPlan) -> Tensor:
        """Takes the rows of a pass (T, ...) through kernels, where `has_kernels` of its spec says that there are some,
        with the records of slots (R, W, ...) and all states (E, ...), which it updates. Returns outputs (T, ...)."""
        raise NotImplementedError


class Scan(NamedTuple):
    """The results of `scan`."""

    state: State  # after the last token of each
    snapshot: State  # after the tokens that `marks` counts
    outputs: Tensor  # (n, S, ...); arbitrary after the last token


def scan(
    layer: RecurrentMixer,
    state: State,
    records: Record,
    counts: Tensor,
    prompts: Tensor,
    marks: Tensor,
    most_steps: int | None = None,
) -> Scan:
    """Takes n states through their first counts (n,) of S tokens, records (n, S, ...). Of these, the first prompts (n,)
    go block by block, as far as blocks are whole, the others token by token. The snapshot is the state after marks (n,)
    tokens, those of whole blocks; arbitrary for 0. most_steps: the most tokens outside of blocks; None asks the device
    for it."""
    size = layer.spec.grid
    length = next(iter(records.values())).shape[1]
    blocks = torch.minimum(counts, prompts).clamp(min=0) // size
    snapshot = state
    outputs = None
    for index in range(length // size):
        rows = slice(index * size, (index + 1) * size)
        after, block = layer.absorb(state, {name: values[:, rows] for name, values in records.items()})
        outputs = _room(block, length) if outputs is None else outputs
        outputs[:, rows] = block
        state = select(index < blocks, after, state)
        snapshot = select((index + 1) * size <= marks, after, snapshot)
    first = blocks * size
    texts = torch.arange(len(counts), device=counts.device)
    for index in range(int((counts - first).max()) if most_steps is None else most_steps):
        places = (first + index).clamp(max=length - 1)
        record = {name: values[texts, places] for name, values in records.items()}
        after = layer.step(state, record)
        token = layer.read(state, after, record)
        outputs = _room(token[:, None], length) if outputs is None else outputs
        exists = first + index < counts
        is_new = exists.view(-1, *[1] * (token.dim() - 1))
        outputs[texts, places] = torch.where(is_new, token, outputs[texts, places])
        state = select(exists, after, state)
    assert outputs is not None, "texts have tokens"
    return Scan(state, snapshot, outputs)


def _room(part: Tensor, length: int) -> Tensor:
    """Returns room for the outputs of `length` tokens, of which `part` has some."""
    return part.new_zeros(len(part), length, *part.shape[2:])


def select(is_new: Tensor, new: State, old: State) -> State:
    """The new states where is_new (n,) holds."""
    return {name: torch.where(is_new.view(-1, *[1] * (x.dim() - 1)), new[name], x) for name, x in old.items()}


def zero_state(shapes: Mapping[str, tuple[int, ...]], count: int, device: torch.device) -> State:
    """The states of `count` empty texts."""
    return {name: torch.zeros(count, *shape, device=device) for name, shape in shapes.items()}
