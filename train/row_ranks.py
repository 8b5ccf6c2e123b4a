"""Long rows, split over the processes of a group: each runs the draft at a part of the rows that ask.

A process has the keys and values of its part; all of them are gathered, once for each layer and pass, so that every row
sees its whole document. A part also runs the rows behind it that its own steps are taught by (the halo); nothing counts
there. So the loss is a sum over the parts, as over rows of other processes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The processes that share rows, of which this is number `index`. `group`: of torch."""

    index: int
    size: int
    group: Any

    @classmethod
    def of(cls, size: int, process: int, num_processes: int) -> "RowGroup | None":
        """Called by all processes; neighbours share rows. None for rows of one process. Raises ValueError where `size`
        does not divide the number of processes."""
        if num_processes % size:
            raise ValueError(
                f"data.row_ranks is {size} and there are {num_processes} processes; start a multiple of {size}"
            )
        if size == 1:
            return None
        starts = range(0, num_processes, size)
        groups = {start: distributed.new_group(list(range(start, start + size))) for start in starts}
        return cls(process % size, size, groups[process - process % size])

    def part(self, count: int) -> range:
        """This process's part of so many things in a row."""
        return range(count * self.index // self.size, count * (self.index + 1) // self.size)

    def parts(self, count: int) -> list[range]:
        return [RowGroup(index, self.size, None).part(count) for index in range(self.size)]


@dataclass(frozen=True, slots=True)
class Gathering:
    """How the processes' key rows are joined. `counts`: how many each has, context rows first; the first `num_own` of
    this one's asking rows are among them."""

    group: RowGroup
    counts: list[int]
    num_own: int

    def join(self, context: Tensor, asking: Tensor) -> Tensor:
        """context (C, ...) and asking (N, ...) of this process -> (sum of counts, ...) of all, one after the other."""
        rows: Tensor = _Join.apply(torch.cat((context, asking[: self.num_own])), self)
        return rows


class _Join(torch.autograd.Function):
    """Gathers rows; the gradient of a process's rows is the sum of those that all processes have for them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gathering: Gathering) -> Tensor:
        ctx.gathering = gathering
        counts = gathering.counts
        longest = max(counts)
        padded = rows.new_zeros(longest, *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in counts]
        distributed.all_gather(parts, padded, group=gathering.group.group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gathering: Gathering = ctx.gathering
        total = gradient.contiguous().clone()
        distributed.all_reduce(total, group=gathering.group.group)
        start = sum(gathering.counts[: gathering.group.index])
        return total[start : start + gathering.counts[gathering.group.index]], None
