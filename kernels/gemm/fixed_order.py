"""Linear layers on a GPU whose rows have the same bits whatever rows are computed beside them.

The order in which a row's products are added decides its bits, not the tile that computes it: on Hopper Triton's and
cuBLAS's kernels agree wherever both add in the order of the inputs. Each product here is cut into as many parts as
kernels/gemm/small_m.py cuts it into for few rows. Those programs sum parts side by side; for many rows one program sums
them one after another, or the library computes the parts and a kernel adds them. The library computes whole products
for the numbers of rows for which it was seen to give the same bits.
Letters: M rows, I inputs, O outputs, S parts.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from slipstream.kernels.gemm.activation import Activation, activation_mul
from slipstream.kernels.gemm.choose import FAST_ROWS, Kernel, choose, device_of, product_of
from slipstream.kernels.gemm.leaves import end_leaf, end_tree, load_tree, new_branches
from slipstream.kernels.gemm.linear import few_rows, gated_few_rows
from slipstream.kernels.gemm.small_m import MAX_ROWS
from slipstream.kernels.gemm.tiling import MAX_OUTPUTS, SHARED_MEMORY, choose_tiling, part_inputs
from slipstream.kernels.kv.rope import Rotation
from slipstream.kernels.launch import pdl_options, shared_memory, wait_for_inputs
from slipstream.kernels.tiles import load_fp32, store_tile, tile_of_program

DEPTH = 64  # inputs of a tile
LEAF_TILE = 64, 128  # rows and outputs of a program whose registers hold sums of several branches of a tree
TIMED_CALLS = 8  # of each way to multiply
HIDING_CALLS = 24  # of a product of many rows, meanwhile: a busy host launches the timed ones in .5 to 1 ms
ProductKey = tuple[int, int, bool, bool, int]  # O, I, whether there is a bias, whether it is gated, inputs of a part
LeafProduct = tuple[int, int, int]  # O, I, leaves
FP8Product = tuple[int, int, bool, bool]  # O, I, whether there is a bias, whether scales are by block


class FixedOrder:
    """Multiplies a target's weights of 16 bits. Our kernels compute the products that `check` was not asked about."""

    def __init__(self) -> None:
        self.by_library: dict[ProductKey, dict[int, Kernel]] = {}  # by numbers of rows
        self.fp8_by_library: dict[FP8Product, set[int]] = {}  # numbers of rows
        self.leaves_by_library: dict[LeafProduct, set[int]] = {}  # likewise
        self.suits_ranks = False  # whether all sums are the same on any number of ranks

    @staticmethod
    def fault(device: torch.device, dtype: torch.dtype) -> str:
        """Why there is no fixed order; empty if there is."""
        if device.type != "cuda":
            return "libraries for a CPU add in another order for another number of rows"
        if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (9, 0):
            return f"the kernels need compute capability 9.0, which {torch.cuda.get_device_name(device)} has not"
        if shared_memory(device) < SHARED_MEMORY:
            size = f"{SHARED_MEMORY >> 10} KB of shared memory for a program"
            return f"the kernels need {size}, which {torch.cuda.get_device_name(device)} has not"
        return "" if dtype in (torch.bfloat16, torch.float16) else f"weights are {dtype}, not of 16 bits"

    def check(
        self, weight: Tensor, bias: Tensor | None, rows: Iterable[int], *, gated: bool = False, part: int | None = None
    ) -> None:
        """Finds out for which numbers of rows the library adds like us, by comparing the bits of random rows: whole
        products, or parts of them where that is faster than our kernel. `part` as in `linear`."""
        fewest = MAX_ROWS if gated else FAST_ROWS if len(weight) <= MAX_OUTPUTS else 0  # for which ours are as fast
        counts = sorted(count for count in set(rows) if count > fewest)
        our_part = part or usual_part(weight, gated)
        kernels = self.by_library.setdefault((*weight.shape, bias is not None, gated, our_part), {})
        if not counts:
            return
        generator = torch.Generator(weight.device).manual_seed(0)
        size = counts[-1], weight.shape[1]
        x = torch.randn(size, generator=generator, device=weight.device).to(weight.dtype)
        ours = linear_many_rows_triton(x, weight, bias, part=our_part)
        by_parts = partial(linear_by_parts, part=our_part)
        for count in counts:
            rows_x = x[:count]
            if torch.equal(F.linear(rows_x, weight, bias), ours[:count]):
                kernels[count] = "library"
            elif has_equal_parts(weight, our_part) and torch.equal(by_parts(rows_x, weight, bias), ours[:count]):
                full_product = partial(linear_many_rows_triton, x, weight, bias)
                times = [
                    milliseconds(run, full_product)
                    for run in (
                        partial(by_parts, rows_x, weight, bias),
                        partial(self._multiply, rows_x, weight, bias, part, None),
                    )
                ]
                if times[0] < times[1]:
                    kernels[count] = "library by parts"

    def check_leaves(self, weight: Tensor, leaves: int, rows: Iterable[int]) -> None:
        """`check` of products whose leaves are added along a tree: the library computes the leaves where that gives the
        bits of our kernels, and is faster."""
        counts = sorted(count for count in set(rows) if count > FAST_ROWS)
        by_library = self.leaves_by_library.setdefault((*weight.shape, leaves), set())
        if not counts:
            return
        generator = torch.Generator(weight.device).manual_seed(0)
        size = counts[-1], weight.shape[1]
        x = torch.randn(size, generator=generator, device=weight.device).to(weight.dtype)
        ours = linear_many_rows_triton(x, weight, leaves=leaves)
        full_product = partial(linear_many_rows_triton, x, weight, leaves=leaves)
        for count in counts:
            leaf = weight.shape[1] // leaves
            by_leaves = partial(linear_by_parts, x[:count], weight, part=leaf, tree=True)
            if torch.equal(by_leaves(), ours[:count]):
                by_kernel = partial(linear_many_rows_triton, x[:count], weight, leaves=leaves)
                if milliseconds(by_leaves, full_product) < milliseconds(by_kernel, full_product):
                    by_library.add(count)

    def leaf_linear(
        self,
        x: Tensor,
        weight: Tensor,
        leaves: int,
        bias: Tensor | None = None,
        dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """x (..., I) @ weight (O, I).T + bias (O,) -> (..., O) in `dtype`, by default that of x. The inputs' leaves are
        added along a tree: those of a rank, for whose partial sums `dtype` is fp32 and there is no bias, give a branch
        of it (leaves.py). But for the fewest rows it is stored in `out` (M, O), if given."""
        rows = x.numel() // x.shape[-1]
        flat = x.reshape(rows, x.shape[-1])
        dtype = dtype or x.dtype
        by_library = rows in self.leaves_by_library.get((*weight.shape, leaves), ())
        library: Kernel | None = "library by parts" if by_library else None
        choice = choose(product_of(flat, weight, is_exact=True, library=library, leaves=leaves), device_of(x))
        if choice.kernel in ("streamed", "few rows"):
            return few_rows(choice, flat, weight, bias, dtype=dtype, out=out).view(*x.shape[:-1], len(weight))
        out = torch.empty(rows, len(weight), dtype=dtype, device=x.device) if out is None else out
        if choice.kernel == "library by parts":
            linear_by_parts(flat, weight, bias, weight.shape[1] // leaves, out, tree=True)
        else:
            linear_many_rows_triton(flat, weight, bias, leaves=leaves, out=out)
        return out.view(*x.shape[:-1], len(weight))

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, part: int | None = None) -> Tensor:
        """x (..., I) @ weight (O, I).T + bias (O,) -> (..., O). `part`: inputs that are added up in one part, where
        these are not those of few rows of 16-bit weights."""
        rows = x.numel() // x.shape[-1]
        library = self._library(rows, weight, bias, part or usual_part(weight))
        return self._multiply(x.reshape(rows, x.shape[-1]), weight, bias, part, library).view(
            *x.shape[:-1], len(weight)
        )

    def rotated_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, rotation: Rotation, leaves: int = 0
    ) -> Tensor | None:
        """See kernels/gemm/linear.py; the bits are those of `linear`, or `leaf_linear`, and of the kernel that
        rotates."""
        if not rotation.is_whole:
            return None
        library = None if leaves else self._library(len(x), weight, bias, usual_part(weight))
        choice = choose(product_of(x, weight, "rotated", True, rotation, library, leaves), device_of(x))
        return None if choice.kernel == "apart" else few_rows(choice, x, weight, bias, rotation)

    def gated_linear(
        self, x: Tensor, weight: Tensor, activation: Activation = "silu", *, is_early: bool = False
    ) -> Tensor:
        """activation_mul(x (..., I) @ weight (2 * O, I).T) -> (..., O), gate before up. is_early: see
        `gated_linear_few_rows_triton`."""
        rows = x.numel() // x.shape[-1]
        flat = x.reshape(rows, x.shape[-1])
        library = self._library(rows, weight, None, weight.shape[1], gated=True)
        choice = choose(product_of(flat, weight, "gated", True, library=library), device_of(x))
        if choice.kernel in ("streamed", "few rows"):
            out = gated_few_rows(choice, flat, weight, activation, is_early)
        elif choice.kernel == "library":
            out = activation_mul(F.linear(flat, weight), activation)
        else:
            out = activation_mul(linear_many_rows_triton(flat, weight, part=weight.shape[1]), activation)
        return out.view(*x.shape[:-1], len(weight) // 2)

    def _library(self, rows: int, weight: Tensor, bias: Tensor | None, part: int, gated: bool = False) -> Kernel | None:
        """How the library multiplies so many rows, if it does."""
        return self.by_library.get((*weight.shape, bias is not None, gated, part), {}).get(rows)

    @staticmethod
    def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, part: int | None, library: Kernel | None) -> Tensor:
        kernel: Kernel = "many rows"  # the only one of ours whose parts may be others
        if part is None or library is not None:
            choice = choose(product_of(x, weight, is_exact=True, library=library), device_of(x))
            kernel = choice.kernel
        if kernel == "library":
            return F.linear(x, weight, bias)
        if kernel == "library by parts":
            return linear_by_parts(x, weight, bias, part)
        if kernel == "many rows":
            return linear_many_rows_triton(x, weight, bias, part=part)
        return few_rows(choice, x, weight, bias)


def milliseconds(run: Callable[[], object], meanwhile: Callable[[], object]) -> float:
    """Times some calls of `run`, which has run before; their launch is hidden behind calls of `meanwhile`."""
    for _ in range(HIDING_CALLS):
        meanwhile()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(TIMED_CALLS):
        run()
    end.record()
    torch.cuda.synchronize()  # sync
    return start.elapsed_time(end)


def usual_part(weight: Tensor, gated: bool = False) -> int:
    """Inputs of each of the parts into which products of few rows are cut."""
    num_inputs = weight.shape[1]
    return num_inputs if gated else min(part_inputs(num_inputs, choose_tiling(*weight.shape)), num_inputs)


def has_equal_parts(weight: Tensor, part: int | None = None) -> bool:
    """Whether there are several parts, all of as many inputs."""
    part = part or usual_part(weight)
    return part < weight.shape[1] and weight.shape[1] % part == 0


def linear_by_parts(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    part: int | None = None,
    out: Tensor | None = None,
    *,
    tree: bool = False,
) -> Tensor:
    """x (M, I) @ weight (O, I).T + bias (O,) -> (M, O): parts by the library, in one batch, added in their order, or
    along a tree. `out` (M, O) receives the result, in its dtype."""
    part = part or usual_part(weight)
    x_parts = x.unflatten(1, (-1, part)).transpose(0, 1)
    weight_parts = weight.unflatten(1, (-1, part)).permute(1, 2, 0)
    parts = torch.bmm(x_parts, weight_parts, out_dtype=torch.float32)
    return sum_parts_triton(parts, bias, x.dtype, tree=tree, out=out)


def sum_parts_triton(
    parts: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    scales: tuple[Tensor, Tensor] | None = None,
    *,
    tree: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """parts (S, M, O) fp32, bias (O,) -> their sum (M, O) in `dtype`, or in `out`, in order or along a tree. `scales`:
    of outputs (O,) and rows (M,), by which the sum is multiplied first."""
    split, num_rows, num_outputs = parts.shape
    if out is None:
        out = torch.empty(num_rows, num_outputs, dtype=dtype, device=parts.device)
    assert out.is_contiguous()
    size = num_rows * num_outputs
    output_scales, row_scales = scales or (None, None)
    stride = 0 if row_scales is None else row_scales.stride(0)
    sum_parts_kernel[(triton.cdiv(size, 2048),)](
        parts, output_scales, row_scales, bias, out, size, num_outputs, stride,
        SPLIT=split, TREE=tree, BLOCK=2048, num_warps=8, **pdl_options(parts.device),
    )  # fmt: skip
    return out


@triton.jit
def sum_parts_kernel(
    parts_ptr, output_scales_ptr, row_scales_ptr, bias_ptr, out_ptr, size, num_outputs, row_scale_stride,
    SPLIT: tl.constexpr, TREE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    cell = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = cell < size
    output = cell % num_outputs
    if TREE:
        total = load_tree(parts_ptr + cell, size.to(tl.int64), inside, 0, SPLIT)
    else:
        total = tl.zeros((BLOCK,), tl.float32)
        for part in tl.static_range(SPLIT):
            total += tl.load(parts_ptr + part * size.to(tl.int64) + cell, mask=inside, other=0.0)
    if output_scales_ptr is not None:
        total *= tl.load(output_scales_ptr + output, mask=inside, other=0.0)
        total *= tl.load(row_scales_ptr + cell // num_outputs * row_scale_stride, mask=inside, other=0.0)
    if bias_ptr is not None:
        total += load_fp32(bias_ptr + output, inside)
    tl.store(out_ptr + cell, total.to(out_ptr.dtype.element_ty), mask=inside)


def linear_many_rows_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    tile: tuple[int, int] | None = None,
    part: int | None = None,
    leaves: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """x (M, I) @ weight (O, I).T + bias (O,) -> (M, O), with the bits of `linear_few_rows_triton`.

    tile: rows and outputs of a program; part: inputs of a part, all for a product whose few rows are gated in their
    kernel; `leaves` instead: added along a tree. `out` (M, O) receives the result, in its dtype.
    """
    num_rows, num_inputs = x.shape
    num_outputs = len(weight)
    x = x if x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 else x.contiguous()
    assert weight.stride(1) == 1
    if out is None:
        out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    assert out.is_contiguous()
    if num_rows == 0:
        return out
    part = num_inputs // leaves if leaves else part or usual_part(weight)
    rows, outputs = tile or (LEAF_TILE if leaves > 1 else _choose_tile(num_rows))
    is_large = rows * outputs > 8192
    describe: Any = TensorDescriptor.from_tensor
    linear_many_kernel[(triton.cdiv(num_rows, rows) * triton.cdiv(num_outputs, outputs),)](
        describe(x, [rows, DEPTH]), describe(weight, [outputs, DEPTH]), bias, out, num_rows, num_outputs, num_inputs,
        part,
        ROWS=rows, OUTPUTS=outputs, DEPTH=DEPTH, SPLIT=triton.cdiv(num_inputs, part), GROUP=8, PRECISION="ieee",
        LEVELS=leaves.bit_length() - 1 if leaves else -1,
        num_stages=4 if is_large else 5, num_warps=8 if is_large or leaves > 1 else 4,
    )  # fmt: skip
    return out


def _choose_tile(num_rows: int) -> tuple[int, int]:
    """The fastest of some for the two products of an 8B Llama that the library adds otherwise (H200)."""
    return (64, 128) if num_rows <= 256 else (128, 128)


@triton.jit(do_not_specialize=["num_rows"])
def linear_many_kernel(
    x_desc, weight_desc, bias_ptr, out_ptr, num_rows, num_outputs, num_inputs, part,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, SPLIT: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """One tile. LEVELS: of the tree of parts; -1: these are added in their order."""
    row, output = tile_of_program(num_rows, num_outputs, ROWS, OUTPUTS, GROUP)
    result = tl.zeros((ROWS, OUTPUTS), tl.float32)
    if LEVELS >= 0:
        branches = new_branches(result, LEVELS)
        for index in range(SPLIT):
            result = _sum_part(
                x_desc, weight_desc, row, output, index, part, num_inputs, ROWS, OUTPUTS, DEPTH, PRECISION
            )
            branches = end_leaf(result, branches, index, LEVELS)
        result = end_tree(result, branches, LEVELS)
    elif SPLIT <= 2:
        for index in tl.static_range(SPLIT):
            acc = _sum_part(x_desc, weight_desc, row, output, index, part, num_inputs, ROWS, OUTPUTS, DEPTH, PRECISION)
            result = acc if SPLIT == 1 else result + acc
    else:  # unrolled, four parts do not fit into registers
        for index in range(SPLIT):
            result += _sum_part(
                x_desc, weight_desc, row, output, index, part, num_inputs, ROWS, OUTPUTS, DEPTH, PRECISION
            )
    rows = row + tl.arange(0, ROWS)
    outputs = output + tl.arange(0, OUTPUTS)
    store_tile(result, bias_ptr, out_ptr, rows, outputs, num_rows, num_outputs)


@triton.jit
def _sum_part(
    x_desc, weight_desc, row, output, index, part, num_inputs,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    acc = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for k in range(index * part, tl.minimum((index + 1) * part, num_inputs), DEPTH):
        # loads beyond the last input are zeros
        x = x_desc.load([row, k])
        weight = weight_desc.load([output, k])
        acc = tl.dot(x, tl.trans(weight), acc, input_precision=PRECISION)
    return acc
