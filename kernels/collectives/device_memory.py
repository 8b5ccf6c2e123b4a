"""Memory of a GPU that processes of one machine share, by the handles of the CUDA driver (CUDA Driver API, "Memory
Management": cuIpcGetMemHandle). Torch's own shares tensors for copies; kernels here read other GPUs by address."""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

HANDLE_BYTES = 64
ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class MemoryHandle(ctypes.Structure):
    """CUipcMemHandle, which the driver takes by value."""

    _fields_ = (("data", ctypes.c_ubyte * HANDLE_BYTES),)


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *args: object) -> None:
    code = getattr(_driver(), name)(*args)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{name} failed: {(text.value or b'error %d' % code).decode()}")


class DeviceMemory:
    """Zeros on the current GPU, from the driver: torch's allocator may split and move its own."""

    def __init__(self, num_bytes: int) -> None:
        """Raises RuntimeError where the GPU has less."""
        torch.cuda.current_stream()  # torch makes the context
        pointer = ctypes.c_uint64()
        _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
        assert pointer.value is not None
        self.address = pointer.value
        self.num_bytes = num_bytes
        self.tensor().zero_()
        torch.cuda.synchronize()  # sync

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def tensor(self) -> Tensor:
        """The bytes, (num_bytes,) uint8; valid until `free`."""
        return torch.as_tensor(self, device="cuda")

    def handle(self) -> Tensor:
        """Returns what another process maps it by: (64,) uint8 of the CPU."""
        handle = MemoryHandle()
        _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self.address))
        return torch.tensor(list(handle.data), dtype=torch.uint8)

    def free(self) -> None:
        _call("cuMemFree_v2", ctypes.c_uint64(self.address))


def open_handle(handle: Tensor) -> int:
    """Maps another process's memory, on the current GPU or one that this one reaches; returns its address."""
    pointer = ctypes.c_uint64()
    data = MemoryHandle((ctypes.c_ubyte * HANDLE_BYTES)(*handle.tolist()))
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), data, ctypes.c_uint(ENABLE_PEER_ACCESS))
    assert pointer.value is not None
    return pointer.value


def copy_from(address: int, place: Tensor) -> None:
    """Copies bytes there into `place` (N,) uint8, in the current stream."""
    stream = torch.cuda.current_stream(place.device).cuda_stream
    target = ctypes.c_uint64(place.data_ptr())
    _call("cuMemcpyAsync", target, ctypes.c_uint64(address), ctypes.c_size_t(len(place)), ctypes.c_void_p(stream))


def close_address(address: int) -> None:
    """Ends what `open_handle` returned."""
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))
