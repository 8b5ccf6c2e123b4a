"""What a target's states take on disk: which are kept, in which dtype, under which names.

Letters: D documents, T tokens, M supervised tokens among them, K captured layers, Ht the target's hidden size.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "fp32": torch.float32}
FP8_MAX = 448.0  # largest finite number of float8_e4m3fn


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureFormat:
    """Feature ids are those of models/config.py: 0..n-1 the output of a layer, n the state after the final norm."""

    layers: tuple[int, ...]
    num_layers: int  # n
    hidden_size: int
    dtype: Literal["bf16", "fp8", "fp32"]
    last_hidden: bool  # keep state n of supervised tokens, too

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "FeatureFormat":
        return cls(**{**values, "layers": tuple(values["layers"])})

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "layers": list(self.layers)}

    @property
    def has_final_state(self) -> bool:
        """Whether state n of every supervised token can be read."""
        return self.last_hidden or self.num_layers in self.layers

    def shapes(self, documents: int, tokens: int, supervised: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Tensors of a shard. Those of T rows and of M rows lie in the order of the documents."""
        states, layers, scaled = DTYPES[self.dtype], len(self.layers), self.dtype == "fp8"
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "documents": ((documents,), torch.int64),  # numbers in their split
            "lengths": ((documents,), torch.int64),  # tokens kept of each
            "checksums": ((documents,), torch.int64),
            "tokens": ((tokens,), torch.int32),
            "supervised": ((tokens,), torch.bool),
            "features": ((tokens, layers, self.hidden_size), states),
        }
        if scaled:
            shapes["features_scales"] = ((tokens, layers), torch.float32)
        if self.last_hidden:
            shapes["last_hidden"] = ((supervised, self.hidden_size), states)
        if self.last_hidden and scaled:
            shapes["last_hidden_scales"] = ((supervised,), torch.float32)
        return shapes

    def num_bytes(self, documents: int, tokens: int, supervised: int) -> int:
        """Exact but for the file's header."""
        shapes = self.shapes(documents, tokens, supervised).values()
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes)


def encode(states: Tensor, dtype: str) -> tuple[Tensor, Tensor | None]:
    """states (..., Ht) -> values (..., Ht) in the stored dtype, and for fp8 their scales (...) fp32.

    A scale per token and layer, because a few tokens' and layers' states are hundreds of times larger than the others'.
    """
    if dtype != "fp8":
        return states.to(DTYPES[dtype]), None
    states = states.float()
    scales = states.abs().amax(dim=-1).clamp(min=torch.finfo(torch.float32).tiny * FP8_MAX) / FP8_MAX
    scaled = (states / scales.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)  # a rounded quotient may pass what fp8 can hold
    return scaled.to(DTYPES[dtype]), scales


def decode(values: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Inverse of `encode`, up to rounding."""
    if scales is None:
        return values.to(dtype)
    return (values.float() * scales.unsqueeze(-1)).to(dtype)


def needed_tokens(supervised: Tensor) -> int:
    """How many of a document's states training reads, by its mask (S,) without the first token.

    Row t is read for the sake of a supervised token behind it, so rows from the last supervised token on never are.
    """
    rows = supervised.nonzero()
    return int(rows[-1]) if len(rows) else 0
