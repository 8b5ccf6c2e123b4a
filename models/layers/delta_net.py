"""Gated delta nets (Yang et al., arXiv 2412.06464), as Qwen3-Next and Qwen3.5 have them.

A head's memory S (K, V) forgets by a factor and is then corrected towards what the token's key should recall:

    S <- exp(decay) S;   S <- S + k u^T with u = beta (v - S^T k);   o = S^T q

q, k and v come out of a causal convolution over the last few tokens, so a state holds its inputs, too.
Letters: n tokens, C channels of the convolution (q, k, v), A and B key and value heads, K and V their dims.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from slipstream.kernels.collectives.ranks import Ranks, RankSum
from slipstream.kernels.norm import rms_norm_gated
from slipstream.kernels.recurrent.delta import Records, States, Weights, delta_net
from slipstream.kernels.recurrent.delta_blocks import Sizes, absorb_block
from slipstream.kernels.recurrent.walks import PassPlan
from slipstream.models.layers.attention import Attention, Mask
from slipstream.models.layers.linear import Linear
from slipstream.models.layers.norm import RMSNorm
from slipstream.models.layers.recurrence import Record, RecurrentMixer, State
from slipstream.models.targets.config import DeltaNetSpec

NORM_EPS = 1e-6  # of queries and keys, whatever the model's is


class Convolution(nn.Module):
    """The weight of a depthwise convolution, one kernel per channel."""

    def __init__(self, sizes: Sequence[int], taps: int) -> None:
        super().__init__()
        self.sections = {None: sizes}
        self.weight = nn.Parameter(torch.empty(sum(sizes), 1, taps))


class DeltaNet(RecurrentMixer):
    dtypes = {"A_log": torch.float32, "dt_bias": torch.float32}

    def __init__(self, spec: DeltaNetSpec, id: int, hidden_size: int, eps: float) -> None:
        super().__init__(spec, id)
        self.sizes = spec.sizes
        self.num_heads = spec.num_value_heads
        self.group = spec.group
        self.key_dim = spec.key_dim
        self.kernel_sizes = Sizes(spec.num_key_heads, spec.num_value_heads, spec.key_dim, spec.value_dim)
        values = spec.num_value_heads * spec.value_dim
        self.in_proj = Linear(hidden_size, {"in_proj_qkv": sum(spec.sizes), "in_proj_z": values})
        self.in_proj.sections = {"in_proj_qkv": spec.sizes}
        self.gate_proj = Linear(hidden_size, {"in_proj_b": self.num_heads, "in_proj_a": self.num_heads})
        self.conv1d = Convolution(spec.sizes, spec.taps)
        self.A_log = nn.Parameter(torch.zeros(self.num_heads))
        self.dt_bias = nn.Parameter(torch.ones(self.num_heads))
        self.norm = RMSNorm(spec.value_dim, eps)
        self.out_proj = Linear(values, hidden_size)
        self.out_proj.shares_inputs = True

    def forward(self, x: Tensor, attention: Attention, mask: Mask = "causal") -> Tensor | RankSum:
        """Its tokens are in the order of the text, or along a tree's paths: who keeps the states knows."""
        projected = self.in_proj(x)
        channels = sum(self.sizes)
        record = {"inputs": projected[..., :channels], "gates": self.gate_proj(x)}
        out = attention.recur(record, self)  # (..., B, V)
        return self.out_proj.added(rms_norm_gated(out, projected[..., channels:], self.norm.weight, self.norm.eps))

    def join(self, ranks: Ranks) -> None:
        self.out_proj.ranks = ranks

    def step(self, state: State, record: Record) -> State:
        inputs = torch.cat((state["inputs"], record["inputs"].float()[:, None]), dim=1)  # (n, taps, C)
        keys, values = self._convolve(inputs, self.sizes[0], sum(self.sizes)).split(self.sizes[1:], dim=-1)
        k = self._heads(keys)  # (n, B, K)
        beta, decay = self._gates(record)
        memory = state["memory"] * decay.exp()[..., None, None]
        recalled = (memory * k[..., None]).sum(-2)
        update = beta[..., None] * (values.unflatten(-1, (self.num_heads, -1)) - recalled)
        return {"inputs": inputs[:, 1:], "memory": memory + k[..., None] * update[..., None, :]}

    def read(self, before: State, after: State, record: Record) -> Tensor:
        inputs = torch.cat((before["inputs"], record["inputs"].float()[:, None]), dim=1)
        q = self._heads(self._convolve(inputs, 0, self.sizes[0])) * self.key_dim**-0.5
        return (after["memory"] * q[..., None]).sum(-2).to(record["inputs"].dtype)

    def absorb(self, state: State, record: Record) -> tuple[State, Tensor]:
        inputs = torch.cat((state["inputs"], record["inputs"].float()), dim=1)
        windows = inputs.unfold(1, self.conv1d.weight.shape[-1], 1).transpose(-1, -2)  # (n, G, taps, C)
        q, k, v = self._convolve(windows, 0, sum(self.sizes)).split(self.sizes, dim=-1)
        beta, decay = self._gates(record)  # (n, G, B)
        tokens = (self._heads(q), self._heads(k), v.unflatten(-1, (self.num_heads, -1)), decay, beta)
        memory, outputs = absorb_block(state["memory"], *(x.transpose(1, 2) for x in tokens))
        after = {"inputs": inputs[:, self.spec.grid :], "memory": memory}
        return after, outputs.transpose(1, 2).to(record["inputs"].dtype)

    def run(self, rows: Record, stored: Record, states: State, plan: PassPlan) -> Tensor:
        weights = Weights(self.conv1d.weight[:, 0], self.A_log, self.dt_bias)
        return delta_net(Records(**rows), Records(**stored), States(**states), weights, self.kernel_sizes, plan)

    def _convolve(self, inputs: Tensor, start: int, end: int) -> Tensor:
        """inputs (..., taps, C) -> (..., end - start) of these channels."""
        weight = self.conv1d.weight[start:end, 0].float().t()  # (taps, channels)
        return silu((inputs[..., start:end] * weight).sum(-2))

    def _gates(self, record: Record) -> tuple[Tensor, Tensor]:
        """Returns beta and the decay, (..., B) fp32."""
        beta, steps = record["gates"].chunk(2, dim=-1)
        return beta.sigmoid().float(), -self.A_log.exp() * softplus(steps.float() + self.dt_bias)

    def _heads(self, x: Tensor) -> Tensor:
        """(..., A * K) -> (..., B, K) of length 1: consecutive value heads share a key head."""
        heads = x.unflatten(-1, (-1, self.key_dim))
        heads = heads * (heads.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()
        return heads.repeat_interleave(self.group, dim=-2)
