from torch import Tensor, nn

from slipstream.models.layers.attention import Attention, Mask, SelfAttention
from slipstream.models.layers.mlp import GatedMLP
from slipstream.models.layers.norm import RMSNorm
from slipstream.models.targets.config import ModelConfig


class DecoderLayer(nn.Module):
    """A pre-norm layer. `window`: see Attention."""

    def __init__(self, config: ModelConfig, layer: int, window: int | None = None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, layer, window=window)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.mlp_bias)

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
