"""The DFLASH draft network (arXiv 2602.06036): a few layers that fill a block of masked tokens in one pass.

Every layer reads [target features ; block]: keys and values of committed tokens come from one projected feature, which
passes through no layer, those of the block from the block's own states. Embedding and head are the target's, so callers
bring embeddings and take final states to the head. The same module trains and serves: attention arrives as an object.
"""

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from slipstream.models.config import ModelConfig, check_feature_layers, default_feature_layers
from slipstream.models.draft import DraftConfig, DraftNetwork
from slipstream.models.layers import Attention, GatedMLP, Linear, Mask, RMSNorm, SelfAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(DraftConfig):
    """`feature_layers` are output ids (models/config.py)."""

    num_layers: int
    feature_layers: tuple[int, ...]
    mask_token_id: int
    block_size: int = 16  # tokens of a block, the anchor (last emitted token) included
    sample_from_anchor: bool = False  # slot k predicts the token behind its own, as in DeepSpec's drafts; ours never do
    sliding_window: int | None = None  # tokens that a windowed layer sees, its own included
    windowed_layers: tuple[int, ...] = ()  # which layers have the window; inside the block these are causal
    attention_bias: bool = False

    def __post_init__(self) -> None:
        DraftConfig.__post_init__(self)
        check_feature_layers(self.feature_layers, self.target_num_layers)
        if not 2 <= self.block_size <= 64:
            raise ValueError(f"block_size is {self.block_size}; it must be between 2 and 64")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id is {self.mask_token_id}; the target has {self.vocab_size} tokens")
        if any(not 0 <= layer < self.num_layers for layer in self.windowed_layers):
            raise ValueError(f"windowed_layers is {list(self.windowed_layers)}; the draft has {self.num_layers} layers")
        if bool(self.windowed_layers) != (self.sliding_window is not None):
            raise ValueError("sliding_window and windowed_layers go together: set both or neither")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window is {self.sliding_window}; it must be at least 1")

    def layer_config(self) -> ModelConfig:
        """The draft's layers seen as a model."""
        biases = {"qkv_bias": self.attention_bias, "output_bias": self.attention_bias}
        return self.decoder_config(architecture="dflash", num_layers=self.num_layers, qk_norm=True, **biases)


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


def default_mask_token(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> tuple[int, str]:
    """The token that stands for "not drafted yet" in a block, and where it is from: the tokenizer's mask token, the
    first embedding that no token uses, or a token that answers hardly contain. `vocab_size` is the number of the
    target's embeddings.

    Raises ValueError if the tokenizer has nothing of the kind.
    """
    if tokenizer.mask_token_id is not None:
        return tokenizer.mask_token_id, "the tokenizer's mask token"
    unused = max(tokenizer.get_vocab().values()) + 1
    if unused < vocab_size:
        return unused, "the first unused embedding"
    for name in ("pad", "eos", "unk"):
        token = getattr(tokenizer, f"{name}_token_id")
        if token is not None:
            return token, f"the tokenizer's {name} token"
    raise ValueError("the tokenizer has no mask, unused, pad, eos or unk token; name one by draft.mask_token_id")


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


class DFlash(DraftNetwork):
    """Leading dims are free."""

    config: DFlashConfig

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.fc = Linear(size * len(config.feature_layers), size, bias=False)
        self.hidden_norm = RMSNorm(size, config.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(size, config.rms_norm_eps)

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
