"""Mixtures of experts: which MLPs a token takes, their weights, and an MLP that all tokens take beside them.

Letters: E experts, k experts of a token, I their intermediate size, H hidden.
"""

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from slipstream.kernels.collectives.ranks import Ranks, RankSum
from slipstream.kernels.gemm.choose import Product
from slipstream.kernels.gemm.expert_weights import ExpertMatrix, format_of
from slipstream.kernels.gemm.fp8 import InputScales, QuantizedRows
from slipstream.kernels.gemm.grouped import (
    Clamped,
    ExpertWeights,
    Leaves,
    Shared,
    experts_product,
    least_block_rows,
    mix_experts,
    plain_rows,
)
from slipstream.kernels.gemm.leaves import LEAVES
from slipstream.kernels.gemm.router import LEAST_ROWS, Routing, Scoring, Share, choose_block_rows, route
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

    def forward(self, x: Tensor, least_rows: int = LEAST_ROWS, share: Share | None = None) -> Routing:
        """x (T, H). least_rows, share: those of `Experts`."""
        return route(
            x, self.weight, self.bias, self.top_k, self.normalise, least_rows, self.scoring, self.correction,
            self.expert_scale, share,
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
    """The weights of all experts of a layer, or of a rank's, and what multiplies them.

    It alone knows how they are stored. Quantised ones are in formats/.
    """

    dtypes: ClassVar[Mapping[str, torch.dtype]] = {}  # of tensors that are not stored in the network's dtype
    unit = 1  # of intermediate channels, which a slice of the experts does not cut
    ranks: Ranks | None = None  # which share the experts, or the channels of each; None: all are here
    num_leaves = 0  # groups of experts with a sum each; 0: outputs are added as chosen

    def __init__(self, hidden_size: int, spec: MoESpec) -> None:
        super().__init__()
        self.spec = spec
        activation = spec.activation
        self.activation = (
            Clamped(activation.alpha, activation.limit) if isinstance(activation, ClampedSwiGLU) else activation
        )
        count = spec.num_local
        size = spec.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * size, hidden_size))  # gate before up
        self.down_proj = nn.Parameter(torch.empty(count, hidden_size, size))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(count, 2 * size)) if spec.bias else None
        self.down_proj_bias = nn.Parameter(torch.empty(count, hidden_size)) if spec.bias else None

    def forward(self, x: Tensor | QuantizedRows, routing: Routing, shared: Shared | None = None) -> Tensor:
        """x (T, H) -> (T, H), the weighted outputs and `shared`; in fp32 where ranks add leaves."""
        dtype = torch.float32 if self.num_leaves and self.ranks is not None else None
        return mix_experts(x, routing, self.weights, shared, leaves=self.leaves, dtype=dtype)

    def added(self, x: Tensor | QuantizedRows, routing: Routing, shared: Shared | None = None) -> Tensor | RankSum:
        """The outputs, and `shared`, of all ranks where these share the experts: a sum that is to be added."""
        out = self(x, routing, shared)
        return out if self.ranks is None else RankSum(out, x.dtype, self.ranks)

    def join(self, ranks: Ranks) -> None:
        """Shares the experts, or the channels of each, with other ranks."""
        self.ranks = ranks

    @property
    def share(self) -> Share | None:
        """The experts of this rank; None: all."""
        if self.spec.shares == 1:
            return None
        assert self.ranks is not None
        return Share(self.ranks.rank * self.spec.num_local, self.spec.num_local)

    @property
    def leaves(self) -> Leaves | None:
        count = self.num_leaves or int(self.spec.shares > 1)
        return Leaves(count, self.spec.num_local // count) if count else None

    def cut_sums(self) -> bool:
        """Lets outputs be added along a tree that any number of ranks shares, and returns whether they are."""
        is_whole = self.ranks is None or self.spec.shares == self.ranks.world
        is_cut = is_whole and self.spec.num_experts % LEAVES == LEAVES % self.spec.shares == 0
        self.num_leaves = LEAVES // self.spec.shares if is_cut else 0
        return is_cut

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
        num_pairs = num_rows * spec.top_k
        block_rows = choose_block_rows(num_pairs, spec.num_experts, self.least_rows(num_rows), is_part=spec.shares > 1)
        x = torch.empty(num_rows, hidden_size, dtype=dtype, device="meta")
        return experts_product(x, block_rows, self.weights)

    def matrix(self, name: str) -> ExpertMatrix:
        """A projection of all experts, as it is stored."""
        return self.get_parameter(name)

    def input_scaling(self) -> Callable[[], InputScales] | None:
        """As of Linear."""
        return None

    def least_rows(self, num_rows: int) -> int:
        """Rows of the smallest blocks of pairs that the router lists for so many tokens."""
        return least_block_rows(format_of(self.matrix("gate_up_proj")), num_rows)

    def parts(self, name: str) -> list[str]:
        """The pieces of parameter `name` in files that have the experts apart, such as "3.up_proj.weight". Empty where
        the family's files have them together."""
        if self.spec.transposed:
            return []
        names = ("gate_proj", "up_proj") if name == "gate_up_proj" else ("down_proj",)
        return [f"{expert}.{part}.weight" for expert in range(self.spec.num_local) for part in names]

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

    def forward(self, x: Tensor | QuantizedRows) -> Tensor | RankSum:
        """x (..., H), quantised (T, H) -> the same shape."""
        if not isinstance(x, Tensor) or x.dim() == 2:
            return self._mix(x)
        out = self._mix(x.reshape(-1, x.shape[-1]))
        return (out.total() if isinstance(out, RankSum) else out).view(x.shape)

    def _mix(self, x: Tensor | QuantizedRows) -> Tensor | RankSum:
        rows = plain_rows(x)
        share = self.experts.share
        shared = None
        if self.shared_expert is not None:
            output = self.shared_expert(rows)
            gate = self.shared_expert_gate
            if isinstance(output, RankSum):
                output = output.total()
            if share is None or share.first == 0:
                shared = Shared(output, None if gate is None else gate(rows))
        return self.experts.added(x, self.gate(rows, self.experts.least_rows(len(rows)), share), shared)

    def join(self, ranks: Ranks) -> None:
        """Shares the experts with other ranks. The channels of the shared one are added with those of slices, and
        before whole ones, to whose first leaf their sum belongs."""
        self.experts.join(ranks)
        if self.shared_expert is not None and self.experts.share is not None:
            self.shared_expert.join(ranks)


def feed_forward(hidden_size: int, spec: MLPSpec | MoESpec) -> GatedMLP | SquaredMLP | MixtureOfExperts:
    """Builds the layer's MLP or mixture of experts."""
    if isinstance(spec, MoESpec):
        return MixtureOfExperts(hidden_size, spec)
    return SquaredMLP(hidden_size, spec) if spec.activation == "relu2" else GatedMLP(hidden_size, spec)
