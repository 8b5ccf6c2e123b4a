"""Times the linear layers of a decoder in every format of weights, against 16-bit ones and against the hardware.

    python bench/formats.py                                  # Llama-3.1-8B's layers
    python bench/formats.py --formats fp8 int4 --rows 1 8 32 --output bench/results/formats.jsonl
    python bench/formats.py --formats int4 --rows 1 --tune   # other tilings, layer by layer
    python bench/formats.py --convert RANDOM_8B --to int4 --folder RANDOM_8B_INT4

A line is a pass through the four products of all layers, inputs quantised and activations included, in one CUDA graph;
every layer has its own weights, so they come from memory. The floor is the larger of the bytes over the bandwidth of
a large copy and of the products over the peak of the tensor cores. On a CPU sizes must be small; times mean nothing.

--convert rounds a checkpoint's weights to the nearest in a format, as a stand-in of its size for other benchmarks:

    python bench/round.py --target RANDOM_8B_INT4 --batch 1 8
    python bench/round.py --target RANDOM_8B --engine.quantization fp8 --batch 1 32
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from slipstream.bench.gpu import copy_bandwidth, milliseconds
from slipstream.bench.lines import Lines, origin, table
from slipstream.config import run
from slipstream.kernels.gemm import fp8, int4, int4_weight
from slipstream.kernels.gemm.activation import silu_mul
from slipstream.kernels.gemm.fixed_order import FixedOrder, usual_part
from slipstream.kernels.gemm.tiling import Tiling, choose_tiling
from slipstream.models.files.checkpoint import read_json, read_tensors

PEAK = {"bf16": 989e12, "fp8": 1979e12, "fp8 blocks": 1979e12, "int4": 989e12, "int4 zeros": 989e12}  # an H100's
PEAKS_OF = tuple(PEAK)
GROUP = 128
COLUMNS = (  # heading, key of a line, format
    ("format", "format", "s"),
    ("rows", "rows", "d"),
    ("ms", "ms", ".3f"),
    ("of bf16", "of_bf16", ".3f"),
    ("floor, ms", "floor_ms", ".3f"),
    ("share of floor", "share", ".2f"),
)
Multiply = Callable[[Tensor, bool], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatsConfig:
    """Linear layers by format and number of rows."""

    formats: list[str] = field(default_factory=lambda: list(PEAKS_OF))
    """Formats to time. bf16 is always timed."""
    rows: list[int] = field(default_factory=lambda: [1, 4, 8, 32, 128, 512, 2048, 8192])
    """Rows of a pass."""
    hidden: int = 4096
    """Hidden size."""
    intermediate: int = 14336
    """Intermediate size of the MLP."""
    qkv: int = 6144
    """Outputs of the projection of queries, keys and values."""
    layers: int = 32
    """Layers."""
    device: str = "cuda"
    """cuda or cpu."""
    tune: bool = False
    """Time other tilings of each product of few rows instead."""
    convert: str | None = None
    """Checkpoint folder to convert instead."""
    to: str = "int4"
    """Format to convert to: fp8 blocks, int4 or int4 zeros."""
    folder: str = ""
    """Folder to write the converted checkpoint to."""
    output: str | None = None
    """File to append the JSON lines to."""

    def __post_init__(self) -> None:
        for name in self.formats:
            if name not in PEAK:
                raise ValueError(f"formats holds {name!r}; choose of {', '.join(PEAK)}")
        if self.convert and (self.to not in ("fp8 blocks", "int4", "int4 zeros") or not self.folder):
            raise ValueError(f"to is {self.to!r}; choose fp8 blocks, int4 or int4 zeros, and name a folder")

    @property
    def shapes(self) -> list[tuple[int, int, bool]]:
        """Outputs and inputs of a layer's products, and whether they are gated."""
        attention = self.hidden
        gate_up = (2 * self.intermediate, self.hidden, True)
        return [
            (self.qkv, self.hidden, False),
            (self.hidden, attention, False),
            gate_up,
            (self.hidden, self.intermediate, False),
        ]


def product_of(
    name: str, outputs: int, inputs: int, gated: bool, config: FormatsConfig, order: FixedOrder
) -> tuple[Multiply, int]:
    """A product with random weights, inputs quantised where the format wants that, and the bytes of the weights.
    `order` is that of 16-bit weights, which takes the library for numbers of rows where it adds alike."""
    device = config.device
    weight = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16) * inputs**-0.5
    if name == "bf16":
        if device == "cuda" and (outputs, inputs, False, gated, usual_part(weight, gated)) not in order.by_library:
            order.check(weight, None, config.rows, gated=gated)
        return lambda x, gated: order.gated_linear(x, weight) if gated else order.linear(x, weight), weight.nbytes
    if name.startswith("fp8"):
        codes, scales = fp8.quantize_weight(weight)
        blocks = name == "fp8 blocks"
        given = fp8.InputScales(by_block=blocks)
        scales = scales[:1].expand(-(-outputs // 128), -(-inputs // 128)).contiguous() if blocks else scales

        shape, split = (outputs, inputs, False, blocks), choose_tiling(outputs, inputs).split
        if shape not in order.fp8_by_library:
            order.fp8_by_library[shape] = fp8.rows_by_library(config.rows, codes, scales, None)
        by_library = order.fp8_by_library[shape]

        def multiply(x: Tensor, gated: bool) -> Tensor:
            rows = fp8.quantize_rows(x, given)
            if len(x) not in by_library:
                return fp8.fp8_linear(rows, codes, scales, None, gated)
            out = fp8.library_linear(rows, codes, scales, None, split)
            return silu_mul(out) if gated else out

        return multiply, codes.nbytes + scales.nbytes
    stored = random_int4(outputs, inputs, name == "int4 zeros", device)
    kept = sum(tensor.nbytes for tensor in stored[:3] if tensor is not None)
    part = int4.part_of(stored, gated)
    if device == "cuda" and (outputs, inputs, False, gated, part) not in order.by_library:
        many = [rows for rows in config.rows if int4.dequantizes(stored, rows, gated)]
        order.check(int4_weight.dequantize(stored, torch.bfloat16), None, many, gated=gated, part=part)
    return lambda x, gated: int4.int4_linear(x, stored, None, gated, order), kept


def random_int4(outputs: int, inputs: int, has_zeros: bool, device: str) -> int4_weight.Int4Weight:
    units = int4_weight.num_pairs(inputs, GROUP), outputs, 2
    words = torch.randint(-(2**31), 2**31, (outputs, int4_weight.num_words(inputs)), device=device).int()
    scales = torch.rand(units, device=device).mul(0.2 * inputs**-0.5).bfloat16()
    zeros = torch.randint(16, units, device=device).to(torch.int16) if has_zeros else None
    return int4_weight.Int4Weight(words, scales, zeros, GROUP, inputs)


@torch.inference_mode()
def formats(config: FormatsConfig) -> None:
    if config.convert:
        return convert(Path(config.convert), config.to, Path(config.folder))
    bandwidth = copy_bandwidth() if config.device == "cuda" else 1e10
    lines = Lines(config.output, origin("formats", config.device))
    if config.tune:
        for line in tune(config):
            print(lines.add(line), flush=True)
        return None
    plain: dict[int, float] = {}
    order = FixedOrder()
    print(f"a large copy moves {bandwidth / 1e9:,.0f} GB/s")
    for index, name in enumerate(dict.fromkeys(["bf16", *config.formats])):
        layers = [[product_of(name, *shape, config, order) for shape in config.shapes] for _ in range(config.layers)]
        kept = sum(size for layer in layers for _, size in layer)
        for rows in config.rows:
            ms = time_pass(config, layers, rows)
            plain.setdefault(rows, ms)
            work = 2 * rows * config.layers * sum(outputs * inputs for outputs, inputs, _ in config.shapes)
            floor = 1000 * max(kept / bandwidth, work / PEAK[name])
            line = {"format": name, "rows": rows, "ms": round(ms, 4), "of_bf16": round(ms / plain[rows], 4)}
            line |= {"floor_ms": round(floor, 4), "share": round(floor / ms, 4)}
            print(table(COLUMNS, [lines.add(line)], heading=index == 0 and rows == config.rows[0]), flush=True)
        del layers
    lines.print()
    return None


def time_pass(config: FormatsConfig, layers: Sequence[Sequence[tuple[Multiply, int]]], rows: int) -> float:
    """Milliseconds of all layers' products."""
    shapes = config.shapes
    inputs = {size: torch.randn(rows, size, device=config.device).bfloat16() for _, size, _ in shapes}

    def one_pass() -> None:
        for layer in layers:
            for (multiply, _), (_, size, gated) in zip(layer, shapes, strict=True):
                multiply(inputs[size], gated)

    return timed(config, one_pass)


def timed(config: FormatsConfig, work: Callable[[], object]) -> float:
    """Milliseconds."""
    return graph_ms(work) if config.device == "cuda" else clock_ms(work)


def graph_ms(work: Callable[[], object]) -> float:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return milliseconds(graph.replay)


def clock_ms(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - start)


def tune(config: FormatsConfig) -> Iterator[dict[str, Any]]:
    """Times of a product of all layers, by tiling; None: as callers get it, perhaps by a kernel that takes no tiling.
    Other splits have other bits."""
    for name in config.formats:
        if name == "bf16":
            continue
        for outputs, inputs, gated in config.shapes:
            for rows in config.rows:
                x = torch.randn(rows, inputs, device=config.device).bfloat16()
                sets = [tunable(name, outputs, inputs, gated, config.device) for _ in range(config.layers)]
                for tiling in (None, *tilings(name, outputs, gated)):
                    try:
                        ms = timed(config, lambda tiling=tiling, sets=sets, x=x: [one(x, tiling) for one in sets])
                    except Exception as error:  # a tiling that does not fit
                        ms = None
                        print(tiling, str(error)[:100])
                    yield {"format": name, "shape": [outputs, inputs], "rows": rows, "tiling": str(tiling), "ms": ms}


def tunable(
    name: str, outputs: int, inputs: int, gated: bool, device: str
) -> Callable[[Tensor, Tiling | None], Tensor]:
    if name.startswith("int4"):
        stored = random_int4(outputs, inputs, name == "int4 zeros", device)
        return lambda x, tiling: int4.int4_linear.triton(x, stored, None, gated, None, tiling)
    codes = torch.randn(outputs, inputs, device=device).to(fp8.E4M3)
    blocks = name == "fp8 blocks"
    scales = torch.rand((outputs // 128, inputs // 128) if blocks else (outputs,), device=device)

    def multiply(x: Tensor, tiling: Tiling | None) -> Tensor:
        rows = fp8.quantize_rows(x, fp8.InputScales(by_block=blocks))
        return fp8.fp8_linear.triton(rows, codes, scales, None, gated, None, tiling)

    return multiply


def tilings(name: str, outputs: int, gated: bool) -> Iterator[Tiling]:
    depth, is_int4 = (int4_weight.CHUNK, True) if name.startswith("int4") else (fp8.BLOCK, False)
    for split in (1,) if gated else (1, 2, 4) if is_int4 else (1, 2, 4, 8):
        for size, warps in ((64, 4), (128, 8), *([(128, 4)] if is_int4 else [])):
            for stages in (3, 4, 6, 8):
                if outputs // size * split <= 2048:
                    yield Tiling(outputs=size, depth=depth, split=split, stages=stages, warps=warps)


def convert(source: Path, name: str, folder: Path) -> None:
    """Rounds the projections of `source` to the nearest in a format, on a GPU if there is one."""
    folder.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja", ".model") and not file.name.endswith("index.json"):
            shutil.copy(file, folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors: dict[str, Tensor] = {}
    for key, tensor in read_tensors(source).items():
        if key.endswith("_proj.weight"):
            base = key.removesuffix("weight")
            own = rounded_blocks(tensor.to(device)) if name == "fp8 blocks" else rounded_int4(tensor.to(device), name)
            tensors |= {f"{base}{end}": part.cpu() for end, part in own.items()}
        else:
            tensors[key] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors")
    config = read_json(folder / "config.json")
    if name == "fp8 blocks":
        own = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
    else:
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": name == "int4"}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
        own = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": own}, indent=1))


def rounded_blocks(weight: Tensor) -> dict[str, Tensor]:
    blocks = weight.float().unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scales = blocks.abs().amax((1, 3)) / fp8.LARGEST
    codes = (blocks / scales[:, None, :, None]).to(fp8.E4M3).flatten(2).flatten(0, 1)
    return {"weight": codes, "weight_scale_inv": scales}


def rounded_int4(weight: Tensor, name: str) -> dict[str, Tensor]:
    groups = weight.float().unflatten(1, (-1, GROUP))
    low, high = groups.amin(2), groups.amax(2)
    symmetric = name == "int4"
    scales = (torch.maximum(high, -low) / 7 if symmetric else (high - low) / 15).bfloat16()
    zeros = torch.full_like(scales, 8) if symmetric else (-low / scales).round().clamp(0, 15)
    codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 15).flatten(1)
    shape = torch.tensor(weight.shape)
    tensors = {"weight_packed": packed(codes), "weight_scale": scales, "weight_shape": shape}
    return tensors if symmetric else tensors | {"weight_zero_point": packed(zeros.t()).t().contiguous()}


def packed(codes: Tensor) -> Tensor:
    """(n, 8 * m) -> (n, m) int32, low nibbles first."""
    pairs = codes.to(torch.uint8).unflatten(1, (-1, 2))
    return (pairs[..., 0] | pairs[..., 1] << 4).contiguous().view(torch.int32)


if __name__ == "__main__":
    run(formats, FormatsConfig, None, "bench/formats.py")
