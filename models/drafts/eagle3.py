"""EAGLE3 drafts, network and files (Li et al. 2025, arXiv 2503.01840): a layer over [embedding ; aux hidden state], and
further decoder layers over its output if the draft has some. The flags of EAGLE-3.1 (arXiv 2605.09992) are options.

The same module trains and serves: attention is an argument. Draft ids are positions in the reduced vocabulary.

On disk: the public config.json fields and key names, ours beside them. Reads the files of SafeAILab's EAGLE, SpecForge
and SGLang, vLLM, ModelOpt, and of speculators (speculators_layout.py). Layer ids have the same name in two places: at
the top level (vLLM) they count layer inputs, one higher than outputs; in eagle_config outputs, as ours do, or inputs
(`_nested_layers`). A file without any means EAGLE-3's three layers, where the target is deep enough for its rule;
elsewhere it says too little, and the reader has to name them.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from slipstream.models.drafts.base import (
    EMBEDDING,
    HEAD,
    Choices,
    DraftConfig,
    DraftNetwork,
    Evidence,
    Tensors,
    check_llama_layer,
    decoder_from_json,
    decoder_to_json,
    ids_of,
    window_from_json,
    window_to_json,
)
from slipstream.models.drafts.speculators_layout import AUX_LAYERS, without_last_layer
from slipstream.models.files.checkpoint import Values
from slipstream.models.files.weights import public_tensors
from slipstream.models.layers.attention import Attention, Mask, SelfAttention
from slipstream.models.layers.decoder_layer import DecoderLayer
from slipstream.models.layers.linear import Head, Linear
from slipstream.models.layers.moe import feed_forward
from slipstream.models.layers.norm import PartNorms, RMSNorm
from slipstream.models.targets.config import LayerSpec, TargetSpec, check_aux_layers, default_aux_layers

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")  # of EAGLE-3.1, by their public names
FLAG_TENSORS = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight"}
POST_NORM = "return_hidden_post_norm"  # norm_output in eagle_config of NVIDIA's files
# Flags of other trainers that change the network; checkpoints that set one are refused.
UNSUPPORTED_FLAGS = ("use_aux_norm", "mlp_bias", "eh_proj_before_attn")
Q_NORM = "midlayer.self_attn.q_norm.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(DraftConfig):
    """`aux_layers` are output ids (models/targets/config.py). Four fields are the FLAGS."""

    kind: ClassVar[str] = "EAGLE3"
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    num_layers: int = 1
    has_fc: bool = True  # without: the draft reads the one state as it is
    attention_bias: bool = False
    norm_before_residual: bool = False  # the layer adds to hidden_norm(hidden), not to hidden
    norm_before_fc: bool = False  # one norm over all target states, before fc
    fc_norm: bool = False  # a norm of each target state, before fc
    norm_output: bool = False  # the next step reads the state after the final norm
    qk_norm: bool = False  # norms of queries and keys, as in Qwen3's layers

    def __post_init__(self) -> None:
        DraftConfig.__post_init__(self)
        check_aux_layers(self.aux_layers, self.target_num_layers)
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm are both set; a draft norms its target states in one way only")
        if self.num_layers < 1:
            raise ValueError(f"num_hidden_layers is {self.num_layers} in the draft; it must be at least 1")
        if not self.has_fc and (len(self.aux_layers) != 1 or self.hidden_size != self.target_hidden_size):
            raise ValueError(
                f"the draft has no fc, so it must be as wide as its target and read one state; it is "
                f"{self.hidden_size} wide, its target {self.target_hidden_size}, and it reads {list(self.aux_layers)}"
            )

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        same: dict[str, Any] = {"window": self.sliding_window, "qk_norm": self.qk_norm}
        return (self.layer(qkv_bias=self.attention_bias, **same),) * self.num_layers

    def to_json(self) -> dict[str, Any]:
        return {
            "architectures": ["Eagle3Qwen3ForCausalLM" if self.qk_norm else "LlamaForCausalLMEagle3"],  # as vLLM does
            "model_type": "qwen3" if self.qk_norm else "llama",
            "target_hidden_size": self.target_hidden_size,
            "num_hidden_layers": self.num_layers,
            "attention_bias": self.attention_bias,
            **decoder_to_json(self),
            **window_to_json(self, self.num_layers),
            **_layers_to_json(self),
            **{flag: True for flag in FLAGS if getattr(self, flag)},
            "target_num_layers": self.target_num_layers,
            "drafter": "eagle3",
        }

    @classmethod
    def from_json(cls, values: Values, target: TargetSpec, tensors: Tensors | None = None) -> Self:
        own_size = {"target_hidden_size": values.get("target_hidden_size") or values.get("hidden_size")}
        sizes = {"target_num_layers": target.num_layers, "target_hidden_size": target.hidden_size}
        decoder = decoder_from_json({**values, **own_size}, target, **sizes)
        eagle = values.get("eagle_config") or {}
        for flag in UNSUPPORTED_FLAGS:
            if values.get(flag) or eagle.get(flag):
                raise ValueError(f"draft config sets {flag}, which is not supported")
        check_llama_layer(values)
        flags: dict[str, Any] = {flag: _flag(flag, values) for flag in FLAGS}
        has_fc = bool(eagle.get("use_aux_hidden_state", True))
        return cls(
            **decoder | {"draft_vocab_size": decoder["draft_vocab_size"] or values["vocab_size"]},
            num_layers=values.get("num_hidden_layers") or 1,
            has_fc=has_fc,
            aux_layers=_layers_from_json(values, target, tensors or {}) if has_fc else (target.num_layers,),
            attention_bias=bool(values.get("attention_bias", False)),
            sliding_window=window_from_json(values),
            qk_norm=Q_NORM in tensors if tensors else values.get("model_type") == "qwen3",
            **flags,
        )

    @classmethod
    def settle(cls, values: Values, target: TargetSpec, choices: Choices, evidence: Evidence | None) -> Values:
        choices.refuse(cls.kind, "aux_layers", "norm_output")
        eagle = dict(values.get("eagle_config") or {})
        settled = {**values, "eagle_config": eagle}
        settled |= _flags_of_tensors(values, evidence)
        settled["norm_output"] = _means_norm_output(settled, choices, evidence)
        eagle.pop("norm_output", None)
        eagle["use_aux_hidden_state"] = _has_fc(eagle, choices, evidence)
        if not values.get(AUX_LAYERS):
            nested = _nested_layers(settled, target, choices)
            option = None if choices.aux_layers is None else list(choices.aux_layers)
            eagle[AUX_LAYERS] = nested or option
        return settled


def _flag(name: str, values: Values) -> bool:
    """From the top level or eagle_config, where vLLM also looks. Raises ValueError if they differ."""
    outer = values.get(name)
    inner = (values.get("eagle_config") or {}).get(name)
    if None not in (outer, inner) and bool(outer) != bool(inner):
        raise ValueError(f"draft config: {name} is {outer} and, in eagle_config, {inner}; delete the wrong one")
    return bool(outer or inner)


def _flags_of_tensors(values: Values, evidence: Evidence | None) -> dict[str, bool]:
    """Flags that the config leaves out and a norm in the file shows."""
    if evidence is None:
        return {}
    eagle = values.get("eagle_config") or {}
    absent = [flag for flag in FLAG_TENSORS if values.get(flag) is None and eagle.get(flag) is None]
    return {flag: True for flag in absent if FLAG_TENSORS[flag] in evidence.tensors}


def _means_norm_output(values: Values, choices: Choices, evidence: Evidence | None) -> bool:
    """Whether the next step reads the state after the final norm.

    Every server takes `norm_output` for this. From May to September 2026 (its pull requests 568 and 879)
    SpecForge meant something else: whether the head reads the normed state, while the next step always read the other.
    Its files have the field at the top level, layers called midlayer, and no norm_before_fc, so a file that differs in
    one of these means what servers do; and a final norm that no step used is as it was initialised.

    Raises ValueError where both are possible.
    """
    if choices.norm_output is not None:
        return choices.norm_output
    eagle = values.get("eagle_config") or {}
    norm_output = _flag("norm_output", values) or bool(eagle.get(POST_NORM))
    if evidence is None or "drafter" in values or values.get("norm_output") is None or eagle.get("norm_output"):
        return norm_output  # ours and speculators' have `drafter`
    if _flag("norm_before_fc", values) or any(name.startswith(("layers.", "model.")) for name in evidence.names):
        return norm_output
    weight = evidence.tensors.get("norm.weight")
    if norm_output:
        raise ValueError(
            "draft config sets norm_output, by which servers mean that the next step reads the state after the final "
            "norm, and SpecForge from May to September 2026 that only the head does; nothing in the file says which. "
            "Say it by the option norm_output, true as servers mean it, false for a draft of SpecForge of that time "
            "(serve: --drafter.norm-output, convert: --norm-output)"
        )
    if weight is not None and bool((weight == 1).all()):
        raise ValueError(
            "draft config: norm_output is false and norm.weight all ones, as SpecForge from May to September 2026 "
            "trained drafts without a norm before the head, which is not supported; if this is not one, give the "
            "option norm_output false (serve: --drafter.norm-output, convert: --norm-output)"
        )
    return norm_output


def _has_fc(eagle: Values, choices: Choices, evidence: Evidence | None) -> bool:
    """`use_aux_hidden_state`, false in drafts that read the target's final state alone and so have no fc."""
    if eagle.get("use_aux_hidden_state", True):
        return True
    if evidence is not None and "fc.weight" in evidence.tensors:
        if choices.aux_layers is None:
            raise ValueError(
                "draft config: use_aux_hidden_state is false, but the file has fc.weight; name the states that it "
                "reads, as layer outputs, by the option aux_layers (serve: --drafter.aux-layers, convert: --aux-layers)"
            )
        return True
    return False


def published_layers(num_layers: int) -> tuple[int, ...] | None:
    """The outputs that EAGLE-3, SpecForge, SGLang, vLLM and speculators all mean where a file names none. None below 11
    layers, where this rule repeats a layer or stops far from the end, and trainers differ."""
    return default_aux_layers(num_layers) if num_layers >= 11 else None


def _nested_layers(values: Values, target: TargetSpec, choices: Choices) -> list[int] | None:
    """The layer outputs that the ids in eagle_config mean, where no others stand at the top level; None: it has none.

    They count outputs in our files and SpecForge's, and inputs in NVIDIA's for gpt-oss and in those that name the three
    states of EAGLE-3 as vLLM does. A first id of 0 or 1 is an output (as SGLang takes it since its pull request 25454):
    nobody reads embeddings. Raises ValueError where both are possible and `choices` do not decide.
    """
    ids = (values.get("eagle_config") or {}).get(AUX_LAYERS)
    if not ids or "drafter" in values:
        return list(ids) if ids else None
    outputs = list(ids)
    inputs = [layer - 1 for layer in ids]
    count = target.num_layers
    if choices.aux_layers is not None:
        return next((ids for ids in (outputs, inputs) if ids == list(choices.aux_layers)), outputs)
    has_sinks = any(spec.sinks for spec in target.attention)  # gpt-oss
    if min(inputs) >= 0 and (max(ids) == count or has_sinks or ids == [2, count // 2, count - 3]):
        return inputs
    if ids[0] in (0, 1) or max(ids) > count:  # refused later: no target has these
        return outputs
    raise ValueError(
        f"draft config: eagle_config.{AUX_LAYERS} is {outputs}, which some trainers count as outputs of layers and "
        f"others as their inputs, so that the outputs are {inputs}; name those of its training by the option "
        "aux_layers (serve: --drafter.aux-layers, convert: --aux-layers)"
    )


def _layers_to_json(config: Eagle3Config) -> dict[str, Any]:
    """Layer ids for SGLang and for vLLM; omitted if they are those that all readers take by themselves."""
    layers = config.aux_layers
    if not config.has_fc:
        return {"eagle_config": {"use_aux_hidden_state": False}}
    if layers == published_layers(config.target_num_layers):
        return {}
    return {
        "eagle_config": {AUX_LAYERS: list(layers), "use_aux_hidden_state": True},
        AUX_LAYERS: [layer + 1 for layer in layers],
    }


def _layers_from_json(values: Values, target: TargetSpec, tensors: Tensors) -> tuple[int, ...]:
    """Output ids. Raises ValueError if the two fields name different states, or neither any that are certain."""
    outputs = (values.get("eagle_config") or {}).get(AUX_LAYERS)
    if not values.get(AUX_LAYERS):
        return tuple(outputs or _unnamed_layers(target, tensors))
    inputs = without_last_layer(values[AUX_LAYERS], target.num_layers, tensors, target.hidden_size)
    layers = tuple(layer - 1 for layer in inputs)
    if outputs and tuple(outputs) != layers:
        raise ValueError(
            f"draft config: eagle_config.{AUX_LAYERS} is {outputs}, layer outputs, and {AUX_LAYERS} is {inputs}, "
            "layer inputs: these are different states; delete the wrong one"
        )
    return layers


def _unnamed_layers(target: TargetSpec, tensors: Tensors) -> tuple[int, ...]:
    """Returns the layer outputs that a file without layer ids reads. Raises ValueError unless a published rule makes
    them certain."""
    published = published_layers(target.num_layers)
    size = target.hidden_size
    count = tensors["fc.weight"].shape[-1] // size if "fc.weight" in tensors else 3
    if published is None or count != len(published):
        raise ValueError(
            f"draft config lacks {AUX_LAYERS}, which {count} states of the target's {target.num_layers} layers fc "
            f"reads; name the {count} layer outputs of its training, counted from 0, by the option aux_layers "
            "(serve: --drafter.aux-layers, convert: --aux-layers)"
        )
    return published


class Midlayer(nn.Module):
    """The decoder layer: attention reads [norm(embedding) ; norm(hidden)], the residual stream is `hidden`,
    with norm_before_residual its norm."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size = config.hidden_size
        eps = config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = SelfAttention(config.layers[0].attention, 0, size, eps, input_size=2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = feed_forward(size, config.layers[0].mlp)
        self.norm_before_residual = config.norm_before_residual

    def forward(self, embeds: Tensor, hidden: Tensor, attention: Attention, mask: Mask) -> tuple[Tensor, Tensor]:
        """Residual and delta, whose sum is the output."""
        normed = self.attention_input(embeds, hidden)
        if self.norm_before_residual:
            hidden = normed[..., hidden.shape[-1] :]
        attended = self.self_attn(normed, attention, mask)
        normed, x = self.post_attention_layernorm.add(hidden, attended)
        return x, self.mlp(normed)

    def attention_input(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        return self.input_layernorm.pair(embeds, self.hidden_norm, hidden)


class Eagle3(DraftNetwork):
    """Any leading dims."""

    Config = Eagle3Config
    shared = (EMBEDDING,)
    may_embed = True
    other_names = {"layers.0.": "midlayer."}
    layers_field = f"eagle_config.{AUX_LAYERS}"
    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        size = config.hidden_size
        target_size = config.target_hidden_size
        count = len(config.aux_layers)
        eps = config.rms_norm_eps
        self.input_norm = RMSNorm(target_size * count, eps) if config.norm_before_fc else None
        self.fc_norm = PartNorms(count, target_size, eps) if config.fc_norm else None
        self.fc = Linear(target_size * count, size, bias=False) if config.has_fc else None
        self.midlayer = Midlayer(config)
        specs = enumerate(config.layers)
        self.layers = nn.ModuleDict({str(i): DecoderLayer(spec, i, size, eps) for i, spec in specs if i})
        self.norm = RMSNorm(size, eps)
        self.lm_head = Head(size, config.draft_vocab_size)

    @property
    def target_ids(self) -> Tensor:
        """(Vd,) int64 target id of each draft id."""
        return ids_of(self.d2t)

    @torch.no_grad()
    def init_from_target(self, weights: Tensors) -> None:
        """Takes over the target's head rows and final norm; fc passes the last aux hidden state through, and the MLP
        adds nothing at first. `weights` by their names in files.

        The target's last MLP is no better start: it expects a state that its own attention has added to.
        """
        parameters = public_tensors(self)
        head = weights[HEAD]
        width = self.config.hidden_size  # the target's
        parameters[HEAD].copy_(head[self.target_ids.to(head.device)])
        if "norm.weight" in weights:
            parameters["norm.weight"].copy_(weights["norm.weight"])
        parameters["midlayer.mlp.down_proj.weight"].zero_()
        if self.fc is not None:
            parameters["fc.weight"].zero_()[:, -width:].copy_(torch.eye(width))
        for index in range(1, self.config.num_layers):  # they pass states on at first
            for name in ("self_attn.o_proj", "mlp.down_proj"):
                parameters[f"layers.{index}.{name}.weight"].zero_()

    @property
    def upper_layers(self) -> list[DecoderLayer]:
        """Layers after the midlayer."""
        return [cast(DecoderLayer, layer) for layer in self.layers.values()]

    def fuse(self, aux_states: Tensor) -> Tensor:
        """Target states (..., K * Ht) -> (..., H)."""
        if self.input_norm is not None:
            aux_states = self.input_norm(aux_states)
        if self.fc_norm is not None:
            aux_states = self.fc_norm(aux_states)
        return aux_states if self.fc is None else self.fc(aux_states)

    def write_context(self, embeds: Tensor, hidden: Tensor, attention: Attention) -> None:
        """Stores keys and values of rows (..., H) without computing their output. With several layers those of the
        upper ones depend on the rows before, so `attention` must be planned for queries of these rows, too."""
        if not self.layers:
            self.midlayer.self_attn.write(self.midlayer.attention_input(embeds, hidden), attention)
            return
        *inner, last = self.upper_layers
        residual, delta = self.midlayer(embeds, hidden, attention, "causal")
        for layer in inner:
            residual, delta = layer(residual, delta, attention, "causal")
        last.mixer.write(last.norm_input(residual, delta, None)[0], attention)

    def forward(self, embeds: Tensor, hidden: Tensor, attention: Attention, mask: Mask = "causal") -> Tensor:
        """embeds and hidden (..., H) -> (..., H), `hidden` of the next step: before the final norm, with norm_output
        after it."""
        residual, delta = self.midlayer(embeds, hidden, attention, mask)
        for layer in self.upper_layers:
            residual, delta = layer(residual, delta, attention, mask)
        states = residual + delta
        return self.norm(states) if self.config.norm_output else states

    def head_input(self, hidden: Tensor) -> Tensor:
        """States (..., H) that `forward` gave, after the final norm."""
        return hidden if self.config.norm_output else self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """States (..., H) that `forward` gave -> (..., Vd)."""
        return self.lm_head(self.head_input(hidden))
