"""Gemma 4's assistants, network and files: a few layers of queries alone, which read keys and values of the target.

A step joins the target's embedding of a token and its state before; the network's output is that state's successor,
and its own head gives logits. Each layer sees what the target's last layer of its kind has cached, so it keeps no KV
and reads no prompt. Every step of a round stands at the position of the round's first token.

The small ones (E2B, E4B) have their vocabulary in clusters: a step proposes tokens of the few whose centroids score
best.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from slipstream.models.drafts.base import DraftConfig, DraftNetwork, Tensors, check_target
from slipstream.models.files.checkpoint import Values
from slipstream.models.layers.attention import Attention
from slipstream.models.layers.decoder_layer import decoder_layer
from slipstream.models.layers.linear import Head, Linear
from slipstream.models.layers.norm import RMSNorm
from slipstream.models.targets.config import AttentionSpec, LayerSpec, RopeConfig, TargetSpec
from slipstream.models.targets.families import count_of

TEXT_PARTS = {  # architecture of an assistant -> that of its layers
    "Gemma4AssistantForCausalLM": "Gemma4ForCausalLM",
    "Gemma4UnifiedAssistantForCausalLM": "Gemma4UnifiedForCausalLM",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4AssistantConfig(DraftConfig):
    kind: ClassVar[str] = "Gemma 4 assistant"
    specs: tuple[LayerSpec, ...]
    num_centroids: int | None = None  # clusters of the vocabulary; None: it has none
    num_open: int = 0  # clusters whose tokens a step may propose
    values: Values = field(default_factory=dict, hash=False)  # config.json

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return self.specs

    def to_json(self) -> dict[str, Any]:
        return dict(self.values)

    @classmethod
    def from_json(cls, values: Values, target: TargetSpec, tensors: Tensors | None = None) -> Self:
        text = values.get("text_config")
        if not isinstance(text, Mapping):
            raise ValueError(f"draft config: text_config is {text!r}; it must be an object")
        if not values.get("tie_word_embeddings", True):
            raise ValueError("draft config: tie_word_embeddings is false; an assistant's head is its embedding")
        architecture = TEXT_PARTS[values["architectures"][0]]
        fields = {**text, "architectures": [architecture], "num_kv_shared_layers": 0}  # it has KV of no layer
        spec = TargetSpec.from_json(fields)
        sizes = {"backbone_hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
        check_target({**values, "vocab_size": spec.vocab_size}, **sizes)
        return cls(
            **spec.shape() | {"rope": RopeConfig(spec.rope.theta)},  # each layer has its own
            target_hidden_size=target.hidden_size,
            target_num_layers=target.num_layers,
            specs=tuple(reading(layer, index, target) for index, layer in enumerate(spec.layers)),
            **clusters_of(values, spec.vocab_size),
            values=values,
        )


def clusters_of(values: Values, vocab_size: int) -> dict[str, Any]:
    """Fields of the config about clusters. Raises ValueError for numbers that cannot be."""
    if not values.get("use_ordered_embeddings"):
        return {}
    count = count_of(values, "num_centroids")
    num_open = count_of(values, "centroid_intermediate_top_k")
    if vocab_size % count or num_open > count:
        raise ValueError(
            f"draft config: num_centroids is {count} and centroid_intermediate_top_k {num_open}; the former must "
            f"divide the {vocab_size} tokens, and the latter be no larger"
        )
    return {"num_centroids": count, "num_open": num_open}


def reading(layer: LayerSpec, index: int, target: TargetSpec) -> LayerSpec:
    """A layer that reads the KV of the target's last layer of its kind that has KV. Raises ValueError where the target
    has none that fits."""
    spec = layer.attention
    kind = "full_attention" if spec.window is None else "sliding_attention"
    layers = [
        (place, other)
        for place, other in enumerate(target.attention)
        if other.kv_source is None and (other.window is None) == (spec.window is None)
    ]
    if not layers:
        raise ValueError(f"draft does not fit the target: its layer {index} is {kind}, and the target has no such one")
    place, source = layers[-1]
    for name in ("num_kv_heads", "head_dim", "window"):
        if getattr(spec, name) != getattr(source, name):
            raise ValueError(
                f"draft does not fit the target: {name} of {kind} is {getattr(spec, name)} in the draft and "
                f"{getattr(source, name)} in the target; serve the target it was trained for"
            )
    return replace(layer, mixer=replace(spec, kv_source=place, key_is_value=False, value_norm=False))


class Clusters(nn.Module):
    """Which tokens of the vocabulary a state may propose."""

    def __init__(self, size: int, num_centroids: int, num_open: int, vocab_size: int) -> None:
        super().__init__()
        self.num_open = num_open
        self.centroids = Linear(size, num_centroids)
        self.register_buffer("token_ordering", torch.arange(vocab_size))  # cluster after cluster
        self.token_ordering: Tensor

    def cluster_ids(self) -> Tensor:
        """Computes the cluster of each token (V,)."""
        places = torch.empty_like(self.token_ordering)
        places[self.token_ordering] = torch.arange(len(places), device=places.device)
        return places // (len(places) // self.centroids.out_features)

    def forward(self, states: Tensor, cluster_ids: Tensor) -> Tensor:
        """states (B, H of the draft) -> (B, V) bool."""
        scores = self.centroids(states)
        best = scores.topk(self.num_open, dim=-1).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)[:, cluster_ids]


class Gemma4Assistant(DraftNetwork):
    """Letters: B requests, H the target's hidden size."""

    Config = Gemma4AssistantConfig
    shared = ()
    other_names = {"embed_tokens.": "lm_head."}  # tied
    config: Gemma4AssistantConfig

    def __init__(self, config: Gemma4AssistantConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        eps = config.rms_norm_eps
        self.pre_projection = Linear(2 * config.target_hidden_size, size)
        self.layers = nn.ModuleList(decoder_layer(spec, index, size, eps) for index, spec in enumerate(config.specs))
        self.norm = RMSNorm(size, eps)
        self.post_projection = Linear(size, config.target_hidden_size)
        self.lm_head = Head(size, config.vocab_size)
        self.masked_embedding = None
        if config.num_centroids is not None:
            self.masked_embedding = Clusters(size, config.num_centroids, config.num_open, config.vocab_size)

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        return tuple(layer.attention for layer in self.config.specs)

    def forward(self, embeds: Tensor, hidden: Tensor, attention: Attention) -> Tensor:
        """The target's embeddings (B, H) of tokens, and states (B, H) before them -> the head's input (B, H of the
        draft)."""
        x = self.pre_projection(torch.cat((embeds, hidden), dim=-1))
        delta = None
        for layer in self.layers:
            x, delta = layer(x, delta, attention, "causal")
        return self.norm(x) if delta is None else self.norm.add(x, delta)[0]
