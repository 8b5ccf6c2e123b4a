"""Ranks on the GPUs of one machine, which add and gather through one another's memory."""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.collectives.all_reduce import AllReduce
from slipstream.kernels.collectives.device_memory import copy_from
from slipstream.kernels.collectives.gather import Gather
from slipstream.kernels.collectives.peers import Peers
from slipstream.kernels.collectives.ranks import GroupRanks, Norm

MOST_ROWS = 2048  # that are added at once
MOST_WORDS = 1 << 21  # of 4 bytes of a rank that are gathered at once
STAGED_BYTES = 32 << 20  # of a rank's part of a table that are copied at once; smaller parts go through the host
SECONDS = 60.0  # that a kernel waits: longer than compilers take; `abort` ends the wait sooner


class PeerRanks(GroupRanks):
    """`group` is one of gloo. Memory is shared at the first call of a size, never in a captured pass; all ranks make
    the same calls."""

    def __init__(self, group: Any, rank: int, world: int, device: torch.device) -> None:
        super().__init__(group, rank, world)
        self.device = device
        self._all_reduces: dict[tuple[int, torch.dtype], AllReduce] = {}  # by numbers in a row and how they are stored
        self._gather: Gather | None = None
        self._staging: Peers | None = None
        self._peers: list[Peers] = []

    def add(self, partial: Tensor, dtype: torch.dtype) -> Tensor:
        rows = partial.reshape(-1, partial.shape[-1])
        reduce = self._all_reduce(rows.shape[1], rows.dtype)
        sums = [reduce.add(some, dtype) for some in rows.split(MOST_ROWS)]
        return (sums[0] if len(sums) == 1 else torch.cat(sums)).view(partial.shape)

    def add_and_norm(self, partial: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        if len(partial) > MOST_ROWS:
            return super().add_and_norm(partial, norm)
        return self._all_reduce(partial.shape[1], partial.dtype).add_and_norm(partial, norm)

    def partial_rows(self, num_rows: int, size: int) -> Tensor | None:
        return None if num_rows > MOST_ROWS else self._all_reduce(size, torch.float32).partial_rows(num_rows)

    def gather(self, part: Tensor) -> Tensor:
        if self._gather is None:
            self._gather = Gather(self._meet(Gather.num_bytes(self.world, MOST_WORDS)), MOST_WORDS)
        return self._gather(part.reshape(-1, part.shape[-1])).view(*part.shape[:-1], -1)

    def collect(self, part: Tensor) -> Tensor:
        if part.nbytes < STAGED_BYTES:
            return super().collect(part.cpu()).to(part.device)
        if self._staging is None:
            self._staging = self._meet(STAGED_BYTES)
        addresses = self._staging.addresses.tolist()
        flat = part.reshape(-1).view(torch.uint8)
        table = flat.new_empty(self.world, len(flat))
        for start in range(0, len(flat), STAGED_BYTES):
            piece = flat[start : start + STAGED_BYTES]
            self._staging.buffer[: len(piece)].copy_(piece)
            self._wait_for_all()
            for address, place in zip(addresses, table, strict=True):
                copy_from(address, place[start : start + len(piece)])
            self._wait_for_all()
        return table.view(part.dtype).view(-1, *part.shape[1:])

    def is_lost(self) -> bool:
        return any(peers.lost for peers in self._peers)

    def abort(self) -> None:
        for peers in self._peers:
            peers.stop()

    def close(self) -> None:
        for peers in self._peers:
            peers.close()

    def _wait_for_all(self) -> None:
        """Returns once all ranks' GPUs have done what was launched."""
        torch.cuda.synchronize(self.device)  # sync
        super().collect(torch.zeros(1))

    def _all_reduce(self, size: int, dtype: torch.dtype) -> AllReduce:
        if (size, dtype) not in self._all_reduces:
            peers = self._meet(AllReduce.num_bytes(self.world, size, MOST_ROWS))
            self._all_reduces[size, dtype] = AllReduce(peers, size, MOST_ROWS, dtype)
        return self._all_reduces[size, dtype]

    def _meet(self, num_bytes: int) -> Peers:
        self._peers.append(Peers.meet(self.group, self.device, num_bytes, SECONDS))
        return self._peers[-1]
