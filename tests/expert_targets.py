"""Tiny mixtures of experts in every layer."""

from transformers import PretrainedConfig, Qwen3MoeConfig

from slipstream.tests.random_targets import CAPPED, FAMILIES, SHAPE

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}

EXPERT_FAMILIES: dict[str, PretrainedConfig] = {
    "qwen3-moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, moe_intermediate_size=24),
    "gpt-oss": CAPPED["gpt-oss"],
    "qwen2-moe": FAMILIES["qwen2-moe"],
    "mixtral": FAMILIES["mixtral"],
}
