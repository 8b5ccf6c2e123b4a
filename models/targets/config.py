"""Shapes and rotary embedding of a model, read from a transformers config."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from slipstream.models.targets import families
from slipstream.models.targets.families import Norms

if TYPE_CHECKING:
    from slipstream.kernels.gemm.activation import Activation

# Architecture -> has it q/k norms? All other differences within the family are config fields.
DENSE_ARCHITECTURES = {
    "LlamaForCausalLM": False,
    "MistralForCausalLM": False,
    "Qwen2ForCausalLM": False,
    "Qwen3ForCausalLM": True,
    **dict.fromkeys(families.FAMILIES.keys() - families.MIXTURES, False),  # they say themselves
}
# Fields whose defaults differ by family: a config.json that names them all says what transformers would make of it.
NEEDED = frozenset(
    ("hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads")
    + ("num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "vocab_size")
)
NEEDED_TOO: dict[str, frozenset[str]] = {
    "LlamaForCausalLM": frozenset(),
    "MistralForCausalLM": frozenset({"sliding_window"}),
    "Qwen2ForCausalLM": frozenset({"use_sliding_window"}),
    "Qwen3ForCausalLM": frozenset({"use_sliding_window", "head_dim"}),
    "MixtralForCausalLM": frozenset({"num_experts_per_tok", "sliding_window"}),
    "Qwen2MoeForCausalLM": frozenset(
        ("use_sliding_window", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
        + ("shared_expert_intermediate_size", "decoder_sparse_step", "mlp_only_layers", "qkv_bias")
    ),
    "Qwen3MoeForCausalLM": frozenset(
        ("use_sliding_window", "head_dim", "num_experts_per_tok", "moe_intermediate_size")
        + ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")
    ),
}
# Mixtures of experts, likewise.
EXPERT_ARCHITECTURES = {
    "Qwen3MoeForCausalLM": True,
    "Qwen2MoeForCausalLM": False,
    "MixtralForCausalLM": False,
    "GptOssForCausalLM": False,
}
ARCHITECTURES = DENSE_ARCHITECTURES | EXPERT_ARCHITECTURES
LAYER_KINDS = {"full_attention", "sliding_attention"}
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base and scaling parameters, named as in transformers."""

    theta: float = 10000.0
    rope_type: str = "default"
    scaling: Mapping[str, Any] = field(default_factory=dict, hash=False)
    partial: float = 1.0
    """The share of a head's dims, the first ones, that are rotated."""

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f"rope_type is {self.rope_type!r}; supported: {', '.join(ROPE_TYPES)}")
        if not 0 < self.partial <= 1:
            raise ValueError(f"partial_rotary_factor is {self.partial}; it must be above 0 and at most 1")

    @classmethod
    def from_json(cls, config: Mapping[str, Any], kind: str = "full_attention") -> "RopeConfig":
        """Reads `rope_parameters` (transformers 5) or the older `rope_theta` + `rope_scaling`; where each kind of layer
        has its own, those of `kind`."""
        parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        if isinstance(parameters.get(kind), Mapping):
            parameters = dict(parameters[kind])
        theta = parameters.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
        rope_type = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
        parameters.pop("type", None)
        partial = parameters.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
        if rope_type in ("llama3", "yarn"):
            parameters.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
        if rope_type == "longrope":
            original = config.get("original_max_position_embeddings") or config["max_position_embeddings"]
            original = parameters.setdefault("original_max_position_embeddings", original)
            parameters.setdefault("factor", config["max_position_embeddings"] / original)
        return cls(float(theta), rope_type, {} if rope_type == "default" else parameters, float(partial))

    def to_json(self) -> dict[str, Any]:
        """The older pair of fields, which all readers of draft checkpoints understand."""
        scaling = None if self.rope_type == "default" else {"rope_type": self.rope_type, **self.scaling}
        return {"rope_theta": self.theta, "rope_scaling": scaling}

    @property
    def of_draft(self) -> "RopeConfig":
        """What a draft of such a target has: the same base and scaling, of whole heads, which every engine can serve.
        Of longrope the base alone: its frequencies depend on the context length that is served, in training another
        one, and a draft must not see other angles than it was trained with."""
        longrope: dict[str, Any] = {"rope_type": "default", "scaling": {}} if self.rope_type == "longrope" else {}
        return replace(self, partial=1.0, **longrope)

    def rotary_dim(self, head_dim: int) -> int:
        return int(head_dim * self.partial)


def most_positions(named: int, rope: Mapping[str, Any]) -> int:
    """The longest text that a model reads whose config names so many positions, with its parameters of rotary
    embedding. YaRN extends the original ones by a factor, and recipes add it without a change of what is named."""
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings") or named
    return max(named, int(factor * original)) if rope.get("rope_type") == "yarn" and factor else named


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Self-attention of one layer. Backends serve every field, or refuse it by name."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    qk_norm: bool = False  # RMS norms of each head's queries and keys
    projection_norm: bool = False  # RMS norms of a token's queries and of its keys, all heads together (OLMo 2)
    norm_offset: bool = False  # they multiply by 1 + weight
    qkv_bias: bool = False
    output_bias: bool = False
    window: int | None = None  # positions that a query sees, its own included; None: all up to it
    scale: float | None = None  # of the scores; None: head_dim ** -0.5
    softcap: float | None = None  # scores s become softcap * tanh(s / softcap)
    sinks: bool = False  # a learnt score per query head joins each softmax

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPSpec:
    """A gated MLP."""

    intermediate_size: int
    bias: bool = False
    activation: "Activation" = "silu"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedSwiGLU:
    """gpt-oss's gated activation: (min(|up|, limit) * sign(up) + 1) * g * sigmoid(alpha * g), g = min(gate, limit)."""

    alpha: float = 1.702
    limit: float = 7.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """A mixture of gated MLPs: a router sends each token to `top_k` of them and weights their outputs."""

    num_experts: int
    top_k: int
    intermediate_size: int
    """Of one expert."""
    normalise: bool = True
    """The weights are a softmax over the chosen experts' scores, else over all. "Softmax, top-k, divide by the sum" and
    "top-k, softmax" both are the former."""
    shared_size: int = 0
    """Intermediate size of an MLP that every token takes as well, times the sigmoid of a learnt gate; 0: none."""
    activation: ClampedSwiGLU | None = None
    """None: silu(gate) * up."""
    bias: bool = False
    """Router and experts have biases."""
    transposed: bool = False
    """In files the experts of a layer are one tensor (E, inputs, outputs) in which gate and up alternate (gpt-oss)."""

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok is {self.top_k}; it must be 1 to {self.num_experts}, the number of experts"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """A decoder layer: attention, then an MLP or a mixture of them, each with RMS norms: "pre", of its input; "post",
    of its output before that is added to the residual (OLMo 2); "sandwich", of both (Gemma)."""

    attention: AttentionSpec
    mlp: MLPSpec | MoESpec
    norms: Norms = "pre"
    norm_offset: bool = False  # norms multiply by 1 + weight


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """What a target and a draft have alike."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig

    @staticmethod
    def read(values: Mapping[str, Any]) -> dict[str, Any]:
        """These fields, from those of a config.json."""
        heads = values["num_attention_heads"]
        same = ("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps", "max_position_embeddings")
        return {
            **{name: values[name] for name in same},
            "num_heads": heads,
            "num_kv_heads": values.get("num_key_value_heads") or heads,
            "head_dim": values.get("head_dim") or values["hidden_size"] // heads,
            "rope": RopeConfig.from_json(values),
        }

    def shape(self) -> dict[str, Any]:
        """These fields alone."""
        return {one.name: getattr(self, one.name) for one in fields(DecoderShape)}

    def layer(
        self,
        *,
        mlp: Mapping[str, Any] | None = None,
        norms: Norms = "pre",
        norm_offset: bool = False,
        **attention: Any,
    ) -> LayerSpec:
        """A layer of this shape; `attention` and `mlp` are the other fields of its AttentionSpec and MLPSpec."""
        same = ("num_heads", "num_kv_heads", "head_dim", "rope")
        spec = AttentionSpec(**{name: getattr(self, name) for name in same} | attention, norm_offset=norm_offset)
        own = MLPSpec(intermediate_size=self.intermediate_size, **mlp or {})
        return LayerSpec(attention=spec, mlp=own, norms=norms, norm_offset=norm_offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSpec(DecoderShape):
    """A decoder of the Llama family, layer by layer."""

    architecture: str
    layers: tuple[LayerSpec, ...]
    tie_word_embeddings: bool = False
    norm_offset: bool = False  # of the final norm, as in LayerSpec
    embedding_scale: float | None = None
    """What the target multiplies embeddings by, rounded to their dtype. Drafts read them as they are in the table."""
    logit_softcap: float | None = None
    """The target's logits x become c * tanh(x / c). A draft's own logits stay raw."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def most_positions(self) -> int:
        """The longest text that it reads."""
        return most_positions(self.max_position_embeddings, {"rope_type": self.rope.rope_type, **self.rope.scaling})

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "TargetSpec":
        """`values`: the fields of a transformers config, defaults included.

        Raises ValueError for another architecture or activation.
        """
        architecture = families.architecture_of(values)
        check_supported(values)
        values = families.text_part(values)
        traits = families.traits_of(values)
        bias = bool(values.get("attention_bias", False))
        attention = {
            "qk_norm": ARCHITECTURES[architecture],
            # Fixed by the architecture, not by a field, in Qwen2ForCausalLM.
            "qkv_bias": bias or architecture == "Qwen2ForCausalLM" or bool(values.get("qkv_bias", False)),
            "output_bias": bias,
            **traits.attention,
        }
        shape = DecoderShape(**DecoderShape.read(values))
        mlp = {"bias": bool(values.get("mlp_bias", False)), "activation": families.activation_of(values, traits)}
        layer = partial(shape.layer, mlp=mlp, norms=traits.norms, norm_offset=traits.norm_offset, **attention)
        ropes = {False: shape.rope, True: RopeConfig.from_json(values, "sliding_attention")}  # by whether windowed
        layers = [layer(window=window, rope=ropes[window is not None]) for window in windows_of(values)]
        return cls(
            **shape.shape(),
            architecture=architecture,
            layers=tuple(
                one if experts is None else replace(one, mlp=experts)
                for one, experts in zip(layers, experts_of(architecture, values), strict=True)
            ),
            tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
            norm_offset=traits.norm_offset,
            embedding_scale=traits.embedding_scale,
            logit_softcap=traits.logit_softcap,
        )


def check_supported(values: Mapping[str, Any]) -> None:
    """Raises ValueError for architectures that are not supported, and for variants of others that are refused."""
    name, reason = (values.get("architectures") or ["(none)"])[0], families.refusal(values)
    if reason or families.architecture_of(values) not in ARCHITECTURES:
        why = f": {reason}" if reason else ""
        known = ", ".join(sorted(ARCHITECTURES.keys() | families.TEXT_PARTS.keys()))
        raise ValueError(f"architecture {name} cannot be a target{why}; supported: {known}")


def windows_of(values: Mapping[str, Any]) -> list[int | None]:
    """The window of each layer, from a transformers config. Raises ValueError for other kinds of layers."""
    count, window = values["num_hidden_layers"], values.get("sliding_window")
    if not window or values.get("use_sliding_window") is False:
        return [None] * count
    kinds = values.get("layer_types")
    if kinds is None:  # transformers' rule for Qwen; Mistral has windows in every layer
        is_qwen3_moe = values.get("architectures") == ["Qwen3MoeForCausalLM"]  # windows in every layer, too
        first = values.get("max_window_layers", count) if "use_sliding_window" in values and not is_qwen3_moe else 0
        kinds = ["full_attention" if layer < first else "sliding_attention" for layer in range(count)]
    if len(kinds) != count or set(kinds) - LAYER_KINDS:
        raise ValueError(
            f"layer_types is {list(kinds)}; it must be {' or '.join(sorted(LAYER_KINDS))} for each of {count} layers"
        )
    return [int(window) if kind == "sliding_attention" else None for kind in kinds]


def experts_of(architecture: str, values: Mapping[str, Any]) -> list[MoESpec | None]:
    """The mixture of each layer, from a transformers config; None for a dense one."""
    count = values["num_hidden_layers"]
    if architecture in DENSE_ARCHITECTURES:
        return [None] * count
    is_qwen, is_gpt_oss = architecture.startswith("Qwen"), architecture == "GptOssForCausalLM"
    spec = MoESpec(
        num_experts=values.get("num_experts") or values["num_local_experts"],
        top_k=values["num_experts_per_tok"],
        intermediate_size=values["moe_intermediate_size" if is_qwen else "intermediate_size"],
        normalise=not is_qwen or bool(values.get("norm_topk_prob", False)),
        shared_size=values["shared_expert_intermediate_size"] if architecture == "Qwen2MoeForCausalLM" else 0,
        activation=clamped_swiglu(values) if is_gpt_oss else None,
        bias=is_gpt_oss,
        transposed=is_gpt_oss,
    )
    step, dense = values.get("decoder_sparse_step") or 1, set(values.get("mlp_only_layers") or ())
    return [spec if not is_qwen or (layer not in dense and (layer + 1) % step == 0) else None for layer in range(count)]


def clamped_swiglu(values: Mapping[str, Any]) -> ClampedSwiGLU:
    """Of gpt-oss, whose older configs lack `swiglu_alpha`."""
    given = {"alpha": values.get("swiglu_alpha"), "limit": values.get("swiglu_limit")}
    return ClampedSwiGLU(**{name: float(value) for name, value in given.items() if value is not None})


def is_complete(values: Mapping[str, Any]) -> bool:
    """Whether `TargetSpec.from_json` reads a config.json as it reads what transformers makes of it."""
    architecture = (values.get("architectures") or [""])[0]
    needed = NEEDED_TOO.get(architecture)
    if needed is None or values.get("use_sliding_window") or "auto_map" in values:
        return False
    if architecture in EXPERT_ARCHITECTURES and not values.keys() & {"num_experts", "num_local_experts"}:
        return False
    return values.keys() >= NEEDED | needed and bool(values.keys() & {"rope_theta", "rope_parameters"})


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """The three target states that an EAGLE3 draft reads, as layer outputs (num_layers = after the final norm).

    Deep targets follow EAGLE-3: outputs of layers 1, N//2 - 1 and N - 4. Below 11 layers that rule repeats a layer or
    stops far from the end, so shallow targets give an early, a middle and the last but one layer's output, from which
    drafts learnt fastest (docs/benchmarks.md, "What decides the accept length").
    """
    if num_layers >= 11:
        return (1, num_layers // 2 - 1, num_layers - 4)
    if num_layers < 3:
        raise ValueError(f"num_layers is {num_layers}; below 3 layers name aux_layers explicitly")
    middle = num_layers // 2
    return (num_layers // 4, middle, max(num_layers - 2, middle + 1))


def check_aux_layers(layers: tuple[int, ...], num_layers: int) -> None:
    """Raises ValueError unless every id is distinct and within 0..num_layers."""
    if not layers or len(set(layers)) != len(layers) or not all(0 <= layer <= num_layers for layer in layers):
        raise ValueError(
            f"aux_layers is {list(layers)}; name distinct states 0..{num_layers - 1} (layer outputs) "
            f"or {num_layers} (after the final norm)"
        )
