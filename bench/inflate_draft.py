"""What bench/inflate.py asks of a small draft, whatever its network."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.bench.inflate_shapes import Shape, check_layer, check_room, places
from slipstream.bench.inflate_weights import Inflation, Part
from slipstream.models.config import ModelConfig
from slipstream.models.dflash import DFlashConfig
from slipstream.models.draft import ids_of
from slipstream.models.eagle3 import Eagle3Config

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Draft(ABC):
    """A small draft, and the big one that it becomes. One file each: bench/inflate_<drafter>.py."""

    config: Eagle3Config | DFlashConfig
    weights: Mapping[str, Tensor]
    """By public name, projections taken apart."""

    @classmethod
    @abstractmethod
    def load(cls, path: Path, model: ModelConfig) -> "Draft":
        """Reads the draft of the target `model` in bf16."""

    @abstractmethod
    def check(self, model: ModelConfig, shape: Shape) -> None:
        """Raises ValueError naming what does not fit."""

    @abstractmethod
    def big_json(self, shape: Shape, **origin: Any) -> dict[str, Any]:
        """config.json of the big draft; `origin`: target, target_fingerprint and tokenizer_hash."""

    @abstractmethod
    def tensors(self, inflation: Inflation, shape: Shape) -> Iterator[Part]:
        """Every tensor of the big draft."""


def check_draft(config: Eagle3Config | DFlashConfig, model: ModelConfig, shape: Shape) -> None:
    """What every draft must be. Raises ValueError naming what does not fit."""
    if config.attention_bias:
        raise ValueError("draft has attention_bias; only drafts without biases can be inflated")
    if config.hidden_size != model.hidden_size:
        raise ValueError(f"draft has hidden_size {config.hidden_size}, its target {model.hidden_size}; make them equal")
    check_layer("draft", config.layer_config(), shape)
    if config.draft_vocab_size is not None:
        check_room("draft_vocab_size", config.draft_vocab_size, shape.draft_vocab_size)
        unused = shape.draft_vocab_size - config.draft_vocab_size
        check_room("unused draft tokens", unused, shape.vocab_size - model.vocab_size)


def big_fields(config: Eagle3Config | DFlashConfig, shape: Shape) -> dict[str, Any]:
    """Fields of the big draft's config that every draft has, but for the states that it reads."""
    same = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "vocab_size", "max_position_embeddings")
    return {name: getattr(shape, name) for name in same} | {
        "draft_vocab_size": None if config.draft_vocab_size is None else shape.draft_vocab_size,
        "rms_norm_eps": config.rms_norm_eps * config.hidden_size / shape.hidden_size,
        "target_num_layers": shape.num_layers,
        "target_revision": None,
    }


def feature_layers(config: Eagle3Config | DFlashConfig, shape: Shape) -> tuple[int, ...]:
    """States of the big target that equal the small draft's features."""
    place_of = {index: big for big, index in places(config.target_num_layers, shape.num_layers).items()}
    return tuple(place_of.get(layer, shape.num_layers) for layer in config.feature_layers)


def vocabulary(d2t: Tensor, small_vocab_size: int, shape: Shape) -> Iterator[Part]:
    """The big draft's map: the small one's (Vd,) and, behind it, the first tokens that nobody uses."""
    unused = small_vocab_size + torch.arange(shape.draft_vocab_size - len(d2t))
    ids = torch.cat((ids_of(d2t), unused))
    yield "d2t", ids - torch.arange(len(ids))
    yield "t2d", torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
