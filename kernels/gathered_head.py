"""The output layer of a draft: logits over a set of the target's tokens, and the best of them without storing logits.

The set may be rows of the target's whole head, read through an index: nothing is copied, so it can change between
rounds. The layer is bound by reading its weights, four times fewer for 32,768 tokens than for 128,256 (FR-Spec, arXiv
2502.14856). The fused kernels round a logit to the dtype of `hidden` and then go on in fp32, as if it had been stored:
they give what the two steps give, up to the order in which a product is added up.
Letters: R rows, H hidden size, V target and Vd draft vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from slipstream.kernels import gathered_head_kernel
from slipstream.kernels.grid_sync import done_counters
from slipstream.kernels.head_topk import MAX_K, empty_topk, merge_blocks, perturbed_topk
from slipstream.kernels.launch import pdl_options
from slipstream.kernels.linear import few_on_gpu, linear
from slipstream.kernels.sampling import Sampling, best_ranks, sample
from slipstream.kernels.skinny import Tiling

MOST_ROWS = 64  # of one program
FUSED_ROWS = 32  # beyond them what follows the product costs the fused kernels too many registers
FUSED_OUTPUTS = 2**16  # of a head in one piece: below it the library and one more kernel are faster


@dataclass(frozen=True, slots=True)
class DraftHead:
    """Weights, and the target id of each logit."""

    weight: Tensor  # (Vd, H); if gathered (V, H), of which row ids[j] gives logit j
    ids: Tensor | None = None  # (Vd,) int64; None: logit j is that of id j. Gathered only: -1 marks an unused place
    gathered: bool = False

    def __post_init__(self) -> None:
        assert self.ids is not None or not self.gathered
        assert self.gathered or self.ids is None or len(self.ids) == len(self.weight)

    @property
    def size(self) -> int:
        """Vd, unused places included."""
        return len(self.weight if self.ids is None else self.ids)


def choose_tiling(num_rows: int) -> Tiling:
    """How a program reads the weights. The best that bench/head.py --tune finds on an H200 at 32,768 x 4,096."""
    if num_rows <= 16:
        return Tiling(outputs=128, depth=64, split=1, stages=4)
    if num_rows <= 32:
        return Tiling(outputs=128, depth=64, split=1, stages=3)
    return Tiling(outputs=128, depth=64, split=1, stages=3, warps=8)


def gathered_linear(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """hidden (R, H) @ weight (V, H)[ids].T -> (R, Vd) for ids (Vd,) int64, -inf where an id is -1.

    Summed in fp32, rounded once. On the GPU nothing but the named rows of the 16-bit weights is read.
    """
    run = gathered_linear_triton if _fits_kernel(hidden, weight) else gathered_linear_reference
    return run(hidden, weight, ids)


def gathered_linear_reference(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return linear(hidden, weight.index_select(0, ids.clamp(min=0))).masked_fill(ids < 0, -torch.inf)


def gathered_linear_triton(hidden: Tensor, weight: Tensor, ids: Tensor, tiling: Tiling | None = None) -> Tensor:
    out = torch.empty(len(hidden), len(ids), dtype=hidden.dtype, device=hidden.device)
    if len(hidden):
        hidden, grid, options = _launch_options(hidden, weight, len(ids), tiling)
        gathered_head_kernel.gathered_linear_kernel[grid](
            hidden, weight, ids, out, hidden.stride(0), weight.stride(0), *out.shape, weight.shape[1], **options
        )
    return out


def head_logits(head: DraftHead, hidden: Tensor) -> Tensor:
    """(R, H) -> (R, Vd)."""
    if head.gathered:
        assert head.ids is not None
        return gathered_linear(hidden, head.weight, head.ids)
    return linear(hidden, head.weight)


def head_sample(head: DraftHead, hidden: Tensor, positions: Tensor, sampling: Sampling) -> Tensor:
    """hidden (R, H), positions (R,) of the token to propose -> place (R,) int64 in the head, of its sample.

    That is sample(head_logits(head, hidden), positions, sampling, head.ids): the same noise by target id, and ties go
    to the lowest place.
    """
    run = head_sample_triton if _fits_fused(head, hidden, sampling) else head_sample_reference
    return run(head, hidden, positions, sampling)


def head_sample_reference(head: DraftHead, hidden: Tensor, positions: Tensor, sampling: Sampling) -> Tensor:
    return sample(head_logits(head, hidden), positions, sampling, head.ids)


def head_sample_triton(
    head: DraftHead, hidden: Tensor, positions: Tensor, sampling: Sampling, tiling: Tiling | None = None
) -> Tensor:
    """Without filters. One launch."""
    out = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
    if len(hidden):
        rows = best_ranks(hidden.device), done_counters(hidden.device), out
        _launch_fused(gathered_head_kernel.head_sample_kernel, head, hidden, positions, sampling, rows, tiling)
    return out


def head_topk(head: DraftHead, hidden: Tensor, k: int, positions: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """hidden (R, H), positions (R,) of the token to propose -> log-probabilities (R, k) fp32, places (R, k) int64.

    That is perturbed_topk(head_logits(head, hidden), k, ...): best first, ties to the lowest place. At least k places
    are used, 1 <= k <= MAX_K.
    """
    run = head_topk_triton if _fits_fused(head, hidden, sampling) else head_topk_reference
    return run(head, hidden, k, positions, sampling)


def head_topk_reference(
    head: DraftHead, hidden: Tensor, k: int, positions: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor]:
    return perturbed_topk(head_logits(head, hidden), k, positions, sampling, head.ids)


def head_topk_triton(
    head: DraftHead, hidden: Tensor, k: int, positions: Tensor, sampling: Sampling, tiling: Tiling | None = None
) -> tuple[Tensor, Tensor]:
    """Without filters. Two launches."""
    assert 1 <= k <= min(MAX_K, head.size)
    R, tiling = len(hidden), tiling or choose_tiling(len(hidden))
    tiles = triton.cdiv(head.size, tiling.outputs)
    candidates, sums, values, places = empty_topk(R, tiles, k, hidden.device)
    if R:
        out = candidates, sums
        _launch_fused(gathered_head_kernel.head_topk_kernel, head, hidden, positions, sampling, out, tiling, K=k)
        gathered_head_kernel.merge_topk_kernel[(R,)](
            candidates, sums, values, places, tiles,
            K=k, **merge_blocks(tiles, k), num_warps=8, **pdl_options(hidden.device),
        )  # fmt: skip
    return values, places


def _fits_kernel(hidden: Tensor, weight: Tensor) -> bool:
    """16-bit rows of a length at which 16 bytes load at once; any number of them."""
    return few_on_gpu(hidden[:1], weight)


def _fits_fused(head: DraftHead, hidden: Tensor, sampling: Sampling) -> bool:
    plain = sampling.temperature is None or sampling.filters is None
    pays = head.gathered or head.size >= FUSED_OUTPUTS
    return plain and pays and len(hidden) <= FUSED_ROWS and _fits_kernel(hidden, head.weight)


def _launch_fused(
    kernel: Any, head: DraftHead, hidden: Tensor, positions: Tensor, sampling: Sampling, out: tuple[Tensor, ...],
    tiling: Tiling | None, **constants: int,
) -> None:  # fmt: skip
    hidden, grid, options = _launch_options(hidden, head.weight, head.size, tiling)
    kernel[grid](
        hidden, head.weight, head.ids, positions, sampling.keys, sampling.temperature, sampling.rows, *out,
        hidden.stride(0), head.weight.stride(0), len(hidden), head.size, hidden.shape[1], sampling.repeats, grid[1],
        GATHERED=head.gathered, **constants, **options,
    )  # fmt: skip


def _launch_options(
    hidden: Tensor, weight: Tensor, num_outputs: int, tiling: Tiling | None
) -> tuple[Tensor, tuple[int, int], dict[str, Any]]:
    """`hidden` with adjacent inputs, the grid (blocks of rows, tiles of outputs), constants and launch options."""
    assert weight.stride(1) == 1
    hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
    num_rows, num_inputs = hidden.shape
    tiling = tiling or choose_tiling(num_rows)
    rows = min(max(triton.next_power_of_2(num_rows), 16), MOST_ROWS)
    grid = triton.cdiv(num_rows, rows), triton.cdiv(num_outputs, tiling.outputs)
    constants = {"ROWS": rows, "OUTPUTS": tiling.outputs, "DEPTH": tiling.depth}
    constants |= {"EVEN": num_inputs % tiling.depth == 0, "PRECISION": "ieee"}
    options = {"num_stages": tiling.stages, "num_warps": tiling.warps}
    return hidden, grid, constants | options | pdl_options(hidden.device)
