"""Drafts as other trainers save them: their config.json written out, their names of tensors, and no field of ours.

Each is made from a draft of ours in the folder `draft`, whose weights it has, so it must propose the same tokens.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.models.targets.config import RopeConfig

# Fields of every config.json that transformers writes; they say nothing about the network.
BOOKKEEPING = {"attention_dropout": 0.0, "initializer_range": 0.02, "transformers_version": "5.19.0", "use_cache": True}
SHAPE = (
    *("attention_bias", "head_dim", "hidden_size", "intermediate_size", "max_position_embeddings", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "vocab_size", "hidden_act"),
)


def save_as_specforge(draft: Path, folder: Path, layers: tuple[int, ...] | None) -> None:
    """SpecForge's export of EAGLE3 for SGLang, whose config.json was the input of its training. It names `layers`, as
    outputs, if the user's file did; the embedding is left out."""
    values, tensors = _read(draft)
    state_fields = {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{name: values[name] for name in SHAPE},
        **BOOKKEEPING,
        "rope_theta": values["rope_theta"],
        "rope_scaling": None,
        "draft_vocab_size": values["draft_vocab_size"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **({"eagle_config": state_fields} if layers else {}),
    }
    _write(folder, config, tensors)


def save_as_zlab(draft: Path, folder: Path) -> None:
    """z-lab's DFLASH, and SpecForge's: neither embedding nor head."""
    values, tensors = _read(draft)
    config = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        **{name: values[name] for name in SHAPE},
        **BOOKKEEPING,
        "rope_theta": values["rope_theta"],
        "rope_scaling": None,
        "block_size": values["block_size"],
        "num_target_layers": values["num_target_layers"],
        "dflash_config": values["dflash_config"],
        "layer_types": values["layer_types"],
        "max_window_layers": values["num_hidden_layers"],
        "sliding_window": values["sliding_window"],
        "use_sliding_window": values["use_sliding_window"],
        **({"is_causal": False} if values.get("sliding_window_non_causal") else {}),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    _write(folder, config, tensors)


def save_as_muse_glimmer(draft: Path, folder: Path) -> None:
    """The draft of Muse-Glimmer's maker: fields at the top level, no vocabulary."""
    values, tensors = _read(draft)
    fields = values["dflash_config"]
    shape = [name for name in SHAPE if name not in ("vocab_size", "attention_bias")]
    config = {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
        **{name: values[name] for name in shape},
        "attention_dropout": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": values["rope_theta"]},
        "block_size": values["block_size"],
        "layer_types": values["layer_types"],
        "sliding_window": values["sliding_window"],
        "mask_token_id": fields["mask_token_id"],
        "target_layer_ids": fields["target_layer_ids"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "bfloat16",
        "transformers_version": "5.22.0",
    }
    names = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
    for name, long in names.items():
        tensors = {long + key.removeprefix(name) if key.startswith(name) else key: x for key, x in tensors.items()}
    _write(folder, config, tensors)


def save_as_laguna(draft: Path, folder: Path, gating: str, *, by_kind: bool = False) -> None:
    """The draft of Laguna's maker, with fused projections. `by_kind`: rotary parameters by kind of layer."""
    values, tensors = _read(draft)
    fields = values["dflash_config"]
    rope = {"rope_type": "default", "rope_theta": values["rope_theta"]}
    config = {
        "architectures": ["DFlashLagunaForCausalLM"],
        "model_type": "laguna",
        **{name: values[name] for name in SHAPE},
        **BOOKKEEPING,
        "rope_theta": values["rope_theta"],
        **({"rope_parameters": {"sliding_attention": rope}} if by_kind else {}),
        "gating": gating,
        "num_experts": 0,
        "draft_vocab_size": values["vocab_size"],
        "layer_types": values["layer_types"],
        "sliding_window": values["sliding_window"],
        "dflash_config": {
            "block_size": values["block_size"],
            "mask_token_id": fields["mask_token_id"],
            "num_target_layers": values["num_target_layers"],
            "target_layer_ids": fields["target_layer_ids"],
            "causal": True,
        },
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    renamed = {key.replace("self_attn.gate_proj", "self_attn.g_proj"): x for key, x in tensors.items()}
    for key in [key for key in renamed if ".q_proj." in key]:
        parts = [renamed.pop(key.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        renamed[key.replace("q_proj", "qkv_proj")] = torch.cat(parts)
    _write(folder, config, renamed)


def save_as_speculators_eagle3(
    draft: Path, target: Path, folder: Path, layers: tuple[int, ...], window: int | None = None
) -> None:
    """The trainer of speculators: ids of `layers` as inputs of the next ones, all flags, a copy of the embedding.
    `window`: its default is 2048."""
    values, tensors = _read(draft)
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    config = {
        **_speculators(draft, target, "eagle3", "llama", 3),
        "architectures": ["Eagle3DraftModel"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
        "embed_requires_grad": False,
        **{flag: values.get(flag, False) for flag in flags},
    }
    config["transformer_layer_config"] |= {
        "mlp_bias": False,
        "pretraining_tp": 1,
        "layer_types": ["full_attention" if window is None else "sliding_attention"],
        "sliding_window": window or 2048,
        "use_sliding_window": window is not None,
    }
    embedding = _read_target(target)["model.embed_tokens.weight"]
    renamed = {key.replace("midlayer.", "layers.0."): tensor for key, tensor in tensors.items()}
    _write(folder, config, {**renamed, "embed_tokens.weight": embedding.to(tensors["fc.weight"].dtype)})


def save_as_speculators_dflash(draft: Path, target: Path, folder: Path) -> None:
    """The trainer of speculators: never an embedding, the head's rows of a reduced vocabulary."""
    values, tensors = _read(draft)
    config = {
        **_speculators(draft, target, "dflash", "qwen3", values["block_size"] - 1),
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"": "config.DFlashSpeculatorConfig"},
        "aux_hidden_state_layer_ids": [layer + 1 for layer in values["dflash_config"]["target_layer_ids"]],
        "block_size": values["block_size"],
        "mask_token_id": values["dflash_config"]["mask_token_id"],
        "sample_from_anchor": False,
        "sliding_window_non_causal": bool(values.get("sliding_window_non_causal")),
    }
    config["transformer_layer_config"] |= {
        "layer_types": values["layer_types"],
        "max_window_layers": 28,
        "sliding_window": values["sliding_window"] or 2048,
        "use_sliding_window": values["use_sliding_window"],
    }
    if "t2d" in tensors:
        head = _read_target(target)["lm_head.weight"][tensors["t2d"]]
        tensors["lm_head.weight"] = head.to(tensors["fc.weight"].dtype)
    _write(folder, config, tensors)


def save_as_zlab_dflash2(draft: Path, folder: Path) -> None:
    """z-lab's DFlash 2: all layers have a window and see their whole block, and no field says which slots predict."""
    values, tensors = _read(draft)
    dflash_config = values["dflash_config"]
    config = {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        **{name: values[name] for name in SHAPE},
        **BOOKKEEPING,
        "is_causal": False,
        "dflash_config": {"block_size": values["block_size"], **dflash_config},
        "dtype": "bfloat16",
        "layer_types": ["sliding_attention"] * values["num_hidden_layers"],
        "max_window_layers": values["num_hidden_layers"],
        "num_target_layers": values["num_target_layers"],
        "rope_parameters": {"rope_theta": values["rope_theta"], "rope_type": "default"},
        "sliding_window": values["sliding_window"],
        "tie_word_embeddings": False,
        "use_sliding_window": True,
    }
    _write(folder, config, tensors)


def save_as_deepspec(draft: Path, target: Path, folder: Path) -> None:
    """DeepSpec's DSpark, or its DFLASH, which has neither head: all fields at the top, copies of embedding and head."""
    values, tensors = _read(draft)
    dflash_config = values["dflash_config"]
    rank = dflash_config.get("markov_rank", 0)
    config = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        **{name: values[name] for name in SHAPE},
        **BOOKKEEPING,
        "rope_theta": values["rope_theta"],
        "layer_types": ["full_attention"] * values["num_hidden_layers"],
        "block_size": values["block_size"],
        "num_target_layers": values["num_target_layers"],
        "mask_token_id": dflash_config["mask_token_id"],
        "target_layer_ids": dflash_config["target_layer_ids"],
        "num_anchors": 512,
        "markov_rank": rank,
        "markov_head_type": dflash_config.get("markov_head_type", "vanilla"),
        "enable_confidence_head": "confidence_head.proj.weight" in tensors,
        "confidence_head_with_markov": rank > 0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    target_tensors = _read_target(target)
    copies = {
        "embed_tokens.weight": target_tensors["model.embed_tokens.weight"],
        "lm_head.weight": target_tensors["lm_head.weight"],
    }
    _write(folder, config, {**tensors, **{key: x.to(tensors["fc.weight"].dtype) for key, x in copies.items()}})


def save_as_specforge_dspark(draft: Path, folder: Path, prefix: str = "markov_head") -> None:
    """SpecForge's and SGLang's DSpark; `prefix` of the Markov head's tensors, at first "logit_head"."""
    values, tensors = _read(draft)
    dflash_config = values["dflash_config"]
    config = {
        "architectures": ["DSparkDraftModel"],
        "model_type": "qwen3",
        **{name: values[name] for name in SHAPE},
        **BOOKKEEPING,
        "rope_theta": values["rope_theta"],
        "rope_scaling": None,
        "layer_types": ["full_attention"] * values["num_hidden_layers"],
        "block_size": values["block_size"],
        "num_target_layers": values["num_target_layers"],
        "dflash_config": {
            "projector_type": "dspark",
            "attention_mode": "gqa",
            "mask_token_id": dflash_config["mask_token_id"],
            "target_layer_ids": dflash_config["target_layer_ids"],
            "markov_rank": dflash_config["markov_rank"],
            "markov_head_type": dflash_config["markov_head_type"],
            "enable_confidence_head": "confidence_head.proj.weight" in tensors,
            "confidence_head_with_markov": True,
        },
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    _write(folder, config, {key.replace("markov_head.", f"{prefix}."): x for key, x in tensors.items()})


def save_as_modelopt_dspark(draft: Path, folder: Path) -> None:
    """ModelOpt's DSpark, as TensorRT-LLM reads it: heads without a prefix, the convention by shift_label."""
    values, tensors = _read(draft)
    dflash_config = values["dflash_config"]
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **{name: values[name] for name in SHAPE},
        **BOOKKEEPING,
        "rope_theta": values["rope_theta"],
        "rope_scaling": None,
        "block_size": values["block_size"],
        "num_target_layers": values["num_target_layers"],
        "dflash_config": {
            "projector_type": "dspark",
            "mask_token_id": dflash_config["mask_token_id"],
            "target_layer_ids": dflash_config["target_layer_ids"],
            "causal": False,
            "use_swa": False,
            "attention_sink_bias": False,
            "shift_label": values["sample_from_anchor"],
            "markov_rank": dflash_config["markov_rank"],
            "markov_head_type": dflash_config["markov_head_type"],
            "use_confidence_head": "confidence_head.proj.weight" in tensors,
        },
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    names = {"markov_head.": "", "confidence_head.proj.": "confidence_proj."}
    for prefix, peer_prefix in names.items():
        tensors = {key.replace(prefix, peer_prefix): x for key, x in tensors.items()}
    _write(folder, config, tensors)


def save_as_lilicorr(draft: Path, folder: Path) -> None:
    """NVIDIA's LiLiCorr draft: every size of its network in dflash_config."""
    values, tensors = _read(draft)
    dflash_config = values["dflash_config"]
    config = {
        "architectures": ["LiLiCorrDraftModel"],
        "model_type": "qwen3",
        **{name: values[name] for name in SHAPE},
        **BOOKKEEPING,
        "rope_theta": values["rope_theta"],
        "rope_scaling": None,
        "block_size": values["block_size"],
        "num_target_layers": values["num_target_layers"],
        "dflash_config": {**dflash_config, "projector_type": "lilicorr", "lilicorr_enabled": True, "causal": False},
        "torch_dtype": "bfloat16",
    }
    _write(folder, config, tensors)


def save_as_speculators_block(draft: Path, target: Path, folder: Path, kind: str) -> None:
    """The trainer of speculators; kind "dspark" or "dflash2"."""
    values, tensors = _read(draft)
    dflash_config = values["dflash_config"]
    from_anchor = values["sample_from_anchor"]
    names = "markov_rank", "markov_head_type"
    if kind == "dflash2":
        names = "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"
    heads = {name: dflash_config[name] for name in names}
    if kind == "dspark":
        heads["enable_confidence_head"] = "confidence_head.proj.weight" in tensors
        heads["confidence_head_with_markov"] = True
    config = {
        **_speculators(draft, target, kind, "qwen3", values["block_size"] - (0 if from_anchor else 1)),
        "architectures": [{"dspark": "DSparkDraftModel", "dflash2": "DFlash2DraftModel"}[kind]],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in dflash_config["target_layer_ids"]],
        "block_size": values["block_size"],
        "mask_token_id": dflash_config["mask_token_id"],
        "sample_from_anchor": from_anchor,
        "sliding_window_non_causal": bool(values.get("sliding_window_non_causal")),
        **heads,
    }
    config["transformer_layer_config"] |= {
        "layer_types": values["layer_types"],
        "sliding_window": values["sliding_window"],
        "use_sliding_window": values["use_sliding_window"],
    }
    if "t2d" in tensors:
        head = _read_target(target)["lm_head.weight"][tensors["t2d"]]
        tensors["lm_head.weight"] = head.to(tensors["fc.weight"].dtype)
    _write(folder, config, tensors)


def _speculators(draft: Path, target: Path, kind: str, model_type: str, num_tokens: int) -> dict[str, Any]:
    """Config fields of both kinds."""
    values, _ = _read(draft)
    bookkeeping = {key: value for key, value in BOOKKEEPING.items() if key != "transformers_version"}
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_tokens, "verifier_accept_k": 1}
    architectures = json.loads((target / "config.json").read_text())["architectures"]
    return {
        "draft_vocab_size": values.get("draft_vocab_size", values["vocab_size"]),
        "dtype": "bfloat16",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "accept_tolerance": 0.0}],
            "verifier": {"architectures": architectures, "name_or_path": str(target)},
        },
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": {
            **{name: values[name] for name in SHAPE},
            **bookkeeping,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            "model_type": model_type,
            "rope_parameters": {"rope_theta": RopeConfig.from_json(values).theta, "rope_type": "default"},
            "tie_word_embeddings": False,
        },
        "transformers_version": "5.19.0",
    }


def _read(draft: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((draft / "config.json").read_text()), load_file(draft / "model.safetensors")


def _read_target(target: Path) -> dict[str, Tensor]:
    return load_file(target / "model.safetensors")


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
