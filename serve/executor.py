"""Between scheduler and device: turns chunks and sequences into passes, launches them, and brings their tokens back.

Nothing here waits for the device but `Flight.read`.
"""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.serve.batch import Batch, HostProposal, SamplingMode
from slipstream.serve.graphs import RoundGraphs
from slipstream.serve.prompt_graphs import PromptGraphs
from slipstream.serve.round import Runner
from slipstream.serve.scheduler import Chunk, Sequence
from slipstream.serve.widths import Offer


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched pass and what it brings."""

    results: NDArray[np.int32]  # (B, 1 + N or 1 + 2 * N): see Runner.round; written once `landed` has passed
    width: int  # N
    landed: torch.cuda.Event | None

    @classmethod
    def launch(cls, results: Tensor, width: int) -> "Flight":
        """Starts the copy of the results to the host."""
        if results.device.type != "cuda":
            return cls(results.numpy(), width, None)
        host = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
        host.copy_(results, non_blocking=True)
        landed = torch.cuda.Event()
        landed.record()
        return cls(host.numpy(), width, landed)

    def read(self) -> "Flight":
        """Waits until the results are on the host."""
        if self.landed is not None:
            self.landed.synchronize()  # sync
        return self

    def tokens(self) -> list[list[int]]:
        """Of each request."""
        return [row[1 : 1 + row[0]] for row in self.results[:, : 1 + self.width].tolist()]

    def accepted(self) -> list[list[int]]:
        """The drafted nodes that each request accepted."""
        counts = self.results[:, 0].tolist()
        if self.results.shape[1] == 1 + self.width:  # chains: nodes are accepted in order
            return [list(range(1, count)) for count in counts]
        nodes = self.results[:, 2 + self.width :].tolist()  # behind the roots
        return [row[: count - 1] for row, count in zip(nodes, counts, strict=True)]


@dataclass(frozen=True, slots=True)
class Planned:
    """A round to be launched: what is known of it while the last one runs."""

    sequences: list[Sequence]
    rows: list[int]
    mode: SamplingMode


@dataclass(frozen=True, slots=True)
class Recipients:
    """The requests of a pass that wait for its tokens, which is known while it runs."""

    places: list[int]  # (B,) in the pass
    rows: list[int]  # (B,)
    rows_on_device: Tensor  # (B,) the same

    def part_of(self, arrived: Flight) -> NDArray[np.int32]:
        """Their results."""
        return arrived.results if len(self.places) == len(arrived.results) else arrived.results[self.places]


class Executor:
    """Launches passes. `graphs`, `prompts`: captured rounds and prefills, where there are any; `width`: nodes that a
    prefill's end proposes."""

    def __init__(
        self, runner: Runner, graphs: RoundGraphs | None, width: int, prompts: PromptGraphs | None = None
    ) -> None:
        self.runner, self.graphs, self.width, self.prompts = runner, graphs, width, prompts
        self.state = runner.state
        self._offers: dict[int, Offer] = {}  # each row's stored proposal
        self._num_uploaded = [0] * self.state.null  # pages of each row that the device knows

    def admit(self, sequence: Sequence) -> None:
        self.state.admit(sequence.row, sequence.request)
        self._num_uploaded[sequence.row] = 0

    def prefill(self, chunks: list[Chunk]) -> Flight:
        """Computes prompt chunks; the flight brings the token sampled behind each, which counts for last ones only."""
        sequences = [chunk.sequence for chunk in chunks]
        self._expect_proposals([sequence.row for sequence in sequences], self.width)
        self.prepare(sequences)
        sampled = self.prompts.prefill(chunks, sampling_mode(sequences)) if self.prompts is not None else None
        sampled = (self._prefill(chunks) if sampled is None else sampled).int()
        return Flight.launch(torch.stack((torch.ones_like(sampled), sampled), dim=1), 1)

    def prepare(self, sequences: list[Sequence]) -> None:
        """Tells the device which pages they have gained: before the pass that needs them, which may be `round`."""
        changes: list[tuple[int, int, int]] = []
        uploaded = self._num_uploaded
        for sequence in sequences:
            row, pages = sequence.row, sequence.table.pages
            if uploaded[row] != len(pages):
                changes += [(row, index, pages[index]) for index in range(uploaded[row], len(pages))]
                uploaded[row] = len(pages)
        self.state.set_pages(changes)

    def plan(self, sequences: list[Sequence]) -> Planned:
        """Does for the next round what can be done before it is launched."""
        self.prepare(sequences)
        rows = [sequence.row for sequence in sequences]
        if self.graphs is not None and rows:
            self.graphs.expect(rows)
        return Planned(sequences, rows, sampling_mode(sequences))

    def round(self, planned: Planned, width: int) -> Flight:
        """Verifies and proposes `width` nodes each. Here a device waits for whatever comes before the launch."""
        results = self._round(planned, width)
        self._expect_proposals(planned.rows, width)
        return Flight.launch(results, width)

    def recipients(self, sequences: list[Sequence | None]) -> Recipients:
        """Of a pass whose tokens are those sequences'; None: a token that does not count."""
        rows = [sequence.row if sequence is not None else -1 for sequence in sequences]
        places = [place for place, row in enumerate(rows) if row >= 0]
        rows = [rows[place] for place in places]
        return Recipients(places, rows, self.state.upload(rows))

    def store(self, to: Recipients, proposal: HostProposal) -> None:
        """Takes proposals made on the host."""
        self.state.store(to.rows_on_device, proposal)
        offers = zip(to.rows, zip(proposal.counts, proposal.kinds, strict=True), strict=True)
        self._offers.update(offers if all(proposal.counts) else [(row, own) for row, own in offers if own[0]])

    def offers(self, rows: list[int]) -> list[Offer]:
        """The stored proposals."""
        return [self._offers[row] for row in rows]

    def _expect_proposals(self, rows: list[int], width: int) -> None:
        """The pass launched leaves what the drafter proposes on the device."""
        self._offers.update(dict.fromkeys(rows, (min(width, self.runner.drafter.device_width), 0)))

    def _round(self, planned: Planned, width: int) -> Tensor:
        captured = self.graphs.round(planned.rows, planned.mode, width) if self.graphs is not None else None
        if captured is not None:
            return captured
        # Of what is in flight this round is the last.
        bounds = tuple(sequence.kv_bound - sequence.in_flight[-1] for sequence in planned.sequences)
        return self.runner.round(self.state.upload(planned.rows), bounds, planned.mode, width)

    def _prefill(self, chunks: list[Chunk]) -> Tensor:
        """The tokens (B,) sampled behind the chunks, one request's packed after the other's."""
        tokens: list[int] = []
        next_tokens: list[int] = []
        positions: list[int] = []
        for chunk in chunks:
            known = chunk.sequence.tokens
            tokens += known[chunk.start : chunk.end]
            next_tokens += (known + [0])[chunk.start + 1 : chunk.end + 1]  # 0: replaced by the sampled token
            positions += range(chunk.start, chunk.end)
        upload, query_lens = self.state.upload, tuple(chunk.end - chunk.start for chunk in chunks)
        last = [end - 1 for end in accumulate(query_lens)]
        each = [(chunk.sequence.row, chunk.start, chunk.end, chunk.is_last) for chunk in chunks]
        rows, lengths, ends, is_last, last_queries = upload([*zip(*each, strict=True), last])
        repeated = [chunk.sequence.row for chunk in chunks for _ in range(chunk.end - chunk.start)]
        packed, successors, depth, row_of_each = upload([tokens, next_tokens, positions, repeated])
        batch = Batch(
            state=self.state,
            rows=rows,
            lengths=lengths,
            positions=depth,
            slots=self.state.slots(row_of_each, depth),
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
