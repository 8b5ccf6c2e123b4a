"""Which kernel computes a product of a linear layer: one table for all formats of weights, numbers of rows, and shapes.

The first rule of a format that takes a product decides. Rules ask nothing but the product and the device, so
`slipstream kernels` prints choices for a GPU that is not there. Whether a format has kernels on a device at all, their
modules know (`runs_kernels`); with an order of sums, start-up finds out where the library keeps it (fixed_order.py).
Choices were measured on an H200 (docs/internals/quantisation.md, docs/log/).
"""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.gemm.int4_weight import CHUNK
from slipstream.kernels.gemm.tiling import (
    MAX_OUTPUTS,
    SHARED_MEMORY,
    Tiling,
    Wide,
    choose_fp8_tiling,
    choose_int4_tiling,
    choose_split,
    choose_tiling,
    choose_wide,
    cut_leaves,
    own_parts,
    part_inputs,
)
from slipstream.kernels.kv.rope import Rotation
from slipstream.kernels.launch import shared_memory, use_triton

Format = Literal["16 bits", "fp8", "fp8 blocks", "int4", "mxfp4"]
Kind = Literal["plain", "gated", "rotated", "mlp", "experts"]
"""A product alone; with the activation of a gated MLP; with the rotation of heads; a whole gated MLP; experts."""
Kernel = Literal[
    "library",  # torch's
    "library by parts",  # fixed_order.linear_by_parts
    "few rows",  # small_m.py
    "streamed",  # streamed_linear.py
    "many rows",  # fixed_order.py
    "fp8 mlp",  # streamed_fp8.py
    "fp8 few rows",  # fp8.py
    "fp8 many rows",  # likewise
    "int4",  # int4.py
    "int4 streamed",  # streamed_int4.py
    "int4 pipelined",  # pipelined_int4.py
    "int4 wide",  # wide_int4.py
    "dequantised",  # into memory, then as a product of 16 bits
    "experts",  # grouped.py
    "experts, large tiles",  # likewise, of the down projection
    "experts, fp8 blocks",  # grouped_fp8.py
    "apart",  # the product, then the rotation; gate and up, then down
]
HALVES = (torch.bfloat16, torch.float16)
TILE = 64  # outputs, as `wgmma` takes them
FP8_BLOCK = 128
NO_LIMIT = 1 << 62
STREAMED_ROWS = {"16 bits": 8, "fp8": 32, "fp8 blocks": 32}
STREAMED_GATED_ROWS = 32  # of 16 bits
STREAMED_BYTES = 64 << 20  # of larger weights the first tiles are too small a share to gain anything; not of blocks
STREAMED_INT4_ROWS = 16
MOST_BRANCHES = 2  # of a tree of leaves, into which the streamed kernel shares out inputs: sums in order are the tree's
PIPELINED_ROWS = 8
FEW_ROWS = 128  # of kernels that read weights once and share inputs out
FEW_GATED_ROWS = 64  # likewise, in FP8
EXPERT_ROWS = 128  # of a block of pairs that fills large tiles
SUMMED_ROWS = 32  # tokens up to which the down projection sums the outputs of experts
FAST_ROWS = 64  # of 16 bits, up to which our kernels are faster than the library, or as fast
WIDE_ROWS = 1024  # more were not tried; dequantising takes less of their time
MOST_UNORDERED_ROWS = 256  # of 4-bit products that the library computes whole beyond, where nothing orders them


class Device(NamedTuple):
    """A device, as far as choices depend on it."""

    has_kernels: bool = True  # a GPU, outside autograd
    is_hopper: bool = True  # earlier and later GPUs multiply by other instructions
    programs: int = 132  # that run at once
    shared_memory: int = 227 << 10
    library: frozenset[Format] = frozenset(("fp8", "fp8 blocks"))
    """Formats of FP8 that torch multiplies in the order of our kernels."""


class Product(NamedTuple):
    """A product of rows (M, I) with weights (O, I)."""

    format: Format
    num_rows: int
    num_outputs: int  # gates and ups, of a gated product
    num_inputs: int
    kind: Kind = "plain"
    is_exact: bool = False  # rows have the same bits in a pass of any size
    dtype: torch.dtype = torch.bfloat16  # of rows before they are quantised
    head_dim: int = 0  # of heads that are rotated
    has_codes: bool = False  # a KV cache in FP8
    is_aligned: bool = True  # rows and weights begin at multiples of 16 bytes
    is_contiguous: bool = True  # rows of 4-bit weights, 16-bit weights and scales of inputs by block have no gaps
    library: Kernel | None = None  # that start-up saw to keep the order, and to be faster, for so many rows
    size: int = 0  # hidden channels, of a whole MLP or an expert
    block_rows: int = 0  # pairs of a token and an expert in a block
    is_plain: bool = True  # experts without biases, whose activation is SiLU
    leaves: int = 0  # of the inputs, that are added along a tree (leaves.py)

    def tiling(self, device: Device) -> Tiling:
        """Tiles of few rows."""
        tiling = self._whole_tiling(device)
        return cut_leaves(tiling, self.num_inputs, self.leaves) if self.leaves else tiling

    def _whole_tiling(self, device: Device) -> Tiling:
        is_gated = self.kind == "gated"
        if self.format == "int4":
            small = device.is_hopper  # no other GPU's bits were compared
            return choose_int4_tiling(self.num_outputs, self.num_inputs, is_gated, self.num_rows, small)
        num_outputs = self.num_outputs // (1 + is_gated)
        if self.format == "16 bits":
            return choose_tiling(num_outputs, self.num_inputs, is_gated, self.num_rows)
        by_block = self.format == "fp8 blocks"
        return choose_fp8_tiling(num_outputs, self.num_inputs, is_gated, self.num_rows, by_block)


class Choice(NamedTuple):
    """A kernel, and its tiles of few rows."""

    kernel: Kernel
    tiling: Tiling
    wide: Wide | None = None


class Rule(NamedTuple):
    """Gives products of some kinds, with so many rows, that fit, to a kernel."""

    kernel: Kernel
    kinds: tuple[Kind, ...]
    max_rows: int = NO_LIMIT
    fits: Callable[[Product, Device], bool] = lambda *_: True
    min_rows: int = 0


def library_takes(product: Product, device: Device, split: int = 1) -> bool:
    """Whether torch multiplies FP8, in `split` parts of the inputs. Scales by block must lie 16 bytes at a time, as
    those of more than FEW_ROWS rows do, and of many inputs."""
    if product.format == "fp8 blocks":
        fits = product.num_outputs % FP8_BLOCK == product.num_inputs % (4 * FP8_BLOCK * split) == 0
        fits &= product.num_rows % 4 == 0 and product.is_contiguous
    else:
        fits = product.num_outputs % 16 == product.num_inputs % 16 == 0
    return fits and product.dtype == torch.bfloat16 and product.format in device.library


def _multiplies_fp8(product: Product, device: Device) -> bool:
    if product.is_exact:
        return product.library is not None
    return product.num_rows > FEW_ROWS and library_takes(product, device)


def _few_rows(product: Product, device: Device) -> bool:
    """16-bit rows that load 16 bytes at a time; with an order there is no other kernel. For more than MAX_OUTPUTS, or
    more rows without a gate, the library is as fast."""
    if product.is_exact or not _rotates(product, device):
        return _rotates(product, device)
    fits = product.dtype in HALVES and product.num_inputs % TILE == 0 and product.is_contiguous
    fits &= device.has_kernels and device.shared_memory >= SHARED_MEMORY
    is_fast = product.num_outputs <= MAX_OUTPUTS and product.num_rows <= FAST_ROWS
    return fits and (product.kind == "gated" or is_fast)


def _rotates(product: Product, _: Device) -> bool:
    """Nothing is to be rotated, or programs have pairs of one head."""
    fits = product.library is None and product.head_dim % TILE == 0
    return product.kind != "rotated" or (fits and (product.format == "int4" or product.num_outputs <= MAX_OUTPUTS))


def _streams(product: Product, device: Device) -> bool:
    """Matrices of whole tiles that are not too large, parts of whole slots of 256 bytes. Those scaled by block may have
    any number of inputs, since two blocks are multiplied at once, but programs that run at once."""
    is_fp8 = product.format != "16 bits"
    by_block = product.format == "fp8 blocks"
    num_bytes = 1 if is_fp8 else 2
    tiling = product.tiling(device)
    part = part_inputs(product.num_inputs, tiling)
    fits = product.num_outputs % TILE == 0 and (tiling.split == 1 or part * num_bytes % 256 == 0)
    if by_block:
        fits &= product.num_inputs % (2 * FP8_BLOCK) == 0
        fits &= product.num_outputs // TILE * tiling.split <= device.programs
    if product.leaves:
        fits &= (
            not is_fp8 and tiling.split <= MOST_BRANCHES and product.num_inputs // product.leaves * num_bytes % 256 == 0
        )
    fits &= by_block or product.num_outputs * product.num_inputs * num_bytes <= STREAMED_BYTES
    fits &= product.is_aligned
    fits &= not product.has_codes and _rotates(product, device)
    fits &= is_fp8 or (product.dtype in HALVES and _few_rows(product, device))
    max_rows = STREAMED_ROWS.get(product.format, 0)
    return fits and product.num_rows <= max_rows and _are_resident(max_rows, device)


def _streams_gates(product: Product, device: Device) -> bool:
    """Whole tiles that run at once, two on a multiprocessor: of more the usual kernel is as fast."""
    fits = product.num_outputs % TILE == 0 and product.num_outputs // TILE <= 2 * device.programs
    fits &= product.is_aligned and not product.leaves
    return fits and product.dtype in HALVES and _few_rows(product, device) and _are_resident(1, device)


def _are_resident(num_programs: int, device: Device) -> bool:
    """Whether all run at once, so that they may wait for each other."""
    return device.has_kernels and device.is_hopper and num_programs <= device.programs


def _whole_mlp(product: Product, device: Device) -> bool:
    """Matrices of whole tiles and steps, not scaled by block."""
    split = choose_split(product.num_outputs, product.size)
    steps = product.num_inputs % (2 * FP8_BLOCK) == product.size % (2 * FP8_BLOCK * split) == 0
    fits = steps and product.num_outputs % TILE == 0 and product.dtype == torch.bfloat16
    return fits and product.format == "fp8" and _are_resident(STREAMED_ROWS["fp8"], device)


def _has_whole_chunks(product: Product, device: Device, outputs: int = TILE) -> bool:
    """Tiles of 4-bit weights on Hopper, of which no part is empty."""
    split = product.tiling(device).split
    part = part_inputs(product.num_inputs, product.tiling(device))
    fits = product.num_inputs % CHUNK == part % CHUNK == product.num_outputs % outputs == 0
    fits &= part * (split - 1) < product.num_inputs and product.dtype in HALVES and product.is_aligned
    return fits and device.has_kernels and device.is_hopper


def _streams_int4(product: Product, device: Device) -> bool:
    """All programs are resident at once. Others would be scheduled only when the rows are ready."""
    fits = product.is_contiguous and product.dtype == torch.bfloat16 and _has_whole_chunks(product, device)
    fits &= product.num_outputs // TILE * product.tiling(device).split <= 2 * device.programs
    return fits and _are_resident(STREAMED_INT4_ROWS, device)


def _pipelines_int4(product: Product, device: Device) -> bool:
    """Heads are rotated if each program sums all parts of its outputs."""
    tiling = product.tiling(device)
    sums_all = own_parts(PIPELINED_ROWS, product.num_inputs, tiling) == tiling.split
    fits = product.kind != "rotated" or (sums_all and not product.has_codes and _rotates(product, device))
    fits &= product.is_contiguous and _has_whole_chunks(product, device)
    return fits and _are_resident(PIPELINED_ROWS, device)


def _find_wide(product: Product, device: Device) -> Wide | None:
    """None where too few programs would have work: the usual kernel, or dequantising, is faster."""
    is_gated = product.kind == "gated"
    max_rows = WIDE_ROWS if is_gated or product.is_exact else MOST_UNORDERED_ROWS
    if not (33 if is_gated else 17) <= product.num_rows <= max_rows or not _has_whole_chunks(
        product, device, outputs=CHUNK
    ):
        return None
    split = product.tiling(device).split
    return choose_wide(product.num_rows, product.num_outputs, split, is_gated, device.programs)


def _has_large_tiles(product: Product, device: Device) -> bool:
    """GPUs that have room for them, Hopper's and later ones, have the accelerator, too, which loads rows of whole 16
    bytes."""
    fits = product.dtype in HALVES and product.size % 8 == 0
    return fits and product.block_rows == EXPERT_ROWS and device.shared_memory >= SHARED_MEMORY


def _has_fp8_blocks(product: Product, device: Device) -> bool:
    fits = product.is_plain and product.num_outputs % FP8_BLOCK == product.size % FP8_BLOCK == 0
    return fits and product.block_rows == EXPERT_ROWS and device.shared_memory >= SHARED_MEMORY


FP8_RULES = (
    Rule("library", ("plain",), fits=_multiplies_fp8),
    Rule("streamed", ("plain", "rotated"), fits=_streams, min_rows=1),
    Rule("fp8 mlp", ("mlp",), STREAMED_ROWS["fp8"], _whole_mlp, min_rows=1),
    Rule("fp8 few rows", ("plain", "rotated"), FEW_ROWS, _rotates),
    Rule("fp8 few rows", ("gated",), FEW_GATED_ROWS),
    Rule("fp8 many rows", ("plain", "gated")),
    Rule("experts, fp8 blocks", ("experts",), fits=_has_fp8_blocks),
)
OTHERWISE = (Rule("experts", ("experts",)), Rule("apart", ("rotated", "mlp")))
TABLE: dict[Format, tuple[Rule, ...]] = {
    "16 bits": (
        Rule("library", ("plain",), fits=lambda product, _: product.library == "library"),
        Rule("library by parts", ("plain",), fits=lambda product, _: product.library is not None),
        Rule("streamed", ("plain", "rotated"), fits=_streams, min_rows=1),
        Rule("streamed", ("gated",), STREAMED_GATED_ROWS, _streams_gates, min_rows=1),
        Rule("few rows", ("plain", "gated", "rotated"), FEW_ROWS, _few_rows),
        Rule("many rows", ("plain", "gated"), fits=lambda product, _: product.is_exact and product.library is None),
        Rule("library", ("plain", "gated")),
        Rule("experts, large tiles", ("experts",), fits=_has_large_tiles, min_rows=SUMMED_ROWS + 1),
        *OTHERWISE,
    ),
    "fp8": (*FP8_RULES, *OTHERWISE),
    "fp8 blocks": (*FP8_RULES, *OTHERWISE),
    "int4": (
        Rule("int4 wide", ("plain", "gated"), fits=lambda *facts: _find_wide(*facts) is not None),
        Rule("int4 streamed", ("plain",), STREAMED_INT4_ROWS, _streams_int4, min_rows=1),
        Rule("int4 pipelined", ("plain", "gated", "rotated"), PIPELINED_ROWS, _pipelines_int4, min_rows=1),
        Rule("int4", ("plain", "gated", "rotated"), FEW_ROWS, _rotates),
        Rule("dequantised", ("plain", "gated")),
        *OTHERWISE,
    ),
    "mxfp4": OTHERWISE,
}


@lru_cache(maxsize=1 << 12)
def choose(product: Product, device: Device) -> Choice:
    """Returns the kernel of a product, by the first rule that takes it."""
    for rule in TABLE[product.format]:
        if (
            product.kind in rule.kinds
            and rule.min_rows <= product.num_rows <= rule.max_rows
            and rule.fits(product, device)
        ):
            wide = _find_wide(product, device) if rule.kernel == "int4 wide" else None
            return Choice(rule.kernel, product.tiling(device), wide)
    raise AssertionError(f"no rule takes {product}")


def device_of(x: Tensor) -> Device:
    return _device(x.device, use_triton(x))


@cache
def _device(device: torch.device, has_kernels: bool) -> Device:
    if device.type != "cuda":
        return Device(has_kernels, False, 0, shared_memory(device), frozenset())
    is_hopper = torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)
    formats: list[Format] = []
    if is_hopper and torch.version.cuda is not None:
        formats = ["fp8"]
        if tuple(int(number) for number in torch.version.cuda.split(".")) >= (12, 9):
            formats.append("fp8 blocks")
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    return Device(has_kernels, is_hopper, programs, shared_memory(device), frozenset(formats))


def are_aligned(*matrices: Tensor) -> bool:
    """Whether the tensor memory accelerator brings tiles of matrices."""
    steps = ((x.data_ptr(), x.stride(0) * x.element_size()) for x in matrices)
    return all(x.stride(1) == 1 for x in matrices) and not any(step % 16 for pair in steps for step in pair)


def product_of(
    x: Tensor,
    weight: Tensor,
    kind: Kind = "plain",
    is_exact: bool = False,
    rotation: Rotation | None = None,
    library: Kernel | None = None,
    leaves: int = 0,
) -> Product:
    """Describes the product of rows x (M, I) with weights (O, I) of 16 or 32 bits."""
    return Product(
        "16 bits",
        len(x),
        len(weight),
        weight.shape[1],
        kind,
        is_exact,
        x.dtype if x.dtype == weight.dtype else torch.float32,
        0 if rotation is None else rotation.head_dim,
        rotation is not None and rotation.scales is not None,
        len(x) <= STREAMED_GATED_ROWS and are_aligned(x, weight),
        weight.stride(-1) == 1,
        library,
        leaves=leaves,
    )
