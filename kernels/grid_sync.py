"""Synchronisation between the programs of a grid: counters that tell the last one to finish, and a barrier."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_ROWS = 1 << 16


@functools.cache
def done_counters(device: torch.device) -> Tensor:
    """(MAX_ROWS,) int32 for `is_last_done`, zero between launches, all of which run on one stream.

    Call it once before capturing a graph: memory allocated in a capture is zeroed in replays only.
    """
    return new_words(device)


@functools.cache
def barriers(device: torch.device) -> Tensor:
    """(MAX_ROWS,) int32 for `barrier_wait`, used like `done_counters`; only the highest bit survives."""
    return new_words(device)


def new_words(device: torch.device) -> Tensor:
    assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing(), "run once before capture"
    return torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)


@functools.cache
def all_resident(device: torch.device, programs: int) -> bool:
    """Whether `programs` neighbours in a grid, which start in order, are resident at the same time.

    Each multiprocessor of the device runs at least one. The interpreter runs programs one after another.
    """
    return device.type == "cuda" and programs <= torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def is_last_done(counter_ptr, arrivals):
    """True in the last of `arrivals` programs to call it. It must read the others' stores past the L1 cache (".cg").

    The barrier and the counter's release order a program's stores before its call; the last one resets the counter.
    """
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == arrivals - 1
    if is_last:
        tl.store(counter_ptr, 0)
    return is_last


@triton.jit
def barrier_wait(point_ptr, is_first, programs, waits):
    """Returns when `programs` > 1 programs, for which `all_resident` holds, have arrived; at once without `waits`.

    Their earlier stores must then be read past the L1 cache (".cg"). One program has is_first: it adds
    2**31 - (programs - 1), every other 1. Together they flip the highest bit and reset the others.
    """
    tl.debug_barrier()
    before = tl.atomic_add(point_ptr, tl.where(is_first, 0x7FFFFFFF - (programs - 2), 1), sem="acq_rel", scope="gpu")
    now = before
    while waits & ((before ^ now) >= 0):
        now = tl.atomic_add(point_ptr, 0, sem="acquire", scope="gpu")
