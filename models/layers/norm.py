from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from slipstream.kernels.collectives.ranks import Norm, RankSum
from slipstream.kernels.gemm.fp8 import InputScales, QuantizedRows, quantized_rms_norm
from slipstream.kernels.norm import (
    Branch,
    Increment,
    add_rms_norm,
    grow_and_norm,
    rms_norm,
    rms_norm_pair,
    rms_norm_parts,
)
from slipstream.models.layers.linear import copy_converted

Delta = Tensor | RankSum | Increment  # that a residual grows by


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in fp32 inside (Zhang & Sennrich 2019).

    `quantize`: the scales of what reads it, where that is one FP8 layer; then rows (T, H) come quantised. keeps_rows:
    with what they were before, for a router.

    `offset`: files hold weight - 1, as Gemma's. The sum is kept in fp32, as the rounded one would lose bits of theirs.
    """

    quantize: Callable[[], InputScales] | None = None
    keeps_rows = False

    def __init__(self, size: int, eps: float, offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self.offset = offset
        self.dtypes = {"weight": torch.float32} if offset else {}

    def load(self, name: str, tensor: Tensor) -> None:
        """Stores a file's "weight"."""
        copy_converted(self.get_parameter(name), 1 + tensor.float() if self.offset else tensor)

    def forward(self, x: Tensor) -> Tensor:
        if self.quantize is not None and x.dim() == 2:
            return cast(Tensor, self._quantized(x, None, None, self.quantize())[0])
        return rms_norm(x, self.weight, self.eps)

    def add(self, residual: Tensor, delta: Delta, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(norm(summed), summed) with summed = residual + delta (..., H), written to `out` if given; in one kernel."""
        if isinstance(delta, RankSum):
            if self.quantize is None:
                return delta.ranks.add_and_norm(delta.partial, Norm(residual, self.weight, self.eps, out))
            delta = delta.total()
        if self.quantize is not None and residual.dim() == 2:
            rows, summed = self._quantized(residual, delta, out, self.quantize())
            return cast(Tensor, rows), summed
        if isinstance(delta, Increment):
            (normed,), summed = grow_and_norm(residual, delta, [self.weight], self.eps, out)
            return normed, summed
        return add_rms_norm(residual, delta, self.weight, self.eps, out)

    def _quantized(
        self, residual: Tensor, delta: Tensor | Increment | None, out: Tensor | None, scales: InputScales
    ) -> tuple[QuantizedRows, Tensor]:
        return quantized_rms_norm(residual, delta, self.weight, self.eps, scales, out, keeps_rows=self.keeps_rows)

    def branch(self, x: Tensor | RankSum) -> Branch:
        """self(x), for an increment of a residual."""
        return Branch(x.total() if isinstance(x, RankSum) else x, *self.gain)

    @property
    def gain(self) -> tuple[Tensor, float]:
        """Weight and eps."""
        return self.weight, self.eps

    def scale_inputs(self, weight: Tensor) -> Tensor:
        """weight (O, H) of a projection that reads normed rows -> that of one that reads them divided by their RMS."""
        return weight * self.weight

    def pair(self, x: Tensor, other: "RMSNorm", y: Tensor) -> Tensor:
        """[self(x) ; other(y)] (..., 2 * H), in one kernel."""
        return rms_norm_pair(x, y, (self.weight, other.weight), self.eps)


def add_delta(residual: Tensor, delta: Delta, out: Tensor | None = None) -> Tensor:
    """residual + delta (..., H), written to `out` if given."""
    if isinstance(delta, RankSum):
        delta = delta.total()
    if isinstance(delta, Increment):
        return grow_and_norm(residual, delta, out=out)[1]
    return residual + delta if out is None else out.copy_(residual).add_(delta)


def add_for_all(norms: Sequence[RMSNorm], residual: Tensor, delta: Increment) -> tuple[list[Tensor], Tensor]:
    """`RMSNorm.add` of several norms with one eps, in one kernel: rows of none come quantised."""
    assert all(norm.eps == norms[0].eps and norm.quantize is None for norm in norms)
    return grow_and_norm(residual, delta, [norm.weight for norm in norms], norms[0].eps)


class PartNorms(nn.ModuleList):
    """An RMSNorm for each of the K parts of a row."""

    def __init__(self, count: int, size: int, eps: float) -> None:
        super().__init__(RMSNorm(size, eps) for _ in range(count))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x (..., K * H) -> the same shape."""
        return rms_norm_parts(x, [norm.get_parameter("weight") for norm in self], self.eps)
