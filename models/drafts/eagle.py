"""EAGLE drafts, network and files (Li et al. 2024, arXiv 2401.15077; EAGLE-2 uses the same weights).

A feature is the target's state after its final norm. Row t reads the embedding of token t + 1 and the feature of t and
predicts the feature of t + 1, from which the target's head computes logits of token t + 2. Callers pass the target's
head and, mostly, its embedding. The same module trains and serves: attention is an argument.

On disk: the public config.json fields and key names, ours beside them.

fc.weight, fc.bias                     (H, 2 * H), (H): reads [embedding ; feature]; the bias is a config field
layers.0.self_attn.*, layers.0.mlp.*, layers.0.post_attention_layernorm.weight
embed_tokens.weight                    in other trainers' files: mostly a copy of the target's, which is left out
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from slipstream.models.drafts.base import (
    DraftConfig,
    DraftNetwork,
    Tensors,
    check_llama_layer,
    decoder_from_json,
    decoder_to_json,
    window_from_json,
    window_to_json,
)
from slipstream.models.files.checkpoint import Values
from slipstream.models.layers.attention import Attention, Mask, SelfAttention
from slipstream.models.layers.linear import Linear
from slipstream.models.layers.moe import feed_forward
from slipstream.models.layers.norm import RMSNorm
from slipstream.models.targets.config import LayerSpec, TargetSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(DraftConfig):
    """As wide as the target, whose head reads the output."""

    kind: ClassVar[str] = "EAGLE"
    fc_bias: bool = True  # EAGLE's default; its drafts for Llama 3 have none
    qkv_bias: bool = False

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The state after the final norm alone (models/targets/config.py)."""
        return (self.target_num_layers,)

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return (self.layer(window=self.sliding_window, qkv_bias=self.qkv_bias),)

    def to_json(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLMEagle"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            **({} if self.fc_bias else {"bias": False}),  # SGLang takes true for biases of attention
            "qkv_bias": self.qkv_bias,
            **decoder_to_json(self),
            **window_to_json(self),
            "num_target_layers": self.target_num_layers,
            "drafter": "eagle",
        }

    @classmethod
    def from_json(cls, values: Values, target: TargetSpec, tensors: Tensors | None = None) -> Self:
        sizes = {"hidden_size": target.hidden_size, "num_target_layers": target.num_layers}
        decoder = decoder_from_json(values, target, **sizes)
        check_llama_layer(values)
        if values.get("num_hidden_layers", 1) != 1:
            raise ValueError(f"draft config: num_hidden_layers is {values['num_hidden_layers']}; EAGLE drafts have 1")
        # EAGLE's trainers omit `bias` if it is true, converters also if it is false.
        has_bias = tensors is None or "fc.bias" in tensors
        is_qwen2 = values.get("architectures") == ["Qwen2ForCausalLMEagle"]
        return cls(
            **decoder,
            sliding_window=window_from_json(values),
            fc_bias=bool(values.get("bias", has_bias)),
            qkv_bias=bool(values.get("qkv_bias", values.get("attention_bias", is_qwen2))),
        )


class EagleLayer(nn.Module):
    """A decoder layer without a norm before its attention."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        size = config.hidden_size
        eps = config.rms_norm_eps
        self.self_attn = SelfAttention(config.layers[0].attention, 0, size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = feed_forward(size, config.layers[0].mlp)

    def forward(self, x: Tensor, attention: Attention, mask: Mask) -> Tensor:
        normed, x = self.post_attention_layernorm.add(x, self.self_attn(x, attention, mask))
        return x + self.mlp(normed)


class Eagle(DraftNetwork):
    """Any leading dims."""

    Config = EagleConfig
    may_embed = True
    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        self.fc = Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList([EagleLayer(config)])

    @property
    def layer(self) -> EagleLayer:
        layer = self.layers[0]
        assert isinstance(layer, EagleLayer)
        return layer

    def fuse(self, aux_states: Tensor) -> Tensor:
        """Target states (..., H) as `forward` reads them: unchanged."""
        return aux_states

    def write_context(self, embeds: Tensor, hidden: Tensor, attention: Attention) -> None:
        """Stores keys and values of rows (..., H) without computing their output."""
        self.layer.self_attn.write(self.join(embeds, hidden), attention)

    def forward(self, embeds: Tensor, hidden: Tensor, attention: Attention, mask: Mask = "causal") -> Tensor:
        """embeds and hidden (..., H) -> the next feature (..., H), input of the head and of the next step."""
        return self.layer(self.join(embeds, hidden), attention, mask)

    def head_input(self, hidden: Tensor) -> Tensor:
        """Features (..., H) as the head reads them: unchanged."""
        return hidden

    def join(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        return self.fc(torch.cat((embeds, hidden), dim=-1))
