"""Mixtures of experts: which MLPs a token takes, their weights, and an MLP that all tokens take beside them.

Letters: E experts, k experts of a token, I their intermediate size, H hidden.
"""

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from slipstream.kernels.collectives.ranks import Ranks
from slipstream.kernels.gemm.choose import Product
from slipstream.kernels.gemm.expert_weights import ExpertMatrix, format_of
from slipstream.kernels.gemm.fp8 import InputScales, QuantizedRows
from slipstream.kernels.gemm.grouped import (
    Clamped,
    ExpertWeights,
    Shared,
    experts_product,
    least_rows,
    mix_experts,
    plain_rows,
)
from slipstream.kernels.gemm.router import LEAST_ROWS, Routing, Scoring, choose_block_rows, route
from slipstream.models.layers.linear import Linear, copy_converted
from slipstream.models.layers.mlp import GatedMLP, SquaredMLP
from slipstream.models.layers.norm import RMSNorm
from slipstream.models.targets.config import ClampedSwiGLU, MLPSpec, MoESpec


class Router(nn.Module):
    """Chooses the experts of each token."""

    def __init__(self, hidden_size: int, spec: MoESpec) -> None:
        super().__init__()
        wide = ("correction", "weight") if spec.wide_router else ("correction",)
        self.dtypes = dict.fromkeys(wide, torch.float32)
        self.top_k = spec.top_k
        self.normalise = spec.normalise
        self.scoring = Scoring(spec.scores, spec.logit_softcap, spec.groups, spec.top_groups, spec.scale)
        self.weight = nn.Parameter(torch.empty(spec.num_experts, hidden_size))
        self.bias = nn.Parameter(torch.empty(spec.num_experts)) if spec.bias else None
        self.correction = nn.Parameter(torch.empty(spec.num_experts)) if spec.correction else None
        self.expert_scale: nn.Parameter | None = None

    def forward(self, x: Tensor, least_rows: int = LEAST_ROWS) -> Routing:
        """x (T, H). least_rows: `Experts.least_rows`."""
        return route(
            x, self.weight, self.bias, self.top_k, self.normalise, least_rows, self.scoring, self.correction,
            self.expert_scale,
        )  # fmt: skip


class ScaledRouter(Router):
    """Multiplies the weights of experts by a learnt number each. It reads the rows of a norm of its own, `norm`, which
    the layer computes with others (Gemma 4)."""

    def __init__(self, hidden_size: int, spec: MoESpec, eps: float) -> None:
        super().__init__(hidden_size, spec)
        self.norm = RMSNorm(hidden_size, eps)
        self.norm.dtypes = {"weight": torch.float32}  # a product of numbers of files, as rounded as they
        self.expert_scale = nn.Parameter(torch.ones(spec.num_experts))


class Experts(nn.Module):
    """The weights of all experts of a layer, and what multiplies them.

    It alone knows how they are stored. Quantised ones are in formats/.
    """

    dtypes: ClassVar[Mapping[str, torch.dtype]] = {}  # of tensors that are not stored in the network's dtype
    unit = 1  # of intermediate channels, which a slice of the experts does not cut
    ranks: Ranks | None = None  # which share the channels of each expert; None: all are here

    def __init__(self, hidden_size: int, spec: MoESpec) -> None:
        super().__init__()
        self.spec = spec
        activation = spec.activation
        self.activation = (
            Clamped(activation.alpha, activation.limit) if isinstance(activation, ClampedSwiGLU) else activation
        )
        count = spec.num_experts
        size = spec.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * size, hidden_size))  # gate before up
        self.down_proj = nn.Parameter(torch.empty(count, hidden_size, size))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(count, 2 * size)) if spec.bias else None
        self.down_proj_bias = nn.Parameter(torch.empty(count, hidden_size)) if spec.bias else None

    def forward(self, x: Tensor | QuantizedRows, routing: Routing, shared: Shared | None = None) -> Tensor:
        """x (T, H) -> (T, H), the weighted outputs and `shared`."""
        return mix_experts(x, routing, self.weights, shared)

    def added(self, x: Tensor | QuantizedRows, routing: Routing, shared: Shared | None = None) -> Tensor:
        """The outputs, and `shared`, of the channels of all ranks where these share them."""
        part = self(x, routing, shared)
        return part if self.ranks is None else self.ranks.add(part.float(), part.dtype)

    @property
    def weights(self) -> ExpertWeights:
        return ExpertWeights(
            self.matrix("gate_up_proj"),
            self.matrix("down_proj"),
            self.gate_up_proj_bias,
            self.down_proj_bias,
            self.activation,
        )

    def product(self, num_rows: int, hidden_size: int, dtype: torch.dtype) -> Product:
        """Describes the products of rows in `dtype` for kernels/gemm/choose.py."""
        spec = self.spec
        block_rows = choose_block_rows(num_rows * spec.top_k, spec.num_experts, self.least_rows)
        x = torch.empty(num_rows, hidden_size, dtype=dtype, device="meta")
        return experts_product(x, block_rows, self.weights)

    def matrix(self, name: str) -> ExpertMatrix:
        """A projection of all experts, as it is stored."""
        return self.get_parameter(name)

    def input_scaling(self) -> Callable[[], InputScales] | None:
        """As of Linear."""
        return None

    @property
    def least_rows(self) -> int:
        """Rows of the smallest blocks of pairs that the router lists."""
        return least_rows(format_of(self.matrix("gate_up_proj")))

    def parts(self, name: str) -> list[str]:
        """The pieces of parameter `name` in files that have the experts apart, such as "3.up_proj.weight". Empty where
        the family's files have them together."""
        if self.spec.transposed:
            return []
        names = ("gate_proj", "up_proj") if name == "gate_up_proj" else ("down_proj",)
        return [f"{expert}.{part}.weight" for expert in range(self.spec.num_experts) for part in names]

    def piece(self, part: str | None, name: str, tensor: Tensor) -> Tensor:
        """The part of `tensor`, shaped as parameter `name`, as files have it; None: all experts."""
        if part is not None:
            expert, projection, _ = part.split(".")
            rows = tensor[int(expert)]
            return rows if projection == "down_proj" else rows.chunk(2)[projection == "up_proj"]
        if self.spec.transposed:
            if name.startswith("gate_up"):
                tensor = tensor.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)  # gate and up alternate
            tensor = tensor.transpose(1, -1)
        return tensor

    def load(self, part: str | None, name: str, tensor: Tensor) -> None:
        """Stores a file's piece of parameter `name`, or all of it."""
        place = self.get_parameter(name)
        if part is not None:
            copy_converted(self.piece(part, name, place), tensor)
        elif self.spec.transposed and name.startswith("gate_up"):
            for half, start in zip(place.chunk(2, dim=1), (0, 1), strict=True):
                copy_converted(half, tensor.transpose(1, -1)[:, start::2])
        else:
            copy_converted(place, tensor.transpose(1, -1) if self.spec.transposed else tensor)


class MixtureOfExperts(nn.Module):
    """The weighted sum of the `top_k` experts of each token, and a shared expert where the family has one."""

    def __init__(self, hidden_size: int, spec: MoESpec) -> None:
        super().__init__()
        self.gate = Router(hidden_size, spec)
        self.experts = Experts(hidden_size, spec)
        self.shared_expert = self.shared_expert_gate = None
        if spec.shared_size:
            activation = spec.activation or "silu"
            assert not isinstance(activation, ClampedSwiGLU)
            shared = MLPSpec(intermediate_size=spec.shared_size, activation=activation)
            self.shared_expert = GatedMLP(hidden_size, shared)
            self.shared_expert_gate = Linear(hidden_size, 1) if spec.shared_gate else None

    def forward(self, x: Tensor | QuantizedRows) -> Tensor:
        """x (..., H), quantised (T, H) -> the same shape."""
        if isinstance(x, Tensor):
            return self._mix(x.reshape(-1, x.shape[-1])).view(x.shape)
        return self._mix(x)

    def _mix(self, x: Tensor | QuantizedRows) -> Tensor:
        rows = plain_rows(x)
        shared = None
        if self.shared_expert is not None:
            gate = self.shared_expert_gate
            shared = Shared(self.shared_expert(rows), None if gate is None else gate(rows))
        return self.experts.added(x, self.gate(rows, self.experts.least_rows), shared)

    def join(self, ranks: Ranks) -> None:
        """Shares the channels of experts with other ranks; those of the shared one are added with them."""
        self.experts.ranks = ranks


def feed_forward(hidden_size: int, spec: MLPSpec | MoESpec) -> GatedMLP | SquaredMLP | MixtureOfExperts:
    """Builds the layer's MLP or mixture of experts."""
    if isinstance(spec, MoESpec):
        return MixtureOfExperts(hidden_size, spec)
    return SquaredMLP(hidden_size, spec) if spec.activation == "relu2" else GatedMLP(hidden_size, spec)
