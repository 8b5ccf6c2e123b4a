"""What the architectures of targets fix beside the fields of their config.json, and which targets are refused.

A family is a function: the config's fields, as transformers gives them, -> `Traits`. Sources: the architectures' code
in transformers; Gemma 2 (arXiv 2408.00118), Gemma 3 (2503.19786), Phi-3 (2404.14219), OLMo 2 (2501.00656),
gpt-oss (2508.10925).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from slipstream.kernels.gemm.activation import Activation

Norms = Literal["pre", "post", "sandwich"]
# A multimodal checkpoint whose text part is served -> the architecture of that part.
TEXT_PARTS = {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"}
ACTIVATIONS: dict[str, "Activation"] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# What `refusal` appends to its reason; README's table and docs/serving.md list the same.
NOT_SERVED = (
    "Slipstream does not serve hybrid and recurrent targets (gated delta nets, Mamba, RWKV), multi-head latent "
    "attention (MLA), encoder-decoders, image inputs, LoRA adapters on targets, or a target over several GPUs"
)
# Fields that only such models have.
IMAGE_FIELDS = ("img_processor", "embd_layer", "vision_lora")  # Phi-3-vision and Phi-4-multimodal, with code of theirs
MAMBA_FIELDS = ("mamba_d_state", "mamba_d_conv", "ssm_cfg", "ssm_state_size", "state_size", "linear_num_key_heads")
RECURRENT_KINDS = {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "hybrid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Of all layers of a family, unless `attention` says otherwise."""

    attention: Mapping[str, Any] = field(default_factory=dict)
    """Fields of AttentionSpec."""
    activation: str = "hidden_act"
    """The config's field that names it."""
    norms: Norms = "pre"
    """Where the layers' norms are: LayerSpec.norms."""
    norm_offset: bool = False
    """Norms multiply by 1 + weight."""
    embedding_scale: float | None = None
    logit_softcap: float | None = None


def gemma2(values: Mapping[str, Any]) -> Traits:
    return Traits(
        attention={"scale": values["query_pre_attn_scalar"] ** -0.5, "softcap": values.get("attn_logit_softcapping")},
        activation="hidden_activation",
        norms="sandwich",
        norm_offset=True,
        embedding_scale=values["hidden_size"] ** 0.5,
        logit_softcap=values.get("final_logit_softcapping"),
    )


def gemma3(values: Mapping[str, Any]) -> Traits:
    """Gemma 2 with norms of queries and keys; its configs leave out the caps, which its code has."""
    one = gemma2(values)
    return Traits(
        attention={**one.attention, "qk_norm": True},
        activation=one.activation,
        norms=one.norms,
        norm_offset=True,
        embedding_scale=one.embedding_scale,
        logit_softcap=one.logit_softcap,
    )


def gpt_oss(_values: Mapping[str, Any]) -> Traits:
    """Windows, biases and YaRN are fields of its config."""
    return Traits(attention={"sinks": True})


def olmo2(_values: Mapping[str, Any]) -> Traits:
    return Traits(attention={"projection_norm": True}, norms="post")


def phi3(_values: Mapping[str, Any]) -> Traits:
    """What is particular, fused projections and longrope, files and fields say."""
    return Traits()


FAMILIES: dict[str, Callable[[Mapping[str, Any]], Traits]] = {
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "GptOssForCausalLM": gpt_oss,
    "Olmo2ForCausalLM": olmo2,
    "Phi3ForCausalLM": phi3,
}
MIXTURES = frozenset({"GptOssForCausalLM"})  # of these, the families of experts
OFFSET_NORMS = frozenset({"Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"})


def architecture_of(values: Mapping[str, Any]) -> str:
    """Of the decoder: of a multimodal checkpoint, that of its text part."""
    name = (values.get("architectures") or ["(none)"])[0]
    return TEXT_PARTS.get(name, name)


def text_part(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The decoder's fields of a config, which a multimodal checkpoint has in `text_config`."""
    name = (values.get("architectures") or [""])[0]
    if name not in TEXT_PARTS:
        return values
    inside = values.get("text_config") or {}
    tied = inside.get("tie_word_embeddings", values.get("tie_word_embeddings", True))  # true where neither says
    return {**inside, "architectures": [TEXT_PARTS[name]], "tie_word_embeddings": tied}


def traits_of(values: Mapping[str, Any]) -> Traits:
    family = FAMILIES.get(architecture_of(values))
    return Traits() if family is None else family(values)


def activation_of(values: Mapping[str, Any], traits: Traits) -> "Activation":
    """Raises ValueError for one that there are no kernels for."""
    name = values.get(traits.activation) or ("gelu_pytorch_tanh" if traits.activation == "hidden_activation" else None)
    if name not in ACTIVATIONS:
        raise ValueError(f"{traits.activation} is {name!r}; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def refusal(values: Mapping[str, Any]) -> str:
    """Why targets with such a config are not served by design, and what else is not; empty where they may be."""
    reason = _reason(values)
    return f"{reason}. {NOT_SERVED}" if reason else ""


def adapter_refusal(values: Mapping[str, Any]) -> str:
    """What to do with a folder that holds an adapter in place of a model, by its adapter_config.json."""
    kind, base = str(values.get("peft_type") or "LORA"), values.get("base_model_name_or_path") or "its base model"
    kind = "a LoRA adapter" if kind.upper() == "LORA" else f"an adapter ({kind})"
    return (
        f"holds {kind} for {base} (adapter_config.json) and no config.json; merge it into {base}, e.g. with peft's "
        f"merge_and_unload, save the result together with the tokenizer and name that folder. {NOT_SERVED}"
    )


def _reason(values: Mapping[str, Any]) -> str:
    name = (values.get("architectures") or [""])[0]
    inside = values.get("text_config")
    both = {**(inside if isinstance(inside, Mapping) else {}), **values}
    if values.get("is_encoder_decoder"):
        return "it is an encoder-decoder"
    if both.get("kv_lora_rank"):
        return "it has multi-head latent attention (MLA)"
    kinds = {kind for key in ("layer_types", "layers_block_type", "block_types") for kind in both.get(key) or ()}
    if kinds & RECURRENT_KINDS or any(both.get(key) for key in MAMBA_FIELDS):
        return "it has recurrent layers (a hybrid, as with gated delta nets or Mamba)"
    if name.lower().startswith("rwkv"):  # its configs have no field that tells
        return "its layers are recurrent (RWKV)"
    reads_images = "vision_config" in values or any(values.get(key) for key in IMAGE_FIELDS)
    if reads_images and name not in TEXT_PARTS:
        return f"it reads images; of multimodal checkpoints the text part of {', '.join(TEXT_PARTS)} is served"
    if both.get("use_bidirectional_attention"):
        return "its attention is bidirectional (use_bidirectional_attention), so it does not continue text"
    return ""
