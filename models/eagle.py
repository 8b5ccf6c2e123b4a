"""The EAGLE draft network (Li et al. 2024, arXiv 2401.15077; the same weights serve EAGLE-2): it regresses features.

A feature is the target's state after its final norm. Row t reads the embedding of token t + 1 and the feature of t, and
its output is a guess of the feature of t + 1, which the target's own head turns into logits of token t + 2. The head
is the target's and so, mostly, is the embedding: callers bring them. The same module trains and serves: attention
arrives as an object.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream.models.config import ModelConfig
from slipstream.models.draft import DraftConfig, DraftNetwork
from slipstream.models.layers import Attention, Embedding, GatedMLP, Linear, Mask, RMSNorm, SelfAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(DraftConfig):
    """The draft is as wide as its target, whose head reads it."""

    fc_bias: bool = True  # EAGLE's default; its drafts for Llama 3 have none
    qkv_bias: bool = False

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The state after the final norm alone (models/config.py)."""
        return (self.target_num_layers,)

    def layer_config(self) -> ModelConfig:
        """The draft's one layer seen as a one-layer model."""
        return self.decoder_config(architecture="eagle", num_layers=1, qkv_bias=self.qkv_bias)


class EagleLayer(nn.Module):
    """A decoder layer without a norm before its attention."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config.layer_config(), 0)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, attention: Attention, mask: Mask) -> Tensor:
        normed, x = self.post_attention_layernorm.add(x, self.self_attn(x, attention, mask))
        return x + self.mlp(normed)


class Eagle(DraftNetwork):
    """Leading dims are free. `embed_tokens` is its own embedding (V, H); None: it was trained with the target's."""

    config: EagleConfig

    def __init__(self, config: EagleConfig, *, has_embedding: bool = False) -> None:
        super().__init__(config)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size) if has_embedding else None
        self.fc = Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList([EagleLayer(config)])

    @property
    def layer(self) -> EagleLayer:
        layer = self.layers[0]
        assert isinstance(layer, EagleLayer)
        return layer

    def fuse(self, features: Tensor) -> Tensor:
        """Target states (..., H) as `forward` reads them: as they are."""
        return features

    def write_context(self, embeds: Tensor, hidden: Tensor, attention: Attention) -> None:
        """Stores keys and values for rows (..., H) whose prediction nobody needs."""
        self.layer.self_attn.write(self.join(embeds, hidden), attention)

    def forward(self, embeds: Tensor, hidden: Tensor, attention: Attention, mask: Mask = "causal") -> Tensor:
        """embeds and hidden (..., H) -> the feature (..., H) that follows, which the head reads and which recurs."""
        return self.layer(self.join(embeds, hidden), attention, mask)

    def join(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        return self.fc(torch.cat((embeds, hidden), dim=-1))
