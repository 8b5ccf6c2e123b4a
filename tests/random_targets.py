"""Tiny random models of each family, which the tests compare with transformers."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CwmConfig,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GlmConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
)

from slipstream.models.targets.decoder import Target
from slipstream.models.targets.packed_attention import PackedAttention

MakeTarget = Callable[[str], Path]  # family -> folder of a random checkpoint
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
WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
GEMMA = {
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
TWO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [1.0, 2.0, 5.0],
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 64,
}
ALWAYS_LONG = LONGROPE | {"original_max_position_embeddings": 1, "attention_factor": 1.2}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama-tied-bias": LlamaConfig(**SHAPE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama-rope-llama3": LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE),
    "llama-rope-linear": LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    ),
    "mistral": MistralConfig(**SHAPE, sliding_window=None),
    "mistral-window": MistralConfig(**SHAPE, sliding_window=19),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen2-windows": Qwen2Config(**SHAPE, **WINDOWS),
    "qwen2-yarn": Qwen2Config(**SHAPE, rope_parameters=YARN_ROPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
    "qwen3-windows": Qwen3Config(**SHAPE, **WINDOWS, head_dim=16),
    "gemma2-free-scores": Gemma2Config(**SHAPE, **GEMMA, attn_logit_softcapping=None, final_logit_softcapping=3.0),
    "gemma3": Gemma3TextConfig(**SHAPE, **GEMMA, rope_parameters=TWO_ROPES),
    "olmo2": Olmo2Config(**SHAPE),
    "phi3-window": Phi3Config(**SHAPE, sliding_window=19),
    "phi4-longrope": Phi3Config(
        **SHAPE, tie_word_embeddings=True, rope_parameters=ALWAYS_LONG, original_max_position_embeddings=1
    ),
    "qwen3-tied": Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
    "qwen3-moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=16, norm_topk_prob=True, mlp_only_layers=[3]),
    "qwen3-moe-windows": Qwen3MoeConfig(**SHAPE, **EXPERTS, use_sliding_window=True, sliding_window=9),
    "qwen2-moe": Qwen2MoeConfig(**SHAPE, **EXPERTS, shared_expert_intermediate_size=40, decoder_sparse_step=2),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=19),
}

# Families whose layers have no part that one of the others lacks.
BY_LAYER = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2}
GLM = {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
GRANITE = {"attention_multiplier": 0.11, "embedding_multiplier": 12.0, "residual_multiplier": 0.22}
OLMOE = {"num_experts": 6, "num_experts_per_tok": 2}
RELATIVES: dict[str, PretrainedConfig] = {
    "cwm": CwmConfig(**SHAPE, **BY_LAYER, head_dim=16, rope_parameters=dict(LLAMA3_ROPE)),
    "cwm-bias": CwmConfig(**SHAPE, **BY_LAYER, head_dim=16, mlp_bias=True, tie_word_embeddings=True),
    "ernie": Ernie4_5Config(**SHAPE, head_dim=16),
    "ernie-bias": Ernie4_5Config(**SHAPE, head_dim=8, use_bias=True, tie_word_embeddings=False),
    "exaone4": Exaone4Config(**SHAPE, sliding_window=None, layer_types=["full_attention"] * 4),
    "exaone4-hybrid": Exaone4Config(**SHAPE, **BY_LAYER),
    "exaone4-unrotated": Exaone4Config(**SHAPE, sliding_window=9, layer_types=["full_attention"] * 4),
    "gemma": GemmaConfig(**SHAPE, head_dim=16),
    "gemma-bias": GemmaConfig(**SHAPE, head_dim=16, attention_bias=True, tie_word_embeddings=False),
    "glm": GlmConfig(**SHAPE, **GLM),
    "glm4": Glm4Config(**SHAPE, **GLM),
    "glm4-tied": Glm4Config(**SHAPE, **GLM, attention_bias=False, tie_word_embeddings=True),
    "granite": GraniteConfig(**SHAPE, **GRANITE, tie_word_embeddings=True, logits_scaling=0.25),
    "granite-bias": GraniteConfig(**SHAPE, **GRANITE, attention_bias=True, mlp_bias=True, logits_scaling=0.7),
    "ministral": MinistralConfig(**SHAPE, **BY_LAYER, head_dim=16),
    "ministral-alike": MinistralConfig(**SHAPE, sliding_window=9, head_dim=16),
    "olmo3": Olmo3Config(**SHAPE, **BY_LAYER),
    "olmo3-yarn": Olmo3Config(
        **SHAPE,
        **BY_LAYER,
        attention_bias=True,
        rope_parameters={"sliding_attention": TWO_ROPES["sliding_attention"], "full_attention": YARN_ROPE},
    ),
    "olmoe": OlmoeConfig(**SHAPE, **OLMOE),
    "olmoe-norm": OlmoeConfig(**SHAPE, **OLMOE, norm_topk_prob=True, attention_bias=True),
    "smollm3": SmolLM3Config(**SHAPE, rope_parameters=dict(YARN_ROPE)),
    "smollm3-windows": SmolLM3Config(
        **SHAPE, use_sliding_window=True, sliding_window=9, no_rope_layers=[0, 1, 1, 0], attention_bias=True
    ),
    "seed-oss": SeedOssConfig(**SHAPE, head_dim=16),
    "seed-oss-output": SeedOssConfig(
        **SHAPE, head_dim=None, attention_bias=False, attention_out_bias=True, mlp_bias=True
    ),
}

SWASH = {**GRANITE, **BY_LAYER, "layer_rope_theta": [10000.0, 0, 500.0, 10000.0], "logits_scaling": 0.7}
MOE = {"num_local_experts": 5, "num_experts_per_tok": 2}
TYPED = {**BY_LAYER, **EXPERTS, "rope_parameters": TWO_ROPES, "head_dim": 16}
GROWTH = {**YARN_ROPE, "original_max_position_embeddings": 8, "factor": 32.0, "llama_4_scaling_beta": 0.4}
ALPHA = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}
MROPE = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
# Name of transformers' class, which older releases may lack, and fields.
ROUTED = {"moe_intermediate_size": 24, "num_experts_per_tok": 3}
DEEPSEEK_MOE = {**ROUTED, "n_routed_experts": 12, "n_shared_experts": 1, "routed_scaling_factor": 1.7}
IN_GROUPS = {"n_group": 4, "topk_group": 2, "n_shared_experts": 2}
DELTA_NETS = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12},
    **{"head_dim": 16, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
}
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
SHARED = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
NAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "arcee": ("ArceeConfig", {}),
    "arcee-bias": ("ArceeConfig", {"head_dim": 16, "mlp_bias": True, "attention_bias": True}),
    "dots1": ("Dots1Config", {**DEEPSEEK_MOE, **IN_GROUPS, "head_dim": 16, "first_k_dense_replace": 1}),
    "dots1-windows": ("Dots1Config", {**DEEPSEEK_MOE, **BY_LAYER, "norm_topk_prob": True, "attention_bias": True}),
    "ernie-moe": ("Ernie4_5_MoeConfig", {"moe_intermediate_size": 24, "moe_num_experts": 6, "moe_k": 2}),
    "ernie-moe-between": (
        "Ernie4_5_MoeConfig",
        {
            **{"moe_intermediate_size": 24, "moe_num_experts": 6, "moe_k": 3, "moe_num_shared_experts": 0},
            **{"moe_layer_start_index": 0, "moe_layer_end_index": 2, "moe_layer_interval": 2},
        },
    ),
    "exaone-moe": ("ExaoneMoeConfig", {**EXPERTS, **BY_LAYER, "routed_scaling_factor": 2.5}),
    "exaone-moe-plain": (
        "ExaoneMoeConfig",
        {**EXPERTS, "layer_types": ["full_attention"] * 4, "n_group": 2, "norm_topk_prob": False},
    ),
    "flint": ("FlintConfig", {**EXPERTS, **BY_LAYER, "head_dim": 16}),
    "glm4-moe": ("Glm4MoeConfig", {**DEEPSEEK_MOE, "head_dim": 16, "use_qk_norm": True}),
    "glm4-moe-groups": (
        "Glm4MoeConfig",
        {**DEEPSEEK_MOE, **IN_GROUPS, "attention_bias": True, "norm_topk_prob": False, "first_k_dense_replace": 2},
    ),
    "hy-v3": ("HYV3Config", {**EXPERTS, "head_dim": 16}),
    "hy-v3-bias": ("HYV3Config", {**EXPERTS, "attention_bias": True, "tie_word_embeddings": True}),
    "minimax-m2": (
        "MiniMaxM2Config",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8},
    ),
    "qwen3-next": ("Qwen3NextConfig", {**DELTA_NETS, **SHARED, "rope_parameters": PARTIAL_ROPE}),
    "qwen3-next-dense": (
        "Qwen3NextConfig",
        {
            **DELTA_NETS,
            **SHARED,
            **{
                "linear_num_key_heads": 4,
                "linear_conv_kernel_dim": 2,
                "attention_bias": True,
                "mlp_only_layers": [1, 3],
            },
            **{"layer_types": ["full_attention", "linear_attention"] * 2, "norm_topk_prob": False},
        },
    ),
    "qwen3-5": ("Qwen3_5TextConfig", {**DELTA_NETS, "rope_parameters": {**MROPE, **PARTIAL_ROPE}}),
    "qwen3-5-tied": ("Qwen3_5TextConfig", {**DELTA_NETS, "linear_conv_kernel_dim": 3, "tie_word_embeddings": True}),
    "qwen3-5-moe": ("Qwen3_5MoeTextConfig", {**DELTA_NETS, **SHARED}),
    "solar-open": ("SolarOpenConfig", {**DEEPSEEK_MOE, "head_dim": 16}),
    "solar-open-groups": ("SolarOpenConfig", {**DEEPSEEK_MOE, **IN_GROUPS, "attention_bias": True}),
    "exaone": ("ExaoneConfig", {"rope_parameters": dict(LLAMA3_ROPE)}),
    "exaone-tied": ("ExaoneConfig", {"head_dim": 16, "tie_word_embeddings": True}),
    "flex-olmo": ("FlexOlmoConfig", OLMOE),
    "flex-olmo-norm": ("FlexOlmoConfig", {**OLMOE, "norm_topk_prob": True, "attention_bias": True}),
    "granite-moe": ("GraniteMoeConfig", {**GRANITE, **MOE, "logits_scaling": 0.25}),
    "granite-moe-tied": ("GraniteMoeConfig", {**GRANITE, **MOE, "tie_word_embeddings": True, "attention_bias": True}),
    "granite-moe-shared": ("GraniteMoeSharedConfig", {**GRANITE, **MOE, "shared_intermediate_size": 40}),
    "granite-moe-unshared": ("GraniteMoeSharedConfig", {**MOE, "shared_intermediate_size": 0}),
    "granite-moe-swa": ("GraniteMoeSWAConfig", {**SWASH, **MOE, "shared_intermediate_size": 40}),
    "granite-swa": ("GraniteSWAConfig", SWASH),
    "granite-swa-bias": ("GraniteSWAConfig", {"sliding_window": 9, "attention_bias": True, "mlp_bias": True}),
    "helium": ("HeliumConfig", {"head_dim": 8}),
    "helium-bias": ("HeliumConfig", {"head_dim": 8, "attention_bias": True, "mlp_bias": True}),
    "hunyuan": ("HunYuanDenseV1Config", {"head_dim": 16, "rope_parameters": ALPHA}),
    "hunyuan-tied": (
        "HunYuanDenseV1Config",
        {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True, "rope_parameters": dict(YARN_ROPE)},
    ),
    "hunyuan-moe": ("HunYuanMoEV1Config", {"num_experts": 5, "moe_topk": [1, 2, 3, 2], "head_dim": 16}),
    "hyperclovax": ("HyperCLOVAXConfig", {**GRANITE, "logits_scaling": 0.25}),
    "hyperclovax-bare": ("HyperCLOVAXConfig", {**GRANITE, "use_post_norm": False, "tie_word_embeddings": True}),
    "internlm3": ("InternLM3Config", {"head_dim": 16}),
    "internlm3-bias": ("InternLM3Config", {"head_dim": None, "attention_bias": True, "mlp_bias": True}),
    "iquestcoder": ("IQuestCoderConfig", {"head_dim": 16}),
    "mellum": ("MellumConfig", {**TYPED, "mlp_layer_types": ["dense", "sparse"] * 2}),
    "mellum-plain": ("MellumConfig", {**EXPERTS, "norm_topk_prob": False, "attention_bias": True}),
    "ministral3": ("Ministral3Config", {"head_dim": 16, "rope_parameters": dict(GROWTH)}),
    "ministral3-window": (
        "Ministral3Config",
        {
            "head_dim": 8,
            "sliding_window": 19,
            "rope_parameters": LLAMA3_ROPE | {"llama_4_scaling_beta": 0.3},
            "tie_word_embeddings": True,
        },
    ),
    "vaultgemma": ("VaultGemmaConfig", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
}
RELATIVES |= {
    name: getattr(transformers, kind)(**SHAPE | fields)
    for name, (kind, fields) in NAMED.items()
    if hasattr(transformers, kind)
}

MUSE: dict[str, Any] = {
    **{"sliding_window": 9, "qk_scale_factor": 1.7, "output_multiplier": 0.4, "post_norm_eps": 0.01},
    **{"head_dim": 16, "final_logit_softcapping": 3.0},
}
MUSE_VISION = {
    **{"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1},
    **{"patch_size": 2, "pos_emb_height": 2, "pos_emb_width": 2},
}


def muse_glimmer(tied: bool = False, **fields: Any) -> PretrainedConfig:
    """The top level says nothing of the head where it is not tied, as in published files."""
    text = transformers.MuseGlimmerTextConfig(**SHAPE | MUSE | fields)
    tower = {"vision_config": dict(MUSE_VISION), "out_hidden_size": 32, "projector_hidden_size": 8}
    return transformers.MuseGlimmerConfig(text_config=text, **tower, **{"tie_word_embeddings": True} if tied else {})


if hasattr(transformers, "MuseGlimmerConfig"):  # later than the oldest release that the package allows
    RELATIVES["muse-glimmer"] = muse_glimmer()
    RELATIVES["muse-glimmer-unrotated"] = muse_glimmer(
        tied=True,
        attention_bias=True,
        hidden_activation="gelu_pytorch_tanh",
        rope_parameters=dict(YARN_ROPE),
        layer_types=["full_attention", "sliding_attention"] * 2,
        layer_rope_theta=[10000.0, 0, 0, 10000.0],
    )

if hasattr(transformers, "LagunaConfig"):
    LAGUNA = (
        SHAPE
        | EXPERTS
        | {
            **{"head_dim": 16, "sliding_window": 9, "shared_expert_intermediate_size": 40},
            **{"num_attention_heads_per_layer": [4, 8, 4, 12], "moe_routed_scaling_factor": 2.5},
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        }
    )
    RELATIVES["laguna"] = transformers.LagunaConfig(**LAGUNA)
    RELATIVES["laguna-elements"] = transformers.LagunaConfig(
        **LAGUNA,
        gating="per-element",
        attention_bias=True,
        tie_word_embeddings=True,
        moe_router_logit_softcapping=0.7,
        mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.25},
            "full_attention": YARN_ROPE | {"partial_rotary_factor": 0.5},
        },
    )

if hasattr(transformers, "Gemma4TextConfig"):
    GEMMA4_KINDS = ["sliding_attention", "full_attention"] * 3
    GEMMA4 = SHAPE | {
        **{"head_dim": 8, "sliding_window": 9, "num_hidden_layers": 6, "global_head_dim": 16},
        **{"hidden_size_per_layer_input": 0, "layer_types": GEMMA4_KINDS},
        "final_logit_softcapping": 3.0,
    }
    PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 130}
    RELATIVES["gemma4"] = transformers.Gemma4TextConfig(
        **GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1, use_bidirectional_attention="vision"
    )
    RELATIVES["gemma4-shared"] = transformers.Gemma4TextConfig(
        **GEMMA4 | PER_LAYER, num_kv_shared_layers=3, use_double_wide_mlp=True
    )
    RELATIVES["gemma4-experts"] = transformers.Gemma4TextConfig(
        **GEMMA4, enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=24
    )
    RELATIVES["gemma4-wide"] = transformers.Gemma4TextConfig(  # heads as wide as those of published ones
        **GEMMA4 | {"head_dim": 256, "global_head_dim": 512, "num_hidden_layers": 4, "layer_types": GEMMA4_KINDS[:4]},
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
    )
    RELATIVES["gemma4-odd"] = transformers.Gemma4TextConfig(
        **GEMMA4 | PER_LAYER | {"layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"] * 2},
        hidden_activation="silu",
        attention_bias=True,
        attention_k_eq_v=True,
        num_kv_shared_layers=1,
        tie_word_embeddings=False,
        rope_parameters={
            "sliding_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.7},
        },
    )
if hasattr(transformers, "Gemma4UnifiedTextConfig"):
    unified = {name: value for name, value in GEMMA4.items() if name != "hidden_size_per_layer_input"}
    RELATIVES["gemma4-unified"] = transformers.Gemma4UnifiedTextConfig(**unified, num_kv_shared_layers=2)

# With soft caps of scores or sinks, which attention backends may lack.
CAPPED: dict[str, PretrainedConfig] = {
    "gemma2": Gemma2Config(**SHAPE, **GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "gpt-oss": GptOssConfig(
        **SHAPE,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=9,
        rope_parameters=YARN_ROPE | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    ),
}


def save_random_target(config: PretrainedConfig, folder: Path, seed: int = 0) -> None:
    """Weights five times the usual spread, so that no two logits of a random model are close."""
    torch.manual_seed(seed)
    config.get_text_config().initializer_range = 0.1
    model = auto_class(config).from_config(config).float()
    roughen(model)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    model.save_pretrained(folder)


def auto_class(config: PretrainedConfig) -> type[AutoModelForCausalLM | AutoModelForImageTextToText]:
    """Returns transformers' class that builds the model: some multimodal ones are no causal LMs to it."""
    is_causal = type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForCausalLM if is_causal else AutoModelForImageTextToText


def load_model(path: Path, **options: Any) -> PreTrainedModel:
    """Returns transformers' model of a folder, text part and head."""
    return auto_class(AutoConfig.from_pretrained(path)).from_pretrained(path, **options)


def roughen(module: nn.Module) -> None:
    """Norms and biases start as constants, and sinks small: makes them count."""
    for name, parameter in module.named_parameters():
        if parameter.dim() == 1:
            parameter.data += (1.0 if name.endswith("sinks") else 0.2) * torch.randn_like(parameter)
        if name.endswith("q_norm.weight") and parameter.numel() >= 256:
            parameter.data *= 0.1  # else each row of wide heads, whose scores Gemma 4 does not scale, sees one token
    for name, tensor in (*module.named_buffers(), *module.named_parameters()):
        if name.endswith(("layer_scalar", "e_score_correction_bias")):  # of Gemma 4, of routers
            tensor.data += 0.2 * torch.randn_like(tensor)


def shared_weights(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Embedding and head (V, H), the weights of the target that drafts use."""
    return model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()


@torch.no_grad()
def logits(target: Target, tokens: Tensor) -> Tensor:
    """(S, V), as our modules compute them."""
    attention = PackedAttention()
    attention.plan(torch.arange(len(tokens))[None])
    return target.logits(target(tokens, attention)[0])


@torch.no_grad()
def target_states(model: PreTrainedModel, tokens: Sequence[int] | Tensor) -> list[Tensor]:
    """States by id: every layer's output (S, H), the last one's before the final norm, and the state after it."""
    decoder = model.get_decoder()
    outputs = []
    hook = decoder.layers[-1].register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    states = model(torch.as_tensor(tokens)[None], output_hidden_states=True).hidden_states
    hook.remove()
    last = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]
    return [state[0] for state in states[1:-1]] + [last[0], states[-1][0]]


def target_aux_states(model: PreTrainedModel, tokens: Sequence[int] | Tensor, layers: Sequence[int]) -> Tensor:
    """(S, K * H): the states that a draft reads."""
    states = target_states(model, tokens)
    return torch.cat([states[layer] for layer in layers], dim=-1)


def change_json(path: Path, **values: Any) -> None:
    """Replaces fields of the object in a file; None deletes."""
    changed = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))
