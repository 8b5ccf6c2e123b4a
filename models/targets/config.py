"""Shapes and rotary embedding of a model, read from a transformers config."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from slipstream.models.files.checkpoint import Values, architecture_name
from slipstream.models.targets import families
from slipstream.models.targets.families import Norms, OutputGate, PerLayerSpec

if TYPE_CHECKING:
    from slipstream.models.targets.families import MLPActivation

ARCHITECTURES = frozenset(families.FAMILIES)
NEEDED = frozenset(families.TABLES["needed"])
NEEDED_TOO: dict[str, list[str]] = families.TABLES["needed_too"]
TAPS = 4  # of the convolution that there are kernels for
LAYER_KINDS = {"full_attention", "sliding_attention"}
# Rotary embeddings -> the numbers, and the lists of numbers, that each must have.
ORIGINAL = "original_max_position_embeddings"
GROWTH = "llama_4_scaling_beta"
ROPE_NUMBERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": ("factor", ORIGINAL),
    "longrope": ("factor", ORIGINAL),
    "proportional": ("partial_rotary_factor",),
}
ROPE_LISTS: dict[str, tuple[str, ...]] = {"longrope": ("short_factor", "long_factor")}
ROPE_TYPES = tuple(ROPE_NUMBERS)


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries at a position are multiplied by 1 + beta * log(1 + floor(position / period))."""

    beta: float
    period: float


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base and scaling parameters, named as in transformers."""

    theta: float = 10000.0
    rope_type: str = "default"
    scaling: Values = field(default_factory=dict, hash=False)
    partial: float = 1.0
    """The share of a head's dims, the first ones, that are rotated."""
    rotates: bool = True
    """False for layers without positions (NoPE): all angles are 0."""
    query_growth: QueryGrowth | None = None

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f"rope_type is {self.rope_type!r}; supported: {', '.join(ROPE_TYPES)}")
        if not 0 < self.partial <= 1:
            raise ValueError(f"partial_rotary_factor is {self.partial}; it must be above 0 and at most 1")
        for name in ROPE_NUMBERS[self.rope_type]:
            families.number_of(self.scaling, name)
        for name in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            families.cap_of(self.scaling, name)
        for name in ROPE_LISTS.get(self.rope_type, ()):
            factors = self.scaling.get(name)
            if not isinstance(factors, Sequence) or not all(isinstance(x, int | float) and x > 0 for x in factors):
                raise ValueError(f"config.json: {name} is {factors!r}; it must be a list of numbers above 0")

    @classmethod
    def from_json(cls, config: Values, kind: str = "full_attention") -> "RopeConfig":
        """Reads `rope_parameters` (transformers 5) or the older `rope_theta` + `rope_scaling`; where each kind of layer
        has its own, those of `kind`. Fields are looked up where transformers looks first."""
        parameters = rope_fields(config)
        is_nested = isinstance(parameters.get(kind), Mapping)
        parameters = dict(parameters[kind]) if is_nested else parameters
        theta = _first(parameters.pop("rope_theta", None), config.get("rope_theta"), 10000.0)
        rope_type = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
        for name in ("type", GROWTH):
            parameters.pop(name, None)
        outer_partial = None if is_nested else config.get("partial_rotary_factor")
        partial = _first(parameters.pop("partial_rotary_factor", None), outer_partial, 1.0)
        if rope_type in ("llama3", "yarn", "longrope"):
            longest = config["max_position_embeddings"]
            outer = None if is_nested else config.get(ORIGINAL)
            original = parameters[ORIGINAL] = _first(outer, parameters.get(ORIGINAL), longest)
            may_lack = rope_type == "longrope" or (rope_type == "yarn" and "factor" in parameters)
            if may_lack and parameters.get("factor") is None:
                parameters["factor"] = longest / families.number_of({ORIGINAL: original}, ORIGINAL)
        if rope_type == "proportional":  # rotates whole heads, most of their dims by 0
            parameters["partial_rotary_factor"] = partial
            partial = 1.0
        theta = families.number_of({"rope_theta": theta}, "rope_theta")
        partial = families.number_of({"partial_rotary_factor": partial}, "partial_rotary_factor")
        return cls(float(theta), rope_type, {} if rope_type == "default" else parameters, float(partial))

    def check(self, head_dim: int) -> None:
        """Raises ValueError where it cannot be that of heads with `head_dim` numbers."""
        pairs, odd = divmod(self.rotary_dim(head_dim), 2)
        if odd or not pairs:
            share = "" if self.partial == 1 else f" with partial_rotary_factor {self.partial}"
            raise ValueError(f"config.json: head_dim is {head_dim}{share}; an even number of dims must be rotated")
        for name in ROPE_LISTS.get(self.rope_type, ()):
            if len(self.scaling[name]) != pairs:
                raise ValueError(
                    f"config.json: {name} has {len(self.scaling[name])} numbers; head_dim {head_dim} needs {pairs}"
                )

    def to_json(self) -> dict[str, Any]:
        """The older pair of fields, which all readers of draft checkpoints understand."""
        scaling = None if self.rope_type == "default" else {"rope_type": self.rope_type, **self.scaling}
        return {"rope_theta": self.theta, "rope_scaling": scaling}

    @property
    def of_draft(self) -> "RopeConfig":
        """The rotary embedding of drafts for such a target: the same base and scaling, of whole heads and without
        growth of queries, which every engine can serve. For longrope the base alone: its frequencies depend on the
        context length that is served, which differs in training, and a draft must see the angles that it was trained
        with. And for a proportional one, which is of heads of another size."""
        is_plain = self.rope_type in ("longrope", "proportional")
        plain: dict[str, Any] = {"rope_type": "default", "scaling": {}} if is_plain else {}
        return replace(self, partial=1.0, rotates=True, query_growth=None, **plain)

    def rotary_dim(self, head_dim: int) -> int:
        return int(head_dim * self.partial)


def most_positions(num_positions: int, rope: Values) -> int:
    """Returns the longest text that a model reads, by its config's `num_positions` and rotary parameters. YaRN extends
    the original positions by a factor, and recipes add it without a change of the config's number."""
    factor = rope.get("factor")
    original = rope.get("original_max_position_embeddings") or num_positions
    return max(num_positions, int(factor * original)) if rope.get("rope_type") == "yarn" and factor else num_positions


def _first(*values: Any) -> Any:
    """The first that is not None."""
    return next(value for value in values if value is not None)


def rope_fields(config: Values) -> dict[str, Any]:
    """`rope_parameters`, or the older `rope_scaling`. Raises ValueError where a config has both and they differ:
    transformers then takes rope_scaling, with another base than the one beside it."""
    sections: dict[str, dict[str, Any]] = {}
    for name in ("rope_parameters", "rope_scaling"):
        value = config.get(name) or {}
        if not isinstance(value, Mapping):
            raise ValueError(f"config.json: {name} is {value!r}; it must be an object")
        if value.get("type", value.get("rope_type")) == "su":
            raise ValueError(
                f"config.json: {name} has type 'su', the former name of longrope; write \"longrope\" in its place"
            )
        if value:
            sections[name] = dict(value)
    alike = [
        {"rope_theta": config.get("rope_theta"), "rope_type": fields.get("type"), **fields, "type": None}
        for fields in sections.values()
    ]
    if len(alike) == 2 and alike[0] != alike[1]:
        raise ValueError(
            "config.json has both rope_parameters and rope_scaling, which differ; merge rope_scaling into "
            "rope_parameters, which keeps rope_theta, and delete it"
        )
    return dict(next(iter(sections.values()), {}))


class KVShape(NamedTuple):
    """The shape of what a layer's cache keeps of a token."""

    parts: int  # 2: keys and values; 0: none, of a layer that reads another's
    heads: int
    head_dim: int

    @property
    def size(self) -> int:
        """Numbers of a row."""
        return self.parts * self.heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Self-attention of one layer. Backends serve every field, or refuse it by name."""

    module_name: ClassVar[str] = "self_attn"
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    qk_norm: bool = False  # RMS norms of each head's queries and keys
    norm_last: bool = False  # they follow the rotation
    projection_norm: bool = False  # RMS norms of a token's queries and of its keys, all heads together (OLMo 2)
    norm_offset: bool = False  # they multiply by 1 + weight
    norm_weights: bool = True  # files have weights of them; else these are 1
    qkv_bias: bool = False
    output_bias: bool = False
    window: int | None = None  # positions that a query sees, its own included; None: all up to it
    scale: float | None = None  # of the scores; None: head_dim ** -0.5
    softcap: float | None = None  # scores s become softcap * tanh(s / softcap)
    sinks: bool = False  # a learnt score per query head joins each softmax
    gate: OutputGate | None = None
    value_norm: bool = False  # an RMS norm of each head's values, without weights
    key_is_value: bool = False  # values are what keys are before their norm
    kv_source: int | None = None  # the layer whose keys and values it reads; None: it has its own

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def kv_shape(self) -> KVShape:
        return KVShape(2 if self.kv_source is None else 0, self.num_kv_heads, self.head_dim)

    def shard(self, world: int) -> "AttentionSpec":
        """Returns one of `world` ranks' part."""
        if self.projection_norm:
            raise ValueError(
                "q_norm and k_norm are over all heads of a token (projection_norm), which ranks with a part of the "
                f"heads cannot compute; use 1 rank in place of {world}"
            )
        return replace(
            self,
            num_heads=quotient("num_attention_heads", self.num_heads, world),
            num_kv_heads=shared_heads("num_key_value_heads", self.num_kv_heads, world),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentSpec(ABC):
    """A mixer with a state of fixed size, which `step` of its layer (models/layers/recurrence.py) takes from a token to
    the next. Each kind is a subclass with a module in `MIXERS` (models/layers/decoder_layer.py)."""

    module_name: ClassVar[str]  # of the module in a decoder layer, as files have it
    grid: ClassVar[int] = 1  # prompts are cut at multiples of so many tokens, in which a layer computes them

    @property
    @abstractmethod
    def state_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The parts of a sequence's state, fp32; zeros before the first token."""

    @property
    @abstractmethod
    def record_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Raw numbers of a token that `step` reads, in the model's dtype. They are kept of each node until it is known
        whether the node was accepted."""

    @property
    def has_kernels(self) -> bool:
        """Whether the layer's `run` takes passes on a GPU; else `step` and `read` do."""
        return False

    def shard(self, world: int) -> "RecurrentSpec":
        """Returns one of `world` ranks' part."""
        raise ValueError(f"layers called {self.module_name} run on 1 rank, not on {world}; use 1 rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetSpec(RecurrentSpec):
    """A gated delta net (models/layers/delta_net.py)."""

    module_name = "linear_attn"
    grid = 64  # tokens of a block (kernels/recurrent/delta_blocks.py)

    num_key_heads: int  # of queries, too
    num_value_heads: int
    key_dim: int
    value_dim: int
    taps: int  # tokens that the convolution sees

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"config.json: linear_num_key_heads is {self.num_key_heads}; it must divide linear_num_value_heads, "
                f"{self.num_value_heads}"
            )

    @property
    def has_kernels(self) -> bool:
        return self.taps == TAPS

    @property
    def group(self) -> int:
        """Consecutive value heads that share a key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Channels of queries, keys and values."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.num_value_heads * self.value_dim

    @property
    def state_shapes(self) -> Mapping[str, tuple[int, ...]]:
        memory = (self.num_value_heads, self.key_dim, self.value_dim)
        return {"inputs": (self.taps - 1, sum(self.sizes)), "memory": memory}

    @property
    def record_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"inputs": (sum(self.sizes),), "gates": (2 * self.num_value_heads,)}

    def shard(self, world: int) -> "DeltaNetSpec":
        return replace(
            self,
            num_key_heads=shared_heads("linear_num_key_heads", self.num_key_heads, world),
            num_value_heads=quotient("linear_num_value_heads", self.num_value_heads, world),
        )


def check_heads(shape: "AttentionSpec | DecoderShape") -> None:
    """Raises ValueError for numbers of heads, or of their dims, that cannot be."""
    if shape.num_heads % shape.num_kv_heads:
        raise ValueError(
            f"config.json: num_key_value_heads is {shape.num_kv_heads}; it must divide num_attention_heads, "
            f"{shape.num_heads}"
        )
    shape.rope.check(shape.head_dim)


def quotient(name: str, size: int, world: int) -> int:
    """size / world. Raises ValueError where that is no integer."""
    if size % world:
        raise ValueError(f"config.json: {name} is {size}, and {world} ranks do not divide it; use 1 rank, or a divisor")
    return size // world


def shared_heads(name: str, num_heads: int, world: int) -> int:
    """Returns a rank's number of heads that several others read. Where ranks are more than heads, each has a copy of
    one."""
    if num_heads < world and world % num_heads == 0:
        return 1
    return quotient(name, num_heads, world)


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPSpec:
    """A gated MLP; one without a gate where the activation is "relu2", the square of ReLU (Arcee)."""

    intermediate_size: int
    bias: bool = False
    activation: "MLPActivation" = "silu"

    def shard(self, world: int) -> "MLPSpec":
        """Returns one of `world` ranks' part."""
        return replace(self, intermediate_size=quotient("intermediate_size", self.intermediate_size, world))


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
    """Size of one expert."""
    normalise: bool = True
    """The weights are a softmax over the chosen experts' scores, else over all. "Softmax, top-k, divide by the sum" and
    "top-k, softmax" both are the former."""
    shared_size: int = 0
    """Intermediate size of an MLP that every token takes as well; 0: none."""
    shared_gate: bool = False
    """The output of that MLP is multiplied by the sigmoid of a learnt gate."""
    activation: ClampedSwiGLU | Literal["gelu_tanh"] | None = None
    """None: silu(gate) * up."""
    bias: bool = False
    """Router and experts have biases."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """Function by which the router makes scores of its logits."""
    correction: bool = False
    """A learnt bias, in fp32, is added to the scores for the choice alone (DeepSeek-V3, arXiv 2412.19437)."""
    logit_softcap: float | None = None
    """The router's logits x first become c * tanh(x / c)."""
    groups: int = 1
    """Experts are in so many groups of equal size; the best are chosen first, by the sum of their two best scores."""
    top_groups: int = 1
    """How many groups."""
    scale: float = 1.0
    """Factor of the weights."""
    wide_router: bool = False
    """The router's weights are in fp32, whatever the network's dtype."""
    transposed: bool = False
    """In files the experts of a layer are one tensor (E, inputs, outputs) in which gate and up alternate (gpt-oss)."""
    shares: int = 1
    """Ranks that have whole experts, as many each; 1: all are here, or a slice of each."""

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok is {self.top_k}; it must be 1 to {self.num_experts}, the number of experts"
            )
        size, rest = divmod(self.num_experts, self.groups)
        if self.groups > 1 and (rest or size < 2 or not 1 <= self.top_groups <= self.groups):
            raise ValueError(
                f"n_group is {self.groups} and topk_group {self.top_groups}; {self.num_experts} experts must be in "
                "groups of equal size, at least 2, and topk_group is at most n_group"
            )
        if self.top_k > size * self.top_groups:
            raise ValueError(
                f"num_experts_per_tok is {self.top_k}; topk_group {self.top_groups} of n_group {self.groups} groups "
                f"have {size * self.top_groups} experts"
            )

    @property
    def num_local(self) -> int:
        """Experts of a rank."""
        return self.num_experts // self.shares

    def shard(self, world: int, *, whole_experts: bool = False) -> "MoESpec":
        """Returns one of `world` ranks' part: a slice of every expert, so that none waits for another whose experts are
        chosen more often, or some whole ones. All ranks route alike, and outputs are added up as those of an MLP."""
        spec = replace(self, shared_size=quotient("shared_expert_intermediate_size", self.shared_size, world))
        if whole_experts:
            quotient("the number of experts", self.num_experts, world)
            return replace(spec, shares=world)
        return replace(
            spec, intermediate_size=quotient("the experts' intermediate size", self.intermediate_size, world)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """A decoder layer: a mixer of tokens, then an MLP or a mixture of MLPs, each with RMS norms: "pre", of its input;
    "post", of its output before that is added to the residual (OLMo 2); "sandwich", of both (Gemma)."""

    mixer: AttentionSpec | RecurrentSpec
    mlp: MLPSpec | MoESpec
    norms: Norms = "pre"
    norm_offset: bool = False  # norms multiply by 1 + weight
    post_norm_eps: float | None = None  # of the norms of outputs; None: as that of the others
    scaled: bool = False  # a learnt number multiplies what the layer gives
    experts: MoESpec | None = None  # beside the MLP
    per_layer_size: int = 0  # of this layer's part of the tokens' second embedding, see PerLayerSpec

    def with_experts(self, experts: MoESpec) -> "LayerSpec":
        """The layer with experts in the place of its MLP or, where it is scaled, beside it."""
        return replace(self, experts=experts) if self.scaled else replace(self, mlp=experts)

    @property
    def attention(self) -> AttentionSpec:
        """The mixer of a layer that has attention."""
        assert isinstance(self.mixer, AttentionSpec), "a layer with recurrent state"
        return self.mixer


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Fields that a target and a draft share."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig

    def __post_init__(self) -> None:
        check_heads(self)

    @staticmethod
    def read(values: Values) -> dict[str, Any]:
        """These fields, from those of a config.json. Raises ValueError for one that is not a number as it must be."""
        heads = families.count_of(values, "num_attention_heads")
        counts = ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")
        sizes = {name: families.count_of(values, name) for name in counts}
        kv_heads = values.get("num_key_value_heads")
        head_dim = values.get("head_dim")
        return {
            **sizes,
            "rms_norm_eps": families.number_of(values, "rms_norm_eps"),
            "num_heads": heads,
            "num_kv_heads": heads if kv_heads is None else families.count_of(values, "num_key_value_heads"),
            "head_dim": sizes["hidden_size"] // heads if head_dim is None else families.count_of(values, "head_dim"),
            "rope": RopeConfig.from_json(values),
        }

    def shape(self) -> dict[str, Any]:
        """Returns these fields alone."""
        return {field.name: getattr(self, field.name) for field in fields(DecoderShape)}

    def layer(
        self,
        *,
        mlp: Values | None = None,
        norms: Norms = "pre",
        norm_offset: bool = False,
        post_norm_eps: float | None = None,
        **attention: Any,
    ) -> LayerSpec:
        """A layer of this shape; `attention` and `mlp` are the other fields of its AttentionSpec and MLPSpec."""
        same = ("num_heads", "num_kv_heads", "head_dim", "rope")
        has_offset = norm_offset and attention.get("norm_weights", True)
        spec = AttentionSpec(**{name: getattr(self, name) for name in same} | attention, norm_offset=has_offset)
        mlp_spec = MLPSpec(intermediate_size=self.intermediate_size, **mlp or {})
        return LayerSpec(mixer=spec, mlp=mlp_spec, norms=norms, norm_offset=norm_offset, post_norm_eps=post_norm_eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSpec(DecoderShape):
    """A decoder of the Llama family, layer by layer."""

    architecture: str
    layers: tuple[LayerSpec, ...]
    tie_word_embeddings: bool = False
    norm_offset: bool = False  # of the final norm, as in LayerSpec
    embedding_norm: bool = False
    """An RMS norm without weights follows the embedding. Drafts read embeddings as they are in the table."""
    embedding_scale: float | None = None
    """Factor of the target's embeddings, rounded to their dtype. Drafts read embeddings as they are in the table."""
    per_layer: PerLayerSpec | None = None
    logit_softcap: float | None = None
    """The target's logits x become c * tanh(x / c). A draft's own logits stay raw."""
    residual_scale: float = 1.0
    """Factor of what attention and MLP add to the residual; folded into their weights when these are loaded."""
    logit_divisor: float = 1.0
    """Divisor of the logits; folded into the final norm's weight when that is loaded."""
    wrapper: str = ""
    """Architecture of the multimodal model that this is the text part of."""
    mtp: LayerSpec | None = None
    """The layer of the module that predicts a token more (families.MTP_FORMS), where the config has one."""
    mtp_modules: int = 1
    """How many such modules the files have, each of which predicts a token more than the one before."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        """Specs of the layers with attention, in order: `AttentionLayer.id` is a place among them."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionSpec))

    @property
    def recurrent(self) -> tuple[RecurrentSpec, ...]:
        """Specs of the layers with recurrent state, in order: `RecurrentMixer.id` is a place among them."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, RecurrentSpec))

    @property
    def most_positions(self) -> int:
        """The longest text that it reads."""
        return most_positions(self.max_position_embeddings, {"rope_type": self.rope.rope_type, **self.rope.scaling})

    def shard(self, rank: int, world: int, *, whole_experts: bool = False) -> "TargetSpec":
        """Returns the spec of a rank's part under tensor parallelism; all ranks' are equal. Its experts are slices of
        all, or some whole ones. The ranks' outputs of an attention, or of an MLP, add up to the target's; embedding and
        head have equal shares of the vocabulary.

        Raises ValueError for sizes that `world` does not divide, and for norms over all heads.
        """
        if not 0 <= rank < world:
            raise ValueError(f"rank is {rank} of {world} ranks; it must be at least 0 and below {world}")
        if world == 1:
            return self
        is_dense = any(isinstance(layer.mlp, MLPSpec) for layer in self.layers)  # mixtures may leave that size unused
        size = self.intermediate_size

        def shard(spec: MLPSpec | MoESpec) -> Any:
            return spec.shard(world, whole_experts=whole_experts) if isinstance(spec, MoESpec) else spec.shard(world)

        return replace(
            self,
            num_heads=quotient("num_attention_heads", self.num_heads, world),
            num_kv_heads=shared_heads("num_key_value_heads", self.num_kv_heads, world),
            vocab_size=quotient("vocab_size", self.vocab_size, world),
            intermediate_size=quotient("intermediate_size", size, world) if is_dense else size,
            layers=tuple(
                replace(
                    layer,
                    mixer=layer.mixer.shard(world),
                    mlp=shard(layer.mlp),
                    experts=None if layer.experts is None else shard(layer.experts),
                )
                for layer in self.layers
            ),
        )

    @classmethod
    def from_json(cls, values: Values) -> "TargetSpec":
        """`values`: the fields of a transformers config, defaults included.

        Raises ValueError for another architecture or activation.
        """
        architecture = families.architecture_of(values)
        check_supported(values)
        (name,) = values["architectures"][:1]
        values = families.text_part(values)
        traits = families.traits_of(values)
        values = {**values, **traits.fields}
        shape = DecoderShape(**DecoderShape.read(values))
        activation = families.activation_of(values, traits)
        mlp = {"bias": bool(values.get(traits.mlp_bias, False)), "activation": activation}
        layers = layers_of(values, traits, partial(shape.layer, mlp=mlp))
        return cls(
            **shape.shape(),
            architecture=architecture,
            layers=tuple(
                spec if experts is None else spec.with_experts(experts)
                for spec, experts in zip(layers, experts_of(architecture, values, activation), strict=True)
            ),
            tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
            norm_offset=traits.norm_offset and traits.final_norm_offset,
            embedding_norm=traits.embedding_norm,
            embedding_scale=traits.embedding_scale,
            per_layer=traits.per_layer,
            logit_softcap=traits.logit_softcap,
            residual_scale=traits.residual_scale,
            logit_divisor=traits.logit_divisor,
            wrapper="" if name == architecture else name,
            mtp=mtp_layer(values),
            mtp_modules=mtp_count(values),
        )


def mtp_count(values: Values) -> int:
    """Returns the number of modules that can draft in turn: 1 where the config does not say, where modules differ, and
    of families whose files have no names for more. Raises ValueError for what is no number."""
    form = families.MTP_FORMS.get(families.architecture_of(values))
    count = None if form is None else values.get(form.count)
    if form is None or count is None:
        return 1
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ValueError(f"config.json: {form.count} is {count!r}; it must be an integer of at least 0")
    kinds = [values.get(name) or [] for name in ("mtp_layer_types", "mtp_mlp_layer_types")]
    are_alike = all(len(set(map(str, entries[:count]))) <= 1 for entries in kinds if isinstance(entries, list))
    return max(count, 1) if form.has_several and are_alike else 1


def mtp_layer(values: Values) -> LayerSpec | None:
    """Returns the layer of each module that predicts a token more: the only one of a model of one layer. Raises
    ValueError for fields of the module that no file can mean."""
    form = families.MTP_FORMS.get(families.architecture_of(values))
    if form is None:
        return None
    if values.get(form.count) == 0:
        return None
    kind = "full_attention" if values.get("sliding_window") is None else form.kind
    one_layer = {
        "num_hidden_layers": 1,
        "first_k_dense_replace": 0,
        "mlp_only_layers": [],
        "moe_layer_start_index": 0,
        "moe_layer_end_index": 0,
        "moe_layer_interval": 1 if form.experts else 2,
        "layer_types": first_kind(values, "mtp_layer_types", kind, LAYER_KINDS),
        "mlp_layer_types": first_kind(
            values, "mtp_mlp_layer_types", "sparse" if form.experts else "dense", {"dense", "sparse"}
        ),
        form.count: 0,
    }
    return TargetSpec.from_json({**values, **one_layer}).layers[0]


def first_kind(values: Values, name: str, default: str, kinds: Collection[str]) -> list[str]:
    """Returns the first entry of a list of kinds of layers, as a list. Raises ValueError for one outside `kinds`."""
    entries = values.get(name) or [default]
    first = entries[0] if isinstance(entries, Sequence) else None
    if not isinstance(first, str) or first not in kinds:
        raise ValueError(f"config.json: {name} is {entries!r}; each must be {' or '.join(sorted(kinds))}")
    return [first]


def query_growth(values: Values, rope: RopeConfig) -> QueryGrowth:
    """Reads it from a config's rotary parameters. Raises ValueError where these lack a number that it needs."""
    parameters = {**rope_fields(values), **rope.scaling}
    beta = parameters.get(GROWTH)
    if not families.is_number(beta):
        raise ValueError(f"config.json: {GROWTH} is {beta!r}; it must be a number of at least 0")
    return QueryGrowth(beta, families.number_of(parameters, ORIGINAL))


def check_supported(values: Values) -> None:
    """Raises ValueError for architectures that are not supported, and for variants of others that are refused."""
    name = architecture_name(values)
    reason = families.refusal(values)
    if reason or families.architecture_of(values) not in ARCHITECTURES:
        why = f": {reason}" if reason else ""
        architectures = ", ".join(sorted(ARCHITECTURES | families.TEXT_PARTS.keys()))
        raise ValueError(f"architecture {name} cannot be a target{why}; supported: {architectures}")


def layers_of(values: Values, traits: families.Traits, dense_layer: Callable[..., LayerSpec]) -> list[LayerSpec]:
    """The layers, without experts, from a transformers config; `dense_layer` makes one of the fields that differ from
    the model's. Raises ValueError for heads that cannot be."""
    bias = traits.attention_bias and bool(values.get("attention_bias", False))
    attention = {"qkv_bias": bias, "output_bias": bias, **traits.attention}
    norms = {name: getattr(traits, name) for name in ("norms", "norm_offset", "post_norm_eps")}
    if values.get("per_layer_config") and not traits.attention_by_layer:
        raise ValueError(
            f"config.json: per_layer_config is {values['per_layer_config']!r}, but the layers of "
            f"{families.architecture_of(values)} have one shape; delete it"
        )
    kinds = {False: "full_attention", True: "sliding_attention"}  # by whether windowed
    ropes = {windowed: RopeConfig.from_json(values, kind) for windowed, kind in kinds.items()}
    for rope in ropes.values():
        if rope.partial != 1 and not traits.partial_rotary:
            raise ValueError(
                f"config.json: partial_rotary_factor is {rope.partial}, but {families.architecture_of(values)} rotates "
                "whole heads; delete it"
            )
    growth = query_growth(values, ropes[False]) if traits.query_growth else None
    delta_net = None if traits.delta_net is None else DeltaNetSpec(**traits.delta_net)
    types = kinds_of_layers(values, "layer_types", {"full_attention", "linear_attention"}) if delta_net else ()
    layers = []
    for index, window in enumerate(windows_of(values, traits)):
        rope = replace(ropes[window is not None], rotates=index not in traits.unrotated, query_growth=growth)
        rope = replace(rope, theta=traits.rope_thetas.get(index, rope.theta))
        differing = traits.attention_by_layer[index] if traits.attention_by_layer else {}
        layer = dense_layer(**norms, **attention | {"window": window, "rope": rope, **differing})
        check_heads(layer.attention)
        if traits.mlp_sizes:
            layer = replace(layer, mlp=replace(layer.mlp, intermediate_size=traits.mlp_sizes[index]))
        if delta_net is not None and types[index] == "linear_attention":
            layer = replace(layer, mixer=delta_net)
        layers.append(replace(layer, **traits.layer))
    return layers


def kinds_of_layers(values: Values, name: str, kinds: Collection[str]) -> Sequence[str]:
    """Returns the kind of each layer, from the field `name`. Raises ValueError for kinds outside `kinds`."""
    count = families.count_of(values, "num_hidden_layers")
    entries = values.get(name)
    if not isinstance(entries, Sequence) or len(entries) != count or not set(entries) <= set(kinds):
        expected = f"{' or '.join(sorted(kinds))} for each of {count} layers"
        raise ValueError(f"config.json: {name} is {entries!r}; it must be {expected}")
    return entries


def windows_of(values: Values, traits: families.Traits) -> list[int | None]:
    """The window of each layer, from a transformers config. Raises ValueError for other kinds of layers."""
    count = families.count_of(values, "num_hidden_layers")
    if traits.windows == "none":
        return [None] * count
    is_off = traits.window_switch and not values.get("use_sliding_window")
    window = None if is_off or values.get("sliding_window") is None else families.count_of(values, "sliding_window")
    if traits.windows == "alike":
        return [window] * count
    if values.get("layer_types") is None and window is None:
        return [None] * count
    kinds = kinds_of_layers(values, "layer_types", LAYER_KINDS)
    if window is None and "sliding_attention" in kinds:
        switch = "use_sliding_window is off" if is_off else "sliding_window is null"
        raise ValueError(f"config.json: layer_types names sliding_attention, but {switch}")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def experts_of(architecture: str, values: Values, activation: "MLPActivation") -> list[MoESpec | None]:
    """The mixture of each layer, from a transformers config; None for a dense one."""
    count = values["num_hidden_layers"]
    family = families.MIXTURES.get(architecture)
    if family is None or (family.switch and not values.get(family.switch)):
        return [None] * count
    assert activation != "relu2", "experts have gates"
    is_gpt_oss = architecture == "GptOssForCausalLM"
    name = family.count or ("num_experts" if "num_experts" in values else "num_local_experts")
    if family.scores == "sigmoid":
        families.check_unread(values, families.TABLES["router_fields"])
    counts = {name: values[name] for name in ("num_experts", "num_local_experts") if name in values}
    if len(set(counts.values())) > 1:
        raise ValueError(f"config.json says how many experts there are twice: {counts}; delete the wrong one")
    spec = MoESpec(
        num_experts=families.count_of(values, name),
        top_k=1,
        intermediate_size=families.count_of(values, family.size),
        normalise=not family.normalise or bool(values.get(family.normalise)),
        shared_size=shared_size_of(values, family),
        shared_gate=family.shared_gate,
        activation=clamped_swiglu(values) if is_gpt_oss else None if activation == "silu" else activation,
        bias=is_gpt_oss,
        scores=family.scores,
        correction=family.correction,
        groups=families.count_of(values, "n_group") if family.grouped else 1,
        top_groups=families.count_of(values, "topk_group") if family.grouped else 1,
        scale=families.number_of(values, family.scale) if family.scale else 1.0,
        wide_router=family.wide_router,
        logit_softcap=families.cap_of(values, family.logit_softcap) if values.get(family.logit_softcap) else None,
        transposed=is_gpt_oss,
    )
    dense = dense_layers(values, family)
    return [
        None if layer in dense else replace(spec, top_k=top_k)
        for layer, top_k in enumerate(numbers_of_experts(values, family.top_k))
    ]


def numbers_of_experts(values: Values, name: str) -> list[int]:
    """Returns how many experts a token takes in each layer, from the field `name`: a number, or one for each layer."""
    count = values["num_hidden_layers"]
    top_k = values.get(name)
    if not isinstance(top_k, list):
        return [families.count_of(values, name)] * count
    if len(top_k) != count:
        raise ValueError(f"config.json: {name} has {len(top_k)} numbers; it must have one for each of {count} layers")
    return [families.count_of({name: number}, name) for number in top_k]


def shared_size_of(values: Values, family: families.Mixture) -> int:
    """Returns the intermediate size of the shared expert; 0 where there is none."""
    if family.shared_experts:
        count = values.get(family.shared_experts)
        is_none = count is None or count == 0
        return (
            0 if is_none else families.count_of(values, family.shared_experts) * families.count_of(values, family.size)
        )
    name = family.shared
    may_lack = not family.shared_gate and values.get(name) == 0
    return families.count_of(values, name) if name and not may_lack else 0


def dense_layers(values: Values, family: families.Mixture) -> set[int]:
    """Returns the layers that have an MLP in place of a mixture. Raises ValueError for other kinds of layers."""
    layers = range(values["num_hidden_layers"])
    if family.layers == "by_step":
        step = values.get("decoder_sparse_step") or 1
        return {layer for layer in layers if (layer + 1) % step} | set(values.get("mlp_only_layers") or ())
    if family.layers == "after_first":
        first = values.get("first_k_dense_replace")
        return set(range(0 if first == 0 else families.count_of(values, "first_k_dense_replace")))
    if family.layers == "between":
        step = families.count_of(values, "moe_layer_interval")
        first = values.get("moe_layer_start_index")
        last = values.get("moe_layer_end_index")
        last = len(layers) - 1 if last == -1 else last
        if first is None or last is None or first not in layers or last not in layers:
            raise ValueError(
                f"config.json: moe_layer_start_index is {first!r} and moe_layer_end_index {last!r}; they must be "
                f"layers, 0 to {len(layers) - 1}, the end also -1 for the last"
            )
        span = range(first, last + 1)
        return {layer for layer in layers if layer not in span or (layer + 1) % step}
    if family.layers == "all" or values.get("mlp_layer_types") is None:
        return set()
    kinds = kinds_of_layers(values, "mlp_layer_types", {"dense", "sparse"})
    return {layer for layer in layers if kinds[layer] == "dense"}


def clamped_swiglu(values: Values) -> ClampedSwiGLU:
    """Returns gpt-oss's activation; its older configs lack `swiglu_alpha`."""
    params = {"alpha": values.get("swiglu_alpha"), "limit": values.get("swiglu_limit")}
    return ClampedSwiGLU(**{name: float(value) for name, value in params.items() if value is not None})


def is_complete(values: Values) -> bool:
    """Whether `TargetSpec.from_json` reads a config.json as it reads what transformers makes of it."""
    architecture = architecture_name(values)
    needed = NEEDED_TOO.get(architecture)
    if needed is None or values.get("use_sliding_window") or "auto_map" in values:
        return False
    if architecture in families.MIXTURES and not values.keys() & {"num_experts", "num_local_experts"}:
        return False
    has_base = values.get("rope_theta") is not None or "rope_theta" in rope_fields(values)
    return values.keys() >= NEEDED.union(needed) and has_base


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """The three target states that an EAGLE3 draft reads, as layer outputs (num_layers = after the final norm).

    Deep targets follow EAGLE-3: outputs of layers 1, N//2 - 1 and N - 4. Below 11 layers that rule repeats a layer or
    stops far from the end, so shallow targets give an early, a middle and the last but one layer's output, from which
    drafts learnt fastest (docs/log/2026-11-21.md, "What decides the accept length").
    """
    if num_layers >= 11:
        return (1, num_layers // 2 - 1, num_layers - 4)
    if num_layers < 3:
        raise ValueError(f"num_layers is {num_layers}; below 3 layers name aux_layers explicitly")
    middle = num_layers // 2
    return (num_layers // 4, middle, max(num_layers - 2, middle + 1))


def check_aux_layers(layers: tuple[int, ...], num_layers: int, option: str = "aux_layers") -> None:
    """Raises ValueError unless every id is distinct and within 0..num_layers."""
    if not layers or len(set(layers)) != len(layers) or not all(0 <= layer <= num_layers for layer in layers):
        raise ValueError(
            f"{option} is {list(layers)}; name distinct states 0..{num_layers - 1} (layer outputs) "
            f"or {num_layers} (after the final norm)"
        )
