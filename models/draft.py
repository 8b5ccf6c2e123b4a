"""What the draft networks share: their shapes, and the vocabulary of those that leave out target tokens.

d2t (Vd,) int64 are offsets, target id = draft id + d2t[draft id]; t2d (V,) bool tells which target ids a draft has.
"""

from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from slipstream.models.config import ModelConfig, RopeConfig

DECODER_FIELDS = (
    *("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"),
    *("rms_norm_eps", "max_position_embeddings", "rope"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """Shapes of a draft and what it was trained for."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    target_hidden_size: int
    target_num_layers: int
    draft_vocab_size: int | None = None  # None: the target's
    rope: RopeConfig = field(default_factory=RopeConfig)
    target: str = ""
    target_revision: str | None = None
    target_fingerprint: str = ""
    tokenizer_hash: str = ""

    def __post_init__(self) -> None:
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size is {self.draft_vocab_size}; the target has {self.vocab_size} tokens")

    @classmethod
    def from_target(cls, model: ModelConfig, /, **fields: Any) -> Self:
        """A draft as wide as the target `model`. `fields` override or add others (intermediate_size, target, ...)."""
        values = {name: getattr(model, name) for name in DECODER_FIELDS}
        values |= {"target_hidden_size": model.hidden_size, "target_num_layers": model.num_layers}
        return cls(**values | fields)

    def decoder_config(self, **fields: Any) -> ModelConfig:
        """The draft's layers seen as a model; `fields` are the others of a ModelConfig."""
        return ModelConfig(**{name: getattr(self, name) for name in DECODER_FIELDS}, **fields)


class DraftNetwork(nn.Module):
    """The buffers d2t and t2d of a reduced vocabulary, which at first holds the first target ids."""

    config: DraftConfig
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        if config.draft_vocab_size is not None:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)

    def set_vocabulary(self, ids: Tensor) -> None:
        """ids (Vd,) int64: the target ids that the draft can propose. Raises ValueError unless they are distinct,
        ascending and the target's."""
        d2t, t2d = self.d2t, self.t2d
        if ids.shape != d2t.shape or not bool((ids[1:] > ids[:-1]).all()) or int(ids[0]) < 0:
            raise ValueError(f"draft vocabulary: need {len(d2t)} distinct ascending ids")
        if int(ids[-1]) >= len(t2d):
            raise ValueError(f"draft vocabulary: id {int(ids[-1])} is outside the target's {len(t2d)} tokens")
        d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        t2d.zero_()[ids.to(t2d.device)] = True

    @property
    def target_ids(self) -> Tensor | None:
        """(Vd,) int64 target id of each draft id; None where they are the same."""
        return None if self.config.draft_vocab_size is None else ids_of(self.d2t)


def ids_of(d2t: Tensor) -> Tensor:
    """(Vd,) int64 target id of each draft id."""
    return d2t + torch.arange(len(d2t), device=d2t.device)
