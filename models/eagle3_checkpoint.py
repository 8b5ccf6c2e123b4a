"""EAGLE3 checkpoints on disk: the public config.json fields and key names, ours beside them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.models.checkpoint import fuse, load_strict, read_json, read_tensors, unfuse, write_checkpoint
from slipstream.models.config import ModelConfig, RopeConfig, default_feature_layers
from slipstream.models.eagle3 import Eagle3, Eagle3Config
from slipstream.models.vocabulary import complete_vocabulary

ARCHITECTURE = "LlamaForCausalLMEagle3"
# Flags of other trainers that change the network: a checkpoint that sets one is refused by name.
UNSUPPORTED_FLAGS = ("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm", "use_aux_norm", "mlp_bias")
REQUIRED_FIELDS = [
    *("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "rms_norm_eps"),
    "max_position_embeddings",
]
OWN_FIELDS = ("target", "target_revision", "target_fingerprint", "tokenizer_hash", "target_num_layers")


def config_to_json(config: Eagle3Config) -> dict[str, Any]:
    """config.json of a checkpoint. Layer ids count outputs, which is also the convention of the public field."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": config.attention_bias,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        **config.rope.to_json(),
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
            "use_aux_hidden_state": True,
        },
        "drafter": "eagle3",
        **{name: getattr(config, name) for name in OWN_FIELDS},
    }


def config_from_json(values: Mapping[str, Any], target: ModelConfig) -> Eagle3Config:
    """Reads our config.json or another trainer's, which names neither target nor, mostly, feature layers.

    Raises ValueError for what the network here cannot run and for a draft that does not fit `target`.
    """
    missing = [name for name in REQUIRED_FIELDS if name not in values]
    if missing:
        raise ValueError(f"draft config lacks {', '.join(missing)}")
    eagle = values.get("eagle_config") or {}
    for flag in UNSUPPORTED_FLAGS:
        if values.get(flag) or eagle.get(flag):
            raise ValueError(f"draft config sets {flag}, which is not supported")
    if values.get("sliding_window") and values.get("use_sliding_window", True):
        raise ValueError(f"draft config sets sliding_window {values['sliding_window']}, which is not supported")
    if values.get("num_hidden_layers", 1) != 1 or values.get("hidden_act", "silu") != "silu":
        raise ValueError("draft config: num_hidden_layers must be 1 and hidden_act 'silu'")
    heads = values["num_attention_heads"]
    config = Eagle3Config(
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        num_heads=heads,
        num_kv_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or values["hidden_size"] // heads,
        vocab_size=values["vocab_size"],
        draft_vocab_size=values.get("draft_vocab_size") or values["vocab_size"],
        rms_norm_eps=values["rms_norm_eps"],
        max_position_embeddings=values["max_position_embeddings"],
        target_hidden_size=values.get("target_hidden_size") or values["hidden_size"],
        feature_layers=tuple(
            eagle.get("eagle_aux_hidden_state_layer_ids") or default_feature_layers(target.num_layers)
        ),
        rope=RopeConfig.from_json(values),
        attention_bias=bool(values.get("attention_bias", False)),
        **{"target_num_layers": target.num_layers}
        | {name: values[name] for name in OWN_FIELDS if values.get(name) is not None},
    )
    for name in ("vocab_size", "target_num_layers", "target_hidden_size"):
        actual = getattr(target, name.removeprefix("target_"))
        if getattr(config, name) != actual:
            raise ValueError(
                f"draft does not fit the target: {name} is {getattr(config, name)} in the draft and {actual} in the "
                "target; serve the target it was trained for"
            )
    return config


def save_eagle3(module: Eagle3, state: Mapping[str, Tensor], path: Path, run: Mapping[str, Any]) -> None:
    """Writes a servable checkpoint into the existing folder `path` (see checkpoint.atomic_folder).

    `state` is the module's state_dict, gathered by the caller where it is sharded; weights are written in bf16.
    """
    layer = module.config.layer_config()
    sizes = {
        "qkv_proj": [heads * layer.head_dim for heads in (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)],
        "gate_up_proj": [layer.intermediate_size] * 2,
    }
    tensors = {
        key: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for key, tensor in unfuse(state, sizes).items()
    }
    config = config_to_json(module.config) | {"torch_dtype": "bfloat16"}
    write_checkpoint(path, config, tensors, run)


def load_eagle3(path: Path, target: ModelConfig, dtype: torch.dtype, device: torch.device) -> Eagle3:
    """Reads a draft for `target`, strictly: every missing or unexpected key is named in the ValueError."""
    config = config_from_json(read_json(path / "config.json"), target)
    with torch.device("meta"):
        module = Eagle3(config)
    tensors = {_public_name(key): tensor for key, tensor in read_tensors(path).items()}
    tensors.pop("embed_tokens.weight", None)  # a copy of the target's, which the draft shares
    if config.draft_vocab_size == config.vocab_size:  # EAGLE leaves the map out then
        tensors.setdefault("d2t", torch.zeros(config.vocab_size, dtype=torch.int64))
    complete_vocabulary(tensors, config.vocab_size, path)
    tensors = {
        key: tensor.to(device, dtype if tensor.is_floating_point() else None) for key, tensor in fuse(tensors).items()
    }
    load_strict(module, tensors, path)
    return module.eval().requires_grad_(False)


def _public_name(key: str) -> str:
    key = key.removeprefix("model.")
    return key.replace("layers.0.", "midlayer.", 1) if key.startswith("layers.0.") else key
