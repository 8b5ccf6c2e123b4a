"""The serving target: a dense Llama-family decoder (Llama, Mistral, Qwen2, Qwen3) with fused projections."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from slipstream.kernels.linear import linear
from slipstream.models.checkpoint import fuse, load_strict, read_tensors
from slipstream.models.config import ModelConfig
from slipstream.models.layers import Attention, GatedMLP, Mask, OutputSplitLinear, RMSNorm, SelfAttention

IGNORED_KEYS = ("rotary_emb.inv_freq",)  # buffers that old checkpoints carry and every loader recomputes


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.mlp_bias)

    def forward(self, x: Tensor, attention: Attention, mask: Mask = "causal") -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), attention, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Target(nn.Module):
    """Attributes: `config`; `embed_tokens.weight` (V, H) and `head` (V, H), which drafters share."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = OutputSplitLinear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def head(self) -> Tensor:
        return self.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def forward(
        self, tokens: Tensor, attention: Attention, feature_layers: Sequence[int] = (), mask: Mask = "causal"
    ) -> tuple[Tensor, Tensor | None]:
        """tokens (T,) -> hidden (T, H) after the final norm, and the states of `feature_layers` as (T, K * H).

        State i below num_layers is the output of layer i; num_layers itself is the hidden state after the final norm.
        """
        x = self.embed_tokens(tokens)
        states: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            x = layer(x, attention, mask)
            if index in feature_layers:
                states[index] = x
        hidden = states[self.config.num_layers] = self.norm(x)
        if not feature_layers:
            return hidden, None
        return hidden, torch.cat([states[index] for index in feature_layers], dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (T, H) -> (T, V)."""
        return linear(hidden, self.head)


def load_config(path: Path, trust_remote_code: bool = False) -> ModelConfig:
    return ModelConfig.from_hf(AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code))


def load_target(path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Target:
    """Reads a transformers checkpoint folder, strictly."""
    with torch.device("meta"):
        target = Target(config)
    tensors = {
        key.removeprefix("model."): tensor.to(device, dtype)
        for key, tensor in read_tensors(path).items()
        if not key.endswith(IGNORED_KEYS)
    }
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    load_strict(target, fuse(tensors), path)
    return target.eval().requires_grad_(False)
