"""The paged KV cache: slots of chains and of drafts, and moving accepted tree nodes to follow the committed tokens.

Letters: B requests, N nodes per request, L layers, G KV heads, D head dim, R and P rows and columns of the page table.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.launch import Op, pdl_options, wait_for_inputs
from slipstream.kernels.limits import MAX_NODES

TILE = 8192  # numbers that a program reads before it writes


class DraftPlaces(NamedTuple):
    """Where B requests draft. Row i of a table: i tokens after the last committed one, from position 0 on."""

    roots: Tensor  # (B,) int64 the token after the last committed one
    positions: Tensor  # (count, B) int64
    slots: Tensor  # (count, B) int64 KV slots


@Op
def move_rows(cache: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Copies KV between slots in every layer, in place.

    cache (L, 2, slots, G, D); sources, destinations (B, N) int64 slots, N <= 64.

    All of a request's sources are read before its destinations are written, so they may overlap; requests must not
    share slots. A source equal to its destination is a no-op.
    """
    moved = sources != destinations  # mostly none: on a CPU to copy the others takes longer than to look
    if moved.any():
        cache = _copyable(cache)
        cache.index_copy_(2, destinations[moved], cache.index_select(2, sources[moved]))


@move_rows.kernel()
def move_rows_triton(cache: Tensor, sources: Tensor, destinations: Tensor) -> None:
    B, N = sources.shape
    cache = _copyable(cache)
    assert N <= MAX_NODES
    assert cache.is_contiguous()
    L, parts, slots, G, D = cache.shape
    nodes = triton.next_power_of_2(N)
    size = G * D
    block = min(triton.next_power_of_2(size), TILE // nodes)
    if B and cache.numel():
        _move_rows[(B, L * parts, triton.cdiv(size, block))](
            cache, sources.contiguous(), destinations.contiguous(), N, slots * size, size,
            NODES=nodes, BLOCK=block, num_warps=4,
        )  # fmt: skip


def _copyable(cache: Tensor) -> Tensor:
    """FP8 codes as bytes: torch copies no e4m3 by index on a CPU, and GPUs before sm_89 know none."""
    return cache.view(torch.uint8) if cache.element_size() == 1 else cache


@triton.jit(do_not_specialize=["N"])
def _move_rows(
    cache_ptr, sources_ptr, destinations_ptr, N, layer_stride, size, NODES: tl.constexpr, BLOCK: tl.constexpr
):
    """One request, one layer's keys or values, BLOCK numbers of every slot. The barrier orders all reads before
    the first write, since another thread may read that slot."""
    request = tl.program_id(0)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    node = tl.arange(0, NODES)
    source = tl.load(sources_ptr + request * N + node, mask=node < N, other=0)
    destination = tl.load(destinations_ptr + request * N + node, mask=node < N, other=0)
    moves = source != destination
    if tl.max(moves.to(tl.int32), axis=0) > 0:
        cache_ptr += tl.program_id(1).to(tl.int64) * layer_stride
        mask = moves[:, None] & (columns < size)[None, :]
        rows = tl.load(cache_ptr + source[:, None] * size + columns[None, :], mask=mask, other=0)
        tl.debug_barrier()
        tl.store(cache_ptr + destination[:, None] * size + columns[None, :], rows, mask=mask)


@Op
def chain_slots(pages: Tensor, page_size: int, rows: Tensor, starts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Positions starts (B,) + 0..count-1 and their slots, each (B * count,) int64.

    pages (R, P) int64 is the page table, rows (B,) int64 the requests' rows of it.
    """
    positions = starts[:, None] + torch.arange(count, device=starts.device)  # (B, count)
    slots = pages[rows[:, None], positions // page_size] * page_size + positions % page_size
    return positions.flatten(), slots.flatten()


@chain_slots.kernel()
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


@Op
def draft_places(
    pages: Tensor, page_size: int, rows: Tensor, lengths: Tensor, roots: Tensor, count: int
) -> DraftPlaces:
    """Looks up `rows` (B,) int64 of pages (R, P) int64, lengths (R,) int32 of committed tokens, and roots (R,) int64.

    Positions beyond the page table have slots of its last page.
    """
    steps = torch.arange(-1, count - 1, device=rows.device)[:, None]
    positions = (lengths[rows] + steps).clamp(min=0)
    page = pages[rows, (positions // page_size).clamp(max=pages.shape[1] - 1)]
    return DraftPlaces(roots[rows], positions, page * page_size + positions % page_size)


@draft_places.kernel()
def draft_places_triton(
    pages: Tensor, page_size: int, rows: Tensor, lengths: Tensor, roots: Tensor, count: int
) -> DraftPlaces:
    """A program per request. Rows of tables begin at multiples of 16 bytes, since kernels are compiled by that."""
    B = len(rows)
    stride = B + B % 2
    table = torch.empty(1 + 2 * count, stride, dtype=torch.int64, device=rows.device)[:, :B]
    places = DraftPlaces(table[0], table[1 : 1 + count], table[1 + count :])
    if B:
        _draft_places[(B,)](
            pages, rows, lengths, roots, places, pages.stride(0), pages.shape[1], stride, count, page_size,
            BLOCK=triton.next_power_of_2(count), num_warps=1, **pdl_options(rows.device),
        )  # fmt: skip
    return places


@triton.jit(do_not_specialize=["stride", "count"])
def _draft_places(
    pages, rows, lengths, roots, places, page_stride, num_pages, stride, count, page_size,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    request = tl.program_id(0)
    row = tl.load(rows + request)
    index = tl.arange(0, BLOCK)
    inside = index < count
    position = tl.maximum(tl.load(lengths + row).to(tl.int64) + index - 1, 0)
    page = tl.load(pages + row * page_stride + tl.minimum(position // page_size, num_pages - 1), mask=inside, other=0)
    out = index * stride + request
    tl.store(places.roots + request, tl.load(roots + row))
    tl.store(places.positions + out, position, mask=inside)
    tl.store(places.slots + out, page * page_size + position % page_size, mask=inside)
