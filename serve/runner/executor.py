"""Between scheduler and device: turns chunks and sequences into passes, launches them and returns their tokens.

Only `PendingResult.read` waits for the device.
"""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.serve.engine.plan import HostProposal, SamplingMode
from slipstream.serve.engine.scheduler import Chunk, Sequence
from slipstream.serve.engine.widths import Offer
from slipstream.serve.runner.batch import Batch
from slipstream.serve.runner.cuda_graphs import RoundGraphs
from slipstream.serve.runner.prompt_graphs import PromptGraphs
from slipstream.serve.runner.round import Runner


@dataclass(frozen=True, slots=True)
class PendingResult:
    """A launched pass and its results."""

    results: NDArray[np.int32]  # (B, 1 + N or 1 + 2 * N): see Runner.round; written once `landed` has passed
    width: int  # N
    landed: torch.cuda.Event | None

    @classmethod
    def launch(cls, results: Tensor, width: int) -> "PendingResult":
        """Starts the copy of the results to the host."""
        if results.device.type != "cuda":
            return cls(results.numpy(), width, None)
        host = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
        host.copy_(results, non_blocking=True)
        landed = torch.cuda.Event()
        landed.record()
        return cls(host.numpy(), width, landed)

    def read(self) -> "PendingResult":
        """Waits until the results are on the host."""
        if self.landed is not None:
            self.landed.synchronize()  # sync
        return self

    def tokens(self) -> list[list[int]]:
        """The emitted tokens of each request."""
        return [row[1 : 1 + row[0]] for row in self.results[:, : 1 + self.width].tolist()]

    def accepted(self) -> list[list[int]]:
        """The drafted nodes that each request accepted."""
        counts = self.results[:, 0].tolist()
        if self.results.shape[1] == 1 + self.width:  # chains: the first nodes are accepted
            return [list(range(1, count)) for count in counts]
        nodes = self.results[:, 2 + self.width :].tolist()  # after the roots
        return [row[: count - 1] for row, count in zip(nodes, counts, strict=True)]


@dataclass(frozen=True, slots=True)
class Planned:
    """A round to launch; made while the previous one still runs."""

    sequences: list[Sequence]
    slots: list[int]
    mode: SamplingMode


@dataclass(frozen=True, slots=True)
class Recipients:
    """The requests of a pass that receive a token from it; known while it runs."""

    places: list[int]  # (B,) in the pass
    slots: list[int]  # (B,)
    slots_on_device: Tensor  # (B,) slots again

    def part_of(self, flight: PendingResult) -> NDArray[np.int32]:
        """Their rows of the results."""
        return flight.results if len(self.places) == len(flight.results) else flight.results[self.places]


class Executor:
    """Launches passes. `graphs`, `prompts`: captured rounds and prefills, or None. `width`: nodes that the drafter
    proposes at the end of a prompt."""

    def __init__(
        self, runner: Runner, graphs: RoundGraphs | None, width: int, prompts: PromptGraphs | None = None
    ) -> None:
        self.runner, self.graphs, self.width, self.prompts = runner, graphs, width, prompts
        self.state = runner.state
        self._offers: dict[int, Offer] = {}  # by request slot: the stored proposal
        self._num_uploaded = [0] * self.state.padding  # pages of each request slot that the device has

    def admit(self, sequence: Sequence) -> None:
        self.state.admit(sequence.slot, sequence.request)
        self._num_uploaded[sequence.slot] = 0

    def prefill(self, chunks: list[Chunk]) -> PendingResult:
        """Computes prompt chunks. Samples a token after each; only the tokens after last chunks count."""
        sequences = [chunk.sequence for chunk in chunks]
        self._expect_proposals([sequence.slot for sequence in sequences], self.width)
        self.prepare(sequences)
        sampled = self.prompts.prefill(chunks, sampling_mode(sequences)) if self.prompts is not None else None
        sampled = (self._prefill(chunks) if sampled is None else sampled).int()
        return PendingResult.launch(torch.stack((torch.ones_like(sampled), sampled), dim=1), 1)

    def prepare(self, sequences: list[Sequence]) -> None:
        """Uploads the pages that the sequences have gained. Called before the pass that needs them."""
        changes: list[tuple[int, int, int]] = []
        uploaded = self._num_uploaded
        for sequence in sequences:
            slot, pages = sequence.slot, sequence.table.pages
            if uploaded[slot] != len(pages):
                changes += [(slot, index, pages[index]) for index in range(uploaded[slot], len(pages))]
                uploaded[slot] = len(pages)
        self.state.set_pages(changes)

    def plan(self, sequences: list[Sequence]) -> Planned:
        """Prepares the next round, as far as possible before its launch."""
        self.prepare(sequences)
        slots = [sequence.slot for sequence in sequences]
        if self.graphs is not None and slots:
            self.graphs.expect(slots)
        return Planned(sequences, slots, sampling_mode(sequences))

    def round(self, planned: Planned, width: int) -> PendingResult:
        """Verifies and proposes `width` nodes each. The device may be idle until the launch, so it comes first."""
        results = self._round(planned, width)
        self._expect_proposals(planned.slots, width)
        return PendingResult.launch(results, width)

    def recipients(self, sequences: list[Sequence | None]) -> Recipients:
        """Maps each output of the pass to its request; None marks an output to discard."""
        slots = [sequence.slot if sequence is not None else -1 for sequence in sequences]
        places = [place for place, slot in enumerate(slots) if slot >= 0]
        slots = [slots[place] for place in places]
        return Recipients(places, slots, self.state.upload(slots))

    def store(self, to: Recipients, proposal: HostProposal) -> None:
        """Stores proposals drafted on the host."""
        self.state.store(to.slots_on_device, proposal)
        offers = zip(to.slots, zip(proposal.counts, proposal.kinds, strict=True), strict=True)
        self._offers.update(offers if all(proposal.counts) else [(slot, own) for slot, own in offers if own[0]])

    def offers(self, slots: list[int]) -> list[Offer]:
        """The stored proposals."""
        return [self._offers[slot] for slot in slots]

    def _expect_proposals(self, slots: list[int], width: int) -> None:
        """Notes the proposals that a launched pass will store on the device."""
        self._offers.update(dict.fromkeys(slots, (min(width, self.runner.drafter.device_width), 0)))

    def _round(self, planned: Planned, width: int) -> Tensor:
        captured = self.graphs.round(planned.slots, planned.mode, width) if self.graphs is not None else None
        if captured is not None:
            return captured
        # This round is the last entry of in_flight.
        bounds = tuple(sequence.kv_bound - sequence.in_flight[-1] for sequence in planned.sequences)
        return self.runner.round(self.state.upload(planned.slots), bounds, planned.mode, width)

    def _prefill(self, chunks: list[Chunk]) -> Tensor:
        """Packs the chunks request after request; returns the tokens (B,) sampled after them."""
        tokens, next_tokens, positions = list[int](), list[int](), list[int]()
        for chunk in chunks:
            known = chunk.sequence.tokens
            tokens += known[chunk.start : chunk.end]
            next_tokens += (known + [0])[chunk.start + 1 : chunk.end + 1]  # 0: replaced by the sampled token
            positions += range(chunk.start, chunk.end)
        upload, query_lens = self.state.upload, tuple(chunk.end - chunk.start for chunk in chunks)
        last = [end - 1 for end in accumulate(query_lens)]
        each = [(chunk.sequence.slot, chunk.start, chunk.end, chunk.is_last) for chunk in chunks]
        slots, lengths, ends, is_last, last_queries = upload([*zip(*each, strict=True), last])
        repeated = [chunk.sequence.slot for chunk in chunks for _ in range(chunk.end - chunk.start)]
        packed, successors, depth, slot_of_each = upload([tokens, next_tokens, positions, repeated])
        batch = Batch(
            state=self.state,
            requests=slots,
            lengths=lengths,
            positions=depth,
            slots=self.state.slots(slot_of_each, depth),
            query_lens=query_lens,
            kv_bounds=tuple(chunk.end for chunk in chunks),
            mode=sampling_mode([chunk.sequence for chunk in chunks]),
            next_tokens=successors,
            last=last_queries,
        )
        proposes = any(chunk.is_last for chunk in chunks)
        return self.runner.prefill(batch, packed, ends, is_last.bool(), self.width, proposes=proposes)


def sampling_mode(sequences: list[Sequence]) -> SamplingMode:
    params = [sequence.request.params for sequence in sequences]
    if all(p.temperature == 0 for p in params):
        return "greedy"
    return "full" if any(p.top_k or p.top_p < 1 or p.min_p for p in params) else "plain"
