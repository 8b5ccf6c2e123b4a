"""How products are tiled, and into which parts their inputs are cut.

Letters: I inputs, O outputs.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import triton

from slipstream.kernels.gemm.int4_weight import CHUNK, PLANE
from slipstream.kernels.kv.rope import NO_ROTATION, Rotation

PROGRAMS = 132  # multiprocessors of an H100 or H200, each with as many loads in flight as its shared memory holds
SHARED_MEMORY = 200 << 10  # bytes that the largest tiles need: sm_90 and sm_100 have them
UNIT = 128  # inputs that are never shared out
MOST_PARTS = 4  # of the inputs, that a program of the streamed kernels sums itself
MOST_COLUMNS = 64  # of their products: the inputs of all parts lie side by side, and sums take registers
INT4_PARTS = 8  # most parts of the inputs of 4-bit weights
INT4_PART = 1024  # inputs of these that are not shared out
SMALL_ROWS = 8  # of tiles of 4-bit weights that two warps multiply by `mma.sync`, which adds as `wgmma` does
RING = 192 << 10  # bytes of the rings of wide_int4.py
WIDE_TILES = 80  # of 128 outputs; fewer leave too many multiprocessors without a program
FEW_TILES = 16  # of 64 outputs, of whose inputs a program has a quarter at most
FEW_INPUTS = 1024  # that are not shared out
MAX_OUTPUTS = 64 * PROGRAMS  # for more, the library is as fast (docs/log/2026-11-21.md)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is tiled. 64 outputs are the least that `wgmma` takes; 16 KB of weights fill a tile."""

    outputs: int
    """Output features of one program; of a gated product, as many gates and as many ups."""
    depth: int
    """Inputs that it loads at a time."""
    split: int
    """Programs that share the inputs of one tile of outputs."""
    stages: int = 4
    """Tiles in shared memory."""
    warps: int = 4
    least_rows: int = 16
    """Fewest rows of a tile: 16 are multiplied by `wgmma` in four warps; fewer, or in two warps, by `mma.sync`."""
    leaves: int = 0
    """Leaves that all programs of a tile of outputs add along a tree (leaves.py); 0: parts are added in their order."""

    @property
    def levels(self) -> int:
        """Levels of the tree of the leaves that one program adds."""
        return max(self.leaves // self.split, 1).bit_length() - 1


def choose_tiling(num_outputs: int, num_inputs: int, gated: bool = False, num_rows: int = 1) -> Tiling:
    """The tiling of 16-bit weights (O, I), the fastest that bench/kernel_times.py --tune finds on an H200.

    Any number of rows sums inputs in the same order, so results round alike.
    """
    if gated:
        if num_rows > 64:
            outputs, stages = (64, 6) if triton.cdiv(num_outputs, 64) <= PROGRAMS else (128, 4)
            return Tiling(outputs=outputs, depth=64, split=1, stages=stages, warps=8)
        stages = 4 if num_rows <= 32 else 3
        if triton.cdiv(num_outputs, 64) > 3 * PROGRAMS:
            stages = 5 if num_rows <= 16 else 4
        return Tiling(outputs=64, depth=64, split=1, stages=3 if fills_three(num_outputs) else stages)
    if num_outputs > MAX_OUTPUTS and triton.cdiv(num_outputs, 128) >= WIDE_TILES:
        return Tiling(outputs=128, depth=64, split=1, stages=3)
    split = choose_split(num_outputs, num_inputs)
    if triton.cdiv(num_outputs, 64) <= FEW_TILES and num_inputs >= FEW_INPUTS:
        split = max(split, MOST_PARTS)
    return Tiling(outputs=64, depth=128 if num_rows <= 64 else 64, split=split, stages=6)


def choose_split(num_outputs: int, num_inputs: int) -> int:
    """Returns into how many parts the inputs of weights (O, I) are cut, so that most of the GPU reads them."""
    if num_outputs > MAX_OUTPUTS and triton.cdiv(num_outputs, 128) >= WIDE_TILES:
        return 1
    split = 1
    while triton.cdiv(num_outputs, 64) * 2 * split <= PROGRAMS and num_inputs >= 1024 * 2 * split:
        split *= 2
    return split


def fills_three(num_outputs: int) -> bool:
    """Whether a gated product in tiles of 64 has three programs on most multiprocessors, which 3 stages leave room for.
    With more stages two fit, and the rest of the tiles would run after them, on a few multiprocessors."""
    return 2 * PROGRAMS < triton.cdiv(num_outputs, 64) <= 3 * PROGRAMS


def cut_leaves(tiling: Tiling, num_inputs: int, leaves: int) -> Tiling:
    """The tiling of a product that adds its inputs along a tree of `leaves`, without parts of leaves."""
    depth = tiling.depth if num_inputs // leaves % tiling.depth == 0 else tiling.depth // 2
    assert num_inputs % (leaves * depth) == 0
    return replace(tiling, depth=depth, split=min(tiling.split, leaves), leaves=leaves)


def choose_fp8_tiling(num_outputs: int, num_inputs: int, gated: bool, num_rows: int, by_block: bool = False) -> Tiling:
    """A tile takes half the bytes of 16-bit weights, so more of them are in flight."""
    tiling = choose_tiling(num_outputs, num_inputs, gated, num_rows)
    if gated:
        # Blocks two at a time, which an even number of stages would have, take too many registers of more rows.
        stages = 5 if num_rows <= 32 else 3 if by_block else 4
        return Tiling(outputs=64, depth=UNIT, split=1, stages=3 if fills_three(num_outputs) else stages)
    stages = 4 if tiling.outputs > 64 else 8 if num_rows <= 64 else 6
    warps = 8 if tiling.outputs > 64 and num_rows > 64 else 4
    split = choose_split(num_outputs, num_inputs)
    return Tiling(outputs=tiling.outputs, depth=UNIT, split=split, stages=stages, warps=warps)


def choose_int4_tiling(
    num_outputs: int, num_inputs: int, gated: bool = False, num_rows: int = 1, small: bool = True
) -> Tiling:
    """As many parts for any number of rows: few rows need them to fill the GPU. num_outputs: gates and ups, of a gated
    product; small: there are tiles of SMALL_ROWS rows. Tiles are the fastest of some on an H200."""
    split = 1
    tiles = triton.cdiv(num_outputs, 64)
    while not gated and split < INT4_PARTS and tiles * split < 2 * PROGRAMS and num_inputs >= 2 * INT4_PART * split:
        split *= 2
    if small and num_rows <= SMALL_ROWS:
        return Tiling(outputs=64, depth=CHUNK, split=split, stages=3, warps=2, least_rows=SMALL_ROWS)
    return Tiling(outputs=128 if gated and 16 < num_rows <= 32 else 64, depth=CHUNK, split=split, stages=3)


def part_inputs(num_inputs: int, tiling: Tiling) -> int:
    """Inputs of each of the parts that `tiling.split` programs sum, but for the last: the same for every depth."""
    if tiling.leaves:
        return num_inputs // tiling.split
    unit = max(tiling.depth, UNIT) if num_inputs >= UNIT * tiling.split else tiling.depth
    return triton.cdiv(triton.cdiv(num_inputs, unit), tiling.split) * unit


def own_parts(rows: int, num_inputs: int, tiling: Tiling) -> int:
    """How many parts a program sums itself: all, if there are at most MOST_PARTS of equal size, else one."""
    fits = part_inputs(num_inputs, tiling) * tiling.split == num_inputs and tiling.split <= MOST_PARTS
    return tiling.split if fits and tiling.split * rows <= MOST_COLUMNS else 1


class Wide(NamedTuple):
    """How a program of wide_int4.py multiplies."""

    rows: int
    tiles: int
    """Tiles of 64 outputs for each of two warpgroups: 2 (two neighbours, or gates and their ups) or 1."""

    @property
    def outputs(self) -> int:
        return 2 * self.tiles * 64

    @property
    def slots(self) -> int:
        """Steps that the rings hold."""
        return min(4, RING // (4 * self.outputs * PLANE + 2 * self.rows * CHUNK))


def choose_wide(num_rows: int, num_outputs: int, split: int, gated: bool, programs: int) -> Wide | None:
    """The faster number of tiles, by how many times the multiprocessors are filled with programs. None if too few of
    them have a program in the last round: then the usual kernel, or dequantising, is faster, by the times of an 8B
    Llama's products on an H200. num_outputs: gates and ups, of a gated product; programs: that run at a time."""
    rows = min(max(triton.next_power_of_2(num_rows), 32), 128)

    def share_and_time(wide: Wide) -> tuple[float, float]:
        count = triton.cdiv(num_rows, rows) * split * triton.cdiv(num_outputs, wide.outputs)
        rounds = triton.cdiv(count, programs)
        return count / (rounds * programs), rounds * (wide.tiles + 0.5)

    wide = min((Wide(rows, tiles) for tiles in ((2,) if gated else (2, 1))), key=lambda wide: share_and_time(wide)[1])
    min_share = 0.8 if num_rows <= 32 else 0.5 if 64 < num_rows <= 256 else 0.65
    return wide if share_and_time(wide)[0] >= min_share else None


class Heads(NamedTuple):
    """Heads of a product whose kernel may rotate them (kernels/kv/rope.py)."""

    num_outputs: int  # that are returned
    head_dim: int  # 0: nothing is rotated
    arguments: tuple[Any, ...]

    @classmethod
    def of(cls, rotation: Rotation | None, num_outputs: int, tiling: Tiling) -> "Heads":
        if rotation is None:
            return cls(num_outputs, 0, NO_ROTATION)
        assert rotation.is_whole
        assert rotation.head_dim % tiling.outputs == 0
        _, num_kv_heads, head_dim = rotation.keys.shape
        num_heads = num_outputs // head_dim - 2 * num_kv_heads
        return cls(num_heads * head_dim, head_dim, rotation.arguments(num_heads))
