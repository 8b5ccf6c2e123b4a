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

from slipstream.models.checkpoint import read_draft_tensors, read_json
from slipstream.models.config import ModelConfig
from slipstream.models.draft_checkpoint import (
    EMBEDDING,
    HEAD,
    check_llama_layer,
    check_numbers,
    check_target,
    complete_vocabulary,
    decoder_from_json,
    decoder_to_json,
    fill,
    pop_own,
    refuse_own,
    write_draft,
)
from slipstream.models.eagle import Eagle, EagleConfig

ARCHITECTURE = "LlamaForCausalLMEagle"


def config_to_json(config: EagleConfig) -> dict[str, Any]:
    """config.json of a checkpoint."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "bias": config.fc_bias,
        "qkv_bias": config.qkv_bias,
        **decoder_to_json(config),
        "num_target_layers": config.target_num_layers,
        "drafter": "eagle",
    }


def config_from_json(values: Mapping[str, Any], target: ModelConfig) -> EagleConfig:
    """Reads our config.json or another trainer's.

    Raises ValueError for what the network here cannot run and for a draft that does not fit `target`.
    """
    check_numbers(values)
    check_llama_layer(values)
    expected = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    check_target(values, **expected, num_target_layers=target.num_layers)
    is_qwen2 = values.get("architectures") == ["Qwen2ForCausalLMEagle"]
    return EagleConfig(
        **decoder_from_json(values, target),
        fc_bias=bool(values.get("bias", True)),
        qkv_bias=bool(values.get("qkv_bias", values.get("attention_bias", is_qwen2))),
    )


def save_eagle(module: Eagle, state: Mapping[str, Tensor], path: Path, run: Mapping[str, Any]) -> None:
    """See write_draft."""
    write_draft(module, config_to_json(module.config), state, path, run)


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
    values = read_json(path / "config.json")
    tensors = {key.removeprefix("model."): tensor for key, tensor in read_draft_tensors(path).items()}
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
    return fill(module, tensors, dtype, device, path)
