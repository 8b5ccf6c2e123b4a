from torch import Tensor, nn

from slipstream.models.layers.attention import Attention, Mask, SelfAttention
from slipstream.models.layers.linear import Linear
from slipstream.models.layers.mlp import GatedMLP
from slipstream.models.layers.moe import feed_forward
from slipstream.models.layers.norm import RMSNorm
from slipstream.models.targets.config import LayerSpec


class DecoderLayer(nn.Module):
    """A pre-norm layer."""

    def __init__(self, spec: LayerSpec, index: int, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden_size, eps)
        self.self_attn = SelfAttention(spec.attention, index, hidden_size, eps)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps)
        self.mlp = feed_forward(hidden_size, spec.mlp)

    @property
    def norm_readers(self) -> list[tuple[RMSNorm, Linear]]:
        """Norms whose output a single projection reads."""
        readers: list[tuple[RMSNorm, Linear]] = [(self.input_layernorm, self.self_attn.qkv_proj)]
        if isinstance(self.mlp, GatedMLP):
            readers.append((self.post_attention_layernorm, self.mlp.gate_up_proj))
        return readers

    def forward(
        self, residual: Tensor, delta: Tensor | None, attention: Attention, mask: Mask, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The layer's input is residual + delta (..., H), written to `out` if given; so is its output.

        The next norm computes the sum, both in one kernel.
        """
        if delta is None:
            normed = self.input_layernorm(residual)
        else:
            normed, residual = self.input_layernorm.add(residual, delta, out)
        normed, residual = self.post_attention_layernorm.add(residual, self.self_attn(normed, attention, mask))
        return residual, self.mlp(normed)
