"""The EAGLE draft network (Li et al. 2024, arXiv 2401.15077; the same weights serve EAGLE-2): it regresses features.

A feature is the target's state after its final norm. Row t reads the embedding of token t + 1 and the feature of t, and
its output is a guess of the feature of t + 1, which the target's own head turns into logits of token t + 2. The head
is the target's and so, mostly, is the embedding: callers bring them. The same module trains and serves: attention
arrives as an object.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.models.config import ModelConfig, RopeConfig
from slipstream.models.layers import Attention, Embedding, GatedMLP, Mask, OutputSplitLinear, RMSNorm, SelfAttention
from slipstream.models.vocabulary import enter_vocabulary, ids_of, vocabulary_buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """Shapes of the draft and what it was trained for. It is as wide as its target, whose head reads it."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    target_num_layers: int
    fc_bias: bool = True  # EAGLE's default; its drafts for Llama 3 have none
    qkv_bias: bool = False
    draft_vocab_size: int | None = None  # None: the target's
    rope: RopeConfig = field(default_factory=RopeConfig)
    target: str = ""
    target_revision: str | None = None
    target_fingerprint: str = ""
    tokenizer_hash: str = ""

    def __post_init__(self) -> None:
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size is {self.draft_vocab_size}; the target has {self.vocab_size} tokens")

    @classmethod
    def from_target(cls, model: ModelConfig, /, **fields: Any) -> "EagleConfig":
        """A draft for the target `model`. `fields` override or add others (intermediate_size, target, ...)."""
        shared = ["hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"]
        shared += ["rms_norm_eps", "max_position_embeddings", "rope"]
        values = {name: getattr(model, name) for name in shared} | fields
        return cls(target_num_layers=model.num_layers, **values)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The state after the final norm alone (models/config.py)."""
        return (self.target_num_layers,)

    def layer_config(self) -> ModelConfig:
        """The draft's one layer seen as a one-layer model."""
        return ModelConfig(
            architecture="eagle",
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
            qkv_bias=self.qkv_bias,
        )


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


class Eagle(nn.Module):
    """Leading dims are free. A reduced vocabulary has the buffers d2t (Vd,) int64 offsets and t2d (V,) bool.

    `embed_tokens` is its own embedding (V, H), None where it was trained with the target's.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: EagleConfig, *, has_embedding: bool = False) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size) if has_embedding else None
        self.fc = OutputSplitLinear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList([EagleLayer(config)])
        if config.draft_vocab_size is not None:
            d2t, t2d = vocabulary_buffers(config.vocab_size, config.draft_vocab_size)
            self.register_buffer("d2t", d2t)
            self.register_buffer("t2d", t2d)

    def set_vocabulary(self, ids: Tensor) -> None:
        """ids (Vd,) int64: the target ids that the draft can propose, ascending and distinct."""
        enter_vocabulary(ids, self.d2t, self.t2d)

    @property
    def target_ids(self) -> Tensor | None:
        """(Vd,) int64 target id of each draft id; None where they are the same."""
        return None if self.config.draft_vocab_size is None else ids_of(self.d2t)

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
