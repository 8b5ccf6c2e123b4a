"""Self-attention of all networks. What computes it is an argument, so training and serving share the code.

Letters: H hidden, Q/G query and KV heads, D head dim; ...: packed tokens, in any leading dims.
"""

from typing import Literal, Protocol

from torch import Tensor, nn

from slipstream.kernels.gemm.linear import linear
from slipstream.kernels.norm import HeadNorms
from slipstream.models.layers.linear import Linear
from slipstream.models.layers.norm import RMSNorm
from slipstream.models.targets.config import ModelConfig

Mask = Literal["causal", "tree", "block"]


class Attention(Protocol):
    """Attention as a network calls it: owns rotary embedding, KV storage and the mask."""

    def write(self, k: Tensor, v: Tensor, layer: int) -> None:
        """Rotates k (..., G, D) by the batch's positions and stores k and v; for rows without queries."""
        ...

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: int,
        mask: Mask,
        window: int | None = None,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """Norms q and k if there are `norms`, writes k and v, rotates q (..., Q, D) and returns the attention output
        (..., Q, D).

        `window`: a query sees the last `window` positions only, its own included (with mask "causal").
        """
        ...


class SelfAttention(nn.Module):
    """Grouped-query attention with q, k and v fused in one projection; q/k norms where the architecture has them."""

    def __init__(
        self, config: ModelConfig, layer: int, input_size: int | None = None, window: int | None = None
    ) -> None:
        super().__init__()
        self.layer = layer
        self.window = window
        self.head_dim = config.head_dim
        self.sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        parts = {f"{name}_proj": size * config.head_dim for name, size in zip("qkv", self.sizes, strict=True)}
        self.qkv_proj = Linear(input_size or config.hidden_size, parts, bias=config.qkv_bias)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, attention: Attention, mask: Mask = "causal") -> Tensor:
        q, k, v = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim)).split(self.sizes, dim=-2)  # (..., heads, D)
        return self.o_proj(attention.attend(q, k, v, self.layer, mask, self.window, self.norms).flatten(-2))

    @property
    def norms(self) -> HeadNorms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)

    @property
    def kv_projection(self) -> tuple[Tensor, Tensor | None]:
        """Views of the weight (2 * G * D, H) and bias of keys, then values."""
        start = self.sizes[0] * self.head_dim
        bias = self.qkv_proj.bias
        return self.qkv_proj.weight[start:], None if bias is None else bias[start:]

    def write(self, x: Tensor, attention: Attention) -> None:
        """Stores keys and values of rows without computing their attention."""
        kv = linear(x, *self.kv_projection)
        k, v = kv.unflatten(-1, (-1, self.head_dim)).chunk(2, dim=-2)  # (..., G, D) each
        attention.write(k if self.k_norm is None else self.k_norm(k), v, self.layer)
