from torch import Tensor, nn

from slipstream.models.layers.attention import Attention, Mask, SelfAttention
from slipstream.models.layers.linear import Linear
from slipstream.models.layers.mlp import GatedMLP
from slipstream.models.layers.moe import Experts, feed_forward
from slipstream.models.layers.norm import RMSNorm
from slipstream.models.targets.config import LayerSpec
from slipstream.models.targets.families import Norms


class DecoderLayer(nn.Module):
    """A pre-norm layer: norms the inputs of attention and MLP."""

    def __init__(self, spec: LayerSpec, index: int, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden_size, eps, spec.norm_offset)
        self.self_attn = SelfAttention(spec.mixer, index, hidden_size, eps)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps, spec.norm_offset)
        self.mlp = feed_forward(hidden_size, spec.mlp)

    @property
    def norm_readers(self) -> list[tuple[RMSNorm, Linear | Experts]]:
        """Norms whose output a single projection reads, or experts and their router."""
        reader = self.mlp.gate_up_proj if isinstance(self.mlp, GatedMLP) else self.mlp.experts
        return [*self.input_readers, (self.post_attention_layernorm, reader)]

    @property
    def input_readers(self) -> list[tuple[RMSNorm, Linear | Experts]]:
        """The first of `norm_readers`; none where a gate reads attention's input, too."""
        return [(self.input_layernorm, self.self_attn.qkv_proj)] if self.self_attn.gate_proj is None else []

    def forward(
        self, residual: Tensor, delta: Tensor | None, attention: Attention, mask: Mask, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The layer's input is residual + delta (..., H), written to `out` if given; so is its output.

        The next norm computes the sum, both in one kernel.
        """
        normed, residual = self.norm_input(residual, delta, out)
        normed, residual = self.post_attention_layernorm.add(residual, self.self_attn(normed, attention, mask))
        return residual, self.mlp(normed)

    def norm_input(self, residual: Tensor, delta: Tensor | None, out: Tensor | None) -> tuple[Tensor, Tensor]:
        """The layer's input, normed and as it is."""
        if delta is None:
            return self.input_layernorm(residual), residual
        return self.input_layernorm.add(residual, delta, out)


class SandwichLayer(DecoderLayer):
    """Norms the inputs and the outputs of attention and MLP (Gemma 2, arXiv 2408.00118)."""

    def __init__(self, spec: LayerSpec, index: int, hidden_size: int, eps: float) -> None:
        super().__init__(spec, index, hidden_size, eps)
        post_eps = eps if spec.post_norm_eps is None else spec.post_norm_eps
        self.post_attention_layernorm.eps = post_eps
        self.pre_feedforward_layernorm = RMSNorm(hidden_size, eps, spec.norm_offset)
        self.post_feedforward_layernorm = RMSNorm(hidden_size, post_eps, spec.norm_offset)

    @property
    def norm_readers(self) -> list[tuple[RMSNorm, Linear | Experts]]:
        return self.input_readers

    def forward(
        self, residual: Tensor, delta: Tensor | None, attention: Attention, mask: Mask, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        normed, residual = self.norm_input(residual, delta, out)
        attended = self.self_attn(normed, attention, mask)
        normed, residual = self.pre_feedforward_layernorm.add_normed(residual, attended, self.post_attention_layernorm)
        return residual, self.post_feedforward_layernorm(self.mlp(normed))


class PostNormLayer(nn.Module):
    """Norms the outputs of attention and MLP alone (OLMo 2, arXiv 2501.00656)."""

    def __init__(self, spec: LayerSpec, index: int, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.self_attn = SelfAttention(spec.mixer, index, hidden_size, eps)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps, spec.norm_offset)
        self.mlp = feed_forward(hidden_size, spec.mlp)
        self.post_feedforward_layernorm = RMSNorm(hidden_size, eps, spec.norm_offset)

    def forward(
        self, residual: Tensor, delta: Tensor | None, attention: Attention, mask: Mask, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if delta is not None:
            residual = residual + delta if out is None else out.copy_(residual).add_(delta)
        residual = residual + self.post_attention_layernorm(self.self_attn(residual, attention, mask))
        return residual, self.post_feedforward_layernorm(self.mlp(residual))


LAYERS: dict[Norms, type[DecoderLayer | PostNormLayer]] = {
    "pre": DecoderLayer,
    "post": PostNormLayer,
    "sandwich": SandwichLayer,
}
