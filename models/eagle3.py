"""The EAGLE3 draft network (Li et al. 2025, arXiv 2503.01840): one decoder layer over [token embedding ; feature].

The same module trains and serves: attention arrives as an object. Draft ids are positions in the reduced vocabulary;
`d2t` maps them to target ids (target = draft + d2t[draft]).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.kernels.norm import rms_norm_pair
from slipstream.models.config import ModelConfig, RopeConfig, check_feature_layers
from slipstream.models.layers import Attention, Embedding, GatedMLP, Mask, OutputSplitLinear, RMSNorm, SelfAttention
from slipstream.models.vocabulary import enter_vocabulary, ids_of, vocabulary_buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """Shapes of the draft and what it was trained for. `feature_layers` are output ids (models/config.py)."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    target_hidden_size: int
    target_num_layers: int
    feature_layers: tuple[int, ...]
    rope: RopeConfig = field(default_factory=RopeConfig)
    attention_bias: bool = False
    target: str = ""
    target_revision: str | None = None
    target_fingerprint: str = ""
    tokenizer_hash: str = ""

    def __post_init__(self) -> None:
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size is {self.draft_vocab_size}; the target has {self.vocab_size} tokens")
        check_feature_layers(self.feature_layers, self.target_num_layers)

    @classmethod
    def from_target(
        cls, model: ModelConfig, /, *, draft_vocab_size: int, feature_layers: tuple[int, ...], **fields: Any
    ) -> "Eagle3Config":
        """A draft as wide as the target `model`. `fields` override or add others (intermediate_size, target, ...)."""
        shared = ["hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"]
        shared += ["rms_norm_eps", "max_position_embeddings", "rope"]
        values = {name: getattr(model, name) for name in shared} | fields
        return cls(
            draft_vocab_size=draft_vocab_size,
            feature_layers=feature_layers,
            target_hidden_size=model.hidden_size,
            target_num_layers=model.num_layers,
            **values,
        )

    def layer_config(self) -> ModelConfig:
        """The draft's one layer seen as a one-layer model."""
        return ModelConfig(
            architecture="eagle3",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=1,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=self.rms_norm_eps,
            max_position_embeddings=self.max_position_embeddings,
            rope=self.rope,
            qkv_bias=self.attention_bias,
        )


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


class Eagle3(nn.Module):
    """Leading dims are free. Buffers: d2t (Vd,) int64 offsets, t2d (V,) bool.

    `embed_tokens` is its own embedding (V, H), None where it was trained with the target's.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config, *, has_embedding: bool = False) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.embed_tokens = Embedding(config.vocab_size, size) if has_embedding else None
        self.fc = OutputSplitLinear(config.target_hidden_size * len(config.feature_layers), size, bias=False)
        self.midlayer = Midlayer(config)
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.lm_head = OutputSplitLinear(size, config.draft_vocab_size, bias=False)
        d2t, t2d = vocabulary_buffers(config.vocab_size, config.draft_vocab_size)
        self.register_buffer("d2t", d2t)
        self.register_buffer("t2d", t2d)

    def set_vocabulary(self, ids: Tensor) -> None:
        """ids (Vd,) int64: the target ids that the draft can propose, ascending and distinct."""
        enter_vocabulary(ids, self.d2t, self.t2d)

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
