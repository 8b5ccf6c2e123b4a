"""Which drafter a checkpoint belongs to, by its config.json: ours names it, other trainers' name an architecture."""

from collections.abc import Mapping
from typing import Any

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
