"""Drafts as other trainers save them: their config.json written out, their names of tensors, and no field of ours.

Each is made from a draft of ours in the folder `draft`, whose weights it has, so it must propose the same tokens.
"""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.models.targets.config import RopeConfig

# Of every config.json that transformers writes; they say nothing about the network.
BOOKKEEPING = {"attention_dropout": 0.0, "initializer_range": 0.02, "transformers_version": "5.19.0", "use_cache": True}
SHAPE = (
    *("attention_bias", "head_dim", "hidden_size", "intermediate_size", "max_position_embeddings", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "vocab_size", "hidden_act"),
)


def save_as_specforge(draft: Path, folder: Path, layers: tuple[int, ...] | None) -> None:
    """SpecForge's export of EAGLE3 for SGLang, whose config.json was the input of its training. It names `layers`, as
    outputs, if the user's file did; the embedding is left out."""
    values, tensors = _read(draft)
    named = {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True}
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
        **({"eagle_config": named} if layers else {}),
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
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    _write(folder, config, tensors)


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
        "sliding_window_non_causal": False,
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


def _speculators(draft: Path, target: Path, kind: str, model_type: str, num_tokens: int) -> dict[str, Any]:
    """What both kinds have."""
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
