"""Traits that the architectures of targets fix beside the fields of config.json, and reasons to refuse a target.

A family is its `Traits`, or a function: the config's fields, as transformers gives them, -> `Traits`. Sources: the
architectures' code in transformers; Gemma 2 (arXiv 2408.00118), Gemma 3 (2503.19786), Phi-3 (2404.14219), OLMo 2
(2501.00656), gpt-oss (2508.10925).
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

from slipstream.models.files.checkpoint import Values, architecture_name
from slipstream.models.files.tables import read_tables

if TYPE_CHECKING:
    from slipstream.kernels.gemm.activation import Activation

    MLPActivation = Activation | Literal["relu2"]

GateActivation = Literal["sigmoid", "softplus"]
Hidden = Literal["after_norm", "before_norm"]
Norms = Literal["pre", "post", "sandwich"]
Windows = Literal["none", "alike", "by_layer"]
TABLES = read_tables(Path(__file__).with_name("families.yaml"))
UNSERVED: dict[str, str] = TABLES["unserved"]
TEXT_PARTS: dict[str, str] = TABLES["text_parts"]
# The same for text parts of another kind, which their `model_type` tells.
TEXT_TYPES = {("Mistral3ForConditionalGeneration", "ministral3"): "Ministral3ForCausalLM"}
FIXED: dict[str, dict[str, Any]] = TABLES["fixed"]
UNGATED: dict[str, "MLPActivation"] = {"relu2": "relu2"}  # of MLPs without a gate
ACTIVATIONS: dict[str, "MLPActivation"] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# `refusal` appends this to its reason; README's table and docs/families.md list the same.
NOT_SERVED = (
    "Slipstream does not serve hybrid and recurrent targets but for gated delta nets (Mamba, RWKV), multi-head latent "
    "attention (MLA), encoder-decoders, image inputs, or LoRA adapters on targets"
)
DELTA_NETS = {"Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"}  # families that have them
RECURRENT_KINDS = {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "hybrid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputGate:
    """A gate on attention's output, before its projection: the activation of a product of the layer's input."""

    activation: GateActivation
    """Softplus is computed in fp32."""
    by_head: bool = False
    """One factor for all dims of a head, else one for each."""
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerSpec:
    """A second embedding of tokens, of which each layer reads a part (Gemma 4)."""

    vocab_size: int
    size: int
    """Numbers of a layer's part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Traits of all layers of a family, unless `attention` says otherwise."""

    attention: Values = field(default_factory=dict)
    """Fields of AttentionSpec."""
    attention_by_layer: Sequence[Values] = ()
    """Fields of AttentionSpec that differ by layer."""
    layer: Values = field(default_factory=dict)
    """Other fields of LayerSpec."""
    mlp_sizes: Sequence[int] = ()
    """Intermediate size of each layer's MLP; empty: `intermediate_size` for all."""
    activation: str = "hidden_act"
    """The config's field that names it."""
    norms: Norms = "pre"
    """Where the layers' norms are: LayerSpec.norms."""
    windows: Windows = "by_layer"
    """Which layers `sliding_window` is for: none, all, or those that `layer_types` calls sliding_attention."""
    window_switch: bool = False
    """`use_sliding_window` decides whether there are windows."""
    attention_bias: bool = True
    """`attention_bias` decides whether all four projections of attention have biases."""
    gated: bool = True
    """MLPs have a gate."""
    mlp_bias: str = ""
    """The config's field that decides whether MLPs have biases; empty: they have none."""
    fields: Values = field(default_factory=dict)
    """Fields in place of the config's."""
    query_growth: bool = False
    """Rotary parameters have a growth of queries by position."""
    partial_rotary: bool = False
    """`partial_rotary_factor` decides how much of a head is rotated."""
    unrotated: Collection[int] = ()
    """Layers without positions (NoPE)."""
    delta_net: Mapping[str, int] | None = None
    """Fields of DeltaNetSpec, of the layers that `layer_types` calls linear_attention."""
    rope_thetas: Mapping[int, float] = field(default_factory=dict)
    """Bases of layers that have one of their own."""
    norm_offset: bool = False
    """Norms multiply by 1 + weight."""
    final_norm_offset: bool = True
    """So does the one after the last layer."""
    post_norm_eps: float | None = None
    """Epsilon of the norms of outputs; None: `rms_norm_eps`."""
    embedding_norm: bool = False
    per_layer: PerLayerSpec | None = None
    embedding_scale: float | None = None
    logit_softcap: float | None = None
    residual_scale: float = 1.0
    logit_divisor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The fields of a family's configs that its experts depend on."""

    switch: str = ""
    """Whether there are any; empty: there are."""
    size: str = "intermediate_size"
    """Intermediate size of one expert."""
    top_k: str = "num_experts_per_tok"
    """How many a token takes; a list where layers differ."""
    count: str = ""
    """How many experts there are; empty: `num_experts` or `num_local_experts`."""
    normalise: str = ""
    """Whether the weights of the chosen experts are divided by their sum; empty: they are."""
    shared: str = ""
    """Size of an expert that every token takes; empty: there is none."""
    shared_experts: str = ""
    """How many experts of `size` every token takes, in place of `shared`."""
    shared_gate: bool = False
    """The shared expert has a gate."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    correction: bool = False
    """A bias is added to the scores for the choice alone."""
    logit_softcap: str = ""
    """Soft cap of the router's logits, where it is above 0; empty: none."""
    wide_router: bool = False
    """Its weights are in fp32."""
    grouped: bool = False
    """`n_group` and `topk_group` are read."""
    scale: str = ""
    """Factor of the weights; empty: 1."""
    layers: Literal["all", "by_step", "by_type", "after_first", "between"] = "all"
    """The layers that have experts: all, those that `decoder_sparse_step` and `mlp_only_layers` leave, those that
    `mlp_layer_types` calls sparse, all but the first `first_k_dense_replace`, or every `moe_layer_interval`-th from
    `moe_layer_start_index` to `moe_layer_end_index`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPForm:
    """The module of a family's files that predicts a token more (multi-token prediction)."""

    names: Mapping[str, str]
    """How names of its tensors begin in files -> here (models/drafts/mtp.py). For the first module {last} is the number
    of layers and {index} 0; for each later one they are one more. The first that fits counts; an empty one leaves
    tensors out."""
    experts: bool = True
    """Its layer has the family's experts, unless `mtp_mlp_layer_types` says otherwise; else an MLP."""
    kind: str = "full_attention"
    """The kind of its layer, where the family has several and `mtp_layer_types` does not say."""
    count: str = "num_nextn_predict_layers"
    """The config's field of the number of modules; without it the files say whether there is one."""
    zero_first: bool = False
    """Row 0 reads zeros in place of an embedding."""
    hidden: Hidden | None = "after_norm"
    """The state that it reads, of the target and later its own: after or before the final norm; None: those who serve
    it differ."""
    has_norm: bool = True
    """It has a final norm, else the target's."""

    @property
    def has_several(self) -> bool:
        """Whether files may have several modules, all of whose tensors are numbered."""
        return all("{" in name for name in self.names)

    @property
    def has_later_layers(self) -> bool:
        """Whether the module is a layer after the last one."""
        return any(name.startswith("layers.") for name in self.names)


PLAIN = {name: Traits(**fields) for name, fields in TABLES["traits"].items()}  # which depend on no config


def mistral(values: Values) -> Traits:
    """Mistral and Mixtral. transformers reads a Mistral that names `layer_types` as a Ministral, with windows by
    layer."""
    is_mistral = values.get("model_type") in ("mistral", "ministral")
    has_layer_types = is_mistral and values.get("layer_types") is not None
    return Traits(windows="by_layer" if has_layer_types else "alike", attention_bias=False)


def qwen2_moe(values: Values) -> Traits:
    return replace(PLAIN["Qwen2ForCausalLM"], attention={"qkv_bias": bool(values.get("qkv_bias", True))})


def qwen3_next(values: Values) -> Traits:
    """Qwen3-Next and Qwen3.5: gated delta nets, and full attention with a gate of its output. Configs of Qwen3.5-MoE
    have no size of MLPs, since all layers have experts."""
    fields = {
        "num_key_heads": "linear_num_key_heads",
        "num_value_heads": "linear_num_value_heads",
        "key_dim": "linear_key_head_dim",
        "value_dim": "linear_value_head_dim",
        "taps": "linear_conv_kernel_dim",
    }
    gate = OutputGate(activation="sigmoid", bias=bool(values.get("attention_bias")))
    return Traits(
        attention={"qk_norm": True, "gate": gate},
        delta_net={name: count_of(values, key) for name, key in fields.items()},
        windows="none",
        fields={} if values.get("intermediate_size") else {"intermediate_size": values.get("moe_intermediate_size")},
        partial_rotary=True,
        norm_offset=True,
    )


def gemma(values: Values) -> Traits:
    return Traits(windows="none", norm_offset=True, embedding_scale=values["hidden_size"] ** 0.5)


def gemma2(values: Values) -> Traits:
    scale = number_of(values, "query_pre_attn_scalar") ** -0.5
    return Traits(
        attention={"scale": scale, "softcap": cap_of(values, "attn_logit_softcapping")},
        activation="hidden_activation",
        norms="sandwich",
        norm_offset=True,
        embedding_scale=values["hidden_size"] ** 0.5,
        logit_softcap=cap_of(values, "final_logit_softcapping"),
    )


def gemma3(values: Values) -> Traits:
    """Gemma 2 with norms of queries and keys, and without a cap of scores: its code reads that field in vain."""
    base = gemma2(values)
    return replace(base, attention={"scale": base.attention["scale"], "qk_norm": True})


def gemma4(values: Values) -> Traits:
    """Gemma 4: full layers have heads of their own size, and may have no values but their keys; the last layers may
    read keys and values of earlier ones. Scores are not scaled. Experts are beside the MLPs."""
    check_rotations(values)
    hidden = count_of(values, "hidden_size")
    per_layer = None
    if values.get("hidden_size_per_layer_input"):
        sizes = {"vocab_size": "vocab_size_per_layer_input", "size": "hidden_size_per_layer_input"}
        per_layer = PerLayerSpec(**{name: count_of(values, key) for name, key in sizes.items()})
        if per_layer.vocab_size < count_of(values, "vocab_size"):
            raise ValueError(
                f"config.json: vocab_size_per_layer_input is {per_layer.vocab_size}; it must be at least vocab_size, "
                f"{values['vocab_size']}"
            )
    by_layer = _gemma4_attention(values)
    is_wide = [bool(values.get("use_double_wide_mlp")) and "kv_source" in layer for layer in by_layer]
    return Traits(
        attention={"qk_norm": True, "scale": 1.0},
        attention_by_layer=by_layer,
        layer={"scaled": True, "per_layer_size": per_layer.size if per_layer else 0},
        mlp_sizes=[count_of(values, "intermediate_size") * (2 if wide else 1) for wide in is_wide],
        activation="hidden_activation",
        norms="sandwich",
        embedding_scale=hidden**0.5,
        per_layer=per_layer,
        logit_softcap=cap_of(values, "final_logit_softcapping"),
    )


def _gemma4_attention(values: Values) -> list[dict[str, Any]]:
    """Fields of each layer's AttentionSpec. Raises ValueError for layers that read keys and values of none before
    them, and for fields by layer that its code does not read, or not so."""
    count = count_of(values, "num_hidden_layers")
    kinds = values.get("layer_types") or []
    is_equal = bool(values.get("attention_k_eq_v"))
    full = _gemma4_heads(values, kinds)
    first = count - int(values.get("num_kv_shared_layers") or 0)
    sources = {kind: index for index, kind in enumerate(kinds[: max(first, 0)])}
    if set(kinds) - sources.keys():
        raise ValueError(
            f"config.json: num_kv_shared_layers is {values.get('num_kv_shared_layers')}; of {count} layers, one of "
            "each kind of layer_types must come before them"
        )
    layers = []
    for index, kind in enumerate(kinds):
        layer = dict(full) if kind == "full_attention" else {}
        if index >= first:
            layer["kv_source"] = sources[kind]
        else:
            layer |= {"value_norm": True, "key_is_value": is_equal and kind == "full_attention"}
        layers.append(layer)
    return layers


def _gemma4_heads(values: Values, kinds: Sequence[str]) -> dict[str, int]:
    """Fields of AttentionSpec by which full layers differ: `per_layer_config`, into which transformers puts
    `global_head_dim` and `num_global_key_value_heads`."""
    by_layer = {int(index): fields for index, fields in (values.get("per_layer_config") or {}).items()}
    if not by_layer:
        heads = values.get("num_global_key_value_heads") if values.get("attention_k_eq_v") else None
        fields = {"head_dim": values.get("global_head_dim"), "num_key_value_heads": heads}
        fields = {name: value for name, value in fields.items() if value is not None}
    else:
        fields = next(iter(by_layer.values()))
        full = {index for index, kind in enumerate(kinds) if kind == "full_attention"}
        is_read = fields.keys() <= {"head_dim", "num_key_value_heads"}
        if not is_read or by_layer != dict.fromkeys(full, fields):
            raise ValueError(
                f"config.json: per_layer_config is {by_layer!r}; it may have head_dim and num_key_value_heads, the "
                "same for all layers that layer_types calls full_attention"
            )
    names = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}
    return {names[name]: count_of(fields, name) for name in fields}


def muse_glimmer(values: Values) -> Traits:
    """Norms of queries and keys have no weights; the scale of queries is that of the scores. The final norm's weight
    holds the factor of the logits once it is loaded (adapt.py). Raises ValueError for rotary bases by layer, of which
    its code reads only whether they are 0: layers without positions."""
    bases = values.get("layer_rope_theta") or ()
    base = (values.get("rope_parameters") or {}).get("rope_theta")
    if len(bases) != count_of(values, "num_hidden_layers") or set(bases) - {0, base}:
        raise ValueError(
            f"config.json: layer_rope_theta is {list(bases)!r}; it must have 0 or rope_theta, {base}, for each layer"
        )
    scale = number_of(values, "qk_scale_factor") * count_of(values, "head_dim") ** -0.5
    attention = {"qk_norm": True, "norm_weights": False, "scale": scale}
    return Traits(
        attention=attention | {"gate": OutputGate(activation="sigmoid")},
        activation="hidden_activation",
        norms="sandwich",
        unrotated=[index for index, theta in enumerate(bases) if not theta],
        norm_offset=True,
        final_norm_offset=False,
        post_norm_eps=number_of(values, "post_norm_eps"),
        embedding_norm=True,
        logit_softcap=number_of(values, "final_logit_softcapping"),
        logit_divisor=1 / number_of(values, "output_multiplier"),
    )


def laguna(values: Values) -> Traits:
    """Numbers of query heads differ by layer. Raises ValueError for gates that its code takes for others, and for
    fields of its makers' code that transformers does not read."""
    check_rotations(values)
    check_unread(values, TABLES["laguna_fields"])
    gating = values.get("gating")
    if gating not in (True, "per-head", "per-element"):
        raise ValueError(f"config.json: gating is {gating!r}; it must be true, 'per-head' or 'per-element'")
    gate = OutputGate(activation="softplus", by_head=gating != "per-element")
    name = "num_attention_heads_per_layer"
    heads = values.get(name) or ()
    if len(heads) != count_of(values, "num_hidden_layers"):
        raise ValueError(
            f"config.json: {name} is {heads!r}; it must have a number for each of {values['num_hidden_layers']} layers"
        )
    by_layer = [{"num_heads": count_of({name: number}, name)} for number in heads]
    return Traits(attention={"qk_norm": True, "gate": gate}, attention_by_layer=by_layer, partial_rotary=True)


def check_unread(values: Values, supported: Values) -> None:
    """Raises ValueError where a field that transformers does not read asks for another model than it makes."""
    for name, value in supported.items():
        if values.get(name) not in (None, value):
            raise ValueError(f"config.json: {name} is {values[name]!r}, which is not supported; only {value!r} is")


def check_types(values: Values) -> None:
    """Raises ValueError for a field of another type than TABLES["types"] says."""
    for name, expected in TABLES["types"].items():
        value = values.get(name)
        items = value if expected.startswith("a list") and isinstance(value, list) else [value]
        kind: Any = str if "text" in expected else int
        is_right = all(isinstance(item, kind) for item in items) and (isinstance(value, list) == ("list" in expected))
        if value is not None and not is_right:
            raise ValueError(f"config.json: {name} is {value!r}; it must be {expected}")


def check_rotations(values: Values) -> None:
    """Raises ValueError unless there are rotary parameters for each kind of layer."""
    rotations = values.get("rope_parameters") or {}
    lacking = {kind for kind in values.get("layer_types") or () if not isinstance(rotations.get(kind), Mapping)}
    if lacking:
        raise ValueError(
            f"config.json: rope_parameters is {rotations!r}; it must have an object for {' and '.join(sorted(lacking))}"
        )


def olmoe(values: Values) -> Traits:
    """Raises ValueError for a config that clips queries, keys and values."""
    if values.get("clip_qkv") is not None:
        raise ValueError(
            f"config.json: clip_qkv is {values['clip_qkv']!r}, and clipped queries, keys and values are not supported"
        )
    return replace(PLAIN["Olmo2ForCausalLM"], norms="pre")


def hunyuan(values: Values) -> Traits:
    """Norms of heads follow the rotation. A "dynamic" rotary embedding with `alpha` is one with a larger base. Raises
    ValueError for keys and values that layers share."""
    if values.get("use_cla"):
        raise ValueError("config.json: use_cla is set, and keys and values that layers share are not supported")
    traits = Traits(attention={"qk_norm": True, "norm_last": True}, windows="none")
    parameters = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if (parameters.get("rope_type") or parameters.get("type")) != "dynamic" or not parameters.get("alpha"):
        return traits
    head_dim = count_of(values, "head_dim")
    theta = number_of({"rope_theta": values.get("rope_theta"), **parameters}, "rope_theta")
    base = theta * number_of(parameters, "alpha") ** (head_dim / (head_dim - 2))
    rope = {"rope_type": "default", "rope_theta": base}
    return replace(traits, fields={"rope_parameters": rope, "rope_scaling": None})


def seed_oss(values: Values) -> Traits:
    """The output projection has a field of its own for its bias."""
    biases = {"qkv_bias": bool(values["attention_bias"]), "output_bias": bool(values["attention_out_bias"])}
    return Traits(attention=biases, windows="none", mlp_bias="mlp_bias")


def glm(values: Values) -> Traits:
    """GLM-4 and Solar Open."""
    biases = {"qkv_bias": bool(values["attention_bias"]), "output_bias": False}
    return Traits(attention=biases, windows="none", partial_rotary=True)


def ernie(values: Values) -> Traits:
    """ERNIE 4.5; its pairs of rotated dims stand side by side (INTERLEAVED)."""
    has_bias = bool(values["use_bias"])
    return Traits(attention={"qkv_bias": has_bias, "output_bias": has_bias}, windows="none", mlp_bias="use_bias")


def ernie_moe(values: Values) -> Traits:
    """Raises ValueError for a config with biases, of which its head has one, too."""
    if values["use_bias"]:
        raise ValueError("config.json: use_bias is true, and heads with a bias are not supported in this family")
    return ernie(values)


def exaone4(values: Values) -> Traits:
    """Where there are windows, layers without one do not rotate."""
    kinds = values.get("layer_types") or ()
    has_windows = values.get("sliding_window") is not None
    unrotated = [index for index, kind in enumerate(kinds) if has_windows and kind != "sliding_attention"]
    return Traits(attention={"qk_norm": True}, norms="post", attention_bias=False, unrotated=unrotated)


def smollm3(values: Values) -> Traits:
    unrotated = [index for index, rotates in enumerate(values["no_rope_layers"]) if not rotates]
    return Traits(window_switch=True, mlp_bias="mlp_bias", unrotated=unrotated)


def granite(values: Values) -> Traits:
    """Weights hold the factors of residuals and logits once they are loaded (adapt.py)."""
    return Traits(
        attention={"scale": number_of(values, "attention_multiplier")},
        windows="none",
        mlp_bias="mlp_bias",
        embedding_scale=number_of(values, "embedding_multiplier"),
        residual_scale=number_of(values, "residual_multiplier"),
        logit_divisor=number_of(values, "logits_scaling"),
    )


def granite_swa(values: Values) -> Traits:
    """Granite with windows, sinks and a rotary base for each layer; those with 0 do not rotate."""
    base = granite(values)
    thetas = values.get("layer_rope_theta")
    count = count_of(values, "num_hidden_layers")
    if not isinstance(thetas, list) or len(thetas) != count or not all(is_number(theta) for theta in thetas):
        raise ValueError(f"config.json: layer_rope_theta is {thetas!r}; it must be a number for each of {count} layers")
    return replace(
        base,
        attention={**base.attention, "sinks": True},
        windows="by_layer",
        unrotated=[index for index, theta in enumerate(thetas) if not theta],
        rope_thetas={index: float(theta) for index, theta in enumerate(thetas) if theta},
    )


def hyperclovax(values: Values) -> Traits:
    """Granite with norms of outputs, unless `use_post_norm` is off, and a factor of logits in place of a divisor."""
    return replace(
        granite(values),
        norms="sandwich" if values["use_post_norm"] else "pre",
        logit_divisor=1 / number_of(values, "logits_scaling"),
    )


def glm4_moe(values: Values) -> Traits:
    """GLM-4.5 and 4.6."""
    base = glm(values)
    return replace(base, attention={**base.attention, "qk_norm": bool(values.get("use_qk_norm"))})


def flint(values: Values) -> Traits:
    """Layers without a window do not rotate."""
    kinds = values.get("layer_types") or ()
    unrotated = [index for index, kind in enumerate(kinds) if kind != "sliding_attention"]
    return Traits(attention={"qk_norm": True, "sinks": True}, unrotated=unrotated)


def variant(family: Callable[[Values], Traits], **fields: Any) -> Callable[[Values], Traits]:
    """Returns the function of a family that differs from another in `fields` of its traits."""
    return lambda values: replace(family(values), **fields)


# Traits, or the function that finds them in a config.
FAMILIES: dict[str, Traits | Callable[[Values], Traits]] = PLAIN | {
    "Ernie4_5ForCausalLM": ernie,
    "Ernie4_5_MoeForCausalLM": ernie_moe,
    "Exaone4ForCausalLM": exaone4,
    "ExaoneMoeForCausalLM": variant(exaone4, norms="pre"),
    "FlintForCausalLM": flint,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Gemma4ForCausalLM": gemma4,
    "Gemma4UnifiedForCausalLM": gemma4,
    "GemmaForCausalLM": gemma,
    "Glm4ForCausalLM": variant(glm, norms="sandwich"),
    "Glm4MoeForCausalLM": glm4_moe,
    "GlmForCausalLM": glm,
    "GraniteForCausalLM": granite,
    "GraniteMoeForCausalLM": granite,
    "GraniteMoeSWAForCausalLM": granite_swa,
    "GraniteMoeSharedForCausalLM": granite,
    "GraniteSWAForCausalLM": granite_swa,
    "HeliumForCausalLM": variant(glm, partial_rotary=False, mlp_bias="mlp_bias"),
    "HunYuanDenseV1ForCausalLM": hunyuan,
    "HunYuanMoEV1ForCausalLM": hunyuan,
    "HyperCLOVAXForCausalLM": hyperclovax,
    "LagunaForCausalLM": laguna,
    "MistralForCausalLM": mistral,
    "MixtralForCausalLM": mistral,
    "MuseGlimmerForCausalLM": muse_glimmer,
    "OlmoeForCausalLM": olmoe,
    "Qwen2MoeForCausalLM": qwen2_moe,
    "Qwen3NextForCausalLM": qwen3_next,
    "Qwen3_5ForCausalLM": qwen3_next,
    "Qwen3_5MoeForCausalLM": qwen3_next,
    "SeedOssForCausalLM": seed_oss,
    "SmolLM3ForCausalLM": smollm3,
    "SolarOpenForCausalLM": glm,
    "VaultGemmaForCausalLM": variant(gemma2, norms="pre"),
}
# Families that rotate dims 2 i and 2 i + 1 of a head together, and not i and i + half.
INTERLEAVED = frozenset(
    {"Ernie4_5ForCausalLM", "Ernie4_5_MoeForCausalLM", "Glm4ForCausalLM", "GlmForCausalLM", "HeliumForCausalLM"}
)
MIXTURES = {name: Mixture(**fields) for name, fields in TABLES["experts"].items()}
MTP_FORMS = {name: MTPForm(**fields) for name, fields in TABLES["mtp"].items()}


def architecture_of(values: Values) -> str:
    """Returns the decoder's architecture: for a multimodal checkpoint, that of its text part."""
    name = architecture_name(values)
    return TEXT_TYPES.get((name, _text_type(values)), "") or TEXT_PARTS.get(name, name)


def text_part(values: Values) -> Values:
    """The decoder's fields of a config, which a multimodal checkpoint has in `text_config`. Whether the head is tied
    the top level says, as in transformers; Muse-Glimmer's files do not, and have a head."""
    name = architecture_name(values)
    if name not in TEXT_PARTS:
        return values
    tied = values.get("tie_word_embeddings", False)
    same = {"architectures": [architecture_of(values)], "tie_word_embeddings": tied}
    return {**(values.get("text_config") or {}), **same, **FIXED.get(name, {})}


def traits_of(values: Values) -> Traits:
    family = FAMILIES[architecture_of(values)]
    return family if isinstance(family, Traits) else family(values)


def count_of(values: Values, name: str) -> int:
    """The field `name` of a config. Raises ValueError unless it is an integer of at least 1."""
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json: {name} is {value!r}; it must be an integer of at least 1")
    return value


def number_of(values: Values, name: str) -> float:
    """The field `name` of a config. Raises ValueError unless it is a number above 0."""
    value = values.get(name)
    if not is_number(value) or value == 0:
        raise ValueError(f"config.json: {name} is {value!r}; it must be a number above 0")
    return value


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it is a finite number of at least 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def cap_of(values: Values, name: str) -> float | None:
    """The field `name` of a config, as `number_of`; None where there is none."""
    return None if values.get(name) is None else number_of(values, name)


def activation_of(values: Values, traits: Traits) -> "MLPActivation":
    """Raises ValueError for one that there are no kernels for."""
    name = values.get(traits.activation) or ("gelu_pytorch_tanh" if traits.activation == "hidden_activation" else None)
    supported = ACTIVATIONS if traits.gated else UNGATED
    if name not in supported:
        raise ValueError(f"{traits.activation} is {name!r}; supported: {', '.join(supported)}")
    return supported[name]


def refusal(values: Values) -> str:
    """Why targets with such a config are not served by design, and what else is not; empty where they may be."""
    reason = _reason(values)
    return f"{reason}. {NOT_SERVED}" if reason else ""


def adapter_refusal(values: Values) -> str:
    """Says how to serve a folder that holds an adapter in place of a model, by its adapter_config.json."""
    kind = str(values.get("peft_type") or "LORA")
    base = values.get("base_model_name_or_path") or "its base model"
    kind = "a LoRA adapter" if kind.upper() == "LORA" else f"an adapter ({kind})"
    return (
        f"holds {kind} for {base} (adapter_config.json) and no config.json; merge it into {base}, e.g. with peft's "
        f"merge_and_unload, save the result together with the tokenizer and name that folder. {NOT_SERVED}"
    )


def _text_type(values: Values) -> str:
    """The `model_type` of a text part; empty where there is none."""
    inside = values.get("text_config")
    return str(inside.get("model_type") or "") if isinstance(inside, Mapping) else ""


def _reason(values: Values) -> str:
    name = architecture_name(values)
    inside = values.get("text_config")
    fields = {**(inside if isinstance(inside, Mapping) else {}), **values}
    if values.get("is_encoder_decoder"):
        return "it is an encoder-decoder"
    if fields.get("kv_lora_rank"):
        return "it has multi-head latent attention (MLA)"
    kinds = {kind for key in ("layer_types", "layers_block_type", "block_types") for kind in fields.get(key) or ()}
    has_delta_nets = architecture_of(values) in DELTA_NETS
    if not has_delta_nets and (kinds & RECURRENT_KINDS or any(fields.get(key) for key in TABLES["mamba_fields"])):
        return "it has recurrent layers (a hybrid, as with gated delta nets or Mamba)"
    if name.lower().startswith("rwkv"):  # its configs have no field that tells
        return "its layers are recurrent (RWKV)"
    text_type = _text_type(values)
    if name == "Mistral3ForConditionalGeneration" and text_type not in ("", "mistral", "ministral3"):
        return f"its text part is a {text_type}"
    reads_images = "vision_config" in values or any(values.get(key) for key in TABLES["image_fields"])
    if reads_images and name not in TEXT_PARTS:
        return f"it reads images; of multimodal checkpoints the text part of {', '.join(TEXT_PARTS)} is served"
    if fields.get("use_bidirectional_attention") not in (None, False, "vision"):  # the latter: only within an image
        return "its attention is bidirectional (use_bidirectional_attention), so it does not continue text"
    return f"it needs {UNSERVED[name]}" if name in UNSERVED else ""
