"""Sizes and kinds of the heads in block_heads.py. Imports no torch, so that options can have these types."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

MarkovType = Literal["vanilla", "gated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiLiCorrConfig:
    """Sizes of the node scorer, by the names that follow `lilicorr_` in public files."""

    candidate_topk: int = 8
    hidden_size: int = 1024  # 0: the draft's
    num_layers: int = 2
    num_heads: int = 8
    mlp_ratio: float = 2.0
    factor_dim: int = 1024
    vector_eps: float = 1e-4
    logit_scale: float = 8.0

    def __post_init__(self) -> None:
        for name in ("candidate_topk", "num_layers", "num_heads", "factor_dim", "mlp_ratio", "logit_scale"):
            if getattr(self, name) <= 0:
                raise ValueError(f"lilicorr_{name} is {getattr(self, name)}; give a positive number")
        if self.candidate_topk > 16 or self.candidate_topk & (self.candidate_topk - 1):
            raise ValueError(f"lilicorr_candidate_topk is {self.candidate_topk}; give 1, 2, 4, 8 or 16")
        if self.hidden_size < 0 or self.hidden_size % self.num_heads:
            raise ValueError(
                f"lilicorr_hidden_size is {self.hidden_size}; give a multiple of lilicorr_num_heads {self.num_heads}, "
                "or 0 for the draft's hidden size"
            )
        if not 0 < self.vector_eps < 0.5:
            raise ValueError(f"lilicorr_vector_eps is {self.vector_eps}; give a number between 0 and 0.5")

    def to_json(self) -> dict[str, Any]:
        return {f"lilicorr_{field.name}": getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self | None:
        """None if the file names none of them. Raises ValueError if it leaves out some: a default would change scores,
        not shapes."""
        names = [field.name for field in fields(cls)]
        options = {name: values[f"lilicorr_{name}"] for name in names if values.get(f"lilicorr_{name}") is not None}
        missing = [f"lilicorr_{name}" for name in names if name not in options]
        if options and missing:
            raise ValueError(f"draft config lacks {', '.join(missing)}; a LiLiCorr draft needs all lilicorr_ fields")
        return cls(**options) if options else None
