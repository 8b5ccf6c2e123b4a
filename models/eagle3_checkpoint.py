"""EAGLE3 checkpoints on disk: the public config.json fields and key names, ours beside them.

Reads the files of SafeAILab's EAGLE, SpecForge and SGLang, vLLM, and of speculators (models/speculators_layout.py).
Layer ids have the same name in two places: in eagle_config, SGLang's, they count outputs of layers, as ours do; at the
top level, vLLM's, the layers that the states go into, one higher. Where there are none, servers follow EAGLE-3.
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
from slipstream.models.config import ModelConfig, RopeConfig, default_feature_layers
from slipstream.models.draft_weights import EMBEDDING, check_fc, check_finite, pop_own
from slipstream.models.eagle3 import Eagle3, Eagle3Config
from slipstream.models.speculators_layout import AUX_LAYERS, from_speculators, is_speculators, without_last_layer
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
    """config.json of a checkpoint."""
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
        **_layers_to_json(config),
        "drafter": "eagle3",
        **{name: getattr(config, name) for name in OWN_FIELDS},
    }


def _layers_to_json(config: Eagle3Config) -> dict[str, Any]:
    """Layer ids for SGLang and for vLLM; none where both, and the loader here, take them by their own rule."""
    layers, count = config.feature_layers, config.target_num_layers
    if layers == (1, count // 2 - 1, count - 4) == default_feature_layers(count):
        return {}
    return {
        "eagle_config": {AUX_LAYERS: list(layers), "use_aux_hidden_state": True},
        AUX_LAYERS: [layer + 1 for layer in layers],
    }


def layers_from_json(values: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Output ids. Raises ValueError where the two places name different states."""
    outputs = (values.get("eagle_config") or {}).get(AUX_LAYERS)
    inputs = values.get(AUX_LAYERS)
    if not inputs:
        return tuple(outputs or default_feature_layers(num_layers))
    layers = tuple(layer - 1 for layer in inputs)
    if outputs and tuple(outputs) != layers:
        raise ValueError(
            f"draft config: eagle_config.{AUX_LAYERS} is {outputs}, outputs of these layers, and {AUX_LAYERS} is "
            f"{inputs}, the layers that the states go into: other states; delete the one that is wrong"
        )
    return layers


def config_from_json(values: Mapping[str, Any], target: ModelConfig) -> Eagle3Config:
    """Reads our config.json or another trainer's, which names neither target nor, mostly, feature layers.

    Raises ValueError for what the network here cannot run and for a draft that does not fit `target`.
    """
    check_numbers(values, REQUIRED_FIELDS)
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
        feature_layers=layers_from_json(values, target.num_layers),
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
    """Writes a servable checkpoint into the existing folder `path` (see atomic.atomic_folder).

    `state` is the module's state_dict, gathered by the caller where it is sharded; weights are written in bf16.
    """
    tensors = {
        key: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for key, tensor in public_tensors(module.config, state).items()
    }
    config = config_to_json(module.config) | {"torch_dtype": "bfloat16"}
    write_checkpoint(path, config, tensors, run)


def load_eagle3(
    path: Path,
    target: ModelConfig,
    dtype: torch.dtype | None,
    device: torch.device,
    shared: Mapping[str, Tensor] | None = None,
) -> Eagle3:
    """Reads a draft for `target`, strictly: every missing or unexpected key is named in the ValueError.

    dtype None keeps the file's. `shared`: the target's embed_tokens.weight (V, H). A file's copy of it is left out; any
    other embedding becomes the draft's own.
    """
    values, tensors = read_public(path)
    config = config_from_json(_without_last_layer(values, tensors, target), target)
    check_fc(tensors, config.target_hidden_size, config.feature_layers, f"eagle_config.{AUX_LAYERS}", path)
    embedding = pop_own(tensors, EMBEDDING, shared)
    if embedding is not None:
        tensors[EMBEDDING] = embedding
    with torch.device("meta"):
        module = Eagle3(config, has_embedding=embedding is not None)
    if config.draft_vocab_size == config.vocab_size:  # EAGLE leaves the map out then
        tensors.setdefault("d2t", torch.zeros(config.vocab_size, dtype=torch.int64))
    complete_vocabulary(tensors, config.vocab_size, path)
    tensors = {
        key: tensor.to(device, dtype if tensor.is_floating_point() else None) for key, tensor in fuse(tensors).items()
    }
    load_strict(module, tensors, path)
    check_finite(tensors, path)
    return module.eval().requires_grad_(False)


def read_public(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors of any layout, in public fields and names; a copy of the target's embedding included."""
    values = read_json(path / "config.json")
    tensors = {public_name(key): tensor for key, tensor in read_draft_tensors(path).items()}
    return (from_speculators(values) if is_speculators(values) else values), tensors


def public_name(key: str) -> str:
    key = key.removeprefix("model.")
    return key.replace("layers.0.", "midlayer.", 1) if key.startswith("layers.0.") else key


def _without_last_layer(
    values: Mapping[str, Any], tensors: Mapping[str, Tensor], target: ModelConfig
) -> dict[str, Any]:
    layers = values.get(AUX_LAYERS)
    if not layers or "fc.weight" not in tensors:
        return dict(values)
    fc_inputs, outputs = tensors["fc.weight"].shape[-1], [layer - 1 for layer in layers]
    kept = without_last_layer(outputs, fc_inputs, target.hidden_size, target.num_layers)
    return {**values, AUX_LAYERS: list(layers[: len(kept)])}
