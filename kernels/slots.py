"""Where a chain of tokens lies: positions and KV slots behind each request's committed tokens.

Letters: B requests, R engine rows, P pages per row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.launch import pdl_options, use_triton, wait_for_inputs


def chain_slots(pages: Tensor, page_size: int, rows: Tensor, starts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Positions starts (B,) + 0..count-1 and their slots, each (B * count,) int64.

    pages (R, P) int64 is the page table, rows (B,) int64 names the requests' rows in it.
    """
    if use_triton(pages):
        return chain_slots_triton(pages, page_size, rows, starts, count)
    return chain_slots_reference(pages, page_size, rows, starts, count)


def chain_slots_reference(
    pages: Tensor, page_size: int, rows: Tensor, starts: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    positions = starts[:, None] + torch.arange(count, device=starts.device)  # (B, count)
    slots = pages[rows[:, None], positions // page_size] * page_size + positions % page_size
    return positions.flatten(), slots.flatten()


def chain_slots_triton(
    pages: Tensor, page_size: int, rows: Tensor, starts: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    positions = torch.empty(len(rows) * count, dtype=torch.int64, device=rows.device)
    slots = torch.empty_like(positions)
    block = triton.next_power_of_2(count)
    _chain_slots[(len(rows),)](
        pages, rows, starts, positions, slots, pages.stride(0), count, page_size,
        BLOCK=block, num_warps=1, **pdl_options(rows.device),
    )  # fmt: skip
    return positions, slots


@triton.jit
def _chain_slots(
    pages, rows, starts, positions, slots, stride, count, page_size, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    wait_for_inputs(PDL)
    request = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    inside = index < count
    position = tl.load(starts + request) + index
    page = tl.load(pages + tl.load(rows + request) * stride + position // page_size, mask=inside, other=0)
    tl.store(positions + request * count + index, position, mask=inside)
    tl.store(slots + request * count + index, page * page_size + position % page_size, mask=inside)
