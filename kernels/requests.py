"""Changes that the host makes to request slots between two passes: one copy to a buffer, which the next pass reads
first.

A kernel between two CUDA graphs lets the device wait: the second starts 21 us after it, but 8 us after a copy (H200).
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

BLOCK = 128  # changes at a time
HEADER: tl.constexpr = tl.constexpr(2)  # numbers of admitted requests and of entries
FIELDS: tl.constexpr = tl.constexpr(8)  # of an admitted request


class SlotColumns(NamedTuple):
    """Columns that a request fills when it gets its slot; (R,) each."""

    lengths: Tensor  # int32 committed tokens: 0 at first
    keys: Tensor  # int64 noise keys
    top_k: Tensor  # int64
    flags: Tensor  # int32 of its logits processors
    logprobs: Tensor  # int32 how many likeliest tokens it wants beside each of its own, -1: no log-probabilities
    temperature: Tensor  # fp32
    top_p: Tensor  # fp32
    min_p: Tensor  # fp32


class Admitted(NamedTuple):
    """A request that gets a slot: fields as in SlotColumns."""

    slot: int
    key: int
    top_k: int
    flags: int
    logprobs: int
    temperature: float
    top_p: float
    min_p: float


def most_changes(num_admitted: int, num_entries: int) -> int:
    """Size of a buffer for so many."""
    return HEADER.value + FIELDS.value * num_admitted + 2 * num_entries


def pack_changes(admitted: Sequence[Admitted], entries: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """(2 + 8 * A + 2 * C,) for `write_changes`: both numbers, the requests, fp32 numbers as their bits, then (index,
    page) of the entries of the flattened page tables."""
    packed = np.empty(most_changes(len(admitted), len(entries)), np.int64)
    packed[: HEADER.value] = len(admitted), len(entries)
    end = most_changes(len(admitted), 0)
    if admitted:
        requests = packed[HEADER.value : end].reshape(-1, FIELDS.value)
        requests[:, :5] = [request[:5] for request in admitted]
        requests[:, 5:] = np.array([request[5:] for request in admitted], np.float32).view(np.int32)
    if entries:
        packed[end:].reshape(-1, 2)[:] = entries
    return packed


@Op
def write_changes(columns: SlotColumns, pages: Tensor, changes: Tensor) -> None:
    """Writes the changes of `pack_changes`, at the beginning of `changes`, and entries of contiguous page tables
    `pages` (...) int64. None may be named twice. Then there are no changes: another call writes nothing."""
    num_admitted, num_entries = changes[: HEADER.value].tolist()
    sizes = [HEADER.value, FIELDS.value * num_admitted, 2 * num_entries]
    header, requests, entries = changes[: sum(sizes)].split(sizes)
    slots, keys, top_k, flags, logprobs, *bits = requests.view(-1, FIELDS.value).unbind(dim=1)
    values = (
        torch.zeros_like(slots),
        keys,
        top_k,
        flags,
        logprobs,
        *(column_bits.int().view(torch.float32) for column_bits in bits),
    )
    for column, new in zip(columns, values, strict=True):
        column[slots] = new.to(column.dtype)
    indices, new_pages = entries.view(-1, 2).unbind(dim=1)
    pages.view(-1)[indices] = new_pages
    header.zero_()


@write_changes.kernel(when=lambda columns, *_: columns.lengths.is_cuda)
def write_changes_triton(columns: SlotColumns, pages: Tensor, changes: Tensor) -> None:
    """One launch of one program: a step changes few entries."""
    assert pages.is_contiguous()
    assert changes.is_contiguous()
    _write_changes[(1,)](columns, pages, changes, BLOCK=BLOCK, num_warps=4, **pdl_options(pages.device))


@triton.jit
def _write_changes(columns, pages, changes, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    A = tl.load(changes)
    C = tl.load(changes + 1)
    for start in range(0, A, BLOCK):
        request = start + tl.arange(0, BLOCK)
        _admit(columns, changes + HEADER + request * FIELDS, request < A)
    for start in range(0, C, BLOCK):
        change = start + tl.arange(0, BLOCK)
        entry = changes + HEADER + A * FIELDS + change * 2
        index = tl.load(entry, mask=change < C, other=0)
        page = tl.load(entry + 1, mask=change < C, other=0)
        tl.store(pages + index, page, mask=change < C)
    tl.debug_barrier()  # every warp has read the numbers
    tl.store(changes + tl.arange(0, HEADER), tl.zeros((HEADER,), tl.int64))


@triton.jit
def _admit(columns, request, is_request):
    slot = tl.load(request, mask=is_request, other=0)
    tl.store(columns.lengths + slot, tl.zeros_like(slot).to(tl.int32), mask=is_request)
    tl.store(columns.keys + slot, tl.load(request + 1, mask=is_request, other=0), mask=is_request)
    tl.store(columns.top_k + slot, tl.load(request + 2, mask=is_request, other=0), mask=is_request)
    flags = tl.load(request + 3, mask=is_request, other=0).to(tl.int32)
    tl.store(columns.flags + slot, flags, mask=is_request)
    logprobs = tl.load(request + 4, mask=is_request, other=0).to(tl.int32)
    tl.store(columns.logprobs + slot, logprobs, mask=is_request)
    tl.store(columns.temperature + slot, _load_fp32(request + 5, is_request), mask=is_request)
    tl.store(columns.top_p + slot, _load_fp32(request + 6, is_request), mask=is_request)
    tl.store(columns.min_p + slot, _load_fp32(request + 7, is_request), mask=is_request)


@triton.jit
def _load_fp32(pointer, mask):
    """From its bits in int64."""
    return tl.load(pointer, mask=mask, other=0).to(tl.int32).to(tl.float32, bitcast=True)
