"""Rows of target passes that the drafter has not been extended by, until something may read what it makes of them.

For drafters that do not attend to context: then each row's KV depends on that row alone, so rows may be computed in any
order, those that were replaced before they were read never. A draft that is seldom asked is extended by few rows: most
requests have ended by then, and their pages have gone to others.
Letters: C rows of a pass, n chosen rows, B requests, R request slots, S KV slots, P pages per request, K captured
states, H hidden.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.serve.runner.batch import PassRows
from slipstream.serve.runner.kv import KVSlots
from slipstream.serve.runner.request_state import RequestState

BUFFER_BYTES = 64 * 2**20  # the system gives pages of it when they are first written
MOST_AT_ONCE = 512  # rows that the drafter is extended by at a time, and of a pass: a few milliseconds' work on a CPU


class DeferredRows:
    """A ring of rows, numbered as they come. A row is pending while no later row goes to its KV slot and the drafter
    has not been extended by it; only pending rows are ever taken.

    All of the draft's KV lies in group 0. Rows that go to the dump page are never taken.
    """

    def __init__(self, state: RequestState, num_slots: int) -> None:
        """num_slots: S. Memory is taken with the first row."""
        self.state = state
        self.size = 0
        self._first = self._next = 0  # numbers of the oldest row that may be pending, and of the next one
        self._pending = torch.full((0,), -1)  # (S,) number of the row that goes there, -1 where none is pending
        self._last = torch.full((0,), -1)  # (R,) of each request's last row, -1 where the drafter was extended by it
        self._num_slots = num_slots

    @property
    def is_empty(self) -> bool:
        """Nothing is pending. Otherwise something may be."""
        return self._first == self._next

    def has_room(self, count: int) -> bool:
        """Whether there is room for `count` more rows, at most MOST_AT_ONCE."""
        return self.size == 0 or self._start(count) + count - self._first <= self.size

    def put(self, rows: PassRows, aux_states: Tensor) -> None:
        """Keeps rows of a pass with their aux hidden states (C, K * H), as pending ones. There must be room."""
        count = len(aux_states)
        if self.size == 0:
            self._allocate(aux_states)
        number = self._start(count)
        self._next = number + count
        slots = rows.slots.of(0)
        place = number % self.size
        for buffer, values in (
            (self._aux_states, aux_states), (self._positions, rows.positions), (self._slots, slots),
            (self._next_tokens, rows.next_tokens),
        ):  # fmt: skip
            buffer[place : place + count] = values
        self._pending.index_copy_(0, slots, torch.arange(number, self._next, device=slots.device))
        self._last.index_copy_(0, rows.requests, rows.last + number)

    def discard(self, rows: PassRows) -> None:
        """The drafter is extended by these rows in their own pass: older ones that go to their KV slots are not
        pending any more, and no older row is a request's last."""
        if not self.is_empty:
            self._pending.index_fill_(0, rows.slots.of(0), -1)
            self._last.index_fill_(0, rows.requests, -1)

    def due(self, requests: Tensor, lengths: Sequence[int]) -> Tensor:
        """(n,) numbers of the pending rows among the first lengths (B,) tokens of requests (B,) int64, oldest first,
        whichever request they came from: pages are shared. Waits for the device."""
        if self.is_empty or not any(lengths):
            return self._pending[:0]
        size = self.state.page_size
        pages = self.state.pages[0, requests, : -(-max(lengths) // size)]
        numbers = self._pending.view(-1, size)[pages].flatten(1)  # (B, P * size)
        within = torch.arange(numbers.shape[1], device=numbers.device) < self.state.upload(lengths)[:, None]
        return numbers[within & (numbers >= 0)].unique()

    def oldest(self, count: int) -> Tensor:
        """(n,) numbers of the `count` oldest pending rows, or of all if there are fewer. They must be taken before
        others are put: these get their room, and that of all rows before. Waits for the device."""
        numbers = self.pending()
        if len(numbers) > count:
            self._first = int(numbers[count])
        elif self.size:  # nothing is left: as at first, passes of any size have room
            self._first = self._next = -(-self._next // self.size) * self.size
        return numbers[:count]

    def trim(self) -> None:
        """Gives back the room before the oldest pending row."""
        self.oldest(0)

    def take(self, numbers: Tensor) -> tuple[PassRows, Tensor]:
        """Pending rows by their numbers (n,), ascending, which are not pending any more, and their aux hidden states
        (n, K * H). Of requests it names those whose last row is among them."""
        places = numbers % self.size
        indices = torch.searchsorted(numbers, self._last)
        (requests,) = torch.where(numbers[indices.clamp(max=len(numbers) - 1)] == self._last)
        slots = self._slots[places]
        rows = PassRows(
            self._positions[places], KVSlots(lambda _: slots), self._next_tokens[places], requests, indices[requests]
        )
        self._pending.index_fill_(0, slots, -1)
        self._last.index_fill_(0, requests, -1)
        return rows, self._aux_states.index_select(0, places)

    def _allocate(self, aux_states: Tensor) -> None:
        """Room for rows like these (C, K * H)."""
        width = aux_states.shape[1]
        device = aux_states.device
        self.size = size = max(BUFFER_BYTES // (width * aux_states.itemsize), MOST_AT_ONCE)
        self._aux_states = aux_states.new_empty(size, width)
        # Zeros, the dump page: where the ring's end was too short for a pass, numbers have no row.
        self._positions, self._slots = torch.zeros(2, size, dtype=torch.int64, device=device)
        self._next_tokens = torch.zeros(size, dtype=torch.int32, device=device)
        self._pending = torch.full((self._num_slots,), -1, device=device)
        self._last = torch.full((len(self.state.lengths),), -1, device=device)

    def pending(self) -> Tensor:
        """(n,) numbers of the pending rows, ascending. Waits for the device."""
        numbers = torch.arange(self._first, self._next, device=self._pending.device)
        if len(numbers):
            slots = self._slots[numbers % self.size]
            numbers = numbers[(self._pending[slots] == numbers) & (slots >= self.state.page_size)]
        return numbers

    def _start(self, count: int) -> int:
        """The number of the next pass's first row: its rows lie in one piece."""
        left = self.size - self._next % self.size
        return self._next if count <= left else self._next + left
