"""config.json of block drafts that makers of targets publish, in the public fields (block_layouts.py).

Such a file names no target and leaves out what its target fixes: the vocabulary, and what becomes of the head's logits.
"""

from collections.abc import Callable, Mapping
from typing import Any

from slipstream.models.drafts.layouts import LAYOUTS
from slipstream.models.files.checkpoint import architecture_name
from slipstream.models.targets.config import TargetSpec

Values = dict[str, Any]
WINDOWED = "sliding_attention"
GATES: dict[Any, dict[str, Any] | None] = LAYOUTS["laguna_gates"]


def publish(values: Mapping[str, Any], target: TargetSpec) -> Mapping[str, Any]:
    """A maker's config.json in the public fields; any other as it is. Raises ValueError for fields that mean what the
    network here does not do."""
    architecture = architecture_name(values)
    if "drafter" in values or architecture not in MAKERS:
        return values
    return MAKERS[architecture](dict(values), target)


def muse_glimmer(values: Values, target: TargetSpec) -> Values:
    """A block draft whose fields stand at the top level. All layers have windows by default, within which slots see
    one another both ways. The head's logits become what the target makes of them; embeddings are read as they are in
    its table, without its norm."""
    num_layers = values.get("num_hidden_layers", 0)
    return {
        "layer_types": [WINDOWED] * num_layers,
        "sliding_window": 2048,
        **with_vocabulary(values, target),
        "is_causal": False,
        "output_multiplier": 1 / target.logit_divisor,
        "final_logit_softcapping": target.logit_softcap,
    }


def laguna(values: Values, target: TargetSpec) -> Values:
    """A block draft with layers like its target's: an RMS norm for each target state that it reads, and the context
    passes through each layer's input norm, too."""
    heads = values.get("num_attention_heads")
    by_layer = values.get("num_attention_heads_per_layer") or []
    if set(by_layer) - {heads}:
        raise ValueError(
            f"draft config: num_attention_heads_per_layer is {by_layer}, which is not supported in drafts; all layers "
            f"must have num_attention_heads, {heads}"
        )
    if values.get("num_experts") and "sparse" in (values.get("mlp_layer_types") or ["sparse"]):
        raise ValueError(f"draft config: num_experts is {values['num_experts']}; experts are not supported in drafts")
    gating = values.get("gating", True)
    if not isinstance(gating, bool | str) or gating not in GATES:
        raise ValueError(f"draft config: gating is {gating!r}; it must be true, false, 'per-head' or 'per-element'")
    fields = {"tap_norms": True, "context_norms": True, "output_gate": GATES[gating]}
    return with_vocabulary(values, target) | fields | {"rope_parameters": laguna_rope(values)}


def laguna_rope(values: Values) -> Mapping[str, Any] | None:
    """Rotary parameters of the draft's kind of layers, which `rope_parameters` may have by kind. Raises ValueError for
    kinds that differ."""
    parameters = values.get("rope_parameters")
    kinds = sorted(set(values.get("layer_types") or ["full_attention"]))
    if not isinstance(parameters, Mapping) or not all(isinstance(parameters.get(kind), Mapping) for kind in kinds):
        return parameters
    if any(parameters[kind] != parameters[kinds[0]] for kind in kinds):
        raise ValueError(
            f"draft config: rope_parameters differ between {' and '.join(kinds)}; the layers of a draft must be alike"
        )
    return parameters[kinds[0]]


def with_vocabulary(values: Values, target: TargetSpec) -> Values:
    return {"vocab_size": target.vocab_size, **values}


MAKERS: dict[str, Callable[[Values, TargetSpec], Values]] = {
    "DFlashLagunaForCausalLM": laguna,
    "MuseGlimmerAssistantModel": muse_glimmer,
}
