"""Changes that the host makes to request slots, against assignments one by one."""

import random

import pytest
import torch
from torch.nn.functional import pad

from slipstream.kernels.requests import Admitted, SlotColumns, pack_changes, write_changes
from slipstream.tests.kernels.triton_runs import each_device
from slipstream.tests.pairwise import grouped

SLOTS = 150
PAGES = 9
DTYPES = (torch.int32, torch.int64, torch.int64, *[torch.int32] * 2, *[torch.float32] * 3)


@grouped()
@pytest.mark.parametrize("counts", [(0, 0), (1, 0), (0, 1), (3, 70), (130, 5)])
@each_device
@torch.inference_mode()
def test_slots_and_pages_hold_what_is_written(counts, device):
    rng = random.Random(sum(counts))
    columns = SlotColumns(*(torch.arange(SLOTS, device=device).to(dtype) + 7 for dtype in DTYPES))
    pages = torch.full((2, SLOTS, PAGES), 5, device=device)
    expected = [column.tolist() for column in columns]
    expected_pages = pages.flatten().tolist()
    admitted = [
        Admitted(
            slot,
            rng.getrandbits(63),
            rng.choice((0, 40)),
            rng.randrange(4),
            rng.randrange(-1, 9),
            rng.random(),
            0.95,
            1e-3,
        )
        for slot in rng.sample(range(SLOTS), counts[0])
    ]
    entries = [(index, rng.randrange(2**40)) for index in rng.sample(range(pages.numel()), counts[1])]
    for request in admitted:
        for column, value in zip(expected, (0, *request[1:]), strict=True):
            column[request.slot] = value
    for index, page in entries:
        expected_pages[index] = page
    packed = torch.from_numpy(pack_changes(admitted, entries))
    changes = pad(packed, (0, 9), value=3).to(device)
    run = write_changes.triton if device == "cuda" else write_changes
    run(columns, pages, changes)
    columns.lengths[0] += 1
    expected[0][0] += 1
    run(columns, pages, changes)  # there are none any more
    for column, values in zip(columns, expected, strict=True):
        assert torch.equal(column.cpu(), torch.tensor(values, dtype=column.dtype))
    assert pages.flatten().tolist() == expected_pages
    if device == "cpu":
        again = SlotColumns(*(torch.arange(SLOTS).to(dtype) + 7 for dtype in DTYPES))
        pages = torch.full((2, SLOTS, PAGES), 5)
        changes = pad(packed, (0, 9), value=3)
        write_changes.triton(again, pages, changes)
        again.lengths[0] += 1
        assert not changes[:2].any()
        for actual, column in zip(again, columns, strict=True):
            assert torch.equal(actual, column)
        assert pages.flatten().tolist() == expected_pages
