"""When Triton kernels run, and how they overlap. Next to each kernel `name` is its torch reference, `name_reference`.

Programmatic dependent launch (sm_90 and later): a kernel's programs may start, and read data that no kernel writes,
while the previous kernel still runs. So every kernel launched with `pdl_options` waits before it reads another kernel's
output and before its first write, and lets the next kernel start as soon as that one has something to do.
"""

import functools
import sys
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def use_triton(x: Tensor) -> bool:
    """On a GPU and outside autograd; otherwise the reference runs."""
    return x.is_cuda and not torch.is_grad_enabled()


@functools.cache
def has_pdl(device: torch.device) -> bool:
    """Whether the device has programmatic dependent launch."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may use; unlimited in the interpreter."""
    if device.type != "cuda":
        return sys.maxsize
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)


def pdl_options(device: torch.device) -> dict[str, Any]:
    """Launch keywords for a kernel that has the constexpr PDL and waits as described above."""
    return {"PDL": True, "launch_pdl": True} if has_pdl(device) else {"PDL": False}


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Lets the next kernel start, then waits until the output of earlier kernels can be read and overwritten."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
