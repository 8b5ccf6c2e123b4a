"""Tiny mixtures of experts in every layer; gpt-oss is trained for and not served."""

from transformers import GptOssConfig, PretrainedConfig, Qwen3MoeConfig

from slipstream.tests.random_targets import FAMILIES, SHAPE

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
LAYER_TYPES = ["sliding_attention", "full_attention"] * 2
YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "truncate": False}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 64}

EXPERT_FAMILIES: dict[str, PretrainedConfig] = {
    "qwen3-moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, moe_intermediate_size=24),
    "gpt-oss": GptOssConfig(**SHAPE, **EXPERTS, sliding_window=3, layer_types=LAYER_TYPES, rope_parameters=YARN),
    "qwen2-moe": FAMILIES["qwen2-moe"],
    "mixtral": FAMILIES["mixtral"],
}
