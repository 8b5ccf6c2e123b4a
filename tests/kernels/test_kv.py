"""Moving KV rows equals a loop that reads everything before it writes; slots of chains equal plain indexing."""

import random

import pytest
import torch
from torch import Tensor

from slipstream.kernels.kv.cache import chain_slots, draft_places, move_rows
from slipstream.tests.kernels.triton_runs import each_device, replayed
from slipstream.tests.pairwise import grouped, rotating

HEADS = [(1, 8), (3, 20), pytest.param((8, 128), marks=pytest.mark.gpu)]


@pytest.mark.parametrize("num_rows", [1, 7, 40])
def test_move_rows_with_overlapping_ranges(num_rows):
    rng = random.Random(num_rows)
    cache = torch.randn(3, 2, 40, 2, 4, generator=torch.Generator().manual_seed(0))
    sources = [rng.randrange(40) for _ in range(num_rows)]
    destinations = rng.sample(range(40), num_rows)
    expected = cache.clone()
    for source, destination in zip(sources, destinations, strict=True):
        for layer in range(3):
            for part in range(2):
                expected[layer, part, destination] = cache[layer, part, source]
    move_rows(cache, torch.tensor([sources]), torch.tensor([destinations]))
    assert torch.equal(cache, expected)


def random_moves(batch: int, width: int, device: str) -> tuple[Tensor, Tensor]:
    """Slots of requests that keep to their own, shuffled; half of the rows stay where they are."""
    generator = torch.Generator().manual_seed(width)
    slots = torch.randperm(batch * width, generator=generator).view(batch, width) * 2 + 1
    nodes = torch.randint(width, (batch, width), generator=generator)
    stays = torch.rand(batch, width, generator=generator) < 0.5
    sources = torch.where(stays, slots, slots.gather(1, nodes))
    return sources.to(device), slots.to(device)


@grouped()
@each_device
@pytest.mark.parametrize(
    ("width", "heads", "dtype"),
    rotating([1, 2, 5, 64], HEADS, [torch.float32, torch.bfloat16]),
)
def test_the_kernel_equals_the_reference(width, heads, dtype, device):
    batch, layers = (2, 2) if device == "cpu" else (32, 16)
    sources, destinations = random_moves(batch, width, device)
    cache = torch.randn(layers, 2, 2 * batch * width + 1, *heads, device=device).to(dtype)
    expected = cache.clone()
    move_rows.reference(expected, sources, destinations)
    move_rows.triton(cache, sources, destinations)
    assert torch.equal(cache, expected)


@each_device
@pytest.mark.parametrize("step", [1, -1])
def test_the_kernel_reads_a_request_before_it_writes_it(step, device):
    cache = torch.arange(64.0, device=device).view(1, 1, 64, 1, 1).repeat(2, 2, 1, 2, 32)
    slots = torch.arange(64, device=device)[None]
    move_rows.triton(cache, (slots + step) % 64, slots)
    assert cache[1, 1, :, 1, 31].tolist() == [(slot + step) % 64 for slot in range(64)]


@pytest.mark.gpu
def test_a_slot_beyond_two_to_the_31_elements():
    cache = torch.zeros(1, 2, 2**21, 8, 128, dtype=torch.bfloat16, device="cuda")
    cache[:, :, -1] = 1.0
    slots = torch.tensor([[2**21 - 1, 5]], device="cuda")
    move_rows.triton(cache, slots, slots.flip(1))
    assert (cache[:, :, 5] == 1).all()
    assert (cache[:, :, -1] == 0).all()


@pytest.mark.gpu
def test_a_graph_replays_it():
    sources, destinations = random_moves(16, 8, "cuda")
    before = torch.randn(4, 2, 300, 8, 128, device="cuda")
    cache = torch.empty_like(before)
    expected = before.clone()

    def run():
        cache.copy_(before)
        move_rows.triton(cache, sources, destinations)
        return cache

    move_rows.reference(expected, sources, destinations)
    assert torch.equal(replayed(run), expected)


@grouped()
@each_device
@pytest.mark.parametrize(("count", "page_size"), rotating([1, 4, 13, 64], [1, 16, 64]))
def test_slots_of_a_chain_equal_indexing(device, page_size, count):
    generator = torch.Generator().manual_seed(count)
    pages = torch.randint(1, 2**40, (7, 130), generator=generator).to(device)
    rows = torch.tensor([3, 0, 6, 6, 2], device=device)
    starts = torch.tensor([0, 1, 17, 64 - count, 5], device=device)
    positions, slots = chain_slots.triton(pages, page_size, rows, starts, count)
    expected = [
        (row, start + step) for row, start in zip(rows.tolist(), starts.tolist(), strict=True) for step in range(count)
    ]
    assert positions.tolist() == [position for _, position in expected]
    table = pages.tolist()
    assert slots.tolist() == [table[row][p // page_size] * page_size + p % page_size for row, p in expected]
    for run in (chain_slots, chain_slots.reference):
        assert all(map(torch.equal, run(pages, page_size, rows, starts, count), (positions, slots)))


@grouped()
@each_device
@pytest.mark.parametrize(("count", "page_size"), rotating([2, 5, 64], [1, 16]))
def test_places_of_drafts_equal_indexing(device, page_size, count):
    """Padding has no tokens; the last request's draft ends beyond the page table."""
    generator = torch.Generator().manual_seed(count)
    pages = torch.randint(1, 2**40, (7, 130), generator=generator).to(device)
    rows = torch.tensor([3, 0, 6, 6, 2], device=device)
    lengths = torch.tensor([1, 7, 130 * page_size - 1, 9, 9, 9, 0], dtype=torch.int32, device=device)
    roots = torch.randint(2**20, (7,), generator=generator).to(device)
    expected = [[(row, max(int(lengths[row]) + step, 0)) for row in rows.tolist()] for step in range(-1, count - 1)]
    table = pages.tolist()
    for run in (draft_places.triton, draft_places.reference):
        places = run(pages, page_size, rows, lengths, roots, count)
        assert torch.equal(places.roots, roots[rows])
        assert places.positions.tolist() == [[position for _, position in step] for step in expected]
        assert places.slots.tolist() == [
            [table[row][min(p // page_size, 129)] * page_size + p % page_size for row, p in step] for step in expected
        ]
    aligned = draft_places.triton(pages, page_size, rows, lengths, roots, count)
    assert all(row.is_contiguous() and row.data_ptr() % 16 == 0 for table in aligned[1:] for row in table)
