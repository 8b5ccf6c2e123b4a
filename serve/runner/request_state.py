"""Per-request state on the device.

Letters: B requests of a batch, N tree nodes per request (root included), R request slots, K KV groups, P pages per
request, V target vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from slipstream.kernels.kv.cache import chain_slots
from slipstream.kernels.requests import Admitted, SlotColumns, most_changes, pack_changes, write_changes
from slipstream.kernels.sampling.processors import BIAS, PENALTIES, Processors
from slipstream.kernels.sampling.sample import Filters, Sampling, noise_key
from slipstream.kernels.speculation.ragged import BINS, Stored
from slipstream.serve.engine.plan import Admission, HostProposal, NodeMasks, SamplingMode
from slipstream.serve.request import Request
from slipstream.serve.runner.kv import zeros

MOST_ENTRIES = 1024  # entries of page tables that are uploaded at a time


@dataclass(slots=True)
class KVSlots:
    """The slots that rows' KV goes to: (T,) int64 in each group, found in its page tables at the first use."""

    find: Callable[[int], Tensor]
    by_group: dict[int, Tensor] = field(default_factory=dict)

    def of(self, group: int) -> Tensor:
        if group not in self.by_group:
            self.by_group[group] = self.find(group)
        return self.by_group[group]


class RequestState:
    """Per-request device state, one slot per running request.

    The padding slot, `padding`, has length 0 and the dump page only. It pads a batch to the size of a captured one.
    What logits processors read is as wide as the vocabulary, 8 bytes per slot and token, and allocated here once, since
    captured passes read it in place: 79 MB for 64 requests and 151,936 tokens.
    """

    def __init__(
        self,
        num_slots: int,
        num_pages: int,
        page_size: int,
        width: int,
        device: torch.device,
        vocab_size: int = 0,
        num_groups: int = 1,
        *,
        has_read_starts: bool = False,
        has_adapters: bool = False,
    ) -> None:
        self.page_size = page_size
        self.device = device
        self.padding = num_slots
        num_slots += 1
        self.lengths = torch.zeros(num_slots, dtype=torch.int32, device=device)  # (R,) committed KV tokens
        # What the host changes between passes: page tables by group (K, R, P), 0 = dump page, entries behind a window
        # are stale; before them (R,) first positions of its text that a request's draft reads, and its adapter.
        column = num_slots + num_slots % 2  # tables begin at 16 bytes, too: see `inputs`
        room = (has_read_starts + has_adapters) * column
        self.entries = torch.zeros(room + num_groups * num_slots * num_pages, dtype=torch.int64, device=device)
        self.pages = self.entries[room:].view(num_groups, num_slots, num_pages)
        self.read_starts = self.entries[:num_slots] if has_read_starts else None
        self.adapters = self.entries[room - column : room - column + num_slots] if has_adapters else None
        # Stored proposals: tokens, parents, acceptance bins and, in the bits of fp32, probabilities (R, W) each.
        self.proposals = torch.full((4, num_slots, width), -1, dtype=torch.int32, device=device)
        self.proposals[3] = 0
        roots = torch.zeros(num_slots, dtype=torch.int64, device=device)  # last tokens, whose KV is not written yet
        tokens, parents, bins, probabilities = self.proposals
        self.stored = Stored(tokens, parents, probabilities.view(torch.float32), bins, self.lengths, roots)
        self.acceptance_table = torch.zeros(BINS, device=device)  # (C,) how likely nodes of a bin are accepted
        self.keys = torch.zeros(num_slots, dtype=torch.int64, device=device)  # (R,) noise keys
        self.temperature = torch.zeros(num_slots, device=device)  # (R,)
        self.top_k = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.top_p = torch.ones(num_slots, device=device)
        self.min_p = torch.zeros(num_slots, device=device)
        # (R,) how many likeliest tokens a request wants beside each of its own; -1: no log-probabilities
        self.logprobs = torch.full((num_slots,), -1, dtype=torch.int32, device=device)
        self.processors = Processors(
            flags=torch.zeros(num_slots, dtype=torch.int32, device=device),
            repetition=torch.ones(num_slots, device=device),
            frequency=torch.zeros(num_slots, device=device),
            presence=torch.zeros(num_slots, device=device),
            counts=zeros((num_slots, vocab_size), torch.int32, device),
            bias=zeros((num_slots, vocab_size), torch.float32, device),
        )

        # Inputs of captured passes: how many nodes to verify, then, from index 2 on, slots of decoding requests, slots
        # to draft for, and changes. Each part begins at 16 bytes: Triton compiles a kernel anew for others.
        room = self.padding + self.padding % 2
        parts = (2, room, room, most_changes(num_slots, MOST_ENTRIES))
        self.inputs = torch.full((sum(parts),), self.padding, dtype=torch.int64, device=device)
        self.budget, self.listed, self.drafting, self.changes = self.inputs.split(parts)
        self.changes.zero_()
        self.budget.zero_()
        self._waiting: list[NDArray[np.int64]] = []  # changes that the device has not got
        self._sent: tuple[tuple[int, ...], int, tuple[int, ...]] | None = None

        # Masks of one pass, and before them, by slot and node, which one each has. Captured passes read them in place.
        words = -(-vocab_size // 32)
        count = num_slots * width
        self._masks = zeros((count + count % 4 + self.padding * width * words,), torch.int32, device)
        self.mask_rows = self._masks[:count].view(num_slots, width).fill_(-1)
        self.mask_bits = self._masks[count + count % 4 :].view(self.padding * width, words)
        self._is_masked = False
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        tensors = [x for x in (*vars(self).values(), *self.stored, *self.processors) if isinstance(x, Tensor)]
        return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())

    def change(
        self,
        admissions: Sequence[Admission],
        pages: Sequence[tuple[int, int, int, int]] = (),
        read_starts: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Gives slots to requests, and writes each (group, slot, index, page) into the page tables and each (slot,
        start) into `read_starts`, before the next target pass reads them: see `write_changes` and `send`."""
        num_groups, num_slots, num_pages = self.pages.shape
        first = int(self.pages.storage_offset())
        entries = [(first + (group * num_slots + slot) * num_pages + index, page) for group, slot, index, page in pages]
        entries += read_starts
        if self.adapters is not None:
            column = int(self.adapters.storage_offset())
            entries += [(column + admission.slot, admission.request.adapter) for admission in admissions]
        admitted = [self._admitted(admission.slot, admission.request) for admission in admissions]
        while admitted or entries:
            self._waiting.append(pack_changes(admitted, entries[:MOST_ENTRIES]))
            admitted = []
            entries = entries[MOST_ENTRIES:]
        for admission in admissions:
            self._admit_processors(admission)

    def write_changes(self) -> None:
        """Writes all changes that `change` has collected."""
        self._write_all_but(0)

    def send(self, slots: tuple[int, ...], budget: int, drafting: tuple[int, ...] = ()) -> None:
        """Copies the inputs of the next captured passes: the requests to verify and how many nodes, the requests to
        draft for, and the changes. In one copy, since between two graphs each takes 8 us on an H200."""
        self._write_all_but(1)
        if self._waiting or self._sent != (slots, budget, drafting):
            values = np.concatenate((self._padded([budget, 0, *slots], drafting), *self._waiting))
            self.copy(values, self.inputs[: len(values)])
            self._waiting.clear()
            self._sent = slots, budget, drafting

    def send_drafting(self, drafting: tuple[int, ...]) -> None:
        """Copies the requests to draft for, unless `send` has sent the same."""
        if self._sent is None or self._sent[2] != drafting:
            self.copy(self._padded([], drafting), self.drafting)
            self._sent = None

    def _padded(self, head: list[int], drafting: Sequence[int]) -> NDArray[np.int64]:
        """The beginning of `inputs`, or its part `drafting`."""
        values = np.full(len(self.inputs) - len(self.changes) if head else len(self.drafting), self.padding, np.int64)
        values[: len(head)] = head
        start = len(values) - len(self.drafting)
        values[start : start + len(drafting)] = drafting
        return values

    def write_sent(self) -> None:
        """Writes the changes that were sent: the beginning of a captured pass."""
        columns = SlotColumns(
            lengths=self.lengths,
            keys=self.keys,
            top_k=self.top_k,
            flags=self.processors.flags,
            logprobs=self.logprobs,
            temperature=self.temperature,
            top_p=self.top_p,
            min_p=self.min_p,
        )
        write_changes(columns, self.entries, self.changes)

    def _write_all_but(self, count: int) -> None:
        while len(self._waiting) > count:
            packed = self._waiting.pop(0)
            self.copy(packed, self.changes[: len(packed)])
            self.write_sent()

    def _admitted(self, slot: int, request: Request) -> Admitted:
        params = request.params
        flags = PENALTIES.value * params.has_penalties + BIAS.value * bool(params.biases)
        key = noise_key(request.seed, request.choice)
        logprobs = -1 if params.logprobs is None else params.logprobs
        return Admitted(slot, key, params.top_k, flags, logprobs, params.temperature, params.top_p, params.min_p)

    def _admit_processors(self, admission: Admission) -> None:
        """Fills the slot's processors. Those that the request does not use keep the last request's numbers: its flags
        say that nothing reads them."""
        slot = admission.slot
        params = admission.request.params
        prompt_len = len(admission.request.prompt)
        processors = self.processors
        vocab_size = processors.counts.shape[1]
        if params.has_penalties:
            processors.repetition[slot].fill_(params.repetition_penalty)  # an assignment would wait for the device
            processors.frequency[slot].fill_(params.frequency_penalty)
            processors.presence[slot].fill_(params.presence_penalty)
            text = np.asarray(admission.tokens, dtype=np.int64)
            counts = 2 * np.bincount(text[prompt_len:], minlength=vocab_size)
            counts[text[:prompt_len]] |= 1
            self.copy(counts.astype(np.int32), processors.counts[slot])
        if params.biases:
            bias = np.zeros(vocab_size, dtype=np.float32)
            bias[list(params.biases)] = list(params.biases.values())
            self.copy(bias, processors.bias[slot])

    def set_masks(self, masks: Sequence[NodeMasks], *, beside: bool = False) -> None:
        """Copies masks for the next pass in mode "all", at once, since the device waits for them. `beside`: that pass
        runs already, has not come to them, and no earlier pass that reads masks is left."""
        if not masks and not self._is_masked:
            return
        self._is_masked = bool(masks)
        first = len(self._masks) - self.mask_bits.numel()
        words = self.mask_bits.shape[1]
        count = sum(len(mask.nodes) for mask in masks)
        host = torch.empty(first + count * words, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        values = host.numpy()
        values[:first] = -1
        rows = values[: self.mask_rows.numel()].reshape(self.mask_rows.shape)
        row = 0
        for mask in masks:
            rows[mask.slot, mask.nodes] = range(row, row + len(mask.nodes))
            row += len(mask.nodes)
        if masks:
            bits = values[first:].view(np.uint32).reshape(count, words)
            np.concatenate([mask.allowed for mask in masks], out=bits)
        if not beside or self._copies is None:
            self._masks[: len(host)].copy_(host, non_blocking=True)
            return
        with torch.cuda.stream(self._copies):
            self._masks[: len(host)].copy_(host, non_blocking=True)
        torch.cuda.current_stream().wait_stream(self._copies)

    def copy(self, values: NDArray[np.generic], to: Tensor) -> None:
        """Replaces `to` on the device. The host does not wait; the copy runs after the work queued there."""
        host = torch.from_numpy(values)
        to.copy_(host.pin_memory() if self.device.type == "cuda" else host, non_blocking=True)

    def upload(self, values: Sequence[int] | Sequence[Sequence[int]] | NDArray[np.int64]) -> Tensor:
        """Copies values to the device as int64. The host does not wait; the copy runs after the work queued there."""
        host = torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values, dtype=torch.int64)
        return host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host

    def store(self, requests: Tensor, proposal: HostProposal) -> None:
        """Replaces the stored proposals of the requests in `requests` (B,), except where the count is 0."""
        host = torch.from_numpy(proposal.nodes)
        if self.device.type == "cuda" and not host.is_pinned():
            host = host.pin_memory()
        nodes = host.to(self.device, non_blocking=True)
        if 0 in proposal.counts:
            indices = self.upload([index for index, count in enumerate(proposal.counts) if count])
            requests = requests[indices]
            nodes = nodes[:, indices]
        unused = self.proposals.shape[2] - nodes.shape[2]
        if unused:
            nodes = torch.cat((pad(nodes[:3], (0, unused), value=-1), pad(nodes[3:], (0, unused))))
        self.proposals.index_copy_(1, requests, nodes)

    def set_acceptance_table(self, table: NDArray[np.float32]) -> None:
        """(C,): how likely nodes of each acceptance bin are accepted, for proposals that are stored from now on."""
        self.copy(table[: len(self.acceptance_table)], self.acceptance_table)

    def sampling(self, requests: Tensor, mode: SamplingMode) -> Sampling:
        temperature = None if mode == "greedy" else self.temperature
        filters = Filters(self.top_k, self.top_p, self.min_p) if mode == "all" else None
        return Sampling(self.keys, temperature, filters, requests)

    @contextmanager
    def random_requests(self, vocab_size: int) -> Iterator[None]:
        """Inside, every slot holds a request with a random proposal and common filters, so that timed passes do the
        work of real ones: copies of one row would read the experts of one. Their KV goes to the dump page."""
        stored = self.stored
        columns = (self.lengths, self.pages, self.proposals, stored.roots, self.temperature, self.top_k, self.top_p)
        backups = [column.clone() for column in columns]
        generator = torch.Generator().manual_seed(0)
        self.lengths.zero_()
        self.pages.zero_()
        stored.tokens.copy_(torch.randint(vocab_size, stored.tokens.shape, generator=generator, dtype=torch.int32))
        stored.roots.copy_(stored.tokens[:, 0])
        stored.parents.copy_(torch.arange(-1, stored.parents.shape[1] - 1, dtype=torch.int32))
        stored.probabilities.fill_(1.0)
        stored.probabilities[self.padding] = 0.0
        for column, value in ((self.temperature, 0.6), (self.top_k, 20), (self.top_p, 0.95)):
            column.fill_(value)
        try:
            yield
        finally:
            for column, values in zip(columns, backups, strict=True):
                column.copy_(values)

    def chain(self, requests: Tensor, starts: Tensor, count: int) -> tuple[Tensor, KVSlots]:
        """Positions starts (B,) + 0..count-1 of `requests` (B,), (B * count,) int64, and their KV slots."""

        def find(group: int) -> tuple[Tensor, Tensor]:
            return chain_slots(self.pages[group], self.page_size, requests, starts, count)

        positions, slots = find(0)
        return positions, KVSlots(lambda group: find(group)[1], {0: slots})

    def slots(self, requests: Tensor, positions: Tensor, group: int = 0) -> Tensor:
        """KV slot (...) int64 of each position (...); `requests` (...) broadcasts against it."""
        pages = self.pages[group, requests, positions // self.page_size]
        return pages * self.page_size + positions % self.page_size
