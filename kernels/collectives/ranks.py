"""Sums of partial products, and logits of parts of a vocabulary, that the ranks of tensor parallelism have.

A rank is a process with a part of a target's weights. All ranks get the same bits, so that each of them can choose
tokens by itself; all call the same methods in the same order.
"""

from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.collectives.tree import add_along_tree

TIMEOUT = timedelta(minutes=10)  # of a collective: `serve/engine/team.py` notices lost ranks long before


class Ranks(ABC):
    """`world` ranks, of which this process is `rank`."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world

    @abstractmethod
    def add(self, partial: Tensor, dtype: torch.dtype) -> Tensor:
        """Adds the ranks' partial sums (..., H) fp32 as `add_along_tree` does, and rounds once: (..., H) in `dtype`."""

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
        """Leaves the group."""


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
        torch.distributed.distributed_c10d._abort_process_group()  # does not wait for ranks that have exited


def join_ranks(device: torch.device, rank: int, world: int, file: str) -> Ranks:
    """Joins the ranks that meet in `file`, which does not exist before; waits for all. On GPUs the current one is the
    rank's. Raises RuntimeError where the others do not come."""
    from torch import distributed  # here, since few processes need it

    store = distributed.FileStore(file, world)
    if device.type == "cpu":
        return GroupRanks(distributed.ProcessGroupGloo(store, rank, world, TIMEOUT), rank, world)
    distributed.init_process_group("nccl", store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    return NCCLRanks(distributed.group.WORLD, rank, world)
