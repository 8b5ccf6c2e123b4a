"""Sums over ranks on GPUs: `python gpu_ranks.py SCENARIO... --world N` runs scenarios, each in a process a rank, prints
what each found, and exits with the number of those that failed."""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.kernels.collectives.all_reduce import AllReduce, add_ranks
from slipstream.kernels.collectives.gather import Gather, gather_columns
from slipstream.kernels.collectives.peer_ranks import PeerRanks
from slipstream.kernels.collectives.peers import Peers
from slipstream.kernels.collectives.ranks import Norm
from slipstream.kernels.gemm.fixed_order import FixedOrder
from slipstream.kernels.gemm.fp8 import InputScales, fp8_leaf_linear, quantize_leaves, quantize_weight
from slipstream.kernels.gemm.int4 import int4_leaf_linear
from slipstream.kernels.gemm.int4_weight import Int4Weight, num_pairs, num_words
from slipstream.kernels.gemm.leaves import LEAVES, leaves_of_rank
from slipstream.kernels.norm import add_rms_norm

BYTES = 1 << 30
PR_SET_PDEATHSIG = 1  # of prctl(2)
ROWS = (1, 2, 3, 8, 33, 64, 65, 128, 300)
MOST_ROWS = 512
EPS = 1e-5
SHAPES = ((4096, 4096), (4096, 14336), (5120, 6144))  # O, I


class Ranks(NamedTuple):
    rank: int
    world: int
    device: torch.device
    store: dist.Store
    group: dist.ProcessGroupGloo
    peers: Peers


def random(*size: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same numbers on every GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(size, generator=generator, device="cuda").to(dtype)


def expect(condition: bool, message: str):
    if not condition:
        raise AssertionError(message)


def sums(ranks: Ranks) -> str:
    """Sums have the reference's bits on every rank, and norms those of the kernel on one GPU."""
    for size, dtype in ((4096, torch.float32), (4096, torch.bfloat16), (5120, torch.float32), (2880, torch.float16)):
        reduce = AllReduce(ranks.peers, size, MOST_ROWS, dtype)
        weight = random(size, seed=1, dtype=torch.bfloat16)
        for seed, rows in enumerate(ROWS * 2):
            name = f"{rows} x {size}, {dtype}"
            partials = random(ranks.world, rows, size, seed=seed, dtype=dtype)
            residual = random(rows, size, seed=100 + seed, dtype=torch.bfloat16)
            total = add_ranks(partials, torch.bfloat16)
            partial = partials[ranks.rank].contiguous()
            expect(torch.equal(reduce.add(partial, torch.bfloat16), total), f"sum of {name}")
            with_bias = reduce.add(partial, torch.float32, weight)
            expect(torch.equal(with_bias, add_ranks(partials, torch.float32, weight)), f"bias, {name}")
            expected = add_rms_norm.triton(residual, total, weight, EPS)
            outputs = reduce.add_and_norm(partial, Norm(residual, weight, EPS))
            for part, output, other in zip(("norm", "residual"), outputs, expected, strict=True):
                expect(torch.equal(output, other), f"{part} of {name}")
    gather = Gather(ranks.peers, 1 << 18)
    for seed, (rows, columns) in enumerate(((1, 64128), (8, 64128), (3, 1001), (1, 2), (64, 64128), (2, 37984))):
        parts = random(ranks.world, rows, columns, seed=seed, dtype=torch.bfloat16)
        expect(torch.equal(gather(parts[ranks.rank]), gather_columns(parts)), f"gather of {rows} x {columns}")
    return f"sums of {ROWS} rows, norms and logits have the reference's bits"


def products(ranks: Ranks) -> str:
    """Products on all ranks together have the bits of one rank's, and rows do not depend on their number."""
    counts = (1, 8, 16, 40, 64, 65, 200, 512)
    for outputs, inputs in SHAPES:
        reduce = AllReduce(ranks.peers, outputs, MOST_ROWS)
        weight = random(outputs, inputs, seed=7, dtype=torch.bfloat16) * inputs**-0.5
        x = random(counts[-1], inputs, seed=8, dtype=torch.bfloat16)
        product = FixedOrder()
        part = FixedOrder()
        leaves = leaves_of_rank(inputs, ranks.world)
        own_weight = weight.chunk(ranks.world, 1)[ranks.rank].contiguous()
        product.check_leaves(weight, LEAVES, counts[::2])
        part.check_leaves(own_weight, leaves, counts[1::2])
        expected = product.leaf_linear(x, weight, LEAVES)
        reference = (x.float() @ weight.float().t()).bfloat16()
        error = (expected.float() - reference.float()).norm() / reference.float().norm()
        expect(error.item() < 5e-3, f"product of {outputs} x {inputs} is off by {error.item()}")
        for rows in counts:
            out = product.leaf_linear(x[:rows], weight, LEAVES)
            expect(torch.equal(out, expected[:rows]), f"{rows} rows of {outputs} x {inputs} on one rank")
            own_x = x[:rows].chunk(ranks.world, 1)[ranks.rank]
            place = reduce.partial_rows(rows)
            partial = part.leaf_linear(own_x, own_weight, leaves, dtype=torch.float32, out=place)
            total = reduce.add(partial, torch.bfloat16)
            expect(torch.equal(total, expected[:rows]), f"{rows} rows of {outputs} x {inputs} on {ranks.world} ranks")
    return f"products of {len(SHAPES)} shapes: {ranks.world} ranks have the bits of 1, for {counts} rows"


def quantised(ranks: Ranks) -> str:
    """Products of FP8 and of 4-bit weights on all ranks together have the bits of one rank's."""
    counts = (1, 8, 16, 64, 128, 200)
    outputs, inputs = SHAPES[1]
    leaves = leaves_of_rank(inputs, ranks.world)
    reduce = AllReduce(ranks.peers, outputs, MOST_ROWS)
    weight = random(outputs, inputs, seed=7) * inputs**-0.5
    x = random(counts[-1], inputs, seed=8, dtype=torch.bfloat16)
    own_x = x.chunk(ranks.world, 1)[ranks.rank].contiguous()
    codes, scales = quantize_weight(weight)
    block_scales = scales[0] * (
        0.5 + torch.rand(outputs // 128, inputs // 128, generator=torch.Generator().manual_seed(3))
    ).to(ranks.device)
    cases = (
        (InputScales(), scales),
        (InputScales(torch.tensor(0.02, device=ranks.device)), scales),
        (InputScales(None, True), block_scales),
    )
    for input_scales, own_scales in cases:
        name = f"FP8, {input_scales}"
        part_scales = own_scales.chunk(ranks.world, 1)[ranks.rank].contiguous() if own_scales.dim() == 2 else own_scales
        part = codes.chunk(ranks.world, 1)[ranks.rank].contiguous()
        rows = quantize_leaves(x, input_scales, LEAVES)
        expected = fp8_leaf_linear(rows, codes, own_scales, LEAVES)
        reference = fp8_leaf_linear.reference(rows, codes, own_scales, LEAVES)
        error = (expected.float() - reference.float()).norm() / reference.float().norm()
        expect(error.item() < 1e-2, f"{name} is off by {error.item()}")
        for count in counts:
            product = fp8_leaf_linear(quantize_leaves(x[:count], input_scales, LEAVES), codes, own_scales, LEAVES)
            expect(torch.equal(product, expected[:count]), f"{name}: {count} rows on one rank")
            own_rows = quantize_leaves(own_x[:count], input_scales, leaves)
            partial = fp8_leaf_linear(own_rows, part, part_scales, leaves, dtype=torch.float32)
            expect(torch.equal(reduce.add(partial, torch.bfloat16), product), f"{name}: {count} rows on all ranks")
    words = torch.randint(-(2**31), 2**31 - 1, (outputs, num_words(inputs)), generator=torch.Generator().manual_seed(1))
    units = 0.002 * (0.5 + torch.rand(num_pairs(inputs, 128), outputs, 2, generator=torch.Generator().manual_seed(2)))
    words = words.int().to(ranks.device)
    units = units.bfloat16().to(ranks.device)
    int4 = Int4Weight(words, units, None, 128, inputs)
    part = Int4Weight(
        words.chunk(ranks.world, 1)[ranks.rank].contiguous(), units.chunk(ranks.world)[ranks.rank].contiguous(), None,
        128, inputs // ranks.world,
    )  # fmt: skip
    expected = int4_leaf_linear(x, int4, LEAVES)
    for count in counts:
        expect(torch.equal(int4_leaf_linear(x[:count], int4, LEAVES), expected[:count]), f"4 bits: {count} rows")
        partial = int4_leaf_linear(own_x[:count], part, leaves, dtype=torch.float32)
        expect(torch.equal(reduce.add(partial, torch.bfloat16), expected[:count]), f"4 bits: {count} rows on all ranks")
    return f"products of FP8 (by row, static, in blocks) and 4 bits: {ranks.world} ranks have the bits of 1"


def replays(ranks: Ranks) -> str:
    """Every replay of a graph with sums of several sizes gives the reference's bits."""
    size = 4096
    reduce = AllReduce(ranks.peers, size, MOST_ROWS)
    gather = Gather(ranks.peers, 1 << 16)
    weight = random(size, seed=1, dtype=torch.bfloat16)
    calls = (1, 8, 64, 3, 128, 8, 300, 66, 1)
    partials = [random(ranks.world, rows, size, seed=index) for index, rows in enumerate(calls)]
    residuals = [random(rows, size, seed=50 + rows, dtype=torch.bfloat16) for rows in calls]

    def run():
        outputs = []
        for partial, residual in zip(partials, residuals, strict=True):
            outputs += reduce.add_and_norm(partial[ranks.rank], Norm(residual, weight, EPS))
            outputs.append(gather(outputs[-2][:1, : size // 2].contiguous()))
        return outputs

    def check():
        outputs = []
        for partial, residual in zip(partials, residuals, strict=True):
            outputs += add_rms_norm.triton(residual, add_ranks(partial, torch.bfloat16), weight, EPS)
            half = outputs[-2][:1, : size // 2]
            outputs.append(torch.cat([half] * ranks.world, 1))
        return outputs

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = run()
    check_graph = torch.cuda.CUDAGraph()
    check()
    torch.cuda.synchronize()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    with torch.cuda.graph(check_graph, capture_error_mode="thread_local"):
        for output, expected in zip(outputs, check(), strict=True):
            wrong += (output != expected).sum()
        for partial in partials:
            partial.copy_(partial.roll(1, -1) * 1.0001)
    count = 1000 if torch.cuda.device_count() >= ranks.world else 100  # ranks that share a GPU take turns
    for number in range(count):
        graph.replay()
        if number % 7 == ranks.rank:
            torch.cuda._sleep(200_000)  # ranks take turns in being late
        check_graph.replay()
    torch.cuda.synchronize()
    expect(wrong.item() == 0, f"{wrong.item()} numbers of {count} replays are wrong")
    expect(ranks.peers.lost == [], f"lost {ranks.peers.lost}")
    return f"{count} replays of {len(calls)} sums and gathers: no bit differs"


def tables(ranks: Ranks) -> str:
    """Parts of tables come together, through the host and, where they are large, in pieces through peers' memory."""
    peers = PeerRanks(ranks.group, ranks.rank, ranks.world, ranks.device)
    for rows in (1, 1000, 4096, 10_001):
        parts = random(ranks.world, rows, 4096, seed=rows, dtype=torch.bfloat16)
        expect(torch.equal(peers.collect(parts[ranks.rank]), parts.flatten(0, 1)), f"table of {rows} rows")
    return "tables are whole"


def lost(ranks: Ranks) -> str:
    """A rank that stays away is named within the limit, later calls do not wait, and a wait can be stopped."""
    reduce = AllReduce(ranks.peers, 4096, MOST_ROWS)
    gather = Gather(ranks.peers, 1 << 16)
    partial, shared, many = (random(rows, 4096, seed=0) for rows in (8, 100, 300))

    def run():
        for _ in range(8):
            reduce.add(partial, torch.bfloat16)
            reduce.add(shared, torch.bfloat16)
            reduce.add(many, torch.bfloat16)
            gather(partial)

    run()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    graph.replay()
    torch.cuda.synchronize()
    expect(ranks.peers.lost == [], f"lost {ranks.peers.lost}")
    ranks.group.barrier().wait()
    torch.cuda.synchronize()
    if ranks.rank != 0:
        time.sleep(4)
        return "stayed away"
    ranks.peers.limit(1.0)
    torch.cuda.synchronize()
    seconds = [timed(graph)]
    expect(ranks.peers.lost == [1], f"lost {ranks.peers.lost} after {seconds}")
    expect(0.9 < seconds[0] < 1.5, f"the kernel gave up after {seconds[0]} s, not 1 s")
    seconds.append(timed(graph))
    expect(seconds[1] < 0.1, f"later calls took {seconds[1]} s")
    ranks.peers.limit(60)
    ranks.peers.watch.words[1] = 0  # as if nothing had failed
    torch.cuda.synchronize()
    begin = time.monotonic()
    graph.replay()
    time.sleep(0.2)
    ranks.peers.stop()
    torch.cuda.synchronize()
    seconds.append(time.monotonic() - begin)
    expect(seconds[2] < 0.5, f"a stop took {seconds[2]} s")
    return "seconds until lost, then, and until stopped: " + ", ".join(f"{number:.3f}" for number in seconds)


def timed(graph: torch.cuda.CUDAGraph) -> float:
    begin = time.monotonic()
    graph.replay()
    torch.cuda.synchronize()
    return time.monotonic() - begin


SCENARIOS: dict[str, Callable[[Ranks], str]] = {
    "sums": sums,
    "products": products,
    "tables": tables,
    "quantised": quantised,
    "replays": replays,
    "lost": lost,
}


def meet(rank: int, world: int, file: str) -> Ranks:
    """Joins the ranks, several to a GPU where there are fewer."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    store = dist.FileStore(file, world)
    group = dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=60))
    return Ranks(rank, world, device, store, group, Peers.meet(group, device, BYTES, 20.0))


@torch.inference_mode()
def work(scenarios: list[Callable[[Ranks], str]], rank: int, world: int, file: str) -> int:
    """Runs a rank, which ends with its parent; returns how many scenarios failed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    ranks = meet(rank, world, file)
    failed = 0
    for scenario in scenarios:
        begin = time.monotonic()
        try:
            message = scenario(ranks)
            torch.cuda.synchronize()
            print(f"rank {rank}: {message} ({time.monotonic() - begin:.1f} s)", flush=True)
        except Exception:
            failed += 1
            print(f"rank {rank}: {scenario.__name__} FAILED: {traceback.format_exc()}", flush=True)
    return failed


def run_ranks(program: str, arguments: list[str], world: int, seconds: float) -> bool:
    """Starts a process for each rank; whether all succeed in time. None is left, even if this one is told to end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    environment = os.environ | {"NCCL_NVLS_ENABLE": "0"}
    with tempfile.TemporaryDirectory() as folder:
        extra = ["--world", str(world), "--file", f"{folder}/store", "--rank"]
        processes = [
            subprocess.Popen([sys.executable, program, *arguments, *extra, str(rank)], env=environment)
            for rank in range(world)
        ]
        end = time.monotonic() + seconds
        try:
            while any(process.poll() is None for process in processes) and time.monotonic() < end:
                if any(process.poll() for process in processes):
                    end = min(end, time.monotonic() + 5)
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
        codes = [process.wait() for process in processes]
    if any(codes):
        print(f"{' '.join(arguments)}: exit codes {codes}", flush=True)
    return not any(codes)


def parse(names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenarios", nargs="+", help=f"of {', '.join(names)}; joined by +: in the same processes")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60, help="limit of a scenario")
    parser.add_argument("--file", help="of a rank: where all meet")
    parser.add_argument("--rank", type=int, help="of a rank: its number")
    return parser.parse_args()


def main():
    options = parse([*SCENARIOS])
    if options.rank is not None:
        scenarios = [SCENARIOS[name] for name in options.scenarios[0].split("+")]
        os._exit(work(scenarios, options.rank, options.world, options.file))  # others may be gone: nothing is tidied up
    begin = time.monotonic()
    failed = 0
    for scenario in options.scenarios:
        failed += not run_ranks(__file__, [scenario], options.world, options.seconds)
        print(f"{scenario}: {time.monotonic() - begin:.1f} s since the start", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
