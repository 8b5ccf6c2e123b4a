"""The DFLASH draft network (arXiv 2602.06036): a few layers that fill a block of masked tokens in one pass.

Every layer reads [target features ; block]: keys and values of committed tokens come from one projected feature, which
passes through no layer, those of the block from the block's own states. Embedding and head are the target's, so callers
bring embeddings and take final states to the head. The same module trains and serves: attention arrives as an object.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from slipstream.models.config import ModelConfig, RopeConfig, check_feature_layers, default_feature_layers
from slipstream.models.layers import Attention, GatedMLP, Mask, OutputSplitLinear, RMSNorm, SelfAttention
from slipstream.models.vocabulary import enter_vocabulary, ids_of, vocabulary_buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig:
    """Shapes of the draft and what it was trained for. `feature_layers` are output ids (models/config.py)."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    target_num_layers: int
    feature_layers: tuple[int, ...]
    mask_token_id: int
    block_size: int = 16  # tokens of a block, the anchor (last emitted token) included
    sample_from_anchor: bool = False  # slot k predicts the token behind its own, as in DeepSpec's drafts; ours never do
    sliding_window: int | None = None  # tokens that a windowed layer sees, its own included
    windowed_layers: tuple[int, ...] = ()  # which layers have the window; inside the block these are causal
    draft_vocab_size: int | None = None  # None: the target's
    rope: RopeConfig = field(default_factory=RopeConfig)
    attention_bias: bool = False
    target: str = ""
    target_revision: str | None = None
    target_fingerprint: str = ""
    tokenizer_hash: str = ""

    def __post_init__(self) -> None:
        check_feature_layers(self.feature_layers, self.target_num_layers)
        if not 2 <= self.block_size <= 64:
            raise ValueError(f"block_size is {self.block_size}; it must be between 2 and 64")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id is {self.mask_token_id}; the target has {self.vocab_size} tokens")
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size is {self.draft_vocab_size}; the target has {self.vocab_size} tokens")
        if any(not 0 <= layer < self.num_layers for layer in self.windowed_layers):
            raise ValueError(f"windowed_layers is {list(self.windowed_layers)}; the draft has {self.num_layers} layers")
        if bool(self.windowed_layers) != (self.sliding_window is not None):
            raise ValueError("sliding_window and windowed_layers go together: set both or neither")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window is {self.sliding_window}; it must be at least 1")

    @classmethod
    def from_target(cls, model: ModelConfig, /, **fields: Any) -> "DFlashConfig":
        """A draft as wide as the target `model`. `fields` override or add others (num_layers, mask_token_id, ...)."""
        shared = ["hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"]
        shared += ["rms_norm_eps", "max_position_embeddings", "rope"]
        values = {name: getattr(model, name) for name in shared} | fields
        return cls(target_num_layers=model.num_layers, **values)

    def layer_config(self) -> ModelConfig:
        """The draft's layers seen as a model."""
        return ModelConfig(
            architecture="dflash",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=self.rms_norm_eps,
            max_position_embeddings=self.max_position_embeddings,
            rope=self.rope,
            qkv_bias=self.attention_bias,
            output_bias=self.attention_bias,
            qk_norm=True,
        )


def default_block_feature_layers(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The target states that a block draft reads, as layer outputs: round(1 + i (N - 4) / (L - 1)), i = 0..L-1.

    On shallow targets that rule repeats layers or stops far from the end: there, the states that EAGLE3 reads.
    """
    if num_draft_layers == 1 and num_target_layers >= 11:
        return (num_target_layers // 2,)
    if num_target_layers < max(11, num_draft_layers + 3):
        return default_feature_layers(num_target_layers)
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    return tuple(round(1 + index * step) for index in range(num_draft_layers))


class BlockLayer(nn.Module):
    """A pre-norm decoder layer whose attention sees the context and the whole block, or causally a window of both."""

    def __init__(self, config: DFlashConfig, layer: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        is_windowed = layer in config.windowed_layers
        self.mask: Mask = "causal" if is_windowed else "block"
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = SelfAttention(
            config.layer_config(), layer, window=config.sliding_window if is_windowed else None
        )
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = GatedMLP(size, config.intermediate_size)

    def forward(self, x: Tensor, delta: Tensor | None, attention: Attention) -> tuple[Tensor, Tensor]:
        """x (..., H) and what the layer before adds to it -> the same of this layer."""
        if delta is None:
            normed = self.input_layernorm(x)
        else:
            normed, x = self.input_layernorm.add(x, delta)
        attended = self.self_attn(normed, attention, self.mask)
        normed, x = self.post_attention_layernorm.add(x, attended)
        return x, self.mlp(normed)


class ContextProjection(NamedTuple):
    """Keys and values of context rows in all layers at once."""

    weight: Tensor  # (L * 2 * G * D, H), each layer's keys before its values
    bias: Tensor | None  # (L * 2 * G * D,)
    k_norm: Tensor  # (L, D)


class DFlash(nn.Module):
    """Leading dims are free. A reduced vocabulary has the buffers d2t (Vd,) int64 offsets and t2d (V,) bool."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.fc = OutputSplitLinear(size * len(config.feature_layers), size, bias=False)
        self.hidden_norm = RMSNorm(size, config.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(size, config.rms_norm_eps)
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

    def fuse(self, features: Tensor) -> Tensor:
        """Target states (..., K * H) -> the context (..., H) that every layer projects to keys and values."""
        return self.hidden_norm(self.fc(features))

    def write_context(self, context: Tensor, attention: Attention) -> None:
        """Stores every layer's keys and values of context rows (..., H)."""
        for layer in self.attentions:
            layer.write(context, attention)

    def stack_context(self) -> ContextProjection:
        """What write_context multiplies and norms by, as copies, for callers that store all layers in one go."""
        weights, biases = zip(*(layer.kv_projection for layer in self.attentions), strict=True)
        norms: list[Tensor] = [layer.k_norm.weight for layer in self.attentions if layer.k_norm is not None]
        bias = None if biases[0] is None else torch.cat(biases)
        return ContextProjection(torch.cat(weights), bias, torch.stack(norms))

    @property
    def attentions(self) -> list[SelfAttention]:
        return [cast(SelfAttention, layer.self_attn) for layer in self.layers]

    def block_tokens(self, anchors: Tensor, count: int) -> Tensor:
        """anchors (...) token ids -> (..., count): each followed by mask tokens."""
        blocks = anchors.unsqueeze(-1).repeat_interleave(count, dim=-1)
        blocks[..., 1:] = self.config.mask_token_id
        return blocks

    def forward(self, embeds: Tensor, attention: Attention) -> Tensor:
        """embeds (..., H) of whole blocks -> final states (..., H), normed: what the target's head reads."""
        x, delta = embeds, None
        for layer in self.layers:
            x, delta = layer(x, delta, attention)
        assert delta is not None
        return self.norm.add(x, delta)[0]
