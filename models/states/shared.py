"""Memory of an engine that a client on the same machine reads, so that states need not cross their socket: of a GPU by
CUDA IPC, of the host by a file in memory without a name.

An engine keeps a few slots for a client. It writes into one until it says so over the socket, and again once the client
says that it has taken the states. A sum finds bytes that did not arrive. The system frees what a dead process has
mapped; the engine frees its own part when the connection ends, so a client first closes its views.
"""

import math
import mmap
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.collectives.device_memory import DeviceMemory, close_address, copy_from, open_handle
from slipstream.models.states.wire import NAMES, NAMES_OF, BrokenError

ALIGNMENT = 16  # of tensors in a slot
PAGE = 1 << 21  # bytes that sizes are multiples of


class HostBlock:
    """Memory that another process may map: `bytes` (size,) uint8, and the `handle` by which it finds that."""

    def __init__(self, size: int) -> None:
        self.file = os.memfd_create("states")
        os.ftruncate(self.file, size)
        self.bytes = torch.frombuffer(mmap.mmap(self.file, size), dtype=torch.uint8)
        self.handle = f"{os.getpid()} {self.file}"

    def close(self) -> None:
        os.close(self.file)


class HostView:
    """Another process's block."""

    def __init__(self, handle: str) -> None:
        self.handle = handle
        process, number = map(int, handle.split())
        with Path(f"/proc/{process}/fd/{number}").open("r+b") as file:
            self.bytes = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)

    def copy(self, place: Tensor) -> None:
        """Copies its first bytes into `place` (N,) uint8, and returns when they are there."""
        place.copy_(self.bytes[: len(place)])

    def close(self) -> None:
        self.bytes = self.bytes[:0].clone()


class DeviceBlock:
    def __init__(self, size: int, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self.memory = DeviceMemory(size)
            self.bytes = self.memory.tensor()
            try:
                self.handle = self.memory.handle().numpy().tobytes().hex()
            except RuntimeError:  # some systems and containers have none
                self.memory.free()
                raise

    def close(self) -> None:
        with torch.cuda.device(self.device):
            self.memory.free()


class DeviceView:
    """The other process's GPU need not be visible in this one: the handle is opened by `device`."""

    def __init__(self, handle: str, device: torch.device) -> None:
        self.handle = handle
        self.device = device
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # sync: this thread gets torch's context
            self.address = open_handle(torch.tensor(list(bytes.fromhex(handle)), dtype=torch.uint8))

    def copy(self, place: Tensor) -> None:
        copy_from(self.address, place)
        torch.cuda.current_stream(self.device).synchronize()  # sync

    def close(self) -> None:
        with torch.cuda.device(self.device):
            close_address(self.address)


Block = HostBlock | DeviceBlock
View = HostView | DeviceView


class Slot:
    """The engine's place for an answer."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.block: Block | None = None
        self.old: list[Block] = []  # the block before, which the client maps until it has taken the next answer

    def fill(self, answer: Mapping[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        """Copies an answer there; the host does not wait. Returns what `Views.take` needs, but for the sum (), which
        lies on the device. Raises OSError or RuntimeError if there is no memory."""
        self.close_old()
        device = next(iter(answer.values())).device
        starts = [0]
        for tensor in answer.values():
            starts.append(starts[-1] + math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT)
        size = starts.pop()
        if self.block is None or len(self.block.bytes) < size:
            room = math.ceil(1.25 * (size + 1) / PAGE) * PAGE
            block: Block = HostBlock(room) if device.type == "cpu" else DeviceBlock(room, device)
            self.old += [] if self.block is None else [self.block]
            self.block = block
        layout = []
        for (name, tensor), start in zip(answer.items(), starts, strict=True):
            place = self.block.bytes[start : start + tensor.nbytes]
            place.copy_(tensor.contiguous().view(-1).view(torch.uint8))
            layout.append([name, NAMES_OF[tensor.dtype], list(tensor.shape), start])
        fields = {"slot": self.number, "handle": self.block.handle, "size": size, "layout": layout}
        return fields, sum_of(self.block.bytes[:size])

    def close_old(self) -> None:
        while self.old:
            self.old.pop().close()

    def close(self) -> None:
        self.close_old()
        if self.block is not None:
            self.block.close()
            self.block = None


class Views:
    """A client's views of an engine's slots. Answers arrive on `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.views: dict[int, View] = {}
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # beside those that compute

    def take(self, fields: Mapping[str, Any]) -> dict[str, Tensor]:
        """Copies an answer out of a slot. Raises OSError or RuntimeError if that cannot be mapped, and BrokenError for
        other bytes."""
        view = self.view(fields["slot"], fields["handle"])
        with torch.cuda.stream(self.stream):
            place = torch.empty(fields["size"], dtype=torch.uint8, device=self.device)
            view.copy(place)
            if int(sum_of(place)) != fields["sum"]:
                raise BrokenError("states in shared memory have another sum than the engine's")
        answer = {}
        for name, dtype, shape, start in fields["layout"]:
            size = math.prod(shape) * NAMES[dtype].itemsize
            answer[name] = place[start : start + size].view(NAMES[dtype]).view(shape)
        return answer

    def view(self, slot: int, handle: str) -> View:
        view = self.views.pop(slot, None)
        if view is not None and view.handle != handle:
            view.close()
            view = None
        if view is None:
            view = HostView(handle) if self.device.type == "cpu" else DeviceView(handle, self.device)
        self.views[slot] = view
        return view

    def close(self) -> None:
        for view in self.views.values():
            with suppress(RuntimeError):  # of a device that has failed
                view.close()
        self.views.clear()


def sum_of(values: Tensor) -> Tensor:
    """() int64 of bytes, a multiple of 8: they lie in memory that processes share, and copies between GPUs can fail
    silently."""
    return values.view(torch.int64).sum()


def memory_name(device: torch.device) -> str:
    """Names the memory that this process can map for states on `device`: those that have the same may share it. Empty
    where the system has no name for itself."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text()
        return f"{device.type} {machine} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
