from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.kernels.collectives.ranks import Ranks, RankSum
from slipstream.models.layers.linear import Linear
from slipstream.models.targets.config import MLPSpec


class MLP(nn.Module):
    down_proj: Linear

    def join(self, ranks: Ranks) -> None:
        """Shares the channels with other ranks."""
        self.down_proj.ranks = ranks


class GatedMLP(MLP):
    """down(activation(gate(x)) * up(x)), gate and up fused in one projection."""

    def __init__(self, hidden_size: int, spec: MLPSpec) -> None:
        super().__init__()
        assert spec.activation != "relu2"
        self.activation = spec.activation
        parts = {"gate_proj": spec.intermediate_size, "up_proj": spec.intermediate_size}
        self.gate_up_proj = Linear(hidden_size, parts, bias=spec.bias)
        self.down_proj = Linear(spec.intermediate_size, hidden_size, bias=spec.bias)
        self.down_proj.shares_inputs = True

    @property
    def reader(self) -> Linear:
        """The projection that reads the input."""
        return self.gate_up_proj

    def forward(self, x: Tensor) -> Tensor | RankSum:
        if self.down_proj.ranks is None:
            out = self.gate_up_proj.gated_mlp(x, self.down_proj, self.activation)
            if out is not None:
                return out
        return self.down_proj.added(self.gate_up_proj.gated(x, self.activation))


class SquaredMLP(MLP):
    """down(relu(up(x)) ** 2), without a gate (Primer, arXiv 2109.08668)."""

    def __init__(self, hidden_size: int, spec: MLPSpec) -> None:
        super().__init__()
        self.up_proj = Linear(hidden_size, spec.intermediate_size, bias=spec.bias)
        self.down_proj = Linear(spec.intermediate_size, hidden_size, bias=spec.bias)
        self.down_proj.shares_inputs = True

    @property
    def reader(self) -> Linear:
        """The projection that reads the input."""
        return self.up_proj

    def forward(self, x: Tensor) -> Tensor | RankSum:
        return self.down_proj.added(F.relu(self.up_proj(x)).square())
