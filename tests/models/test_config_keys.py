"""Every key of a config.json changes the text as it does in transformers, or is refused by name.

Each family gets each key that any family's config class has, with another legal value: keys of other families are what
people leave behind in a file.
"""

import copy
import json
import re
from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Gemma3Config, PreTrainedModel, SiglipVisionConfig

from slipstream.models.targets.decoder import load_config, load_target
from slipstream.models.targets.frozen import load_frozen_target
from slipstream.models.targets.packed_attention import PackedAttention
from slipstream.models.targets.pretrained import load_tokenizer
from slipstream.tests.models.saved_drafts import CPU
from slipstream.tests.pairwise import gate_of, grouped
from slipstream.tests.random_targets import CAPPED, FAMILIES, RELATIVES, auto_class, roughen
from slipstream.tests.sources import TINY

Changes = dict[str, Any]
WRAPPER = "gemma3-wrapper"
MIXED = ["sliding_attention", "full_attention"]
ORIGINAL = "original_max_position_embeddings"
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 64}
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 64}
LINEAR = {"rope_type": "linear", "factor": 4.0}

# Key -> what is changed, the key among it.
CHANGES: dict[str, list[Changes]] = {
    "attention_bias": [{"attention_bias": True}, {"attention_bias": False}],
    "attn_logit_softcapping": [{"attn_logit_softcapping": 0.5}, {"attn_logit_softcapping": None}],
    "decoder_sparse_step": [{"decoder_sparse_step": 2}],
    "final_logit_softcapping": [{"final_logit_softcapping": 0.5}, {"final_logit_softcapping": None}],
    "head_dim": [{"head_dim": 12}, {"head_dim": 7}],
    "hidden_act": [{"hidden_act": "gelu_pytorch_tanh"}, {"hidden_act": "relu"}, {"hidden_act": "swish"}],
    "hidden_activation": [{"hidden_activation": "silu"}, {"hidden_activation": "gelu"}],
    "hidden_size": [{"hidden_size": 64}],
    "intermediate_size": [{"intermediate_size": 40}],
    "layer_types": [
        {"layer_types": MIXED, "sliding_window": 7},
        {"layer_types": MIXED[::-1], "sliding_window": 7, "use_sliding_window": True},
        {"layer_types": MIXED, "sliding_window": 7, "use_sliding_window": False},
        {"layer_types": ["full_attention"] * 2, "sliding_window": 7},
    ],
    "max_position_embeddings": [
        {"max_position_embeddings": 512},
        {"max_position_embeddings": 512, "rope_scaling": YARN},
    ],
    "max_window_layers": [
        {"max_window_layers": 1, "use_sliding_window": True, "sliding_window": 7, "layer_types": None}
    ],
    "mlp_bias": [{"mlp_bias": True}],
    "mlp_only_layers": [{"mlp_only_layers": [1]}],
    "moe_intermediate_size": [{"moe_intermediate_size": 16}],
    "norm_topk_prob": [{"norm_topk_prob": True}, {"norm_topk_prob": False}],
    "num_attention_heads": [{"num_attention_heads": 2}, {"num_attention_heads": 8}],
    "num_experts": [{"num_experts": 5}],
    "num_experts_per_tok": [{"num_experts_per_tok": 1}],
    "num_hidden_layers": [{"num_hidden_layers": 1, "layer_types": None}],
    "num_key_value_heads": [{"num_key_value_heads": 1}, {"num_key_value_heads": None}, {"num_key_value_heads": 3}],
    "num_local_experts": [{"num_local_experts": 5}],
    ORIGINAL: [
        {ORIGINAL: 16, "rope_parameters": {**LLAMA3, "rope_theta": 1e4}},
        {ORIGINAL: 16, "rope_parameters": {**YARN, "rope_theta": 1e4}},
        {ORIGINAL: 16},
    ],
    "partial_rotary_factor": [
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"rope_parameters": {**LINEAR, "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ],
    "qkv_bias": [{"qkv_bias": False}, {"qkv_bias": True}],
    "query_pre_attn_scalar": [{"query_pre_attn_scalar": 7}],
    "rms_norm_eps": [{"rms_norm_eps": 0.1}],
    "rope_local_base_freq": [{"rope_local_base_freq": 500.0, "rope_parameters": None}],
    "rope_parameters": [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rope_parameters": {**LINEAR, "rope_theta": 1e4}},
        {"rope_parameters": {**YARN, "rope_theta": 1e4, "factor": None}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0}},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default"}},
    ],
    "rope_scaling": [
        {"rope_scaling": LINEAR},
        {"rope_scaling": {"type": "yarn", **YARN}, "rope_parameters": None, "rope_theta": 1e4},
        {"rope_scaling": {**YARN, "rope_theta": 500.0}, "rope_parameters": None},
        {"rope_scaling": {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}, "rope_parameters": None},
    ],
    "rope_theta": [{"rope_theta": 500.0, "rope_parameters": None}, {"rope_theta": 500.0}],
    "shared_expert_intermediate_size": [{"shared_expert_intermediate_size": 16}],
    "sliding_window": [
        {"sliding_window": 5},
        {"sliding_window": None},
        {"sliding_window": 5, "use_sliding_window": True},
    ],
    "sliding_window_pattern": [{"sliding_window_pattern": 2, "layer_types": None}],
    "swiglu_alpha": [{"swiglu_alpha": 1.0}],
    "swiglu_limit": [{"swiglu_limit": 0.5}],
    "tie_word_embeddings": [{"tie_word_embeddings": True}, {"tie_word_embeddings": False}],
    "use_bidirectional_attention": [{"use_bidirectional_attention": True}],
    "use_sliding_window": [
        {"use_sliding_window": False},
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": None},
    ],
    "vocab_size": [{"vocab_size": 99}],
}
NO_EFFECT = {
    **dict.fromkeys(("attention_dropout", "resid_pdrop", "embd_pdrop", "router_jitter_noise"), "training alone"),
    **dict.fromkeys(("output_router_logits", "router_aux_loss_coef"), "a training loss"),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), "where a text begins and ends"),
    "initializer_range": "weights are read",
    "pretraining_tp": "how the products were cut, which transformers no longer does",
    "use_cache": "the same logits either way",
}
# Fields that a refusal may name instead, because the key makes them wrong.
ALSO_NAMED = {
    "hidden_size": ("head_dim", "short_factor"),
    "num_attention_heads": ("num_key_value_heads", "head_dim", "short_factor", "hidden_size"),
    "layer_types": ("sliding_window",),
    "max_position_embeddings": ("rope_scaling",),
    "partial_rotary_factor": ("rope_parameters",),
    "rope_theta": ("rope_parameters",),
    "rope_parameters": ("rope_type", "factor"),
    "rope_scaling": ("rope_type", "rope_parameters"),
    ORIGINAL: ("rope_parameters",),
    "num_hidden_layers": ("mlp_only_layers",),
}
# One of each config class.
BASES = [
    *("llama", "mistral-window", "qwen2-windows", "qwen3-windows", "gemma2", "gemma3", "olmo2", "phi3-window"),
    *("qwen3-moe-windows", "qwen2-moe", "mixtral", "gpt-oss", WRAPPER),
]
TRAPS = (
    *("attn_logit_softcapping", "hidden_act", "layer_types", ORIGINAL, "partial_rotary_factor", "rope_scaling"),
    *("sliding_window", "tie_word_embeddings", "use_sliding_window"),
)
CASES = [
    (family, key, number)
    for family in (*FAMILIES, *CAPPED, WRAPPER)
    for key in CHANGES
    for number in range(len(CHANGES[key]))
]
GATE = [case for case in CASES if case[0] in BASES and case[1] in TRAPS and case[2] == 0]


GROWTH = {**YARN, "rope_theta": 1e4, ORIGINAL: 16, "llama_4_scaling_beta": 0.3}
# Families with fields of their own -> changes of them, and of those that they share with others.
BY_LAYER = {"0": {"head_dim": 16}, "1": {"head_dim": 16}, "3": {"head_dim": 16}, "5": {"head_dim": 16}}
LATER: dict[str, list[Changes]] = {
    "arcee": [{"hidden_act": name} for name in ("silu", "relu2")],
    "dots1": [
        *({"n_group": groups} for groups in (1, 2, 3, 5, 12, 0, None)),
        *({"topk_group": groups} for groups in (1, 4, 5, 0)),
        *({"first_k_dense_replace": count} for count in (0, 2, 4, -1)),
        *({"routed_scaling_factor": 2.5}, {"routed_scaling_factor": 0}, {"norm_topk_prob": True}),
        *({"num_experts_per_tok": count} for count in (6, 7)),
        *({"scoring_func": "softmax"}, {"topk_method": "greedy"}, {"n_routed_experts": 8}, {"hidden_act": "relu"}),
    ],
    "ernie-moe": [
        *({"moe_layer_start_index": index} for index in (0, 3, -1, None)),
        *({"moe_layer_end_index": index} for index in (1, 3, -1, 9, None)),
        *({"moe_layer_interval": 2}, {"moe_num_shared_experts": 1}, {"use_bias": True}, {"moe_k": 3}, {"moe_k": 9}),
    ],
    "exaone-moe": [
        *({"mlp_layer_types": kinds} for kinds in (["dense"] * 2 + ["sparse"] * 2, ["sparse"] * 3)),
        *({"sliding_window": 5}, {"n_group": 2}, {"num_shared_experts": 2}, {"norm_topk_prob": False}),
    ],
    "glm4-moe": [
        *({"use_qk_norm": False}, {"attention_bias": True}, {"norm_topk_prob": False}, {"n_group": 2}),
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
    ],
    "minimax-m2": [
        *({"rotary_dim": dims} for dims in (4, 16)),
        *({"num_local_experts": 5}, {"scoring_func": "softmax"}, {"use_qk_norm": False}, {"qk_norm_type": "per_head"}),
    ],
    "granite-moe-shared": [
        *({key: 2.0} for key in ("attention_multiplier", "embedding_multiplier", "residual_multiplier")),
        *({"logits_scaling": factor} for factor in (2.0, 1, 0, None)),
        *({"shared_intermediate_size": size} for size in (16, 0, None)),
        *({"num_local_experts": 3}, {"num_experts_per_tok": 5}, {"hidden_act": "gelu_pytorch_tanh"}),
    ],
    "granite-swa": [
        *({"layer_rope_theta": thetas} for thetas in (None, [0] * 4, [1e4] * 3, [500, 0, 1000, 1e4])),
        *({"sliding_window": 5}, {"sliding_window": None}, {"mlp_bias": True}, {"attention_bias": True}),
    ],
    "hunyuan": [
        *({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": alpha}} for alpha in (1.0, 9.0, 0)),
        *({"rope_parameters": {"rope_type": kind, "rope_theta": 500.0}} for kind in ("default", "dynamic")),
        {
            "rope_parameters": None,
            "rope_scaling": {"type": "dynamic", "alpha": 9.0, "factor": 1.0},
            "rope_theta": 500.0,
        },
        *({"use_cla": True}, {"head_dim": 8}, {"attention_bias": True}, {"rms_norm_eps": 0.1}),
    ],
    "hunyuan-moe": [{"moe_topk": number} for number in (3, [1, 2], [2, 1, 1, 5])],
    "hyperclovax": [
        *({"use_post_norm": False}, {"use_post_norm": None}, {"attention_multiplier": None}, {"logits_scaling": 3}),
        *({"residual_multiplier": 1.0}, {"residual_multiplier": None}, {"attention_bias": True}),
    ],
    "mellum": [
        *({"mlp_layer_types": kinds} for kinds in (None, ["dense"] * 4, ["sparse"] * 3, ["x"] * 4)),
        *({"decoder_sparse_step": 2}, {"mlp_only_layers": [1]}, {"norm_topk_prob": True}, {"num_mtp_layers": 1}),
        *({"layer_types": MIXED[::-1] * 2}, {"rope_parameters": None}, {"use_sliding_window": False}),
    ],
    "ministral3": [
        *({"rope_parameters": GROWTH | {"llama_4_scaling_beta": beta}} for beta in (0, None, 1)),
        *({"rope_parameters": GROWTH | {"rope_type": kind}} for kind in ("default", "linear")),
        *(
            {"rope_parameters": GROWTH, ORIGINAL: 4},
            {"rope_parameters": GROWTH | {"rope_type": "default"}, ORIGINAL: 4},
        ),
        {"rope_parameters": GROWTH | {"partial_rotary_factor": 0.5}},
        *({"rope_parameters": None, "rope_scaling": GROWTH}, {"sliding_window": 5}, {"layer_types": MIXED * 2}),
    ],
    "muse-glimmer": [
        *({"sliding_window": 5}, {"sliding_window": None}, {"attention_bias": True}, {"rms_norm_eps": 0.1}),
        *({"qk_scale_factor": 2.0}, {"qk_scale_factor": 0.0}, {"output_multiplier": 2.0}, {"post_norm_eps": 0.5}),
        *({"final_logit_softcapping": 1.0}, {"final_logit_softcapping": None}, {"layer_rope_theta": None}),
        *({"layer_rope_theta": [0] * 4}, {"layer_rope_theta": [500.0] * 4}, {"layer_types": None}),
        *({"rope_parameters": {**LINEAR, "rope_theta": 1e4}}, {"head_dim": 8}, {"num_key_value_heads": 1}),
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        *({"hidden_activation": "gelu_pytorch_tanh"}, {"hidden_activation": "relu"}, {"num_hidden_layers": 3}),
        {"per_layer_config": {"0": {"head_dim": 8}}},
    ],
    "laguna": [
        *({"gating": kind} for kind in ("per-head", "per-element", False, "none")),
        *({"num_attention_heads_per_layer": heads} for heads in (None, [4, 4, 4, 5], [4, 4])),
        *({"num_attention_heads": 8}, {"num_key_value_heads": 4}, {"head_dim": 8}, {"attention_bias": True}),
        *({"moe_router_logit_softcapping": cap} for cap in (0.0, 0.5, -1.0)),
        *({"moe_routed_scaling_factor": 0.5}, {"moe_apply_router_weight_on_input": True}, {"norm_topk_prob": False}),
        *({"mlp_layer_types": kinds} for kinds in (None, ["sparse"] * 4, ["dense"] * 4, ["other"] * 4)),
        *({"shared_expert_intermediate_size": 16}, {"num_experts": 5}),
        *({"num_experts_per_tok": 7}, {"hidden_act": "gelu_pytorch_tanh"}, {"hidden_act": "relu"}),
        *({"sliding_window": 5}, {"layer_types": None}, {"partial_rotary_factor": 0.5}, {"rms_norm_eps": 0.1}),
        {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": 500.0} for kind in MIXED}},
        {
            "partial_rotary_factor": 0.5,
            "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 500.0} for kind in MIXED},
        },
        {"rope_parameters": {kind: {**YARN, "rope_theta": 1e4, "partial_rotary_factor": 0.25} for kind in MIXED}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        *({"swa_attention_sink_enabled": value} for value in (True, False)),
        *({"moe_router_use_sigmoid": value} for value in (True, False)),
        *({"moe_router_score_func": "sqrtsoftplus"}, {"swa_rope_parameters": {"rope_theta": 1e4}}),
        {"mlp_only_layers": [0, 1], "decoder_sparse_step": 2, "qkv_bias": True},
    ],
    "gemma4": [
        *({"sliding_window": 5}, {"attention_bias": True}, {"final_logit_softcapping": None}, {"rms_norm_eps": 0.1}),
        *({"num_kv_shared_layers": 2}, {"num_kv_shared_layers": 5}, {"num_kv_shared_layers": 6}),
        *({"use_double_wide_mlp": True}, {"use_double_wide_mlp": True, "num_kv_shared_layers": 1}),
        *({"attention_k_eq_v": False}, {"hidden_activation": "silu"}, {"hidden_activation": "relu"}),
        *({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": size} for size in (120, 99)),
        *({"use_bidirectional_attention": kind} for kind in ("all", "vision", None)),
        *({"head_dim": 12}, {"head_dim": 7}, {"num_key_value_heads": 4}, {"num_key_value_heads": 3}),
        *({"per_layer_config": None, "global_head_dim": size} for size in (24, 7)),
        {"per_layer_config": None, "global_head_dim": 8, "num_global_key_value_heads": 2},
        *({"per_layer_config": BY_LAYER}, {"per_layer_config": {"1": {"head_dim": 16}}}),
        {"per_layer_config": {str(layer): {"intermediate_size": 24} for layer in (1, 3, 5)}},
        *({"layer_types": ["full_attention"] * 6, "per_layer_config": None}, {"layer_types": MIXED}),
        {"layer_types": ["full_attention", *["sliding_attention"] * 5], "per_layer_config": None},
        {"rope_parameters": {kind: {**LINEAR, "rope_theta": 1e4} for kind in MIXED}},
        {"rope_parameters": {kind: {"rope_type": "proportional", "rope_theta": 1e4} for kind in MIXED}},
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {
                    **{"rope_type": "proportional", "rope_theta": 5e3},
                    **{"partial_rotary_factor": 0.5, "factor": 8.0},
                },
            }
        },
        *({"enable_moe_block": True}, {"tie_word_embeddings": False}, {"num_hidden_layers": 4}),
        {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 6, "moe_intermediate_size": 16},
        {
            **{"enable_moe_block": True, "num_experts": 5, "top_k_experts": 3, "moe_intermediate_size": 16},
            **{"hidden_activation": "silu", "hidden_size_per_layer_input": 8},
        },
    ],
}
LATER_ALSO_NAMED = {"layer_types", "per_layer_config", "partial_rotary_factor", "llama_4_scaling_beta", ORIGINAL}
LATER_ALSO_NAMED |= {"num_experts", "num_key_value_heads", "rope_parameters"}
LATER_CASES = [(family, changes) for family in LATER if family in RELATIVES for changes in LATER[family]]


def base_values(family: str) -> dict[str, Any]:
    """config.json of a model of two layers, or of a later family."""
    config = copy.deepcopy((FAMILIES | CAPPED | RELATIVES)["gemma3" if family == WRAPPER else family])
    architecture = auto_class(config)._model_mapping[type(config)].__name__
    values = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [architecture]}
    if family in LATER:
        return values
    values["num_hidden_layers"] = 2
    for key in ("layer_types", "mlp_only_layers"):
        if values.get(key):
            values[key] = [entry for entry in values[key][:2] if entry not in (2, 3)]
    if family != WRAPPER:
        return values
    vision = SiglipVisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=28, patch_size=14
    )
    outer = json.loads(Gemma3Config(vision_config=vision, mm_tokens_per_image=4).to_json_string(use_diff=False))
    return outer | {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": values}


def changed_values(family: str, changes: Changes) -> dict[str, Any]:
    values = base_values(family)
    if "text_config" not in values:
        return values | changes
    tied = {key: changes[key] for key in ("tie_word_embeddings",) if key in changes}
    return values | tied | {"text_config": values["text_config"] | changes}


def reference_model(path: Path) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(path)
    torch.manual_seed(0)
    config.get_text_config().initializer_range = 0.1
    # The class of the config, which is not always the one that config.json names: a Mistral may be a Ministral.
    model = auto_class(config)._model_mapping[type(config)](config).float().eval()
    model.set_attn_implementation("eager")
    roughen(model)
    return model


@grouped("family")
@pytest.mark.parametrize(("family", "key", "number"), gate_of(CASES, GATE))
def test_a_key_does_what_it_does_in_transformers(family: str, key: str, number: int, tmp_path: Path) -> None:
    check_changes(family, CHANGES[key][number], (key, *ALSO_NAMED.get(key, ())), tmp_path)


@grouped("family")
@pytest.mark.parametrize(("family", "changes"), gate_of(LATER_CASES, LATER_CASES[::2]))
def test_keys_of_later_families_do_what_they_do_in_transformers(family: str, changes: Changes, tmp_path: Path) -> None:
    check_changes(family, changes, changes.keys() | LATER_ALSO_NAMED, tmp_path)


def check_changes(family: str, changes: Changes, names: Collection[str], tmp_path: Path) -> None:
    """Compares logits, or asks for a refusal that has one of the `names`."""
    text = json.dumps(changed_values(family, changes))
    (tmp_path / "config.json").write_text(text)
    tokens = torch.randint(3, 90, (60,), generator=torch.Generator().manual_seed(1))
    try:
        model = reference_model(tmp_path)
        with torch.no_grad():
            expected = model(input_ids=tokens[None]).logits[0]
        model.save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text(text)
    except Exception:  # of any kind: transformers does not run it
        expected = None
    try:
        config = load_config(tmp_path)
        target = None if expected is None else load_target(tmp_path, config, torch.float32, CPU)
    except ValueError as error:
        if not any(name in str(error) for name in names):
            raise
        return
    if target is None:
        return  # nothing to compare with
    attention = PackedAttention()
    attention.plan(torch.arange(len(tokens))[None])
    with torch.no_grad():
        torch.testing.assert_close(target.logits(target(tokens, attention)[0]), expected, atol=5e-5, rtol=1e-4)


def test_every_key_of_every_family_is_tried() -> None:
    keys = {key for family in BASES if family != WRAPPER for key in (FAMILIES | CAPPED)[family].__dataclass_fields__}
    inherited = set(transformers.PretrainedConfig.__dataclass_fields__)
    assert keys - inherited - CHANGES.keys() - NO_EFFECT.keys() == set()
    assert not CHANGES.keys() & NO_EFFECT.keys()


@pytest.mark.parametrize("family", BASES)
def test_transformers_runs_each_family_as_it_is(family: str, tmp_path: Path) -> None:
    """Else the test above would compare nothing."""
    (tmp_path / "config.json").write_text(json.dumps(base_values(family)))
    assert reference_model(tmp_path)(input_ids=torch.arange(3, 63)[None]).logits.isfinite().all()


ROPE = {"rope_theta": 1e4}
LONGROPE = {"rope_type": "longrope", ORIGINAL: 64, **ROPE}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        *(
            ("llama", {key: value}, f"config.json: {key} is {re.escape(repr(value))}; ")
            for key, value in {
                **{"hidden_size": "32", "vocab_size": None, "num_attention_heads": 0, "num_hidden_layers": -1},
                **{"intermediate_size": 48.0, "rms_norm_eps": None, "num_key_value_heads": 3, "head_dim": 7},
                **{"max_position_embeddings": True, "rope_parameters": [1]},
            }.items()
        ),
        ("mistral", {"sliding_window": [1, 2]}, r"config.json: sliding_window is \[1, 2\]; it must be an integer"),
        ("llama", {"rope_parameters": {"rope_type": "linear", **ROPE}}, "config.json: factor is None"),
        ("llama", {"rope_parameters": {"rope_theta": "1e4"}}, "config.json: rope_theta is '1e4'"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, **ROPE}}, "low_freq_factor is None"),
        ("llama", {"rope_parameters": LONGROPE}, "config.json: short_factor is None; it must be a list"),
        (
            "llama",
            {"rope_parameters": {**LONGROPE, "short_factor": [1.0], "long_factor": [1.0]}},
            "config.json: short_factor has 1 numbers; head_dim 8 needs 4",
        ),
        ("phi3-window", {"rope_scaling": {"type": "su", **LONGROPE}, "rope_parameters": None}, "'su', the former name"),
        ("qwen3", {"use_sliding_window": "yes"}, "config.json cannot be read by transformers .*use_sliding_window"),
        ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0; it must be a number above 0"),
        ("mixtral", {"num_local_experts": 4, "num_experts": 5}, "how many experts there are twice"),
    ],
)
def test_a_config_that_cannot_be_is_refused_with_its_key(
    family: str, changes: Changes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(changed_values(family, changes)))
    with pytest.raises(ValueError, match=message):
        load_config(tmp_path)


def test_a_config_at_fault_is_not_told_as_a_tokenizer(tmp_path: Path) -> None:
    """transformers reads it first, to know the tokenizer's class."""
    (tmp_path / "tokenizer.json").write_text((TINY / "tokenizer.json").read_text())
    values = changed_values("phi3-window", {"rope_parameters": None, "rope_scaling": {"type": "su"}})
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"config\.json cannot be read by transformers .*rope_parameters"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(("outer", "inner"), [(True, True), (False, False), (False, True), (True, False)])
def test_a_wrappers_top_level_says_whether_the_head_is_tied(outer: bool, inner: bool, tmp_path: Path) -> None:
    values = changed_values(WRAPPER, {"tie_word_embeddings": inner}) | {"tie_word_embeddings": outer}
    (tmp_path / "config.json").write_text(json.dumps(values))
    model = reference_model(tmp_path)
    tokens = torch.arange(3, 40)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values))
    target = load_target(tmp_path, load_config(tmp_path), torch.float32, CPU)
    attention = PackedAttention()
    attention.plan(torch.arange(len(tokens))[None])
    with torch.no_grad():
        expected = model(input_ids=tokens[None]).logits[0]
        torch.testing.assert_close(target.logits(target(tokens, attention)[0]), expected, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("reader", ["served", "trained"])
@pytest.mark.parametrize("family", ["llama-tied-bias", "gemma2", WRAPPER])
def test_a_head_that_contradicts_the_config_is_refused(reader: str, family: str, tmp_path: Path) -> None:
    """transformers unties it, with a warning; a copy of the embedding is none."""
    values = changed_values(family, {"tie_word_embeddings": True})
    (tmp_path / "config.json").write_text(json.dumps(values))
    reference_model(tmp_path).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values))
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = next(tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
    for head, is_copy in ((embedding.clone(), True), (embedding.roll(1, 0), False)):
        save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with (
            nullcontext() if is_copy else pytest.raises(ValueError, match=r"tie_word_embeddings .* \(lm_head.weight\)")
        ):
            if reader == "trained":
                load_frozen_target(tmp_path, (0,), CPU)
            else:
                load_target(tmp_path, load_config(tmp_path), torch.float32, CPU)
