"""Runs a function in a process for each rank. The interpreter's kernels of all ranks see one another's memory."""

import multiprocessing
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.collectives.peers import Peers

SECONDS = 60  # that a test's ranks may take
PATIENCE = 1e9  # seconds of the interpreter, which counts looks at a clock


def run_ranks(world: int, num_bytes: int, run: Callable[[Peers], list[Tensor]]) -> list[list[Tensor]]:
    """Returns what `run` returns on each rank, whose kernels wait for as long as it takes."""
    buffers = [torch.zeros(num_bytes, dtype=torch.uint8).share_memory_() for _ in range(world)]
    addresses = [buffer.data_ptr() for buffer in buffers]
    context = multiprocessing.get_context("fork")  # memory has the same addresses in all
    results = context.SimpleQueue()

    def work(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            outputs = run(Peers(rank, buffers[rank], addresses, PATIENCE))
            results.put((rank, [(output.float().numpy(), output.dtype) for output in outputs]))
        except BaseException:
            results.put((rank, traceback.format_exc()))

    processes = [context.Process(target=work, args=(rank,), daemon=True) for rank in range(world)]
    for process in processes:
        process.start()
    outputs: dict[int, Any] = {}
    try:
        while len(outputs) < world:
            rank, output = results.get()
            assert not isinstance(output, str), f"rank {rank}: {output}"
            outputs[rank] = output
    finally:
        for process in processes:
            process.join(SECONDS if len(outputs) == world else 0)
            process.kill()
    return [[torch.from_numpy(numbers).to(dtype) for numbers, dtype in outputs[rank]] for rank in range(world)]
