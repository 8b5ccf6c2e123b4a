"""Runs a function in a process for each rank. The interpreter's kernels of all ranks see one another's memory."""

import ctypes
import gc
import multiprocessing
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from slipstream.kernels.collectives import peers
from slipstream.kernels.collectives.peers import Peers

SECONDS = 120  # that a test's ranks may take for each output
PATIENCE = 1e9  # seconds of the interpreter, which counts looks at a clock
look = peers._is_over
load = interpreter._interpreter.load
store = interpreter._interpreter.store


def look_and_rest(*arguments: Any) -> Any:
    """Leaves the processor to the ranks that are waited for."""
    time.sleep(0.001)
    return look(*arguments)


def store_at_once(pointers: Any, values: Any, mask: Any):
    """Stores each number once. The interpreter copies bytes by the C library, which stores one byte of two before both,
    and four bytes twice: a cell may look full when half of it is, or again after it is emptied."""
    word = {2: ctypes.c_int16, 4: ctypes.c_int32}.get(values.itemsize)
    if word is None:
        store(pointers, values, mask)
        return
    bits = values.view(f"i{values.itemsize}")
    for pointer, number in zip(pointers[mask].tolist(), bits[mask].tolist(), strict=True):
        word.from_address(pointer).value = number


def load_whole(pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
    """Loads numbers of two bytes twice, since the C library reads one byte of them before both: a cell that was half
    empty the first time is full the second time."""
    first = load(pointers, mask, other, dtype)
    if dtype.itemsize != 2:
        return first
    return np.where(first.view(np.int16) == 0, first, load(pointers, mask, other, dtype))


def run_ranks(world: int, num_bytes: int, run: Callable[[Peers], list[Tensor]]) -> list[list[Tensor]]:
    """Returns what `run` returns on each rank, whose kernels wait for as long as it takes."""
    buffers = [torch.zeros(num_bytes, dtype=torch.uint8).share_memory_() for _ in range(world)]
    addresses = [buffer.data_ptr() for buffer in buffers]
    context = multiprocessing.get_context("fork")  # memory has the same addresses in all
    results = context.Queue()

    def work(rank):
        gc.disable()  # what earlier tests have left may wait for threads that only their process has
        torch.set_num_threads(1)
        peers._is_over = look_and_rest  # in this process alone
        peers.POLLS = tl.constexpr(2)
        interpreter._interpreter.load = load_whole
        interpreter._interpreter.store = store_at_once
        try:
            outputs = run(Peers(rank, buffers[rank], addresses, PATIENCE))
            results.put((rank, [(output.float().numpy(), output.dtype) for output in outputs]))
        except BaseException:
            results.put((rank, traceback.format_exc()))

    processes = [context.Process(target=work, args=(rank,), daemon=True) for rank in range(world)]
    for process in processes:
        process.start()
    outputs = {}
    try:
        while len(outputs) < world:
            rank, output = results.get(timeout=SECONDS)
            assert not isinstance(output, str), f"rank {rank}: {output}"
            outputs[rank] = output
    finally:
        for process in processes:
            process.join(SECONDS if len(outputs) == world else 0)
            process.kill()
    return [[torch.from_numpy(numbers).to(dtype) for numbers, dtype in outputs[rank]] for rank in range(world)]
