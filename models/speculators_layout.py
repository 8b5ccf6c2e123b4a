"""The config.json of the library speculators, which vLLM reads too: to and from the public fields of a draft.

There a draft's decoder is described in a config of its own (`transformer_layer_config`), the verifier, our target, is
named inside, and captured states are counted by the layer that they go into: our output id + 1.
"""

from collections.abc import Mapping
from typing import Any

VERSION = "0.5.0"  # of the layout that this was written for
OWN = ("drafter", "num_target_layers", "target", "target_revision", "target_fingerprint", "tokenizer_hash")
RENAMED = (("target_layer_ids", "aux_hidden_state_layer_ids"),)  # public name, name here
# Public fields of a draft that are not its decoder's.
OUTSIDE = ("architectures", "block_size", "dflash_config", "draft_vocab_size", "sample_from_anchor", "torch_dtype")


def is_speculators(values: Mapping[str, Any]) -> bool:
    return "speculators_model_type" in values


def to_speculators(values: Mapping[str, Any], verifier: str, architectures: list[str]) -> dict[str, Any]:
    """A DFLASH draft's public config.json -> the same in this layout; `verifier` is the target, by folder or hub id."""
    own = values["dflash_config"]
    from_anchor = values.get("sample_from_anchor", False)
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": values["block_size"] - (0 if from_anchor else 1),
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
        "transformer_layer_config": {name: value for name, value in values.items() if name not in (*OUTSIDE, *OWN)},
        "draft_vocab_size": values.get("draft_vocab_size") or values["vocab_size"],
        "target_hidden_size": values["hidden_size"],
        "block_size": values["block_size"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in own["target_layer_ids"]],
        "mask_token_id": own["mask_token_id"],
        "sample_from_anchor": from_anchor,
        "sliding_window_non_causal": False,
        "tie_word_embeddings": False,
        **{name: values[name] for name in ("torch_dtype", *OWN) if name in values},
    }


def from_speculators(values: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse. Raises ValueError for another kind of draft or a config that lacks what the public fields need."""
    if values["speculators_model_type"] != "dflash":
        raise ValueError(f"speculators_model_type is {values['speculators_model_type']!r}; only 'dflash' is supported")
    missing = [name for name in ("transformer_layer_config", "aux_hidden_state_layer_ids") if not values.get(name)]
    if missing:
        raise ValueError(f"draft config lacks {', '.join(missing)}")
    inside = values["transformer_layer_config"]
    own = {"mask_token_id": values.get("mask_token_id")}
    own["target_layer_ids"] = [layer - 1 for layer in values["aux_hidden_state_layer_ids"]]
    public = {**inside, **values, "architectures": ["DFlashDraftModel"], "dflash_config": own}
    verifier = (values.get("speculators_config") or {}).get("verifier") or {}
    public.setdefault("target", verifier.get("name_or_path") or "")
    if public.get("draft_vocab_size") == inside["vocab_size"]:
        del public["draft_vocab_size"]
    moved = ("transformer_layer_config", "aux_hidden_state_layer_ids", "mask_token_id")
    return {name: value for name, value in public.items() if name not in moved and "speculators" not in name}
