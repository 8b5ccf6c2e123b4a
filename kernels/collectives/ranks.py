"""Sums of partial products, and logits of parts of a vocabulary, that the ranks of tensor parallelism have.

A rank is a process with a part of a target's weights. All ranks get the same bits, so that each of them can choose
tokens by itself; all call the same methods in the same order.
"""

from abc import ABC, abstractmethod
from datetime import timedelta
from threading import Thread
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.collectives.tree import add_along_tree
from slipstream.kernels.norm import add_rms_norm

TIMEOUT = timedelta(minutes=10)  # of a collective: `serve/engine/team.py` notices lost ranks long before


class Norm(NamedTuple):
    """The residual add and the norm behind a sum."""

    residual: Tensor  # (T, H)
    gain: Tensor  # (H,), the norm's weight
    eps: float
    out: Tensor | None = None  # (T, H), rows may be strided: receives the new residual


class Ranks(ABC):
    """`world` ranks, of which this process is `rank`."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world

    @abstractmethod
    def add(self, partial: Tensor, dtype: torch.dtype) -> Tensor:
        """Adds the ranks' partial sums (..., H) in fp32 as `add_along_tree` does, and rounds once: (..., H) in
        `dtype`."""

    def add_and_norm(self, partial: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """(rms_norm(summed), summed) with summed = residual + add(partial), all (T, H)."""
        delta = self.add(partial, norm.residual.dtype)
        return add_rms_norm(norm.residual, delta, norm.gain, norm.eps, norm.out)

    def partial_rows(self, num_rows: int, size: int) -> Tensor | None:  # noqa: ARG002
        """Where a product best stores its partial sums (num_rows, size) fp32, which are added next; None: anywhere."""
        return None

    @abstractmethod
    def gather(self, part: Tensor) -> Tensor:
        """Joins the ranks' parts (..., N) of rows, in their order: (..., world * N)."""

    @abstractmethod
    def collect(self, part: Tensor) -> Tensor:
        """Joins tensors (N, ...) of any size, such as parts of a table: (world * N, ...). Never in a captured pass."""

    def is_lost(self) -> bool:
        """Whether a kernel has given up waiting for another rank: what passes gave since then is wrong."""
        return False

    def abort(self) -> None:
        """Lets calls that wait for a lost rank return or raise, where they would not by themselves."""

    def close(self) -> None:
        """Frees what is shared, once the other ranks have ended."""


class RankSum(NamedTuple):
    """A sum over ranks that is not added yet, so that the next norm's kernel does it."""

    partial: Tensor  # (T, H)
    dtype: torch.dtype
    ranks: Ranks

    def total(self) -> Tensor:
        """Adds it up: (T, H) in `dtype`."""
        return self.ranks.add(self.partial, self.dtype)


class GroupRanks(Ranks):
    """Ranks that exchange tensors through a process group of torch: gloo on a CPU, NCCL on GPUs."""

    def __init__(self, group: Any, rank: int, world: int) -> None:
        super().__init__(rank, world)
        self.group = group

    def add(self, partial: Tensor, dtype: torch.dtype) -> Tensor:
        return add_along_tree(self._parts(partial.float())).to(dtype)

    def gather(self, part: Tensor) -> Tensor:
        return torch.cat(self._parts(part), dim=-1)

    def collect(self, part: Tensor) -> Tensor:
        return torch.cat(self._parts(part))

    def _parts(self, tensor: Tensor) -> list[Tensor]:
        """Returns each rank's tensor."""
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.world)]
        if tensor.numel():
            self.group.allgather([parts], [tensor]).wait()
        return parts


class NCCLRanks(GroupRanks):
    def abort(self) -> None:
        self.group.abort()

    def close(self) -> None:
        Thread(target=self.group.abort, daemon=True).start()  # it waits for the end of all graphs with its kernels
