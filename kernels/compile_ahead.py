"""Compiles the Triton kernels of coming passes in parallel, without launching them.

Triton compiles a kernel when it is first launched, one after the other: 61 of them for an 8B target with EAGLE3, 21 s.
Here a pass runs without its kernels instead: Triton names each one that it would have to compile, and a pool of threads
does so. Most of the work is LLVM's and ptxas's, outside the interpreter's lock.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import triton
from tqdm import tqdm
from triton import AsyncCompileMode
from triton.runtime.jit import JITFunction

MAX_THREADS = 16  # each takes up to 300 MB


@contextmanager
def dry_run(run: Callable[..., Any] = lambda *_, **__: None) -> Iterator[None]:
    """Runs passes without Triton kernels: `run` stands in for their launch. All other operators run.

    None is launched, not even what is compiled already: a kernel could take indices from one that was skipped. What
    they would have written is zero, so that indices made of it are valid. Allocations are those of a real pass.
    """
    launch = JITFunction.run
    JITFunction.run = run
    try:
        with zero_filled():
            yield
    finally:
        JITFunction.run = launch


@contextmanager
def compile_ahead(description: str) -> Iterator[None]:
    """A dry run whose kernels are compiled when it ends; a bar shows how many are. Raises what a compilation raises."""
    launch = JITFunction.run

    def compile_only(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        return launch(kernel, *args, **{**kwargs, "warmup": True})

    num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(num_threads) as pool, _Compiled(pool, description), dry_run(compile_only):
        yield


class _Compiled(AsyncCompileMode):
    """Triton hands it each kernel that it would have to compile."""

    def __init__(self, executor: Executor, description: str) -> None:
        super().__init__(executor)
        self._description = description

    def submit(self, key: str, compile_kernel: Callable[[], Any], *args: Any) -> Any:
        future_kernel = self.future_kernels.get(key)
        if future_kernel is not None:
            if future_kernel.kernel is None and future_kernel.future.done():
                future_kernel.result()  # Triton 3.6 looks for it in vain until then, which takes longer than a launch
            return future_kernel

        def compile_both() -> Any:
            kernel = compile_kernel()
            # Triton 3.6 runs a C compiler for each signature.
            triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
            return kernel

        return super().submit(key, compile_both, *args)

    def __exit__(self, *exception: Any) -> None:
        bar = tqdm(as_completed(self.raw_futures), self._description, len(self.raw_futures), leave=False, unit="kernel")
        errors = [error for error in (future.exception() for future in bar) if error is not None]
        self.ignore_errors = True  # else Triton 3.6 stays in this mode
        super().__exit__(*exception)  # hands the kernels to their functions
        if errors and exception[0] is None:
            raise errors[0]


@contextmanager
def zero_filled() -> Iterator[None]:
    """Allocates zeros where a program asks for memory that is not initialised. Replaces three functions: torch's modes
    would take several microseconds for each operator, or import torch._dynamo, which takes seconds."""
    with ExitStack() as stack:
        for owner, name, zeros in (
            (torch, "empty", torch.zeros),
            (torch, "empty_like", torch.zeros_like),
            (torch.Tensor, "new_empty", torch.Tensor.new_zeros),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, zeros)
        yield
