"""`slipstream kernels`: prints the table of kernels (kernels/gemm/choose.py) for the shapes of a target.

The layers are built without weights, quantised where the checkpoint's config lists them, and asked as in a pass.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from slipstream.kernels.gemm.choose import Device, Kernel, Product, choose
from slipstream.kernels.gemm.fixed_order import FixedOrder
from slipstream.models.drafts.mtp import MTP, MTPConfig, mtp_quantization
from slipstream.models.files.checkpoint import read_json, resolve
from slipstream.models.layers.attention import SelfAttention
from slipstream.models.layers.formats.base import Quantization, QuantizedExperts, QuantizedLinear
from slipstream.models.layers.formats.table import read_quantization
from slipstream.models.layers.linear import Linear
from slipstream.models.layers.mlp import GatedMLP
from slipstream.models.layers.moe import Experts
from slipstream.models.layers.quantized import quantize_by_config
from slipstream.models.targets.config import TargetSpec
from slipstream.models.targets.decoder import Target, load_config
from slipstream.models.targets.sizes import weight_bytes
from slipstream.serve.engine.engine_plan import find_unordered
from slipstream.serve.kernels_options import KernelsConfig

GPUS = {
    "h100": Device(),
    "h200": Device(),
    "b200": Device(is_hopper=False, programs=148, library=frozenset()),
}
NOTE = """In exact arithmetic torch's library multiplies many rows if start-up finds that it adds in the same order and
is faster. docs/internals/quantisation.md explains the kernels."""


class Line(NamedTuple):
    """A projection, or experts."""

    name: str
    format: str
    shape: str
    bits: str  # of a weight, with its scales
    kernels: tuple[Kernel, ...]  # by numbers of rows


@dataclass(frozen=True, slots=True)
class Pass:
    """The rows and the device of a pass."""

    num_rows: int
    dtype: torch.dtype
    device: Device
    has_codes: bool

    def kernel(self, product: Product) -> Kernel:
        return choose(product, self.device).kernel

    def linear(self, name: str, layer: Linear, owner: nn.Module | None) -> Kernel:
        """Returns the kernel of a projection of an attention or an MLP, `owner`, as that calls it."""
        if isinstance(owner, GatedMLP):
            gate_up = owner.gate_up_proj
            mlp = gate_up.mlp_product(owner.down_proj, self.num_rows, self.dtype)
            if mlp is not None and owner.activation == "silu" and (kernel := self.kernel(mlp)) != "apart":
                return kernel
            if layer is gate_up:
                kind = layer.gated_kind(self.num_rows, owner.activation)
                return self.kernel(layer.product(self.num_rows, kind, self.dtype))
        if isinstance(owner, SelfAttention) and name == "qkv_proj" and rotates(owner):
            product = layer.product(self.num_rows, "rotated", self.dtype)
            kernel = self.kernel(product._replace(head_dim=owner.head_dim, has_codes=self.has_codes))
            if kernel != "apart":
                return kernel
        return self.kernel(layer.product(self.num_rows, "plain", self.dtype))

    def experts(self, layer: Experts, hidden_size: int) -> Kernel:
        return self.kernel(layer.product(self.num_rows, hidden_size, self.dtype))


def rotates(attention: SelfAttention) -> bool:
    """Whether the projection may rotate heads: they have no norms, and all their dims are rotated alike."""
    spec = attention.spec
    has_norms = attention.norms is not None or spec.projection_norm
    is_whole = spec.rope.query_growth is None and spec.rope.rotary_dim(spec.head_dim) == spec.head_dim
    return is_whole and not has_norms


def print_kernels(config: KernelsConfig) -> None:
    print(report(config))


def report(config: KernelsConfig) -> str:
    """Returns the lines to print. Raises ValueError for a target that is not served, and options that do not fit it."""
    path = resolve(config.target, trust_remote_code=config.trust_remote_code, weights=False)
    spec = load_config(path, config.trust_remote_code)
    formats = read_quantization(path, config.quantization)
    values = read_json(path / "config.json")
    dtype = torch.float16 if values.get("dtype", values.get("torch_dtype")) == "float16" else torch.bfloat16
    with torch.device("meta"):
        target = Target(spec)
    quantize_by_config(target, formats)
    is_exact = fix_order(config, target)
    has_codes = config.kv_cache_dtype == "fp8"
    passes = [Pass(num_rows, dtype, GPUS[config.gpu], has_codes) for num_rows in config.rows]
    kind = str(dtype).removeprefix("torch.")
    kind = kind if formats is None else f"{formats.name}, {kind}"
    order = "exact" if is_exact else "without an order of sums"
    lines = lines_of(target, passes)
    if config.draft == "mtp":
        lines = {**lines, **mtp_lines(spec, path, formats, passes)}
    title = f"{config.target} ({spec.architecture}, {kind}) on one {config.gpu.upper()}, {order}"
    return "\n".join((title, "", *rows_of(lines, config.rows), "", NOTE))


def fix_order(config: KernelsConfig, target: Target) -> bool:
    """Gives layers an order of sums as the server does; says whether they have one."""
    fault = find_unordered(target)
    if fault and config.exact:
        raise ValueError(f"exact is true, but {fault}; leave exact out")
    is_exact = config.exact is not False and not fault
    for module in target.modules():
        if isinstance(module, Linear):
            module.order = FixedOrder() if is_exact else None
    return is_exact


def lines_of(target: Target, passes: list[Pass]) -> Mapping[Line, list[int]]:
    """Returns lines with the layers that they are of; the head is of none."""
    lines: dict[Line, list[int]] = {}
    for index, layer in enumerate(target.layers):
        for line in lines_in(layer, target.config.hidden_size, passes):
            lines.setdefault(line, []).append(index)
    return lines | {line_of("lm_head", target.lm_head, None, target.config.hidden_size, passes): []}


def mtp_lines(
    spec: TargetSpec, path: Path, formats: Quantization | None, passes: list[Pass]
) -> Mapping[Line, list[int]]:
    """Returns the lines of the target's MTP head, which shares the target's output head and has no order of sums."""
    with torch.device("meta"):
        module = MTP(MTPConfig.of(spec, path))
    quantize_by_config(module, mtp_quantization(formats, spec))
    lines = lines_in(module, spec.hidden_size, passes)
    return {line._replace(name="mtp." + re.sub(r"layers\.\d+\.", "", line.name)): [] for line in lines}


def lines_in(module: nn.Module, hidden_size: int, passes: list[Pass]) -> Iterator[Line]:
    modules = dict(module.named_modules())
    for path, part in modules.items():
        if isinstance(part, Linear | Experts):
            yield line_of(path, part, modules.get(path.rpartition(".")[0]), hidden_size, passes)


def line_of(path: str, layer: Linear | Experts, owner: nn.Module | None, hidden_size: int, passes: list[Pass]) -> Line:
    if isinstance(layer, Linear):
        kernels = tuple(rows.linear(path.rpartition(".")[2], layer, owner) for rows in passes)
        shape = f"{layer.out_features} x {layer.in_features}"
        count = layer.out_features * layer.in_features
    else:
        kernels = tuple(rows.experts(layer, hidden_size) for rows in passes)
        shape = f"{layer.spec.num_experts} of {layer.spec.intermediate_size} x {hidden_size}"
        count = 3 * layer.spec.num_experts * layer.spec.intermediate_size * hidden_size
    bits = 8 * weight_bytes(layer, passes[0].dtype) / count
    return Line(path, format_of(layer), shape, f"{bits:.2f}", kernels)


def format_of(layer: Linear | Experts) -> str:
    if isinstance(layer, QuantizedLinear):
        return layer.format.description
    formats = layer.formats if isinstance(layer, QuantizedExperts) else ()
    return ", ".join(dict.fromkeys(format.description for format in formats)) or "16 bits"


def rows_of(lines: Mapping[Line, list[int]], rows: tuple[int, ...]) -> Iterator[str]:
    """Yields the lines of a table with aligned columns."""
    cells = [["layer", "layers", "format", "shape", "bits", *(f"{num_rows:,} rows" for num_rows in rows)]]
    cells += [
        [line.name, ranges(layers), line.format, line.shape, line.bits, *line.kernels] for line, layers in lines.items()
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def ranges(layers: list[int]) -> str:
    """Returns the numbers of layers in short, such as 0-3, 5."""
    starts = [index for index in layers if index - 1 not in layers]
    ends = [index for index in layers if index + 1 not in layers]
    pairs = zip(starts, ends, strict=True)
    return ", ".join(f"{start}-{end}" if end > start else str(start) for start, end in pairs)
