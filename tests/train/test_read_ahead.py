"""Batches that a thread makes ahead of the loop: their order, how far ahead, faults, and its end."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.train.feature_source import BATCHES_AHEAD, read_ahead


class CountedRows:
    """Stands for PackedRows whose batches come from disk."""

    def __init__(self) -> None:
        self.add_states = lambda batch, _documents: batch
        self.made = 0

    def batches(self, count: int, fault: int = -1) -> Iterator[int]:
        for number in range(count):
            if number == fault:
                raise ValueError("no such shard")
            self.made += 1
            yield number


def test_batches_are_read_ahead_in_order_and_not_too_far() -> None:
    rows: Any = CountedRows()
    assert list(read_ahead(rows.batches(10), rows)) == list(range(10))
    rows = CountedRows()
    batches = read_ahead(rows.batches(100), rows)
    assert [next(batches) for _ in range(4)] == [0, 1, 2, 3]
    batches.close()  # type: ignore[attr-defined]
    assert 4 <= rows.made <= 4 + BATCHES_AHEAD
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]
    batches = read_ahead(rows.batches(5, fault=2), rows)
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(ValueError, match="no such shard"):
        next(batches)


def test_batches_that_need_no_disk_are_made_when_they_are_asked_for() -> None:
    rows: Any = CountedRows()
    rows.add_states = None
    batches = read_ahead(rows.batches(9), rows)
    next(batches)
    assert rows.made == 1
