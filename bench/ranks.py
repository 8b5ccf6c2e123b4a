"""Times sums over ranks, one process a GPU, and what the order of their sums costs on one GPU.

    python bench/ranks.py sums --world 2
    python bench/ranks.py ways --world 2 --seconds 300
    python bench/ranks.py late --world 2
    python bench/ranks.py order

`sums`: the sum of rows with the residual add and norm behind it, in a graph, against NCCL's all-reduce of bf16 rows and
our norm, and logits gathered, against NCCL's. `ways`: the same sums by each way of adding, for the limits between
them. `late`: a graph of sums that all ranks begin together, and one that a rank begins later. `order`: products whose
inputs are added along a tree of leaves against the usual order, and a rank's part of them.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import os
import sys
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.kernels.collectives import all_reduce
from slipstream.kernels.collectives.all_reduce import AllReduce
from slipstream.kernels.collectives.gather import Gather, gather_columns
from slipstream.kernels.collectives.ranks import Norm
from slipstream.kernels.gemm.fixed_order import FixedOrder, linear_many_rows_triton
from slipstream.kernels.norm import add_rms_norm
from slipstream.tests.kernels.gpu_ranks import EPS, Ranks, parse, random, run_ranks, work

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
SIZE = 4096
WAY_ROWS = (1, 8, 32, 64, 96, 128, 192, 256)
WAYS = {"all to all": (256, 256), "by shares": (0, 256), "two kernels": (0, 0)}  # FEW_ROWS and SHARED_ROWS
SHAPES = ((4096, 4096), (4096, 14336), (5120, 6144), (5120, 17408))  # O, I: o and down of an 8B Llama and a 27B Qwen
PRODUCT_ROWS = (1, 8, 32, 512, 2048)
LATE_CYCLES = 10_000_000  # of a GPU's clock, some 5 ms
LATE_CALLS = 64  # of a pass of an 8B Llama
BYTES = 600 << 20  # of weights that launches take in turn, ten times the L2 cache


def microseconds(run: Callable[[int], object], calls: int, replays: int = 30) -> float:
    """The time of a call in a graph of `calls`, the median of five runs of some replays."""
    graph = graph_of(run, calls)
    times = []
    for _ in range(5):
        if dist.is_initialized():
            dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / replays / calls)
    return sorted(times)[2]


def graph_of(run: Callable[[int], object], calls: int) -> torch.cuda.CUDAGraph:
    """A graph of some calls, which has been replayed."""
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call in range(calls):
            run(call)
    graph.replay()
    return graph


def sums(ranks: Ranks) -> str:
    store = dist.PrefixStore("nccl", ranks.store)
    dist.init_process_group("nccl", store=store, rank=ranks.rank, world_size=ranks.world, device_id=ranks.device)
    weight = random(SIZE, seed=1, dtype=torch.bfloat16)
    lines = [
        f"\nus of a sum of rows of {SIZE} with add and norm: ours, NCCL's of bf16, ratio; [ours alone; norm alone]"
    ]
    for dtype in (torch.float32, torch.bfloat16):
        reduce = AllReduce(ranks.peers, SIZE, ROWS[-1], dtype)
        lines += [f"{dtype} {sum_line(reduce, rows, weight)}" for rows in ROWS]
    lines.append("us of gathered logits, half of 128256: ours, NCCL's")
    gather = Gather(ranks.peers, 64 * 32064)
    for rows in (1, 8, 64):
        part = random(rows, 128256 // ranks.world, seed=1, dtype=torch.bfloat16)
        parts = torch.empty(ranks.world, *part.shape, dtype=part.dtype, device="cuda")

        def library(_: int, part: Tensor = part, parts: Tensor = parts) -> None:
            dist.all_gather_into_tensor(parts.flatten(0, 1), part)
            gather_columns(parts)

        times = [microseconds(lambda _, part=part: gather(part), 10), microseconds(library, 10)]
        lines.append(f"{rows:5} rows {times[0]:7.2f} {times[1]:7.2f}")
    return "\n".join(lines)


def sum_line(reduce: AllReduce, rows: int, weight: Tensor) -> str:
    part_sum = part_of(reduce, rows)
    delta = random(rows, SIZE, seed=2, dtype=torch.bfloat16) * 0
    residual = random(rows, SIZE, seed=3, dtype=torch.bfloat16)

    def ours(_: int) -> None:
        reduce.add_and_norm(part_sum, Norm(residual, weight, EPS))

    def alone(_: int) -> None:
        reduce.add(part_sum, torch.bfloat16)

    def norm(_: int) -> None:
        add_rms_norm.triton(residual, delta, weight, EPS)

    def nccl(_: int) -> None:
        dist.all_reduce(delta)
        add_rms_norm.triton(residual, delta, weight, EPS)

    times = [microseconds(run, 20 if rows <= 512 else 8) for run in (ours, nccl, alone, norm)]
    more_times = " ".join(f"{time:7.2f}" for time in times[2:])
    return f"{rows:5} rows {times[0]:7.2f} {times[1]:7.2f} {times[1] / times[0]:5.2f}x {more_times}"


def ways(ranks: Ranks) -> str:
    lines = [f"\nus of a sum with add and norm: {', '.join(WAYS)}"]
    for size in (4096, 8192):
        weight = random(size, seed=1, dtype=torch.bfloat16)
        for dtype in (torch.float32, torch.bfloat16):
            reduces = []
            for few_rows, shared_rows in WAYS.values():
                with patch.multiple(all_reduce, FEW_ROWS=few_rows, SHARED_ROWS=shared_rows):
                    reduces.append(AllReduce(ranks.peers, size, WAY_ROWS[-1], dtype))
            for rows in WAY_ROWS:
                times = [microseconds(sum_of_rows(reduce, rows, weight), 20) for reduce in reduces]
                lines.append(f"{dtype} {rows:4} x {size} " + " ".join(f"{time:7.2f}" for time in times))
    return "\n".join(lines)


def late(ranks: Ranks) -> str:
    """A late rank costs no more than what it is late, if ranks that wait hold up no others."""
    lines = [f"\nms of {LATE_CALLS} sums with add and norm: together, with rank 1 late by {LATE_CYCLES} cycles"]
    reduce = AllReduce(ranks.peers, SIZE, WAY_ROWS[-1])
    weight = random(SIZE, seed=1, dtype=torch.bfloat16)
    for rows in WAY_ROWS:
        graph = graph_of(sum_of_rows(reduce, rows, weight), LATE_CALLS)
        line = f"{rows:5} rows"
        for cycles in (1, 1 + LATE_CYCLES * ranks.rank):
            ranks.group.barrier().wait()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            torch.cuda._sleep(cycles)
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            line += f" {start.elapsed_time(end):7.2f}"
        lines.append(line)
    return "\n".join(lines)


def part_of(reduce: AllReduce, rows: int) -> Tensor:
    """A rank's part of a sum, where it is added up."""
    part_sum = random(rows, reduce.size, seed=reduce.peers.rank, dtype=reduce.dtype)
    place = reduce.partial_rows(rows)
    return part_sum if place is None else place.copy_(part_sum)


def sum_of_rows(reduce: AllReduce, rows: int, weight: Tensor) -> Callable[[int], object]:
    part_sum = part_of(reduce, rows)
    norm = Norm(random(rows, reduce.size, seed=3, dtype=torch.bfloat16), weight, EPS)
    return lambda _: reduce.add_and_norm(part_sum, norm)


Multiply = Callable[[Tensor, Tensor], object]


def rotating(multiply: Multiply, x: Tensor, weights: list[Tensor]) -> Callable[[int], object]:
    """Multiplies x by the weights in turn, so that none of them is in the cache."""
    return lambda call: multiply(x, weights[call % len(weights)])


def order() -> str:
    lines = [
        "\nus: the usual order, twice; trees of 4 and 8 leaves, per cent; ranks of 2 and 4, by 4 and 8 leaves, or tiles"
    ]
    for outputs, inputs in SHAPES:
        count = max(2, BYTES // (2 * outputs * inputs))
        weights = [random(outputs, inputs, seed=i, dtype=torch.bfloat16) * inputs**-0.5 for i in range(count)]
        lines += [order_line(weights, rows) for rows in PRODUCT_ROWS]
    return "\n".join(lines)


def order_line(weights: list[Tensor], rows: int) -> str:
    outputs, inputs = weights[0].shape
    fixed = FixedOrder()
    x = random(rows, inputs, seed=5, dtype=torch.bfloat16)
    fixed.check(weights[0], None, [rows])
    usual = rotating(fixed.linear, x, weights)
    runs = [usual, usual, *(leaf_run(fixed, x, weights, leaves, 1) for leaves in (4, 8))]
    for world in (2, 4) if rows <= 64 else ():
        runs += [leaf_run(fixed, x, weights, leaves, world) for leaves in (4, 8)]
    for tile in ((64, 128), (128, 128)) if rows > 64 else ():
        runs.append(rotating(partial(linear_many_rows_triton, tile=tile, leaves=4), x, weights))
    calls = max(4, len(weights))
    first, second, *times = [microseconds(run, calls, 15 if rows <= 64 else 3) for run in runs]
    costs = " ".join(f"{time:7.2f} {100 * time / min(first, second) - 100:+5.1f}%" for time in times[:2])
    by_library = [str(leaves) for (*_, leaves), counts in fixed.leaves_by_library.items() if rows in counts]
    return (
        f"{outputs} x {inputs:5} {rows:5} rows {first:7.2f} {second:7.2f} | {costs} | "
        f"{' '.join(f'{time:6.2f}' for time in times[2:])}{' library' if by_library else ''} {' '.join(by_library)}"
    )


def leaf_run(fixed: FixedOrder, x: Tensor, weights: list[Tensor], leaves: int, world: int) -> Callable[[int], object]:
    """A rank's part of a product that `world` ranks share."""
    size = x.shape[1] // world
    parts = weights if world == 1 else [weight[:, :size].contiguous() for weight in weights]
    fixed.check_leaves(parts[0], leaves // world, [len(x)])
    dtype = None if world == 1 else torch.float32
    multiply = partial(fixed.leaf_linear, leaves=leaves // world, dtype=dtype)
    return rotating(multiply, x[:, :size].contiguous(), parts)


def main() -> None:
    options = parse(["sums", "ways", "late", "order"])
    if options.rank is not None:
        scenario = {"sums": sums, "ways": ways, "late": late}[options.scenarios[0]]
        os._exit(work([scenario], options.rank, options.world, options.file))
    failed = 0
    for name in options.scenarios:
        if name == "order":
            with torch.inference_mode():
                print(order(), flush=True)
        else:
            failed += not run_ranks(__file__, [name], options.world, options.seconds)
    sys.exit(failed)


if __name__ == "__main__":
    main()
