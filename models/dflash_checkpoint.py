"""DFLASH checkpoints on disk: the public config.json fields and key names (z-lab's, SpecForge's), ours beside them.

Reads these, DeepSpec's and the layout of speculators (models/speculators_layout.py).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.models.checkpoint import read_json, read_tensors
from slipstream.models.config import ModelConfig
from slipstream.models.dflash import DFlash, DFlashConfig, default_block_feature_layers
from slipstream.models.draft_checkpoint import (
    EMBEDDING,
    HEAD,
    REQUIRED_FIELDS,
    check_fc,
    check_numbers,
    check_target,
    complete_vocabulary,
    decoder_from_json,
    decoder_to_json,
    fill,
    refuse_own,
    write_draft,
)
from slipstream.models.speculators_layout import from_speculators, is_speculators, without_last_layer

ARCHITECTURE = "DFlashDraftModel"
DEEPSPEC_ARCHITECTURE = "Qwen3DSparkModel"
# Settings of other trainers and servers that change the network or what is made of its output -> the values that do
# not. A checkpoint with another value is refused by name.
OFF: tuple[Any, ...] = (None, False, 0, "", [], {})
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("conv_kernel_size", "selector_rank", "selector_top_k", "shift_label", "causal", "is_causal"), OFF),
    **dict.fromkeys(("final_logit_softcapping", "attention_sink_bias", "use_swa", "sliding_window_non_causal"), OFF),
    **dict.fromkeys(("markov_rank", "enable_confidence_head", "mlp_bias", "quantization_config"), OFF),
    **dict.fromkeys(("output_multiplier", "attention_value_scale", "embedding_scale", "logit_scale"), (None, 1)),
    "projector_type": (None, "", "dflash"),
}
ALIASES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}


def config_to_json(config: DFlashConfig) -> dict[str, Any]:
    """config.json of a checkpoint. Layer ids count outputs, which is also the convention of the public field."""
    windowed = [layer in config.windowed_layers for layer in range(config.num_layers)]
    shifted = {"sample_from_anchor": True} if config.sample_from_anchor else {}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "num_target_layers": config.target_num_layers,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.feature_layers),
        },
        "num_hidden_layers": config.num_layers,
        "attention_bias": config.attention_bias,
        **decoder_to_json(config),
        "layer_types": ["sliding_attention" if one else "full_attention" for one in windowed],
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
        **shifted,
        "drafter": "dflash",
    }


def config_from_json(values: Mapping[str, Any], target: ModelConfig) -> DFlashConfig:
    """Reads our config.json or another trainer's.

    Raises ValueError for what the network here cannot run and for a draft that does not fit `target`.
    """
    check_numbers(values, (*REQUIRED_FIELDS, "num_hidden_layers"))
    own = {**values, **(values.get("dflash_config") or {})}  # where a field may stand, trainers disagree
    _refuse_unsupported(own)
    expected = {"num_target_layers": target.num_layers, "target_hidden_size": target.hidden_size}
    check_target(values, **expected, hidden_size=target.hidden_size, vocab_size=target.vocab_size)
    num_layers = values["num_hidden_layers"]
    return DFlashConfig(
        **decoder_from_json(values, target),
        num_layers=num_layers,
        feature_layers=tuple(
            own.get("target_layer_ids") or default_block_feature_layers(target.num_layers, num_layers)
        ),
        mask_token_id=_mask_token(own),
        block_size=_block_size(values),
        sample_from_anchor=bool(own.get("sample_from_anchor", DEEPSPEC_ARCHITECTURE in _architectures(values))),
        attention_bias=bool(values.get("attention_bias", False)),
        **_windows(values),
    )


def _architectures(values: Mapping[str, Any]) -> list[str]:
    return values.get("architectures") or []


def _refuse_unsupported(values: Mapping[str, Any]) -> None:
    for name, neutral in UNSUPPORTED.items():
        if values.get(name) not in neutral:
            raise ValueError(f"draft config sets {name} to {values[name]!r}, which is not supported")
    if values.get("hidden_act", "silu") != "silu":
        raise ValueError(f"draft config: hidden_act is {values['hidden_act']!r}; only 'silu' is supported")


def _mask_token(values: Mapping[str, Any]) -> int:
    if values.get("mask_token_id") is None:
        token = values.get("mask_token") or "the token that masked its blocks in training (SGLang assumes <|MASK|>)"
        raise ValueError(f"draft config lacks dflash_config.mask_token_id; enter the target's id of {token}")
    return int(values["mask_token_id"])


def _block_size(values: Mapping[str, Any]) -> int:
    outer, inner = values.get("block_size"), (values.get("dflash_config") or {}).get("block_size")
    size = inner if outer is None else outer
    if size is None:
        raise ValueError("draft config lacks block_size, the tokens of the blocks that the draft was trained on")
    if None not in (outer, inner) and outer != inner:
        raise ValueError(f"draft config: block_size is {outer} and, in dflash_config, {inner}; they must be equal")
    return int(size)


def _windows(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields `sliding_window` and `windowed_layers` of the config."""
    num_layers, window = values["num_hidden_layers"], values.get("sliding_window")
    types, is_used = values.get("layer_types"), values.get("use_sliding_window")
    if types is None:  # transformers' older rule
        first = values.get("max_window_layers", num_layers) if is_used and window else num_layers
        types = ["full_attention" if layer < first else "sliding_attention" for layer in range(num_layers)]
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown or len(types) != num_layers:
        raise ValueError(
            f"draft config: layer_types is {list(types)}; it must be full_attention or sliding_attention for each of "
            f"the {num_layers} layers"
        )
    windowed = tuple(layer for layer, kind in enumerate(types) if kind == "sliding_attention")
    if windowed and (not window or is_used is False):
        raise ValueError(
            f"draft config: layers {list(windowed)} are sliding_attention; sliding_window must be set and "
            "use_sliding_window not be false"
        )
    return {"sliding_window": window if windowed else None, "windowed_layers": windowed}


def save_dflash(module: DFlash, state: Mapping[str, Tensor], path: Path, run: Mapping[str, Any]) -> None:
    """See write_draft."""
    write_draft(module, config_to_json(module.config), state, path, run)


def load_dflash(
    path: Path,
    target: ModelConfig,
    dtype: torch.dtype | None,
    device: torch.device,
    shared: Mapping[str, Tensor] | None = None,
) -> DFlash:
    """Reads a draft for `target`, strictly: every missing or unexpected key is named in the ValueError.

    dtype None keeps the file's. `shared`: the target's embed_tokens.weight and lm_head.weight (V, H). Copies of them
    are left out; others are refused.
    """
    values, tensors = read_public(path)
    own = values.get("dflash_config") or {}
    if own.get("target_layer_ids") and "fc.weight" in tensors:
        fc_inputs = tensors["fc.weight"].shape[-1]
        layers = without_last_layer(own["target_layer_ids"], fc_inputs, target.hidden_size, target.num_layers)
        values = {**values, "dflash_config": {**own, "target_layer_ids": layers}}
    config = config_from_json(values, target)
    with torch.device("meta"):
        module = DFlash(config)
    check_fc(tensors, config.hidden_size, config.feature_layers, "target_layer_ids", path)
    complete_vocabulary(tensors, config.vocab_size, path)
    for key in (EMBEDDING, HEAD):
        refuse_own(tensors, key, shared, path)
    return fill(module, tensors, dtype, device, path)


def read_public(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors of any layout, in public fields and names; copies of the target's included."""
    values = read_json(path / "config.json")
    if (path / "mask_embedding.pt").exists():
        raise ValueError(f"{path} has a mask embedding of its own (mask_embedding.pt), which is not supported")
    tensors = {public_name(key): tensor for key, tensor in read_tensors(path).items()}
    return (from_speculators(values) if is_speculators(values) else values), tensors


def public_name(key: str) -> str:
    key = key.removeprefix("model.")
    return ALIASES.get(key, key)
