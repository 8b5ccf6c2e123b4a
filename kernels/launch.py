"""When the Triton kernels run, and how one follows another. Each kernel `name` has `name_reference` in torch beside it.

Programmatic dependent launch (sm_90 on): a kernel's programs may start, and read what no other kernel writes, while the
kernel before still runs. So every kernel launched with `pdl_options` waits before it reads what another has written
and before it writes anything, and lets the next one start as early as that one finds something to do.
"""

import functools
import sys
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def use_triton(x: Tensor) -> bool:
    """On a GPU and outside autograd; elsewhere the reference runs."""
    return x.is_cuda and not torch.is_grad_enabled()


@functools.cache
def has_pdl(device: torch.device) -> bool:
    """Whether programmatic dependent launch exists there."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have there; the interpreter's have no bound."""
    if device.type != "cuda":
        return sys.maxsize
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)


def pdl_options(device: torch.device) -> dict[str, Any]:
    """Keywords for the launch of a kernel that has the constexpr PDL and waits as this module says."""
    return {"PDL": True, "launch_pdl": True} if has_pdl(device) else {"PDL": False}


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Starts the next kernel, then waits until what the kernels before have written can be read and written over."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
