"""What the host changes of request slots between two passes: one copy to the device, one launch.

A launch for each column would take 2 us of the time in which the device waits for the next pass.
Letters: R request slots, A admitted requests, C changed entries of page tables.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from slipstream.kernels.launch import Op, pdl_options, wait_for_inputs

BLOCK = 64  # changes of one program
FIELDS: tl.constexpr = tl.constexpr(7)  # of an admitted request


class SlotColumns(NamedTuple):
    """What a request brings along when it gets its slot; (R,) each."""

    lengths: Tensor  # int32 committed tokens: 0 at first
    keys: Tensor  # int64 noise keys
    top_k: Tensor  # int64
    flags: Tensor  # int32 of its logits processors
    temperature: Tensor  # fp32
    top_p: Tensor  # fp32
    min_p: Tensor  # fp32


class Admitted(NamedTuple):
    """A request that gets a slot: fields as in SlotColumns."""

    slot: int
    key: int
    top_k: int
    flags: int
    temperature: float
    top_p: float
    min_p: float


def pack_changes(admitted: Sequence[Admitted], entries: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """(7 * A + 2 * C,) for `write_changes`: the requests, fp32 numbers as their bits, then (index, page) of the entries
    of the flattened page tables."""
    packed = np.empty(FIELDS.value * len(admitted) + 2 * len(entries), np.int64)
    requests = packed[: FIELDS.value * len(admitted)].reshape(-1, FIELDS.value)
    if admitted:
        requests[:, :4] = [request[:4] for request in admitted]
        requests[:, 4:] = np.array([request[4:] for request in admitted], np.float32).view(np.int32)
    if entries:
        packed[requests.size :].reshape(-1, 2)[:] = entries
    return packed


@Op
def write_changes(columns: SlotColumns, pages: Tensor, packed: Tensor, num_admitted: int) -> None:
    """Writes what `pack_changes` gave of `num_admitted` requests, and entries of contiguous page tables `pages` (...)
    int64. None may be named twice."""
    requests, entries = packed.split([FIELDS.value * num_admitted, len(packed) - FIELDS.value * num_admitted])
    slots, keys, top_k, flags, *bits = requests.view(-1, FIELDS.value).unbind(dim=1)
    values = (torch.zeros_like(slots), keys, top_k, flags, *(each.int().view(torch.float32) for each in bits))
    for column, new in zip(columns, values, strict=True):
        column[slots] = new.to(column.dtype)
    indices, new_pages = entries.view(-1, 2).unbind(dim=1)
    pages.view(-1)[indices] = new_pages


@write_changes.kernel(when=lambda columns, *_: columns.lengths.is_cuda)
def write_changes_triton(columns: SlotColumns, pages: Tensor, packed: Tensor, num_admitted: int) -> None:
    """One launch."""
    num_entries = (len(packed) - FIELDS.value * num_admitted) // 2
    assert pages.is_contiguous()
    assert packed.is_contiguous()
    _write_changes[(max(1, triton.cdiv(max(num_admitted, num_entries), BLOCK)),)](
        columns, pages, packed, num_admitted, num_entries, BLOCK=BLOCK, num_warps=2, **pdl_options(pages.device)
    )


@triton.jit(do_not_specialize=["A", "C"])
def _write_changes(columns, pages, packed, A, C, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    change = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_request, request = change < A, packed + change * FIELDS
    slot = tl.load(request, mask=is_request, other=0)
    tl.store(columns.lengths + slot, tl.zeros_like(slot).to(tl.int32), mask=is_request)
    tl.store(columns.keys + slot, tl.load(request + 1, mask=is_request, other=0), mask=is_request)
    tl.store(columns.top_k + slot, tl.load(request + 2, mask=is_request, other=0), mask=is_request)
    flags = tl.load(request + 3, mask=is_request, other=0).to(tl.int32)
    tl.store(columns.flags + slot, flags, mask=is_request)
    tl.store(columns.temperature + slot, _load_fp32(request + 4, is_request), mask=is_request)
    tl.store(columns.top_p + slot, _load_fp32(request + 5, is_request), mask=is_request)
    tl.store(columns.min_p + slot, _load_fp32(request + 6, is_request), mask=is_request)
    is_entry, entry = change < C, packed + A * FIELDS + change * 2
    index, page = tl.load(entry, mask=is_entry, other=0), tl.load(entry + 1, mask=is_entry, other=0)
    tl.store(pages + index, page, mask=is_entry)


@triton.jit
def _load_fp32(pointer, mask):
    """From its bits in int64."""
    return tl.load(pointer, mask=mask, other=0).to(tl.int32).to(tl.float32, bitcast=True)
