"""EAGLE checkpoints on disk: the public config.json fields and key names, ours beside them.

fc.weight, fc.bias                     (H, 2 * H), (H): reads [embedding ; feature]; the bias is a config field
layers.0.self_attn.*, layers.0.mlp.*, layers.0.post_attention_layernorm.weight
embed_tokens.weight                    in other trainers' files: mostly a copy of the target's, which is left out
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.models.checkpoint import (
    check_numbers,
    fuse,
    load_strict,
    public_tensors,
    read_draft_tensors,
    read_json,
    write_checkpoint,
)
from slipstream.models.config import ModelConfig, RopeConfig
from slipstream.models.draft_weights import EMBEDDING, HEAD, check_finite, pop_own, refuse_own
from slipstream.models.eagle import Eagle, EagleConfig
from slipstream.models.vocabulary import complete_vocabulary

ARCHITECTURE = "LlamaForCausalLMEagle"
REQUIRED_FIELDS = [
    *("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "rms_norm_eps"),
    "max_position_embeddings",
]
OWN_FIELDS = ("target", "target_revision", "target_fingerprint", "tokenizer_hash")
IGNORED_KEYS = ("rotary_emb.inv_freq",)  # buffers that old checkpoints carry and every loader recomputes


def config_to_json(config: EagleConfig) -> dict[str, Any]:
    """config.json of a checkpoint."""
    reduced = {} if config.draft_vocab_size is None else {"draft_vocab_size": config.draft_vocab_size}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "bias": config.fc_bias,
        "qkv_bias": config.qkv_bias,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        **config.rope.to_json(),
        "vocab_size": config.vocab_size,
        **reduced,
        "tie_word_embeddings": False,
        "num_target_layers": config.target_num_layers,
        "drafter": "eagle",
        **{name: getattr(config, name) for name in OWN_FIELDS},
    }


def config_from_json(values: Mapping[str, Any], target: ModelConfig) -> EagleConfig:
    """Reads our config.json or another trainer's, which mostly does not name its target.

    Raises ValueError for what the network here cannot run and for a draft that does not fit `target`.
    """
    check_numbers(values, REQUIRED_FIELDS)
    if values.get("num_hidden_layers", 1) != 1 or values.get("hidden_act", "silu") != "silu":
        raise ValueError("draft config: num_hidden_layers must be 1 and hidden_act 'silu'")
    if values.get("sliding_window") and values.get("use_sliding_window", True):
        raise ValueError(f"draft config sets sliding_window {values['sliding_window']}, which is not supported")
    if values.get("mlp_bias"):
        raise ValueError("draft config sets mlp_bias, which is not supported")
    _check_target(values, target)
    heads, is_qwen2 = values["num_attention_heads"], values.get("architectures") == ["Qwen2ForCausalLMEagle"]
    reduced = values.get("draft_vocab_size") or values["vocab_size"]
    return EagleConfig(
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        num_heads=heads,
        num_kv_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or values["hidden_size"] // heads,
        vocab_size=values["vocab_size"],
        draft_vocab_size=None if reduced == values["vocab_size"] else reduced,
        rms_norm_eps=values["rms_norm_eps"],
        max_position_embeddings=values["max_position_embeddings"],
        target_num_layers=target.num_layers,
        fc_bias=bool(values.get("bias", True)),
        qkv_bias=bool(values.get("qkv_bias", values.get("attention_bias", is_qwen2))),
        rope=RopeConfig.from_json(values),
        **{name: values[name] for name in OWN_FIELDS if values.get(name) is not None},
    )


def _check_target(values: Mapping[str, Any], target: ModelConfig) -> None:
    for name, actual in (
        ("hidden_size", target.hidden_size),
        ("vocab_size", target.vocab_size),
        ("num_target_layers", target.num_layers),
    ):
        if values.get(name) not in (None, actual):
            raise ValueError(
                f"draft does not fit the target: {name} is {values[name]} in the draft and {actual} in the target; "
                "serve the target it was trained for"
            )


def save_eagle(module: Eagle, state: Mapping[str, Tensor], path: Path, run: Mapping[str, Any]) -> None:
    """Writes a servable checkpoint into the existing folder `path` (see atomic.atomic_folder).

    `state` is the module's state_dict, gathered by the caller where it is sharded; weights are written in bf16.
    """
    tensors = {
        key: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for key, tensor in public_tensors(module.config, state).items()
    }
    write_checkpoint(path, config_to_json(module.config) | {"torch_dtype": "bfloat16"}, tensors, run)


def load_eagle(
    path: Path,
    target: ModelConfig,
    dtype: torch.dtype | None,
    device: torch.device,
    shared: Mapping[str, Tensor] | None = None,
) -> Eagle:
    """Reads a draft for `target`, strictly: every missing or unexpected key is named in the ValueError.

    dtype None keeps the file's. `shared`: the target's embed_tokens.weight and lm_head.weight (V, H). Copies of them
    are left out; another embedding becomes the draft's own, another head is refused.
    """
    values, tensors = read_json(path / "config.json"), _read(path)
    if "bias" not in values:  # EAGLE's trainers leave it out where it is true, converters also where it is false
        values["bias"] = "fc.bias" in tensors
    config = config_from_json(values, target)
    if config.draft_vocab_size is not None:
        complete_vocabulary(tensors, config.vocab_size, path)
    refuse_own(tensors, HEAD, shared, path)
    embedding = pop_own(tensors, EMBEDDING, shared)
    if embedding is not None:
        tensors[EMBEDDING] = embedding
    with torch.device("meta"):
        module = Eagle(config, has_embedding=embedding is not None)
    tensors = {
        key: tensor.to(device, dtype if tensor.is_floating_point() else None) for key, tensor in fuse(tensors).items()
    }
    load_strict(module, tensors, path)
    check_finite(tensors, path)
    return module.eval().requires_grad_(False)


def _read(path: Path) -> dict[str, Tensor]:
    """The tensors by public name, copies of the target's included."""
    named = {key.removeprefix("model."): tensor for key, tensor in read_draft_tensors(path).items()}
    return {key: tensor for key, tensor in named.items() if not key.endswith(IGNORED_KEYS)}
