"""Moving KV rows equals a loop that reads everything before it writes."""

import random

import pytest
import torch

from slipstream.kernels.kv import move_rows


@pytest.mark.parametrize("num_rows", [1, 7, 40])
def test_move_rows_with_overlapping_ranges(num_rows: int) -> None:
    rng = random.Random(num_rows)
    cache = torch.randn(3, 2, 40, 2, 4, generator=torch.Generator().manual_seed(0))
    sources = [rng.randrange(40) for _ in range(num_rows)]
    destinations = rng.sample(range(40), num_rows)
    expected = cache.clone()
    for source, destination in zip(sources, destinations, strict=True):
        for layer in range(3):
            for part in range(2):
                expected[layer, part, destination] = cache[layer, part, source]
    move_rows(cache, torch.tensor(sources), torch.tensor(destinations))
    assert torch.equal(cache, expected)


def test_a_shift_by_one_reads_before_it_writes() -> None:
    cache = torch.arange(10.0).view(1, 1, 10, 1, 1).repeat(2, 2, 1, 1, 1)
    move_rows(cache, torch.arange(1, 10), torch.arange(9))
    assert cache[1, 1].flatten().tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 9]
