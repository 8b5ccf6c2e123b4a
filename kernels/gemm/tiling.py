"""How products of few rows are tiled, and into which parts their inputs are cut.

Letters: I inputs, O outputs.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton

from slipstream.kernels.kv.rope import NO_ROTATION, Rotation

PROGRAMS = 132  # multiprocessors of an H100 or H200, each with as many loads in flight as its shared memory holds
SHARED_MEMORY = 200 << 10  # bytes that the largest tiles need: sm_90 and sm_100 have them
UNIT = 128  # inputs that are never shared out
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


def choose_tiling(num_outputs: int, num_inputs: int, gated: bool = False, num_rows: int = 1) -> Tiling:
    """The tiling of 16-bit weights (O, I), the fastest that bench/kernel_times.py --tune finds on an H200.

    Any number of rows sums inputs in the same order, so results round alike.
    """
    if gated:
        if num_rows > 64:
            return Tiling(outputs=128, depth=64, split=1, warps=8)
        # Either way two programs fit on a multiprocessor.
        return Tiling(outputs=64, depth=64, split=1, stages=4 if num_rows <= 32 else 3)
    if num_outputs > MAX_OUTPUTS:
        return Tiling(outputs=128, depth=64, split=1, stages=3)
    split = 1
    while triton.cdiv(num_outputs, 64) * 2 * split <= PROGRAMS and num_inputs >= 1024 * 2 * split:
        split *= 2
    return Tiling(outputs=64, depth=128 if num_rows <= 64 else 64, split=split, stages=6)


def part_inputs(num_inputs: int, tiling: Tiling) -> int:
    """Inputs of each of the parts that `tiling.split` programs sum, but for the last: the same for every depth."""
    unit = max(tiling.depth, UNIT) if num_inputs >= UNIT * tiling.split else tiling.depth
    return triton.cdiv(triton.cdiv(num_inputs, unit), tiling.split) * unit


class Heads(NamedTuple):
    """Heads of a product whose kernel may rotate them (kernels/kv/rope.py)."""

    num_outputs: int  # that are returned
    head_dim: int  # 0: nothing is rotated
    arguments: tuple[Any, ...]

    @classmethod
    def of(cls, rotation: Rotation | None, num_outputs: int, tiling: Tiling) -> "Heads":
        if rotation is None:
            return cls(num_outputs, 0, NO_ROTATION)
        assert rotation.fits(tiling.outputs)
        _, num_kv_heads, head_dim = rotation.keys.shape
        num_heads = num_outputs // head_dim - 2 * num_kv_heads
        return cls(num_heads * head_dim, head_dim, rotation.arguments(num_heads))
