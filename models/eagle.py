"""EAGLE drafts, network and files (Li et al. 2024, arXiv 2401.15077; EAGLE-2 uses the same weights).

A feature is the target's state after its final norm. Row t reads the embedding of token t + 1 and the feature of t and
predicts the feature of t + 1, from which the target's head computes logits of token t + 2. Callers pass the target's
head and, mostly, its embedding. The same module trains and serves: attention is an argument.

On disk: the public config.json fields and key names, ours beside them.

fc.weight, fc.bias                     (H, 2 * H), (H): reads [embedding ; feature]; the bias is a config field
layers.0.self_attn.*, layers.0.mlp.*, layers.0.post_attention_layernorm.weight
embed_tokens.weight                    in other trainers' files: mostly a copy of the target's, which is left out
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.models.checkpoint import read_draft_tensors, read_json
from slipstream.models.config import ModelConfig
from slipstream.models.draft import (
    EMBEDDING,
    HEAD,
    DraftConfig,
    DraftNetwork,
    check_llama_layer,
    check_target,
    complete_vocabulary,
    decoder_from_json,
    decoder_to_json,
    drop_copy,
    fill,
    refuse_own,
    write_draft,
)
from slipstream.models.layers import Attention, Embedding, GatedMLP, Linear, Mask, RMSNorm, SelfAttention

ARCHITECTURE = "LlamaForCausalLMEagle"


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(DraftConfig):
    """As wide as the target, whose head reads the output."""

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
    """Any leading dims. `embed_tokens` is the draft's own embedding (V, H); None: it uses the target's."""

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
        """Target states (..., H) as `forward` reads them: unchanged."""
        return features

    def write_context(self, embeds: Tensor, hidden: Tensor, attention: Attention) -> None:
        """Stores keys and values of rows (..., H) without computing their output."""
        self.layer.self_attn.write(self.join(embeds, hidden), attention)

    def forward(self, embeds: Tensor, hidden: Tensor, attention: Attention, mask: Mask = "causal") -> Tensor:
        """embeds and hidden (..., H) -> the next feature (..., H), input of the head and of the next step."""
        return self.layer(self.join(embeds, hidden), attention, mask)

    def join(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        return self.fc(torch.cat((embeds, hidden), dim=-1))


def config_to_json(config: EagleConfig) -> dict[str, Any]:
    """config.json of a checkpoint."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "bias": config.fc_bias,
        "qkv_bias": config.qkv_bias,
        **decoder_to_json(config),
        "num_target_layers": config.target_num_layers,
        "drafter": "eagle",
    }


def config_from_json(values: Mapping[str, Any], target: ModelConfig) -> EagleConfig:
    """Reads our config.json or another trainer's.

    Raises ValueError for what the network here cannot run and for a draft that does not fit `target`.
    """
    decoder = decoder_from_json(values, target)
    check_llama_layer(values)
    expected = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    check_target(values, **expected, num_target_layers=target.num_layers)
    is_qwen2 = values.get("architectures") == ["Qwen2ForCausalLMEagle"]
    return EagleConfig(
        **decoder,
        fc_bias=bool(values.get("bias", True)),
        qkv_bias=bool(values.get("qkv_bias", values.get("attention_bias", is_qwen2))),
    )


def save_eagle(module: Eagle, state: Mapping[str, Tensor], path: Path, run: Mapping[str, Any]) -> None:
    """See write_draft."""
    write_draft(module, config_to_json(module.config), state, path, run)


def load_eagle(
    path: Path,
    target: ModelConfig,
    dtype: torch.dtype | None,
    device: torch.device,
    shared: Mapping[str, Tensor] | None = None,
) -> Eagle:
    """Reads a draft for `target`, strictly: every missing or unexpected key is named in the ValueError.

    dtype None keeps the file's. `shared`: the target's embed_tokens.weight and lm_head.weight (V, H). Copies of them
    are dropped; a different embedding becomes the draft's own, a different head is refused.
    """
    values = read_json(path / "config.json")
    tensors = {key.removeprefix("model."): tensor for key, tensor in read_draft_tensors(path).items()}
    if "bias" not in values:  # EAGLE's trainers omit it if true, converters also if false
        values["bias"] = "fc.bias" in tensors
    config = config_from_json(values, target)
    if config.draft_vocab_size is not None:
        complete_vocabulary(tensors, config.vocab_size, path)
    refuse_own(tensors, HEAD, shared, path)
    has_embedding = drop_copy(tensors, EMBEDDING, shared)
    with torch.device("meta"):
        module = Eagle(config, has_embedding=has_embedding)
    return fill(module, tensors, dtype, device, path)
