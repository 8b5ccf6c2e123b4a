"""Memory that the ranks of one machine share: each rank has a part, and kernels of all ranks read and write all parts.

Numbers are sent without flags (Lamport's way): a receiver waits until no cell is empty, and empties it for a later
call. Each number is stored at once; that 16 bytes are, or arrive in order, no model of memory says (PTX ISA, "Vector
Data-types"; NCCL's LL counts on 8). Calls are counted in memory of their own device, so that a captured graph may be
replayed; a flag carries the count of its call, a tag.
A receiver that waits too long, or is told to stop, says so in memory of the host, and later calls do not wait at all:
their results are wrong, and whoever reads them asks `Peers.lost` first.
"""

from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.collectives.device_memory import HANDLE_BYTES, DeviceMemory, close_address, open_handle
from slipstream.kernels.launch import COMPILED

ALIGNMENT = 256  # bytes
NANOSECONDS = 1_000_000_000
LIMIT, FAILED, REPORT = (tl.constexpr(place) for place in range(3))  # in `Watch.words`
POLLS = tl.constexpr(1024 if COMPILED else 16)  # between two looks at the clock
LOOK = tl.constexpr(1_000_000)  # nanoseconds that a look takes in the interpreter, which has no clock
# The time in lane 0, and 0 in the others
GLOBALTIMER = tl.constexpr(
    "{.reg .pred first; setp.eq.s32 first, $1, 0; mov.u64 $0, 0; @first mov.u64 $0, %globaltimer;}"
)


class Watch(NamedTuple):
    """How long kernels wait for others, and for whom they waited in vain."""

    words: Tensor  # (3,) int64: the limit in ns, whether a call failed, and where `report` is
    report: Tensor  # (1 + N,) int32 of the host: whether to stop, then for each rank whether it is lost

    @classmethod
    def start(cls, world: int, device: torch.device, seconds: float) -> "Watch":
        with torch.inference_mode(False):  # other threads write to it
            report = torch.zeros(1 + world, dtype=torch.int32, pin_memory=device.type == "cuda")
            words = torch.tensor([int(seconds * NANOSECONDS), 0, report.data_ptr()], device=device)
        return cls(words, report)


class Peers:
    """The memory of all ranks, as this process sees it.

    Ranks call `take` in the same order with the same sizes, before any graph is captured.
    """

    def __init__(self, rank: int, buffer: Tensor, addresses: list[int], seconds: float) -> None:
        """buffer: this rank's bytes, zeros; addresses: where each rank's begin, in this process."""
        self.rank = rank
        self.world = len(addresses)
        self.buffer = buffer
        self.addresses = torch.tensor(addresses, device=buffer.device)
        self.watch = Watch.start(self.world, buffer.device, seconds)
        self._memory: DeviceMemory | None = None
        self._end = 0

    @classmethod
    def meet(cls, group: Any, device: torch.device, num_bytes: int, seconds: float) -> "Peers":
        """Allocates `num_bytes` on this rank's GPU, which is the current one, and maps those of the others. All ranks
        of `group` call it.

        Raises RuntimeError where a GPU has less memory, or a rank is lost.
        """
        memory = DeviceMemory(num_bytes)
        handles = [torch.empty(HANDLE_BYTES, dtype=torch.uint8) for _ in range(group.size())]
        group.allgather([handles], [memory.handle()]).wait()
        rank = group.rank()
        addresses = [memory.address if i == rank else open_handle(handle) for i, handle in enumerate(handles)]
        peers = cls(rank, memory.tensor(), addresses, seconds)
        assert peers.device == device
        peers._memory = memory
        return peers

    def close(self) -> None:
        """Frees the memory, which the other ranks no longer use."""
        if self._memory is not None:
            for rank, address in enumerate(self.addresses.tolist()):
                if rank != self.rank:
                    close_address(address)
            self._memory.free()
            self._memory = None

    @property
    def device(self) -> torch.device:
        return self.buffer.device

    def take(self, num_bytes: int) -> int:
        """Returns where the next `num_bytes` of each rank's memory begin."""
        start = self._end
        self._end = -(-(start + num_bytes) // ALIGNMENT) * ALIGNMENT
        if self._end > len(self.buffer):
            raise ValueError(
                f"ranks share {len(self.buffer)} bytes, of which {start} are taken; {num_bytes} more do not fit: "
                "meet with more"
            )
        return start

    def local(self, start: int, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns this rank's part of what was taken, as a tensor."""
        count = torch.Size(size).numel()
        return self.buffer[start : start + count * dtype.itemsize].view(dtype).view(size)

    def counters(self, count: int) -> Tensor:
        """Returns zeros (count,) int32 of this device, for tags."""
        return torch.zeros(count, dtype=torch.int32, device=self.device)

    def limit(self, seconds: float) -> None:
        """Says how long kernels wait from now on, captured ones too: long while ranks compile, short while serving."""
        self.watch.words[0] = int(seconds * NANOSECONDS)

    def stop(self) -> None:
        """Ends the wait of kernels that run now."""
        self.watch.report[0] = 1

    @property
    def lost(self) -> list[int]:
        """Ranks for which a kernel waited in vain; asked without waiting for the device."""
        return [rank for rank, is_lost in enumerate(cast(list[int], self.watch.report[1:].tolist())) if is_lost]


@triton.jit
def start_of(addresses_ptr, rank, start, dtype: tl.constexpr):
    """A pointer to what `take` returned, in a rank's memory."""
    return tl.multiple_of((tl.load(addresses_ptr + rank) + start).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _is_over(start_time, lanes, watch_ptr, peer):
    """Whether to stop waiting for `peer`, and when the first look at the clock was (0: this is it). All threads must
    agree, so what one of them reads reaches all through a maximum over as many lanes as `lanes` has, at least one a
    thread. If all read, a look of many programs took longer than the wait that it follows: the other ranks then waited
    for this one, looked, too, and so on, 9 ms a sum of 256 rows."""
    lane = tl.arange(0, lanes.shape[0])
    report = tl.load(watch_ptr + REPORT).to(tl.pointer_type(tl.int32))
    stop = tl.max(tl.load(report + lane * 0, mask=lane == 0, other=0, volatile=True), axis=0)
    if COMPILED:
        times = tl.inline_asm_elementwise(GLOBALTIMER, "=l,r", [lane], tl.int64, is_pure=False, pack=1)
        time = tl.max(times, axis=0)
        start_time = tl.where(start_time == 0, time, start_time)
        elapsed = time - start_time
    else:
        start_time += LOOK
        elapsed = start_time
    is_over = (elapsed > tl.load(watch_ptr + LIMIT)) | (stop != 0)
    if is_over:
        tl.store(report + 1 + peer, 1)
        tl.store(watch_ptr + FAILED, 1)
    return is_over, start_time


@triton.jit
def send(cells, numbers, inside):
    """Stores numbers (n,) at `cells`, pointers to their dtype in a peer's memory, inverted: a cell of 0 is empty. So
    one NaN, all of whose bits are 1, is sent as another one."""
    INTEGER: tl.constexpr = tl.int32 if cells.dtype.element_ty.primitive_bitwidth == 32 else tl.int16
    bits = ~numbers.to(INTEGER, bitcast=True)
    tl.store(cells.to(tl.pointer_type(INTEGER)), tl.where(bits == 0, 1, bits), mask=inside)


@triton.jit
def receive(cells, inside, watch_ptr, peer):
    """Waits until none of `cells` inside, pointers in this rank's memory, is empty, and empties them; numbers (n,), 0
    outside."""
    INTEGER: tl.constexpr = tl.int32 if cells.dtype.element_ty.primitive_bitwidth == 32 else tl.int16
    places = cells.to(tl.pointer_type(INTEGER))
    failed = tl.load(watch_ptr + FAILED)
    bits = tl.load(places, mask=inside, other=-1, volatile=True)
    waits = tl.max(((bits == 0) & (failed == 0)).to(tl.int32), axis=0)
    polls = waits * 0
    start_time = failed * 0
    while waits > 0:
        bits = tl.load(places, mask=inside, other=-1, volatile=True)
        waits = tl.max((bits == 0).to(tl.int32), axis=0)
        polls += 1
        if polls % POLLS == 0:
            is_over, start_time = _is_over(start_time, bits.to(tl.int32), watch_ptr, peer)
            waits = tl.where(is_over, 0, waits)
    tl.store(places, tl.zeros_like(bits), mask=inside)
    return (~bits).to(cells.dtype.element_ty, bitcast=True)


@triton.jit
def send_flag(flag, tag):
    """Stores the tag at `flag` in a peer's memory, after what this program stored before."""
    tl.debug_barrier()
    tl.atomic_xchg(flag, tag, sem="release", scope="sys")


@triton.jit
def wait_flag(flag, tag, lanes, watch_ptr, peer):
    """Waits until `flag` in this rank's memory has the tag, or a later one; then what the peer stored before is there.
    lanes: as in `_is_over`."""
    failed = tl.max(lanes * 0 + tl.load(watch_ptr + FAILED).to(tl.int32), axis=0)
    waits = (tl.atomic_add(flag, 0, sem="acquire", scope="sys") - tag < 0) & (failed == 0)
    polls = tag * 0
    start_time = tag.to(tl.int64) * 0
    while waits:
        waits = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - tag < 0
        polls += 1
        if polls % POLLS == 0:
            is_over, start_time = _is_over(start_time, lanes, watch_ptr, peer)
            waits = waits & (is_over == 0)
