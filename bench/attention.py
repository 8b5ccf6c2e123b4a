"""The tree-attention kernel against the memory: time of one launch inside a CUDA graph, and its share of a large
copy's bandwidth, counting KV bytes only.

    python bench/attention.py
    python bench/attention.py --batches 8 --contexts 8192 --nodes 4 16 --page-sizes 16 --tune
    python bench/attention.py --ragged --output bench/results/attention.jsonl

A graph holds one launch for each of many layers, every layer with KV of its own, more than the L2 cache holds, so that
KV comes from memory as it does in a model. `--tune` times other ways to cut the work, too. Prints a table and ends in
one JSON line per result.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from slipstream.bench.gpu import copy_bandwidth, revision
from slipstream.bench.lines import Lines
from slipstream.kernels.tree_attention import Blocks, Parts, choose_blocks, choose_parts, tree_attention_triton

COLD_BYTES = 256 * 2**20  # KV of all layers at least: four times an H200's L2
MAX_LAYERS = 128
MIN_LAUNCHES = 32  # of one replay, as a target's layers: a graph's start is not a kernel's time
SMALL_TILES = ((32, 2, 4), (32, 4, 3), (32, 4, 4), (64, 2, 3), (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 8, 3))
TUNED = (*SMALL_TILES, (128, 4, 2), (128, 4, 3), (128, 8, 2), (128, 8, 3))  # (tokens, warps, stages)


@dataclass(frozen=True, slots=True)
class Work:
    """New nodes of each of `batch` requests behind `context` committed tokens, on average."""

    batch: int
    context: int
    nodes: int
    page_size: int


class Scene:
    """Layers of random KV under one shuffled page table."""

    def __init__(self, work: Work, options: argparse.Namespace) -> None:
        B, N, G, D = work.batch, work.nodes, options.kv_heads, options.head_dim
        dtype = getattr(torch, options.dtype)
        spread = torch.linspace(0.1, 1.9, B)[torch.randperm(B)] if options.ragged and B > 1 else torch.ones(B)
        self.lengths = (spread * work.context).long().cuda()
        longest = -(-(int(self.lengths.max()) + N) // work.page_size)  # in pages
        num_pages = B * longest + 1
        capacity = max(longest, options.max_len // work.page_size)
        self.pages = torch.zeros(B, capacity, dtype=torch.int64, device="cuda")
        self.pages[:, :longest] = (torch.randperm(num_pages - 1, device="cuda") + 1).view(B, longest)
        self.rows = torch.arange(B, device="cuda")
        self.kv_bytes = (int(self.lengths.sum()) + B * N) * 2 * G * D * dtype.itemsize  # of one layer
        layers = min(MAX_LAYERS, max(2, -(-COLD_BYTES // self.kv_bytes)))
        self.cache = torch.empty(layers, 2, num_pages, work.page_size, G, D, dtype=dtype, device="cuda").normal_()
        self.q = torch.randn(layers, B, N, options.query_heads, D, dtype=dtype, device="cuda")
        self.ancestors = (1 | 1 << torch.arange(N, device="cuda")).expand(B, N).contiguous()  # the root's children
        heads = options.query_heads // G
        self.blocks = choose_blocks(B, N * heads, D, dtype.itemsize)
        tiles = G * -(-N * heads // self.blocks.rows)
        self.parts = choose_parts(B, tiles, self.blocks.rows, capacity * work.page_size, D)

    def attend(self, layer: int, blocks: Blocks, parts: Parts) -> Tensor:
        keys, values = self.cache[layer]
        where = (self.pages, self.rows, self.lengths, self.ancestors)
        scale = self.q.shape[-1] ** -0.5
        out = tree_attention_triton(self.q[layer], keys, values, *where, "tree", scale, blocks=blocks, parts=parts)
        assert isinstance(out, Tensor)
        return out

    def time(self, blocks: Blocks, parts: Parts) -> float:
        """Seconds of one launch among those of other layers."""
        expected, out = self.attend(0, self.blocks, self.parts).float(), self.attend(0, blocks, parts).float()
        assert (out - expected).norm() < 0.02 * expected.norm(), f"{blocks} in {parts} gives something else"
        count = max(MIN_LAUNCHES, len(self.cache))
        layers = [launch % len(self.cache) for launch in range(count)]
        return replay_time(lambda: [self.attend(layer, blocks, parts) for layer in layers]) / count

    def cuts(self, tune: bool) -> Iterator[tuple[Blocks, Parts]]:
        """What the kernel would choose; then, to tune, other blocks, numbers of parts, and shortest parts."""
        yield self.blocks, self.parts
        most = self.parts.most
        for tile in TUNED if tune else ():
            blocks = Blocks(self.blocks.rows, *tile)
            for number in sorted({max(1, most // 2), most, min(64, 2 * most)}):
                yield blocks, Parts(number)
            for tokens in (64, 256) if most > 1 else ():
                yield blocks, Parts(most, tokens)


def replay_time(launch: Callable[[], Any], repeats: int = 20) -> float:
    """Median seconds of a replay of what `launch` enqueues."""
    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    times = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return median(times[3:])


def measure(work: Work, options: argparse.Namespace, copy: float, head: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One result for each cut of the work; those that do not fit the device are left out."""
    scene = Scene(work, options)
    for blocks, parts in scene.cuts(options.tune):
        try:
            seconds = scene.time(blocks, parts)
        except OutOfResources:
            continue
        rate = scene.kv_bytes / seconds
        figures = {"us": round(seconds * 1e6, 2), "gb_s": round(rate / 1e9), "share": round(rate / copy, 3)}
        yield {**head, **asdict(work), "parts": list(parts), "blocks": list(blocks), **figures}


def describe(options: argparse.Namespace, copy: float) -> dict[str, Any]:
    return {
        "bench": "attention",
        "device": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "revision": revision(),
        "shape": [options.query_heads, options.kv_heads, options.head_dim],
        "dtype": options.dtype,
        "ragged": options.ragged,
        "copy_gb_s": round(copy / 1e9),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time the tree-attention kernel.", allow_abbrev=False)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[700, 8192, 32768])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--query-heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--max-len", type=int, default=32768, help="tokens that a page table has room for")
    parser.add_argument("--ragged", action="store_true", help="lengths from 0.1 to 1.9 times the context")
    parser.add_argument("--tune", action="store_true", help="try other blocks and numbers of parts")
    parser.add_argument("--output", type=Path, help="file to append the JSON lines to")
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    options = parse()
    lines = Lines(options.output)
    torch.manual_seed(0)
    copy = copy_bandwidth()
    head = describe(options, copy)
    print(f"{head['device']}: a copy moves {head['copy_gb_s']} GB/s")
    print("batch context nodes page | rows tokens warps stages parts tokens |       us   GB/s  share")
    for numbers in product(options.batches, options.contexts, options.nodes, options.page_sizes):
        work = Work(*numbers)
        for result in measure(work, options, copy, head):
            rows, tokens, warps, stages = result["blocks"]
            most, part = result["parts"]
            shape = f"{work.batch:5} {work.context:7} {work.nodes:5} {work.page_size:4}"
            cut = f"{rows:4} {tokens:6} {warps:5} {stages:6} {most:5} {part:6}"
            print(f"{shape} | {cut} | {result['us']:8.2f} {result['gb_s']:6} {result['share']:6.3f}", flush=True)
            lines.add(result)
    lines.print()


if __name__ == "__main__":
    main()
