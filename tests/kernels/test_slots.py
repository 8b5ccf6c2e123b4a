"""Slots of chains: the kernel against plain indexing."""

import pytest
import torch

from slipstream.kernels.kv import chain_slots, chain_slots_reference, chain_slots_triton

DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("count", [1, 4, 13, 64])
def test_kernel_equals_indexing(device: str, page_size: int, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    pages = torch.randint(1, 2**40, (7, 130), generator=generator).to(device)
    rows = torch.tensor([3, 0, 6, 6, 2], device=device)
    starts = torch.tensor([0, 1, 17, 64 - count, 5], device=device)
    positions, slots = chain_slots_triton(pages, page_size, rows, starts, count)
    expected = [
        (row, start + step) for row, start in zip(rows.tolist(), starts.tolist(), strict=True) for step in range(count)
    ]
    assert positions.tolist() == [position for _, position in expected]
    table = pages.tolist()
    assert slots.tolist() == [table[row][p // page_size] * page_size + p % page_size for row, p in expected]
    for found in (chain_slots, chain_slots_reference):
        assert [x.tolist() for x in found(pages, page_size, rows, starts, count)] == [
            positions.tolist(),
            slots.tolist(),
        ]
