"""The EAGLE3 draft network (Li et al. 2025, arXiv 2503.01840): one decoder layer over [token embedding ; feature].

The same module trains and serves: attention arrives as an object. Draft ids are positions in the reduced vocabulary;
`d2t` maps them to target ids (target = draft + d2t[draft]).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream.kernels.norm import rms_norm_pair
from slipstream.models.config import ModelConfig, check_feature_layers
from slipstream.models.draft import DraftConfig, DraftNetwork, ids_of
from slipstream.models.layers import Attention, Embedding, GatedMLP, Linear, Mask, RMSNorm, SelfAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(DraftConfig):
    """`feature_layers` are output ids (models/config.py)."""

    draft_vocab_size: int
    feature_layers: tuple[int, ...]
    attention_bias: bool = False

    def __post_init__(self) -> None:
        DraftConfig.__post_init__(self)
        check_feature_layers(self.feature_layers, self.target_num_layers)

    def layer_config(self) -> ModelConfig:
        """The draft's one layer seen as a one-layer model."""
        return self.decoder_config(architecture="eagle3", num_layers=1, qkv_bias=self.attention_bias)


class Midlayer(nn.Module):
    """The decoder layer: attention reads [norm(embedding) ; norm(hidden)], the residual stream is `hidden`."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        layer, size, eps = config.layer_config(), config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = SelfAttention(layer, 0, input_size=2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = GatedMLP(size, config.intermediate_size)

    def forward(self, embeds: Tensor, hidden: Tensor, attention: Attention, mask: Mask) -> Tensor:
        attended = self.self_attn(self.attention_input(embeds, hidden), attention, mask)
        normed, x = self.post_attention_layernorm.add(hidden, attended)
        return x + self.mlp(normed)

    def attention_input(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        weights = self.input_layernorm.weight, self.hidden_norm.weight
        return rms_norm_pair(embeds, hidden, weights, self.hidden_norm.eps)


class Eagle3(DraftNetwork):
    """Leading dims are free. `embed_tokens` is its own embedding (V, H); None: it was trained with the target's."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config, *, has_embedding: bool = False) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.embed_tokens = Embedding(config.vocab_size, size) if has_embedding else None
        self.fc = Linear(config.target_hidden_size * len(config.feature_layers), size, bias=False)
        self.midlayer = Midlayer(config)
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.lm_head = Linear(size, config.draft_vocab_size, bias=False)

    @property
    def target_ids(self) -> Tensor:
        """(Vd,) int64 target id of each draft id."""
        return ids_of(self.d2t)

    @torch.no_grad()
    def init_from_target(self, head: Tensor, final_norm: Tensor, mlp: Mapping[str, Tensor]) -> None:
        """Starts as the target's own last step: its head rows, final norm and last MLP; fc passes the last feature on.

        Neurons beyond the target's stay random and add nothing yet: their outputs start at zero.
        head (V, Ht), final_norm (Ht,), mlp with gate_proj, up_proj (I, Ht) and down_proj (Ht, I).
        """
        config = self.config
        hidden_size, neurons = head.shape[1], len(mlp["gate_proj"])
        if config.hidden_size != hidden_size or config.intermediate_size < neurons:
            raise ValueError(
                f"init_from_target needs a draft as wide as its target or with a wider MLP: hidden_size "
                f"{config.hidden_size} and intermediate_size {config.intermediate_size} against {hidden_size} and "
                f"{neurons}; change them or switch init_from_target off"
            )
        self.lm_head.weight.copy_(head[self.target_ids.to(head.device)])
        self.norm.weight.copy_(final_norm)
        block = self.midlayer.mlp
        gate, up = block.gate_up_proj.weight.chunk(2)
        gate[:neurons].copy_(mlp["gate_proj"])
        up[:neurons].copy_(mlp["up_proj"])
        block.down_proj.weight.zero_()
        block.down_proj.weight[:, :neurons].copy_(mlp["down_proj"])
        self.fc.weight.zero_()
        self.fc.weight[:, -config.hidden_size :].copy_(torch.eye(config.hidden_size))

    def fuse(self, features: Tensor) -> Tensor:
        """Target states (..., K * Ht) -> (..., H)."""
        return self.fc(features)

    def write_context(self, embeds: Tensor, hidden: Tensor, attention: Attention) -> None:
        """Stores keys and values for rows (..., H) whose prediction nobody needs."""
        self.midlayer.self_attn.write(self.midlayer.attention_input(embeds, hidden), attention)

    def forward(self, embeds: Tensor, hidden: Tensor, attention: Attention, mask: Mask = "causal") -> Tensor:
        """embeds and hidden (..., H) -> (..., H), before the final norm: the state that recurs as `hidden`."""
        return self.midlayer(embeds, hidden, attention, mask)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., H) before the final norm -> (..., Vd)."""
        return self.lm_head(self.norm(hidden))
