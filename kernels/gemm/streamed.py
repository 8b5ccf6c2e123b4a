"""Building blocks of kernels that keep memory busy from their first weight to their last. They are written in Gluon,
Triton's language for explicit layouts and copies (experimental: names that changed between versions are settled here).

One warp asks the tensor memory accelerator for tiles of weights, as many as a ring of slots in shared memory holds,
another one for tiles of inputs, and the others multiply. Each slot has two barriers, which tell that it is full or
empty. Where programs wait for each other, all of them must be resident, and all such launches of a process must be on
one stream. Weights are read before the kernel waits for earlier ones, so whatever writes them must have finished.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents

from slipstream.kernels.grid_sync import is_last_done

MOST_REGISTERS = 104  # of a thread, on average: a program is to fit beside those of the kernels before
# Their names before Triton 3.8.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
load_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
ACQUIRE = gl.constexpr("ld.acquire.gpu.global.b32 $0, [$1];")
FENCE = gl.constexpr("fence.proxy.async; mov.b32 $0, $1;")


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Earlier and later GPUs multiply by other instructions."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


def programs_of(device: torch.device) -> int:
    """Returns the programs that run at once, one on each multiprocessor: the limit for programs that wait for each
    other."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def tile_rows(num_rows: int) -> int:
    """Rows of a tile of inputs: as `wgmma` takes them."""
    return max(8, triton.next_power_of_2(num_rows))


def tiles_of(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """Describes tiles of a contiguous matrix to the tensor memory accelerator. Rows beyond the last are zeros."""
    layout = gl.NVMMASharedLayout(128, 8 * tensor.element_size(), 2)
    return TensorDescriptor.from_tensor(tensor, block, layout)


@triton.jit
def sync():
    """Waits for the threads that run this part of the program."""
    tl.debug_barrier()


@gluon.jit
def launch_next(PDL: gl.constexpr):
    """Lets the next kernel start. It waits for the results of this one, but what it does before that overlaps."""
    if PDL:
        gdc_launch_dependents()


@gluon.jit
def ring_barriers(SLOTS: gl.constexpr, READERS: gl.constexpr = 1):
    """Allocates the barriers of a ring's slots: full, and empty when all READERS have arrived. `share_barriers` comes
    before their first use."""
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=READERS)
    return full, empty


@gluon.jit
def share_barriers():
    """Makes barriers that were initialised known to all threads and to copies."""
    fence_async_shared()
    sync()


@gluon.jit
def wait_empty(empty, number, SLOTS: gl.constexpr):
    """Waits until what the slot of the `number`-th tile held before has been read."""
    mbarrier.wait(empty.index(number % SLOTS), ((number // SLOTS) & 1) ^ 1)


@gluon.jit
def wait_paced(full, empty, number, PACE: gl.constexpr, SLOTS: gl.constexpr):
    """Like `wait_empty`, but while the ring is filled for the first time, only PACE tiles are on their way at once:
    memory requests of kernels that are still running queue behind them."""
    if number >= PACE and number < SLOTS:
        wait_full(full, number - PACE, SLOTS)
    wait_empty(empty, number, SLOTS)


@gluon.jit
def wait_full(full, number, SLOTS: gl.constexpr):
    mbarrier.wait(full.index(number % SLOTS), (number // SLOTS) & 1)


@gluon.jit
def fence_copies(values):
    """Orders what these threads have stored, or seen of others' stores, before copies of tiles that read it. `values`:
    any int32 numbers, at least one of each thread."""
    return gl.inline_asm_elementwise(FENCE, "=r,r", [values], gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_all(point_ptr, program, programs):
    """`barrier_wait` of kernels/grid_sync.py for all programs. They poll by loads, which do not delay arrivals."""
    sync()
    before = gl.atomic_add(
        point_ptr, gl.where(program == 0, 0x7FFFFFFF - (programs - 2), 1), sem="acq_rel", scope="gpu"
    )
    now = before
    while (before ^ now) >= 0:
        now = gl.inline_asm_elementwise(ACQUIRE, "=r,l", [point_ptr.to(gl.int64)], gl.int32, is_pure=False, pack=1)


@gluon.jit
def store_part(partial_ptr, counter_ptr, sums, part, outputs, rows, valid, SPLIT: gl.constexpr):
    """Stores a part's sums (outputs, rows) where they are `valid`. Returns the sum of all parts in their order, and
    whether this program is the last of a tile's to store; in others the sum is of zeros."""
    SIZE: gl.constexpr = sums.shape[0] * sums.shape[1]
    cells = rows[None, :] * sums.shape[0] + outputs[:, None]
    gl.store(partial_ptr + part * SIZE + cells, sums, mask=valid)
    last = is_last_done(counter_ptr, SPLIT)
    valid &= last
    total = gl.zeros_like(sums)
    for index in gl.static_range(SPLIT):  # unrolled, so that no load waits for another
        total += gl.load(partial_ptr + index * SIZE + cells, mask=valid, other=0.0, cache_modifier=".cg")
    return total, last
