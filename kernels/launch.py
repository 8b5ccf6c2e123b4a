"""When Triton kernels run, and how they overlap.

Programmatic dependent launch (sm_90 and later): a kernel's programs may start, and read data that no kernel writes,
while the previous kernel still runs. So every kernel launched with `pdl_options` waits before it reads another kernel's
output and before its first write, and lets the next kernel start as soon as that one has something to do. Weights,
scales and biases are loaded or prefetched before the wait: other layers' weights have gone through the cache since the
last pass, so they come from memory, and a kernel that loads them after the wait waits twice.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

triton.knobs.language.default_fp_fusion = True  # that of Triton 3.10 is False, of which 3.9 warns
COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
"""The interpreter knows neither assembly nor a device library."""
P = ParamSpec("P")
R = TypeVar("R")
Launcher = TypeVar("Launcher", bound=Callable[..., Any])


def on_gpu(x: Tensor, *_: Any, **__: Any) -> bool:
    """Under autograd, too."""
    return x.is_cuda


def use_triton(x: Tensor, *_: Any, **__: Any) -> bool:
    """On a GPU and outside autograd; otherwise the reference runs."""
    return x.is_cuda and not torch.is_grad_enabled()


class Op(Generic[P, R]):
    """Decorates a function in plain torch that a kernel computes on a GPU.

    The function stays as `reference`: the CPU's path, autograd's, and the oracle of tests. `kernel` decorates what
    launches the kernel, `triton`: its further parameters have defaults.
    """

    def __init__(self, reference: Callable[P, R]) -> None:
        functools.update_wrapper(self, reference)
        self.reference = reference

    def kernel(self, when: Callable[..., bool] = use_triton) -> Callable[[Launcher], Launcher]:
        """`when`, of the arguments: whether the kernel runs. The default asks the first one, a tensor."""

        def register(launcher: Launcher) -> Launcher:
            self.when = when
            self.triton = launcher
            return launcher

        return register

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        run = self.triton if self.when(*args, **kwargs) else self.reference
        return run(*args, **kwargs)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may use; unlimited in the interpreter."""
    if device.type != "cuda":
        return sys.maxsize
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)


@functools.cache
def pdl_options(device: torch.device) -> dict[str, Any]:
    """Launch keywords for a kernel that has the constexpr PDL and waits as described above."""
    has_pdl = device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if has_pdl else {"PDL": False}


PREFETCH = tl.constexpr("cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;")


@triton.jit
def prefetch(rows, start, LENGTH: tl.constexpr):
    """Asks for LENGTH elements of each of `rows` (n, 1), pointers, from `start` on to be read into the L2 cache, before
    the kernel waits for its inputs. They must exist, and halves of LENGTH be multiples of 16 bytes."""
    if LENGTH > 0:
        HALF: tl.constexpr = LENGTH // 2  # two requests a row: tiles have half as many rows as programs have threads
        cells = rows + start + tl.arange(0, 2)[None, :] * HALF
        size = tl.full(cells.shape, HALF * (cells.dtype.element_ty.primitive_bitwidth // 8), tl.int32)
        tl.inline_asm_elementwise(PREFETCH, "=r,l,r", [cells.to(tl.int64), size], tl.int32, is_pure=False, pack=1)


SECTOR = tl.constexpr(32)  # bytes
READ = tl.constexpr("{ .reg .b32 t; ld.relaxed.gpu.global.b32 t, [$1]; mov.b32 $0, 0; }")


@triton.jit
def read_ahead(rows, start, LENGTH: tl.constexpr):
    """`prefetch` by loads of a number in each 32 bytes. They take instructions, but bring what is read to the half of
    the L2 cache beside this multiprocessor, from where it comes at twice the speed (H200: 8 instead of 4.8 TB/s; from
    memory 4.2)."""
    if LENGTH > 0:
        STEP: tl.constexpr = SECTOR // (rows.dtype.element_ty.primitive_bitwidth // 8)
        COUNT: tl.constexpr = triton.next_power_of_2((LENGTH + STEP - 1) // STEP)
        place = tl.minimum(tl.arange(0, COUNT) * STEP, LENGTH - 1)
        cells = (rows + start + place[None, :]).to(tl.int64)
        tl.inline_asm_elementwise(READ, "=r,l", [cells], tl.int32, is_pure=False, pack=1)


PREFETCH_LINE = tl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")


@triton.jit
def prefetch_lines(cells):
    """Prefetches the lines of memory that hold `cells`, pointers, into the L2 cache."""
    if COMPILED:
        tl.inline_asm_elementwise(PREFETCH_LINE, "=r,l", [cells.to(tl.int64)], tl.int32, is_pure=False, pack=1)


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Lets the next kernel start, then waits until the output of earlier kernels can be read and overwritten."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
