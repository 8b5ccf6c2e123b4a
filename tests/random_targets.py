"""Tiny random models of each family: what the tests compare with transformers."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

SHAPE = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama-tied-bias": LlamaConfig(**SHAPE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama-rope-llama3": LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE),
    "llama-rope-linear": LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    ),
    "mistral": MistralConfig(**SHAPE, sliding_window=None),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen2-yarn": Qwen2Config(**SHAPE, rope_parameters=YARN_ROPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
    "qwen3-tied": Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
}


def save_random_target(config: PretrainedConfig, folder: Path, seed: int = 0) -> None:
    """Weights five times the usual spread, so that no two logits of a random model are close."""
    torch.manual_seed(seed)
    config.initializer_range = 0.1
    model = AutoModelForCausalLM.from_config(config).float()
    for name, parameter in model.named_parameters():  # norms and biases start as constants: make them count
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
        assert torch.isfinite(parameter).all(), name
    model.save_pretrained(folder)
