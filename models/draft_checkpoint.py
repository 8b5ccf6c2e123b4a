"""What the checkpoints of all drafts share: the drafter that they name, the fields of the decoder in config.json, and
the checks of a file's tensors before they enter the network.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from slipstream.models.checkpoint import fuse, load_strict, public_tensors, write_checkpoint
from slipstream.models.config import ModelConfig, RopeConfig
from slipstream.models.draft import DraftConfig, DraftNetwork, ids_of

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"  # the target's, of which some files hold copies
ROWS = 4096  # compared at once: bounds the copies that conversions between dtypes make
REQUIRED_FIELDS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "rms_norm_eps"),
    "max_position_embeddings",
)
OWN_FIELDS = ("target", "target_revision", "target_fingerprint", "tokenizer_hash")
FOREIGN_ARCHITECTURES = {
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
    "Eagle3Speculator": "eagle3",
    "LlamaForCausalLMEagle": "eagle",
    "EagleLlamaForCausalLM": "eagle",
    "Qwen2ForCausalLMEagle": "eagle",
    "DFlashDraftModel": "dflash",
    "DFlashSpeculator": "dflash",
    "Qwen3DSparkModel": "dflash",
}

Network = TypeVar("Network", bound=DraftNetwork)


def drafter_of(config: Mapping[str, Any], draft: str) -> str:
    """The drafter's name. Raises ValueError for an architecture that is no draft's; `draft` names the checkpoint."""
    if "drafter" in config:
        return str(config["drafter"])
    architecture = (config.get("architectures") or ["(none)"])[0]
    if architecture == "LlamaForCausalLM" and config.get("num_hidden_layers") == 1:  # EAGLE's authors name no draft
        return "eagle3" if "draft_vocab_size" in config else "eagle"
    if architecture not in FOREIGN_ARCHITECTURES:
        raise ValueError(
            f"draft {draft} has architecture {architecture}; known drafts: {', '.join(FOREIGN_ARCHITECTURES)}"
        )
    return FOREIGN_ARCHITECTURES[architecture]


def decoder_to_json(config: DraftConfig) -> dict[str, Any]:
    """The fields of config.json that all drafts have, by their public names, and ours."""
    reduced = {} if config.draft_vocab_size is None else {"draft_vocab_size": config.draft_vocab_size}
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        **config.rope.to_json(),
        "vocab_size": config.vocab_size,
        **reduced,
        "tie_word_embeddings": False,
        **{name: getattr(config, name) for name in OWN_FIELDS},
    }


def decoder_from_json(values: Mapping[str, Any], target: ModelConfig) -> dict[str, Any]:
    """The inverse: fields of a DraftConfig. Another trainer's config mostly does not name its target."""
    heads, reduced = values["num_attention_heads"], values.get("draft_vocab_size") or values["vocab_size"]
    return {
        "hidden_size": values["hidden_size"],
        "intermediate_size": values["intermediate_size"],
        "num_heads": heads,
        "num_kv_heads": values.get("num_key_value_heads") or heads,
        "head_dim": values.get("head_dim") or values["hidden_size"] // heads,
        "vocab_size": values["vocab_size"],
        "draft_vocab_size": None if reduced == values["vocab_size"] else reduced,
        "rms_norm_eps": values["rms_norm_eps"],
        "max_position_embeddings": values["max_position_embeddings"],
        "target_hidden_size": target.hidden_size,
        "target_num_layers": target.num_layers,
        "rope": RopeConfig.from_json(values),
        **{name: values[name] for name in OWN_FIELDS if values.get(name) is not None},
    }


def check_numbers(values: Mapping[str, Any], names: Sequence[str] = REQUIRED_FIELDS) -> None:
    """Raises ValueError for fields of a draft's config.json that are absent, null or no numbers."""
    missing = [name for name in names if values.get(name) is None]
    if missing:
        raise ValueError(f"draft config lacks {', '.join(missing)}")
    for name in names:
        if not isinstance(values[name], int | float):
            raise ValueError(f"draft config: {name} is {values[name]!r}; it must be a number")


def check_llama_layer(values: Mapping[str, Any]) -> None:
    """Raises ValueError unless the decoder is one plain layer."""
    if values.get("num_hidden_layers", 1) != 1 or values.get("hidden_act", "silu") != "silu":
        raise ValueError("draft config: num_hidden_layers must be 1 and hidden_act 'silu'")
    if values.get("sliding_window") and values.get("use_sliding_window", True):
        raise ValueError(f"draft config sets sliding_window {values['sliding_window']}, which is not supported")
    if values.get("mlp_bias"):
        raise ValueError("draft config sets mlp_bias, which is not supported")


def check_target(values: Mapping[str, Any], **expected: int) -> None:
    """Raises ValueError for a field of config.json that is given and not as `expected`, the target's."""
    for name, actual in expected.items():
        if values.get(name) not in (None, actual):
            raise ValueError(
                f"draft does not fit the target: {name} is {values[name]} in the draft and {actual} in the target; "
                "serve the target it was trained for"
            )


def write_draft(
    module: DraftNetwork, config: Mapping[str, Any], state: Mapping[str, Tensor], path: Path, run: Mapping[str, Any]
) -> None:
    """Writes a servable checkpoint into the existing folder `path` (see atomic.atomic_folder).

    `state` is the module's state_dict, gathered by the caller where it is sharded; weights are written in bf16.
    """
    tensors = {
        key: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for key, tensor in public_tensors(module.config, state).items()
    }
    write_checkpoint(path, {**config, "torch_dtype": "bfloat16"}, tensors, run)


def fill(
    module: Network, tensors: Mapping[str, Tensor], dtype: torch.dtype | None, device: torch.device, path: Path
) -> Network:
    """`module`, which lies on the meta device, with the public `tensors` of `path` in `dtype`; None keeps the file's.

    Raises ValueError that names every missing or unexpected key, and for a value that is not finite.
    """
    moved = {
        key: tensor.to(device, dtype if tensor.is_floating_point() else None) for key, tensor in fuse(tensors).items()
    }
    load_strict(module, moved, path)
    check_finite(moved, path)
    return module.eval().requires_grad_(False)


def complete_vocabulary(tensors: dict[str, Tensor], vocab_size: int, path: Path) -> None:
    """Makes t2d of a file's d2t, which others leave out. Raises ValueError for a d2t that is no map into the target."""
    if "d2t" not in tensors:
        return
    ids = ids_of(tensors["d2t"])
    if not bool(((ids >= 0) & (ids < vocab_size)).all()) or len(ids.unique()) != len(ids):
        raise ValueError(f"{path}: d2t maps outside the target's {vocab_size} tokens or twice to one")
    tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)


def pop_own(tensors: dict[str, Tensor], key: str, shared: Mapping[str, Tensor] | None) -> Tensor | None:
    """Takes `key` out of a draft's tensors, and returns it if it is not a copy of the target's, `shared` (V, H).

    A head is compared at the rows that the draft's t2d (V,) names. Without `shared` whatever is there counts as a copy.
    """
    own = tensors.pop(key, None)
    if own is None or shared is None:
        return None
    ids = tensors["t2d"].nonzero().flatten() if key == HEAD and "t2d" in tensors else None
    return None if is_copy(own, shared[key], ids) else own


def refuse_own(tensors: dict[str, Tensor], key: str, shared: Mapping[str, Tensor] | None, path: Path) -> None:
    """As `pop_own`, for drafts that can only use the target's. Raises ValueError for one that differs."""
    if pop_own(tensors, key, shared) is not None:
        raise ValueError(f"{path}: {key} is not the target's; a draft with one of its own is not supported")


def is_copy(own: Tensor, expected: Tensor, ids: Tensor | None = None) -> bool:
    """Whether `own` (N, H) is `expected` (V, H), at its rows `ids` (N,) where given, but for rounding.

    Rounding: all rows are equal in the dtype of one of them, or in bf16, from which a file in fp32 may come.
    """
    count = len(expected) if ids is None else len(ids)
    if own.shape != (count, expected.shape[1]):
        return False
    dtypes = {own.dtype, expected.dtype, torch.bfloat16}
    for start in range(0, count, ROWS):
        rows = slice(start, start + ROWS)
        theirs = expected[rows] if ids is None else expected[ids[rows].to(expected.device)]
        mine = own[rows].to(expected.device)
        dtypes = {dtype for dtype in dtypes if torch.equal(mine.to(dtype), theirs.to(dtype))}  # sync
        if not dtypes:
            return False
    return True


def check_finite(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raises ValueError that names the first tensor with a value that is NaN or infinite."""
    for key, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.numel() == 0:
            continue
        if not torch.stack(tensor.aminmax()).isfinite().all():  # sync
            raise ValueError(f"{path}: {key} holds NaN or infinite values; fetch the draft again or train it again")


def check_fc(tensors: Mapping[str, Tensor], size: int, layers: Sequence[int], field: str, path: Path) -> None:
    """Raises ValueError unless fc.weight reads the states of `layers`, each of `size` numbers; `field` names them."""
    columns = tensors["fc.weight"].shape[-1] if "fc.weight" in tensors else len(layers) * size
    if columns % size:
        raise ValueError(
            f"{path}: fc.weight has {columns} columns, not a multiple of the target's hidden size {size}; serve the "
            "target that the draft was trained for"
        )
    if columns != len(layers) * size:
        raise ValueError(
            f"{path}: fc.weight has {columns} columns, for {columns // size} target states of {size}, and the config "
            f"means {len(layers)}, those of layers {list(layers)}; name the layers that it was trained on in {field}"
        )
