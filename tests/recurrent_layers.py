"""A small layer with recurrent state, of the kind of gated delta nets: raw inputs of a convolution, and a memory that
gates by the input. Import it where a spec of it is unpickled."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream.models.layers.attention import Attention, Mask
from slipstream.models.layers.decoder_layer import MIXERS
from slipstream.models.layers.linear import Linear
from slipstream.models.layers.recurrence import Record, RecurrentMixer, State
from slipstream.models.targets.config import RecurrentSpec

TAPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageSpec(RecurrentSpec):
    """An exponential moving average of convolved values."""

    module_name = "average"
    grid = 4
    size: int

    @property
    def state_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"mean": (self.size,), "inputs": (TAPS - 1, self.size)}

    @property
    def record_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"value": (self.size,), "gate": (self.size,)}


class Average(RecurrentMixer):
    def __init__(self, spec: AverageSpec, id: int, hidden_size: int, eps: float):
        super().__init__(spec, id)
        names = ("value_proj", "gate_proj", "query_proj")
        self.in_proj = Linear(hidden_size, dict.fromkeys(names, spec.size))
        self.out_proj = Linear(spec.size, hidden_size)
        self.taps = nn.Parameter(torch.zeros(TAPS, spec.size))

    def forward(self, x: Tensor, attention: Attention, mask: Mask = "causal") -> Tensor:
        value, gate, query = self.in_proj(x).chunk(3, dim=-1)
        return self.out_proj(attention.recur({"value": value, "gate": gate, "query": query}, self))

    def step(self, state: State, record: Record) -> State:
        inputs = torch.cat((state["inputs"], record["value"].float()[:, None]), dim=1)  # (n, TAPS, size)
        gate = record["gate"].float().sigmoid()
        mean = gate * state["mean"] + (1 - gate) * (inputs * self.taps).sum(1)
        return {"mean": mean, "inputs": inputs[:, 1:]}

    def read(self, before: State, after: State, record: Record) -> Tensor:
        return (after["mean"] + before["mean"]).to(record["query"].dtype) * record["query"]


MIXERS[AverageSpec] = Average
