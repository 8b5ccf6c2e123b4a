"""DFLASH drafts, network and files (arXiv 2602.06036): a few layers that fill a block of masked tokens in one pass.

Every layer attends to [target's states ; block]: keys and values of committed tokens come from one projected state
that passes through no layer, those of the block from its own states. Embedding and head are the target's: callers pass
embeddings and apply the head to final states. The same module trains and serves: attention is an argument.

On disk: the public config.json fields and key names (z-lab's, SpecForge's), ours beside them. Reads these and what
other trainers write (models/drafts/block_layouts.py, speculators_layout.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn

from slipstream.models.drafts.base import (
    Choices,
    DraftConfig,
    DraftNetwork,
    Evidence,
    Tensors,
    check_target,
    decoder_from_json,
    decoder_to_json,
)
from slipstream.models.drafts.block_layouts import HEAD_NAMES, OFF, settle_block
from slipstream.models.drafts.speculators_layout import without_last_layer
from slipstream.models.layers.attention import Attention, Mask, SelfAttention
from slipstream.models.layers.decoder_layer import DecoderLayer
from slipstream.models.layers.linear import Linear, derive
from slipstream.models.layers.norm import RMSNorm
from slipstream.models.targets.config import LayerSpec, TargetSpec, check_aux_layers, default_aux_layers

if TYPE_CHECKING:  # serving a draft needs no tokenizer's type
    from transformers import PreTrainedTokenizerBase

HEADS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("conv_kernel_size", "selector_rank", "selector_top_k", "markov_rank"), OFF),
    **dict.fromkeys(("enable_confidence_head", "final_logit_softcapping"), OFF),
    "output_multiplier": (None, 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(DraftConfig):
    """`aux_layers` are output ids (models/targets/config.py)."""

    num_layers: int
    aux_layers: tuple[int, ...]
    mask_token_id: int
    block_size: int = 16  # tokens of a block, the anchor (last emitted token) included
    sample_from_anchor: bool = False  # slot k predicts the next token, as in DeepSpec's drafts; never in ours
    windowed_layers: tuple[int, ...] = ()  # which layers have the window
    sliding_window_non_causal: bool = False  # whether slots see later ones of their block in these, too
    attention_bias: bool = False

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

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        windows = [self.sliding_window if index in self.windowed_layers else None for index in range(self.num_layers)]
        same: dict[str, Any] = {"qk_norm": True, "qkv_bias": self.attention_bias, "output_bias": self.attention_bias}
        return tuple(self.layer(window=window, **same) for window in windows)

    def to_json(self) -> dict[str, Any]:
        """Layer ids count outputs, which is also the convention of the public field."""
        windowed = [layer in self.windowed_layers for layer in range(self.num_layers)]
        public = {"sliding_window_non_causal": True, "is_causal": False}  # speculators' and z-lab's
        non_causal = public if self.sliding_window_non_causal else {}
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": self.block_size,
            "num_target_layers": self.target_num_layers,
            "dflash_config": {"mask_token_id": self.mask_token_id, "target_layer_ids": list(self.aux_layers)},
            "num_hidden_layers": self.num_layers,
            "attention_bias": self.attention_bias,
            **decoder_to_json(self),
            "layer_types": ["sliding_attention" if one else "full_attention" for one in windowed],
            "sliding_window": self.sliding_window,
            "use_sliding_window": self.sliding_window is not None,
            **non_causal,
            "sample_from_anchor": self.sample_from_anchor,
            "drafter": "dflash",
        }

    @classmethod
    def settle(
        cls, values: Mapping[str, Any], target: TargetSpec, choices: Choices, evidence: Evidence | None
    ) -> Mapping[str, Any]:
        choices.refuse("block", "sample_from_anchor")
        settled = settle_block(values, choices.sample_from_anchor)
        if layers := settled["dflash_config"].get("target_layer_ids"):
            tensors = evidence.tensors if evidence is not None else {}
            layers = without_last_layer(list(layers), target.num_layers - 1, tensors, target.hidden_size)
            settled["dflash_config"]["target_layer_ids"] = layers
        return settled

    @classmethod
    def from_json(cls, values: Mapping[str, Any], target: TargetSpec, tensors: Tensors | None = None) -> Self:
        decoder = decoder_from_json(values, target, "num_hidden_layers")
        own = values["dflash_config"]
        for name, neutral in HEADS.items():
            if own.get(name) not in neutral:
                raise ValueError(f"draft config sets {name} to {own[name]!r}, which is not supported")
        expected = {"num_target_layers": target.num_layers, "target_hidden_size": target.hidden_size}
        check_target(values, **expected, hidden_size=target.hidden_size, vocab_size=target.vocab_size)
        num_layers = values["num_hidden_layers"]
        layers = tuple(own.get("target_layer_ids") or ())
        return cls(
            **decoder,
            num_layers=num_layers,
            aux_layers=layers or default_block_aux_layers(target.num_layers, num_layers),
            mask_token_id=_mask_token(own),
            block_size=_block_size(values),
            sample_from_anchor=bool(values.get("sample_from_anchor")),
            attention_bias=bool(values.get("attention_bias", False)),
            **_windows(values),
        )


def _mask_token(values: Mapping[str, Any]) -> int:
    if values.get("mask_token_id") is None:
        token = values.get("mask_token") or "the token that masked its blocks in training (SGLang assumes <|MASK|>)"
        raise ValueError(f"draft config lacks dflash_config.mask_token_id; enter the target's id of {token}")
    return int(values["mask_token_id"])


def _block_size(values: Mapping[str, Any]) -> int:
    outer, inner = values.get("block_size"), (values.get("dflash_config") or {}).get("block_size")
    size = inner if outer is None else outer
    if size is None:
        raise ValueError("draft config lacks block_size, the tokens of the blocks that the draft was trained on")
    if None not in (outer, inner) and outer != inner:
        raise ValueError(f"draft config: block_size is {outer} and, in dflash_config, {inner}; they must be equal")
    return int(size)


def _windows(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields `sliding_window`, `windowed_layers` and `sliding_window_non_causal` of the config."""
    num_layers, window = values["num_hidden_layers"], values.get("sliding_window")
    types, is_used = values.get("layer_types"), values.get("use_sliding_window")
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


class DFlash(DraftNetwork):
    """Any leading dims. A layer's attention sees the context and the whole block, or a window of both."""

    Config = DFlashConfig
    other_names = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm.", **HEAD_NAMES}
    layers_field = "target_layer_ids"
    unsupported_files = {"mask_embedding.pt": "a mask embedding of its own"}
    config: DFlashConfig

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        size, specs = config.hidden_size, config.layers
        causal = [spec.attention.window is not None and not config.sliding_window_non_causal for spec in specs]
        self.masks: list[Mask] = ["causal" if one else "block" for one in causal]
        self.fc = Linear(size * len(config.aux_layers), size, bias=False)
        self.hidden_norm = RMSNorm(size, config.rms_norm_eps)
        sizes = size, config.rms_norm_eps
        self.layers = nn.ModuleList(DecoderLayer(spec, index, *sizes) for index, spec in enumerate(specs))
        self.norm = RMSNorm(size, config.rms_norm_eps)

    def fuse(self, aux_states: Tensor) -> Tensor:
        """Target states (..., K * H) -> the context (..., H) that every layer projects to keys and values."""
        return self.hidden_norm(self.fc(aux_states))

    def write_context(self, context: Tensor, attention: Attention) -> None:
        """Stores every layer's keys and values of context rows (..., H)."""
        for layer in self.attentions:
            layer.write(context, attention)

    def stack_context(self, layers: Sequence[int]) -> ContextProjection:
        """Copies of the weights that write_context uses in these layers, for callers that store all of them at once."""
        attentions = [self.attentions[layer] for layer in layers]
        weights, biases = zip(*(layer.kv_projection for layer in attentions), strict=True)
        norms = [layer.norms.k for layer in attentions if layer.norms is not None]
        bias = None if biases[0] is None else derive(self, lambda: torch.cat(biases))
        k_norm = derive(self, lambda: torch.stack(norms))
        return ContextProjection(derive(self, lambda: torch.cat(weights)), bias, k_norm)

    @property
    def attentions(self) -> list[SelfAttention]:
        return [cast(SelfAttention, layer.self_attn) for layer in self.layers]

    def block_tokens(self, anchors: Tensor, count: int) -> Tensor:
        """anchors (...) token ids -> (..., count): each anchor followed by mask tokens."""
        blocks = anchors.unsqueeze(-1).repeat_interleave(count, dim=-1)
        blocks[..., 1:] = self.config.mask_token_id
        return blocks

    def forward(self, embeds: Tensor, attention: Attention) -> Tensor:
        """embeds (..., H) of whole blocks -> normed final states (..., H), input of the target's head."""
        x, delta = embeds, None
        for layer, mask in zip(self.layers, self.masks, strict=True):
            x, delta = layer(x, delta, attention, mask)
        assert delta is not None
        return self.norm.add(x, delta)[0]
