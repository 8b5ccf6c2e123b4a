"""DFLASH drafts, network and files (arXiv 2602.06036): a few layers that fill a block of masked tokens in one pass.

Every layer attends to [target's states ; block]: keys and values of committed tokens come from one projected state
that passes through no layer, those of the block from its own states. Embedding and head are the target's: callers pass
embeddings and apply the head to final states. The same module trains and serves: attention is an argument.

A draft may have more: convolutions inside the block (convolution.py) and heads (heads/), of which one at most joins
its slots.

On disk: the public config.json fields and key names (z-lab's, SpecForge's), ours beside them. Reads these and what
other trainers write (models/drafts/block_layouts.py, speculators_layout.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar, cast, get_args

import torch
from torch import Tensor, nn

from slipstream.kernels.gemm.low_rank import LowRankChange, stack_changes
from slipstream.models.drafts.base import (
    Choices,
    DraftConfig,
    DraftNetwork,
    Evidence,
    Tensors,
    decoder_from_json,
    decoder_to_json,
    target_fields,
)
from slipstream.models.drafts.block_layouts import HEAD_FIELDS, HEAD_NAMES, settle_block
from slipstream.models.drafts.convolution import ConvolvedLayer
from slipstream.models.drafts.heads.base import Block, Candidates, Head, JoiningHead, joined_scores
from slipstream.models.drafts.heads.config import BlockSizes, HeadConfig
from slipstream.models.drafts.heads.table import CONFIGS, head_of, heads_from_json, heads_of
from slipstream.models.drafts.maker_layouts import publish
from slipstream.models.drafts.speculators_layout import without_last_layer
from slipstream.models.files.checkpoint import Values
from slipstream.models.layers.attention import Attention, Mask, SelfAttention
from slipstream.models.layers.decoder_layer import DecoderLayer
from slipstream.models.layers.linear import Linear, derive
from slipstream.models.layers.norm import PartNorms, RMSNorm
from slipstream.models.targets.config import LayerSpec, TargetSpec, check_aux_layers, default_aux_layers
from slipstream.models.targets.families import GateActivation, OutputGate

if TYPE_CHECKING:  # serving a draft needs no tokenizer's type
    from transformers import PreTrainedTokenizerBase


CONVOLUTION_TAPS = (0, 2)
PLAIN_FIELDS = (
    *("conv_kernel_size", "conv_group_size", "output_multiplier", "input_embedding_scale"),
    *("tap_norms", "context_norms"),
)
HEAD_OPTIONS = frozenset(kind.option for kind in CONFIGS)
ARCHITECTURES = (
    "DFlashLagunaForCausalLM",
    "LiLiCorrDraftModel",
    "DSparkDraftModel",
    "DFlash2DraftModel",
    "DFlashDraftModel",
)
KindOfHead = TypeVar("KindOfHead", bound=Head)
KindOfConfig = TypeVar("KindOfConfig", bound=HeadConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(DraftConfig):
    """`aux_layers` are output ids (models/targets/config.py)."""

    kind: ClassVar[str] = "block"
    num_layers: int
    aux_layers: tuple[int, ...]
    mask_token_id: int
    block_size: int = 16  # tokens of a block, the anchor (last emitted token) included
    sample_from_anchor: bool = False  # slot k predicts the token after its place, slot 0 too, as in DSpark
    windowed_layers: tuple[int, ...] = ()  # which layers have the window
    sliding_window_non_causal: bool = False  # whether slots see later ones of their block in these, too
    attention_bias: bool = False
    tap_norms: bool = False  # an RMS norm of each target state that it reads
    context_norms: bool = False  # the context passes through each layer's input norm before its keys and values
    gate: OutputGate | None = None  # on the output of attention
    conv_kernel_size: int = 0  # taps of the convolutions inside the block; 0: none
    conv_group_size: int = 16  # channels that share a kernel
    heads: tuple[HeadConfig, ...] = ()  # in the order of heads/table.py
    output_multiplier: float = 1.0  # of the head's logits
    final_logit_softcapping: float | None = None  # c, where the multiplied logits x become c * tanh(x / c)
    input_embedding_scale: float = 1.0  # of the embeddings that the block begins with

    def __post_init__(self) -> None:
        DraftConfig.__post_init__(self)
        check_aux_layers(self.aux_layers, self.target_num_layers)
        if not 2 <= self.block_size <= 64:
            raise ValueError(f"block_size is {self.block_size}; it must be between 2 and 64")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id is {self.mask_token_id}; the target has {self.vocab_size} tokens")
        if any(not 0 <= layer < self.num_layers for layer in self.windowed_layers):
            raise ValueError(f"windowed_layers is {list(self.windowed_layers)}; the draft has {self.num_layers} layers")
        if bool(self.windowed_layers) != (self.sliding_window is not None):
            raise ValueError("sliding_window and windowed_layers go together: set both or neither")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window is {self.sliding_window}; it must be at least 1")
        if self.sliding_window_non_causal and not self.windowed_layers:
            raise ValueError("sliding_window_non_causal is true, but no layer has a window; leave it out")
        if self.final_logit_softcapping is not None and self.final_logit_softcapping <= 0:
            raise ValueError(f"final_logit_softcapping is {self.final_logit_softcapping}; give a positive number")
        self._check_heads()

    def _check_heads(self) -> None:
        if self.conv_kernel_size not in CONVOLUTION_TAPS:
            raise ValueError(f"conv_kernel_size is {self.conv_kernel_size}; supported: 0 (none) and 2")
        if self.conv_kernel_size and (self.conv_group_size < 1 or self.hidden_size % self.conv_group_size):
            raise ValueError(
                f"conv_group_size is {self.conv_group_size}; it must divide the hidden size {self.hidden_size}"
            )
        joining = [head.option for head in self.heads if head.joins]
        if len(joining) > 1:
            raise ValueError(f"{' and '.join(joining)}: a draft has one way to join its slots; leave out the others")
        for head in self.heads:
            head.check(self.sizes)

    @classmethod
    def from_target(cls, model: TargetSpec, /, **fields: Any) -> Self:
        """`fields` may also be options of heads, as training has them."""
        plain = {name: value for name, value in fields.items() if name not in HEAD_FIELDS and name not in HEAD_OPTIONS}
        return cls(**target_fields(model) | {"heads": heads_of(fields)} | plain)

    @property
    def sizes(self) -> BlockSizes:
        return BlockSizes(*(getattr(self, name) for name in BlockSizes._fields))

    @property
    def num_tokens(self) -> int:
        """Vd, the tokens that it can propose."""
        return self.draft_vocab_size or self.vocab_size

    def head(self, kind: type[KindOfConfig]) -> KindOfConfig | None:
        return next((head for head in self.heads if isinstance(head, kind)), None)

    def with_head(self, head: HeadConfig) -> Self:
        """The config with another one of a head that it has."""
        return replace(self, heads=tuple(head if type(other) is type(head) else other for other in self.heads))

    @property
    def network(self) -> Self:
        same = DraftConfig.network.fget(self)  # type: ignore[attr-defined]
        return replace(same, heads=tuple(head.uncalibrated for head in self.heads))

    @property
    def first_slot(self) -> int:
        """The block's row that drafts the first token."""
        return 0 if self.sample_from_anchor else 1

    @property
    def num_proposals(self) -> int:
        """K, the tokens that a whole block drafts."""
        return self.block_size - self.first_slot

    @property
    def num_candidates(self) -> int:
        """k, the candidates of a slot in the lattice."""
        count = max([head.num_candidates for head in self.heads if head.joins], default=1)
        return min(count, self.num_tokens)

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        windows = [self.sliding_window if index in self.windowed_layers else None for index in range(self.num_layers)]
        same: dict[str, Any] = {"qk_norm": True, "qkv_bias": self.attention_bias, "output_bias": self.attention_bias}
        same["gate"] = self.gate
        return tuple(self.layer(window=window, **same) for window in windows)

    def to_json(self) -> dict[str, Any]:
        """Layer ids count outputs, which is also the convention of the public field."""
        windowed = [layer in self.windowed_layers for layer in range(self.num_layers)]
        non_causal = self.sliding_window_non_causal
        window: dict[str, Any] = {}
        if self.windowed_layers:  # the fields of speculators and z-lab; DFlash 2 without them is not causal here
            window = {"sliding_window_non_causal": non_causal} | ({"is_causal": False} if non_causal else {})
        fields = {"mask_token_id": self.mask_token_id, "target_layer_ids": list(self.aux_layers)}
        nested = self._heads_to_json()
        return {
            "architectures": [self.architecture],
            "model_type": "qwen3",
            "block_size": self.block_size,
            "num_target_layers": self.target_num_layers,
            "dflash_config": fields | nested,
            **{name: nested.get(name, False) for head in self.heads for name in head.top_fields},
            "num_hidden_layers": self.num_layers,
            "attention_bias": self.attention_bias,
            **decoder_to_json(self),
            "layer_types": ["sliding_attention" if is_windowed else "full_attention" for is_windowed in windowed],
            "sliding_window": self.sliding_window,
            "use_sliding_window": self.sliding_window is not None,
            **window,
            "sample_from_anchor": self.sample_from_anchor,
            "drafter": "dflash",
        }

    @property
    def architecture(self) -> str:
        """The public name of drafts with these heads."""
        names = {head.architecture for head in self.heads}
        if self.sample_from_anchor:
            names.add("DSparkDraftModel")
        if self.conv_kernel_size:
            names.add("DFlash2DraftModel")
        if self.tap_norms or self.context_norms or self.gate is not None:
            names.add("DFlashLagunaForCausalLM")
        return next((name for name in ARCHITECTURES if name in names), "DFlashDraftModel")

    def _heads_to_json(self) -> dict[str, Any]:
        """Fields of `dflash_config` that differ from a plain draft's."""
        fields: dict[str, Any] = {}
        if self.conv_kernel_size:
            fields |= {"conv_kernel_size": self.conv_kernel_size, "conv_group_size": self.conv_group_size}
        for head in self.heads:
            fields |= head.to_json(fields)
        if self.architecture == "DSparkDraftModel":
            fields["projector_type"] = "dspark"
        neutral_values = {
            "output_multiplier": 1.0,
            "input_embedding_scale": 1.0,
            "tap_norms": False,
            "context_norms": False,
            "final_logit_softcapping": None,
        }
        for name, neutral in neutral_values.items():
            if getattr(self, name) != neutral:
                fields[name] = getattr(self, name)
        if self.gate is not None:
            fields["output_gate"] = asdict(self.gate)
        return fields

    @classmethod
    def settle(cls, values: Values, target: TargetSpec, choices: Choices, evidence: Evidence | None) -> Values:
        choices.refuse(cls.kind, "sample_from_anchor")
        settled = settle_block(publish(values, target), choices.sample_from_anchor)
        if layers := settled["dflash_config"].get("target_layer_ids"):
            tensors = evidence.tensors if evidence is not None else {}
            layers = without_last_layer(list(layers), target.num_layers - 1, tensors, target.hidden_size)
            settled["dflash_config"]["target_layer_ids"] = layers
        return settled

    @classmethod
    def from_json(cls, values: Values, target: TargetSpec, tensors: Tensors | None = None) -> Self:
        sizes = dict.fromkeys(("hidden_size", "target_hidden_size"), target.hidden_size)
        sizes["num_target_layers"] = target.num_layers
        decoder = decoder_from_json(values, target, "num_hidden_layers", **sizes)
        draft_fields = values["dflash_config"]
        num_layers = values["num_hidden_layers"]
        layers = tuple(draft_fields.get("target_layer_ids") or ())
        return cls(
            **decoder,
            num_layers=num_layers,
            aux_layers=layers or default_block_aux_layers(target.num_layers, num_layers),
            mask_token_id=_mask_token(draft_fields),
            block_size=_block_size(values),
            sample_from_anchor=bool(values.get("sample_from_anchor")),
            attention_bias=bool(values.get("attention_bias", False)),
            **_windows(values),
            **{name: draft_fields[name] for name in PLAIN_FIELDS if draft_fields.get(name) is not None},
            final_logit_softcapping=draft_fields.get("final_logit_softcapping") or None,
            gate=_gate(draft_fields.get("output_gate")),
            heads=heads_from_json(draft_fields),
        )


def _gate(values: Values | None) -> OutputGate | None:
    if not values:
        return None
    try:
        gate = OutputGate(**values)
    except TypeError:  # not a mapping of its fields
        gate = None
    if gate is None or gate.activation not in get_args(GateActivation):
        raise ValueError(
            f"draft config: output_gate is {values}; it must have activation, {' or '.join(get_args(GateActivation))}, "
            "and by_head"
        )
    return gate


def _mask_token(values: Values) -> int:
    if values.get("mask_token_id") is None:
        token = values.get("mask_token") or "the token that masked its blocks in training (SGLang assumes <|MASK|>)"
        raise ValueError(f"draft config lacks dflash_config.mask_token_id; enter the target's id of {token}")
    return int(values["mask_token_id"])


def _block_size(values: Values) -> int:
    outer = values.get("block_size")
    inner = (values.get("dflash_config") or {}).get("block_size")
    size = inner if outer is None else outer
    if size is None:
        raise ValueError("draft config lacks block_size, the tokens of the blocks that the draft was trained on")
    if None not in (outer, inner) and outer != inner:
        raise ValueError(f"draft config: block_size is {outer} and, in dflash_config, {inner}; they must be equal")
    return int(size)


def _windows(values: Values) -> dict[str, Any]:
    """Fields `sliding_window`, `windowed_layers` and `sliding_window_non_causal` of the config."""
    num_layers = values["num_hidden_layers"]
    window = values.get("sliding_window")
    types = values.get("layer_types")
    is_used = values.get("use_sliding_window")
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
    non_causal = bool(windowed and values.get("sliding_window_non_causal"))
    return {
        "sliding_window": window if windowed else None,
        "windowed_layers": windowed,
        "sliding_window_non_causal": non_causal,
    }


def default_block_aux_layers(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The target states that a block draft reads, as layer outputs: round(1 + i (N - 4) / (L - 1)), i = 0..L-1.

    On shallow targets that rule repeats layers or stops far from the end: there, the states that EAGLE3 reads.
    """
    if num_draft_layers == 1 and num_target_layers >= 11:
        return (num_target_layers // 2,)
    if num_target_layers < max(11, num_draft_layers + 3):
        return default_aux_layers(num_target_layers)
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    return tuple(round(1 + index * step) for index in range(num_draft_layers))


def default_mask_token(tokenizer: "PreTrainedTokenizerBase", vocab_size: int) -> tuple[int, str]:
    """The token that stands for "not drafted yet" in a block, and where it is from: the tokenizer's mask token, the
    first embedding that no token uses, or a token that answers hardly contain. `vocab_size` is the number of the
    target's embeddings.

    Raises ValueError if the tokenizer has nothing of the kind.
    """
    if tokenizer.mask_token_id is not None:
        return tokenizer.mask_token_id, "the tokenizer's mask token"
    unused = max(tokenizer.get_vocab().values()) + 1
    if unused < vocab_size:
        return unused, "the first unused embedding"
    for name in ("pad", "eos", "unk"):
        token = getattr(tokenizer, f"{name}_token_id")
        if token is not None:
            return token, f"the tokenizer's {name} token"
    raise ValueError("the tokenizer has no mask, unused, pad, eos or unk token; name one by draft.mask_token_id")


class ContextProjection(NamedTuple):
    """Keys and values of context rows in several layers at once."""

    weight: Tensor  # (L * 2 * G * D, H), each layer's keys before its values
    bias: Tensor | None  # (L * 2 * G * D,)
    k_norm: Tensor  # (L, D)
    norm: Tensor | None  # (H,) ones: the weight of an RMS norm that the rows pass through first
    change: LowRankChange | None  # by adapters


class DFlash(DraftNetwork):
    """Any leading dims. A layer's attention sees the context and the whole block, or a window of both."""

    Config = DFlashConfig
    other_names = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm.", **HEAD_NAMES}
    other_parts = {"g_proj": "gate_proj"}
    layers_field = "target_layer_ids"
    unsupported_files = {"mask_embedding.pt": "a mask embedding of its own"}
    config: DFlashConfig

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        specs = config.layers
        causal = [spec.attention.window is not None and not config.sliding_window_non_causal for spec in specs]
        self.masks: list[Mask] = ["causal" if is_causal else "block" for is_causal in causal]
        num_taps = len(config.aux_layers)
        self.aux_hidden_norms = PartNorms(num_taps, size, config.rms_norm_eps) if config.tap_norms else None
        self.fc = Linear(size * num_taps, size, bias=False)
        self.hidden_norm = RMSNorm(size, config.rms_norm_eps)
        eps = config.rms_norm_eps
        kernel_size = config.conv_kernel_size
        group_size = config.conv_group_size
        self.layers: nn.ModuleList = nn.ModuleList(
            ConvolvedLayer(spec, index, size, eps, kernel_size, group_size)
            if kernel_size
            else DecoderLayer(spec, index, size, eps)
            for index, spec in enumerate(specs)
        )
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.heads: list[Head] = []  # registered by their names in files
        for head_config in config.heads:
            kind = head_of(head_config)
            head = kind(head_config, config.sizes, self.heads)
            self.add_module(kind.name, head)
            self.heads.append(head)

    def head(self, kind: type[KindOfHead]) -> KindOfHead | None:
        return next((head for head in self.heads if isinstance(head, kind)), None)

    @property
    def joining(self) -> JoiningHead | None:
        """The head that joins the slots."""
        return self.head(JoiningHead)  # type: ignore[type-abstract]

    def adopt(self, config: DraftConfig) -> None:
        super().adopt(config)
        for head, head_config in zip(self.heads, self.config.heads, strict=True):
            head.adopt(head_config)

    def fuse(self, aux_states: Tensor) -> Tensor:
        """Target states (..., K * H) -> the context (..., H) that every layer projects to keys and values."""
        if self.aux_hidden_norms is not None:
            aux_states = self.aux_hidden_norms(aux_states)
        return self.hidden_norm(self.fc(aux_states))

    def write_context(self, context: Tensor, attention: Attention) -> None:
        """Stores every layer's keys and values of context rows (..., H)."""
        for layer, mixer in zip(self.layers, self.attentions, strict=True):
            rows = cast(DecoderLayer, layer).input_layernorm(context) if self.config.context_norms else context
            mixer.write(rows, attention)

    def stack_context(self, layers: Sequence[int]) -> ContextProjection:
        """Copies of the weights that write_context uses in these layers, for callers that store all of them at once.
        Weights of norms of the context are multiplied into the projections."""
        attentions = [self.attentions[layer] for layer in layers]
        weights, biases = zip(*(layer.kv_projection for layer in attentions), strict=True)
        norms = [layer.norms.k for layer in attentions if layer.norms is not None]
        bias = None if biases[0] is None else derive(self, lambda: torch.cat(biases))
        k_norm = derive(self, lambda: torch.stack(norms))
        input_norms = [cast(DecoderLayer, self.layers[layer]).input_layernorm for layer in layers]
        has_norms = self.config.context_norms
        normed = zip(attentions, input_norms, strict=True)
        changes = [layer.kv_change(norm if has_norms else None) for layer, norm in normed]
        change = stack_changes(changes, len(weights[0]))
        if not has_norms:
            return ContextProjection(derive(self, lambda: torch.cat(weights)), bias, k_norm, None, change)
        pairs = list(zip(input_norms, weights, strict=True))
        weight = derive(self, lambda: torch.cat([norm.scale_inputs(projection) for norm, projection in pairs]))
        return ContextProjection(weight, bias, k_norm, weight.new_ones(self.config.hidden_size), change)

    @property
    def attentions(self) -> list[SelfAttention]:
        return [cast(SelfAttention, layer.self_attn) for layer in self.layers]

    def block_tokens(self, anchors: Tensor, count: int) -> Tensor:
        """anchors (...) token ids -> (..., count): each anchor followed by mask tokens."""
        blocks = anchors.unsqueeze(-1).repeat_interleave(count, dim=-1)
        blocks[..., 1:] = self.config.mask_token_id
        return blocks

    def forward(self, embeds: Tensor, attention: Attention, block_size: int | None = None) -> Tensor:
        """embeds (..., H) of whole blocks -> normed final states (..., H), input of the target's head.

        `block_size`: rows of a block, which follow one another; default: those of training. Convolutions need it, since
        they stop at a block's first row.
        """
        scale = self.config.input_embedding_scale
        x = embeds if scale == 1 else embeds * scale
        delta = None
        size = block_size or self.config.block_size
        for layer, mask in zip(self.layers, self.masks, strict=True):
            if isinstance(layer, ConvolvedLayer):
                x, delta = layer.forward_block(x, delta, attention, mask, size)
            else:
                x, delta = layer(x, delta, attention, mask)
        assert delta is not None
        return self.norm.add(x, delta)[0]

    def unary(self, logits: Tensor) -> Tensor:
        """The head's logits (..., Vd) at final states -> those of a slot alone: multiplied, and capped."""
        config = self.config
        logits = logits if config.output_multiplier == 1 else logits * config.output_multiplier
        cap = config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def lattice(
        self,
        hidden: Tensor,
        anchors: Tensor,
        logits: Tensor,
        *,
        num_candidates: int | None = None,
        noise: Tensor | None = None,
        context: Tensor | None = None,
        embed: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Candidates, Tensor]:
        """The candidates of the K slots that draft, and their scores by whichever head joins them (heads/base.py).

        hidden (B, K, H) final states of these slots, anchors (B,) target ids, logits (B, K, Vd) of the head there.
        `num_candidates`: k, by default the config's. `noise` (B, K, Vd) fp32: what the requests add to each logit,
        T * gumbel; default: none, T = 0. Some heads also need `context` (B, H), what `fuse` makes of the row before the
        anchor (zeros where there is none), and `embed`, the target's embedding of ids (...) -> (..., H).
        """
        join = self.joining
        is_noisy = join is None or join.is_noisy
        unary = self.unary(logits)
        perturbed = unary.float() + noise if noise is not None and is_noisy else unary
        best, rows = perturbed.topk(num_candidates or self.config.num_candidates, dim=-1)  # (B, K, k)
        values = best.float()
        if not is_noisy:
            values = values - unary.float().logsumexp(dim=-1, keepdim=True)
        late_noise = None if noise is None else noise.gather(2, rows)
        block = Block(anchors, hidden, context, embed, None if late_noise is None else lambda _: late_noise)
        candidates = Candidates(values, rows, rows if self.target_ids is None else self.target_ids[rows])
        return candidates, joined_scores(join, block, candidates)
