"""Dry runs of kernels for a GPU that need not be there; prints what happened as JSON. A process of its own, since tests
on the CPU interpret kernels."""

import json
import sys

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from slipstream.kernels.compile_ahead import compile_ahead, dry_run


@triton.jit
def add_number(x_ptr, out_ptr, number, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets) + number)


@triton.jit
def wrong_kernel(_out_ptr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK == 0)


EMPTY = torch.empty


class Hopper:
    """Triton's driver for one, as far as compilation asks."""

    def __init__(self):
        self.num_launchers = 0

    def launcher_cls(self, source: object, metadata: object):
        self.num_launchers += 1

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def one_pass(block: int) -> int:
    """A pass whose second step indexes by what the kernel of its first would have written."""
    x = torch.full((block,), 2**40)
    out = torch.empty_like(x)
    add_number[(1,)](x, out, 7, BLOCK=block)
    assert torch.empty is not EMPTY
    return int(torch.arange(8)[out].sum())


def main():
    driver = Hopper()
    triton.runtime.driver.set_active(driver)
    cache = add_number.device_caches[0][0]
    with dry_run():
        sums = [one_pass(64)]
    skipped = len([kernel for kernel in cache.values() if kernel is not None])
    with compile_ahead("compiling"):
        sums += [one_pass(block) for block in (64, 128, 64, 128, 256)]
    with compile_ahead("compiled already"):
        sums += [one_pass(64)]
    with dry_run():
        sums += [one_pass(128)]
    compiled = [type(kernel).__name__ for kernel in cache.values()]
    num_launchers = driver.num_launchers
    try:
        with compile_ahead("compiling"):
            one_pass(512)
            raise KeyError("a pass that fails")
    except KeyError:
        failed = "raised"
    try:
        with compile_ahead("compiling"):
            wrong_kernel[(1,)](torch.zeros(4), BLOCK=4)
    except triton.CompilationError:
        failed += ", said"
    with compile_ahead("after that"):
        sums += [one_pass(64)]
    assert "torch._dynamo" not in sys.modules  # it takes seconds to import
    print(json.dumps([sums, skipped, compiled, num_launchers, failed, torch.empty is EMPTY]))


if __name__ == "__main__":
    main()
