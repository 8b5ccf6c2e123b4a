"""Drafts as other trainers save them: their config.json written out, their names of tensors, and no field of ours.

Each is made from a draft of ours in the folder `draft`, whose weights it has, so it must propose the same tokens.
"""

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.models.targets.config import RopeConfig

SHAPE = (
    *("attention_bias", "head_dim", "hidden_size", "intermediate_size", "max_position_embeddings", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "vocab_size", "hidden_act"),
)
FIELDS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
MARKOV = ("markov_rank", "markov_head_type")
SELECTOR = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def save_as_specforge(draft: Path, folder: Path, layers: tuple[int, ...] | None):
    """SpecForge's export of EAGLE3 for SGLang, whose config.json was the input of its training. It names `layers`, as
    outputs, if the user's file did; the embedding is left out."""
    values, tensors = _read(draft)
    config = _config("specforge", values)
    if layers:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True}
    _write(folder, config, tensors)


def save_as_zlab(draft: Path, folder: Path):
    """z-lab's DFLASH, and SpecForge's: neither embedding nor head."""
    values, tensors = _read(draft)
    config = _config("zlab", values) | {"max_window_layers": values["num_hidden_layers"]}
    if values.get("sliding_window_non_causal"):
        config["is_causal"] = False
    _write(folder, config, tensors)


def save_as_muse_glimmer(draft: Path, folder: Path):
    """The draft of Muse-Glimmer's maker: fields at the top level, no vocabulary."""
    values, tensors = _read(draft)
    config = {
        **_config("muse_glimmer", values),
        **_copied(values["dflash_config"], "mask_token_id", "target_layer_ids"),
        "rope_parameters": _rope(values),
    }
    for name in ("vocab_size", "attention_bias"):
        del config[name]
    names = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
    for name, long in names.items():
        tensors = {long + key.removeprefix(name) if key.startswith(name) else key: x for key, x in tensors.items()}
    _write(folder, config, tensors)


def save_as_laguna(draft: Path, folder: Path, gating: str, *, by_kind: bool = False):
    """The draft of Laguna's maker, with fused projections. `by_kind`: rotary parameters by kind of layer."""
    values, tensors = _read(draft)
    config = {
        **_config("laguna", values),
        "gating": gating,
        "draft_vocab_size": values["vocab_size"],
        "dflash_config": {
            **_copied(values, "block_size", "num_target_layers"),
            **_copied(values["dflash_config"], "mask_token_id", "target_layer_ids"),
            "causal": True,
        },
    }
    if by_kind:
        config["rope_parameters"] = {"sliding_attention": _rope(values)}
    renamed = {key.replace("self_attn.gate_proj", "self_attn.g_proj"): x for key, x in tensors.items()}
    for key in [key for key in renamed if ".q_proj." in key]:
        parts = [renamed.pop(key.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        renamed[key.replace("q_proj", "qkv_proj")] = torch.cat(parts)
    _write(folder, config, renamed)


def save_as_speculators_eagle3(
    draft: Path, target: Path, folder: Path, layers: tuple[int, ...], window: int | None = None
):
    """The trainer of speculators: ids of `layers` as inputs of the next ones, all flags, a copy of the embedding.
    `window`: its default is 2048."""
    values, tensors = _read(draft)
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    config = {
        **_speculators(values, target, "eagle3", "llama", 3),
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


def save_as_speculators_dflash(draft: Path, target: Path, folder: Path):
    """The trainer of speculators: never an embedding, the head's rows of a reduced vocabulary."""
    values, tensors = _read(draft)
    config = {
        **_speculators_block(values, target, "dflash"),
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"": "config.DFlashSpeculatorConfig"},
        "sample_from_anchor": False,
    }
    layers = config["transformer_layer_config"]
    layers |= {"max_window_layers": 28, "sliding_window": layers["sliding_window"] or 2048}
    _write(folder, config, _with_head(tensors, target))


def save_as_zlab_dflash2(draft: Path, folder: Path):
    """z-lab's DFlash 2: all layers have a window and see their whole block, and no field says which slots predict."""
    values, tensors = _read(draft)
    config = {
        **_config("zlab_dflash2", values),
        "dflash_config": {"block_size": values["block_size"], **values["dflash_config"]},
        "layer_types": ["sliding_attention"] * values["num_hidden_layers"],
        "max_window_layers": values["num_hidden_layers"],
        "rope_parameters": _rope(values),
    }
    _write(folder, config, tensors)


def save_as_deepspec(draft: Path, target: Path, folder: Path):
    """DeepSpec's DSpark, or its DFLASH, which has neither head: all fields at the top, copies of embedding and head."""
    values, tensors = _read(draft)
    fields = {"markov_rank": 0, "markov_head_type": "vanilla"} | values["dflash_config"]
    config = {
        **_config("deepspec", values),
        **_copied(fields, "mask_token_id", "target_layer_ids", *MARKOV),
        "layer_types": ["full_attention"] * values["num_hidden_layers"],
        "enable_confidence_head": "confidence_head.proj.weight" in tensors,
        "confidence_head_with_markov": fields["markov_rank"] > 0,
    }
    target_tensors = _read_target(target)
    copies = {
        "embed_tokens.weight": target_tensors["model.embed_tokens.weight"],
        "lm_head.weight": target_tensors["lm_head.weight"],
    }
    _write(folder, config, {**tensors, **{key: x.to(tensors["fc.weight"].dtype) for key, x in copies.items()}})


def save_as_specforge_dspark(draft: Path, folder: Path, prefix: str = "markov_head"):
    """SpecForge's and SGLang's DSpark; `prefix` of the Markov head's tensors, at first "logit_head"."""
    values, tensors = _read(draft)
    config = {
        **_config("specforge_dspark", values),
        "layer_types": ["full_attention"] * values["num_hidden_layers"],
        "dflash_config": {
            "projector_type": "dspark",
            "attention_mode": "gqa",
            **_copied(values["dflash_config"], "mask_token_id", "target_layer_ids", *MARKOV),
            "enable_confidence_head": "confidence_head.proj.weight" in tensors,
            "confidence_head_with_markov": True,
        },
    }
    _write(folder, config, {key.replace("markov_head.", f"{prefix}."): x for key, x in tensors.items()})


def save_as_modelopt_dspark(draft: Path, folder: Path):
    """ModelOpt's DSpark, as TensorRT-LLM reads it: heads without a prefix, the convention by shift_label."""
    values, tensors = _read(draft)
    config = {
        **_config("modelopt_dspark", values),
        "dflash_config": {
            "projector_type": "dspark",
            **_copied(values["dflash_config"], "mask_token_id", "target_layer_ids", *MARKOV),
            **dict.fromkeys(("causal", "use_swa", "attention_sink_bias"), False),
            "shift_label": values["sample_from_anchor"],
            "use_confidence_head": "confidence_head.proj.weight" in tensors,
        },
    }
    names = {"markov_head.": "", "confidence_head.proj.": "confidence_proj."}
    for prefix, peer_prefix in names.items():
        tensors = {key.replace(prefix, peer_prefix): x for key, x in tensors.items()}
    _write(folder, config, tensors)


def save_as_lilicorr(draft: Path, folder: Path):
    """NVIDIA's LiLiCorr draft: every size of its network in dflash_config."""
    values, tensors = _read(draft)
    fields = {**values["dflash_config"], "projector_type": "lilicorr", "lilicorr_enabled": True, "causal": False}
    _write(folder, _config("lilicorr", values) | {"dflash_config": fields}, tensors)


def save_as_speculators_block(draft: Path, target: Path, folder: Path, kind: str):
    """The trainer of speculators; kind "dspark" or "dflash2"."""
    values, tensors = _read(draft)
    config = _speculators_block(values, target, kind)
    if kind == "dspark":
        config |= {
            "architectures": ["DSparkDraftModel"],
            **_copied(values["dflash_config"], *MARKOV),
            "enable_confidence_head": "confidence_head.proj.weight" in tensors,
            "confidence_head_with_markov": True,
        }
    else:
        config |= {"architectures": ["DFlash2DraftModel"], **_copied(values["dflash_config"], *SELECTOR)}
    _write(folder, config, _with_head(tensors, target))


def _speculators_block(values: dict[str, Any], target: Path, kind: str) -> dict[str, Any]:
    """Config fields of its block drafts."""
    num_tokens = values["block_size"] - (0 if values["sample_from_anchor"] else 1)
    config = {
        **_speculators(values, target, kind, "qwen3", num_tokens),
        "aux_hidden_state_layer_ids": [layer + 1 for layer in values["dflash_config"]["target_layer_ids"]],
        **_copied(values["dflash_config"], "mask_token_id"),
        **_copied(values, "block_size", "sample_from_anchor"),
        "sliding_window_non_causal": bool(values.get("sliding_window_non_causal")),
    }
    config["transformer_layer_config"] |= _copied(values, "layer_types", "sliding_window", "use_sliding_window")
    return config


def _speculators(values: dict[str, Any], target: Path, kind: str, model_type: str, num_tokens: int) -> dict[str, Any]:
    """Config fields of all its drafts."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_tokens, "verifier_accept_k": 1}
    architectures = json.loads((target / "config.json").read_text())["architectures"]
    return {
        **FIELDS["speculators"]["fixed"],
        "draft_vocab_size": values.get("draft_vocab_size", values["vocab_size"]),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "accept_tolerance": 0.0}],
            "verifier": {"architectures": architectures, "name_or_path": str(target)},
        },
        "speculators_model_type": kind,
        "transformer_layer_config": {
            **FIELDS["speculators"]["layers"],
            **_copied(values, *SHAPE),
            "model_type": model_type,
            "rope_parameters": _rope(values),
        },
    }


def _config(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Fields of a format that are fixed, and those that our draft has, too."""
    return {**FIELDS[name]["fixed"], **_copied(values, *SHAPE, *FIELDS[name]["copied"])}


def _copied(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names}


def _rope(values: dict[str, Any]) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": RopeConfig.from_json(values).theta}


def _with_head(tensors: dict[str, Tensor], target: Path) -> dict[str, Tensor]:
    """Adds the head's rows of a reduced vocabulary."""
    if "t2d" not in tensors:
        return tensors
    head = _read_target(target)["lm_head.weight"][tensors["t2d"]]
    return tensors | {"lm_head.weight": head.to(tensors["fc.weight"].dtype)}


def _read(draft: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((draft / "config.json").read_text()), load_file(draft / "model.safetensors")


def _read_target(target: Path) -> dict[str, Tensor]:
    return load_file(target / "model.safetensors")


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
