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

from slipstream.models.checkpoint import read_draft_tensors, read_json
from slipstream.models.config import ModelConfig, default_feature_layers
from slipstream.models.draft_checkpoint import (
    EMBEDDING,
    check_fc,
    check_llama_layer,
    check_numbers,
    check_target,
    complete_vocabulary,
    decoder_from_json,
    decoder_to_json,
    fill,
    pop_own,
    write_draft,
)
from slipstream.models.eagle3 import Eagle3, Eagle3Config
from slipstream.models.speculators_layout import AUX_LAYERS, from_speculators, is_speculators, without_last_layer

ARCHITECTURE = "LlamaForCausalLMEagle3"
# Flags of other trainers that change the network: a checkpoint that sets one is refused by name.
UNSUPPORTED_FLAGS = ("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm", "use_aux_norm", "mlp_bias")


def config_to_json(config: Eagle3Config) -> dict[str, Any]:
    """config.json of a checkpoint."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "target_hidden_size": config.target_hidden_size,
        "num_hidden_layers": 1,
        "attention_bias": config.attention_bias,
        **decoder_to_json(config),
        **_layers_to_json(config),
        "target_num_layers": config.target_num_layers,
        "drafter": "eagle3",
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
    """Reads our config.json or another trainer's, which mostly does not name its feature layers.

    Raises ValueError for what the network here cannot run and for a draft that does not fit `target`.
    """
    check_numbers(values)
    eagle = values.get("eagle_config") or {}
    for flag in UNSUPPORTED_FLAGS:
        if values.get(flag) or eagle.get(flag):
            raise ValueError(f"draft config sets {flag}, which is not supported")
    check_llama_layer(values)
    own_size = {"target_hidden_size": values.get("target_hidden_size") or values["hidden_size"]}
    expected = {"vocab_size": target.vocab_size, "target_num_layers": target.num_layers}
    check_target({**values, **own_size}, **expected, target_hidden_size=target.hidden_size)
    fields = decoder_from_json(values, target)
    return Eagle3Config(
        **fields | {"draft_vocab_size": fields["draft_vocab_size"] or values["vocab_size"]},
        feature_layers=layers_from_json(values, target.num_layers),
        attention_bias=bool(values.get("attention_bias", False)),
    )


def save_eagle3(module: Eagle3, state: Mapping[str, Tensor], path: Path, run: Mapping[str, Any]) -> None:
    """See write_draft."""
    write_draft(module, config_to_json(module.config), state, path, run)


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
    return fill(module, tensors, dtype, device, path)


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
