"""Programs of one launch that share a row: the last to arrive goes on with what all of them have stored."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_ROWS = 1 << 16


@functools.cache
def arrival_counters(device: torch.device) -> Tensor:
    """(MAX_ROWS,) int32, zero between launches, which follow each other on one stream.

    A graph must not be the first to ask: its memory is zeroed in replays only.
    """
    assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing(), "run once before capture"
    return torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)


@triton.jit
def arrives_last(counter_ptr, arrivals):
    """True in the last of `arrivals` programs. It must read what the others stored past the L1 cache (".cg").

    The barrier and the count's release order a program's stores before its arrival; the last one resets the counter.
    """
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == arrivals - 1
    if is_last:
        tl.store(counter_ptr, 0)
    return is_last
