"""Between scheduler and device: turns chunks and sequences into passes, launches them, and brings their tokens back.

Nothing here waits for the device but `Flight.read`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.serve.batch import Batch, HostProposal, SamplingMode
from slipstream.serve.graphs import RoundGraphs
from slipstream.serve.round import Runner
from slipstream.serve.sequence import Chunk, Sequence
from slipstream.serve.widths import Offer


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched pass: where its tokens arrive, and when."""

    results: Tensor  # (B, 1 + N or 1 + 2 * N) int32 on the host: see Runner.round; written once `landed` has passed
    width: int  # N
    landed: torch.cuda.Event | None

    @classmethod
    def launch(cls, results: Tensor, width: int) -> "Flight":
        """Starts the copy of the results to the host."""
        if results.device.type != "cuda":
            return cls(results, width, None)
        host = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
        host.copy_(results, non_blocking=True)
        landed = torch.cuda.Event()
        landed.record()
        return cls(host, width, landed)

    def read(self) -> tuple[list[list[int]], list[list[int]]]:
        """Each request's tokens, and the drafted nodes that it accepted."""
        if self.landed is not None:
            self.landed.synchronize()  # sync
        rows = self.results.tolist()
        tokens = [row[1 : 1 + row[0]] for row in rows]
        if self.results.shape[1] == 1 + self.width:  # chains: nodes are accepted in order
            return tokens, [list(range(1, row[0])) for row in rows]
        return tokens, [row[2 + self.width : 1 + self.width + row[0]] for row in rows]


class Executor:
    """Launches passes. `graphs`: captured rounds, where there are any; `width`: nodes that a prefill's end proposes."""

    def __init__(self, runner: Runner, graphs: RoundGraphs | None, width: int) -> None:
        self.runner, self.graphs, self.width = runner, graphs, width
        self.state = runner.state
        self._offers = [Offer(0)] * self.state.null  # each row's stored proposal
        self._num_uploaded = [0] * self.state.null  # pages of each row that the device knows

    def admit(self, sequence: Sequence) -> None:
        self.state.admit(sequence.row, sequence.request)
        self._num_uploaded[sequence.row] = 0

    def prefill(self, chunks: list[Chunk]) -> Flight:
        """Computes prompt chunks; the flight brings the token sampled behind each, which counts for last ones only."""
        batch, tokens = self._pack(chunks)
        self._expect_proposals([chunk.sequence.row for chunk in chunks], self.width)
        sampled = self.runner.prefill(batch, tokens, tuple(chunk.is_last for chunk in chunks), self.width).int()
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

    def round(self, sequences: list[Sequence], width: int) -> tuple[Flight, list[int]]:
        """Verifies and proposes `width` nodes each, for sequences that are prepared.

        Also returns how many of the nodes verified are drafted tokens.
        """
        rows = [sequence.row for sequence in sequences]
        drafted = [min(self._offers[row].nodes, width) - 1 for row in rows]
        self._expect_proposals(rows, width)
        return Flight.launch(self._round(sequences, rows, width), width), drafted

    def store(self, rows: list[int], proposal: HostProposal) -> None:
        """Takes proposals made on the host."""
        self.state.store(rows, proposal)
        for row, nodes, kind in zip(rows, proposal.counts, proposal.kinds, strict=True):
            if nodes:
                self._offers[row] = Offer(nodes, kind)

    def offers(self, sequences: list[Sequence]) -> list[Offer]:
        """The stored proposals."""
        return [self._offers[sequence.row] for sequence in sequences]

    def _expect_proposals(self, rows: list[int], width: int) -> None:
        """The pass about to be launched leaves what the drafter proposes on the device."""
        offer = Offer(min(width, self.runner.drafter.device_width))
        for row in rows:
            self._offers[row] = offer

    def _round(self, sequences: list[Sequence], rows: list[int], width: int) -> Tensor:
        mode = _sampling_mode(sequences)
        if self.graphs is not None:
            return self.graphs.round(rows, mode, width)
        bounds = tuple(sequence.kv_bound - sequence.in_flight[-1] for sequence in sequences)  # this round is the last
        return self.runner.round(self.state.upload(rows), bounds, mode, width, width)

    def _pack(self, chunks: list[Chunk]) -> tuple[Batch, Tensor]:
        tokens: list[int] = []
        next_tokens: list[int] = []
        positions: list[int] = []
        for chunk in chunks:
            known = chunk.sequence.tokens
            tokens += known[chunk.start : chunk.end]
            next_tokens += (known + [0])[chunk.start + 1 : chunk.end + 1]  # 0: replaced by the sampled token
            positions += range(chunk.start, chunk.end)
        sequences = [chunk.sequence for chunk in chunks]
        self.prepare(sequences)
        upload = self.state.upload
        query_lens = tuple(chunk.end - chunk.start for chunk in chunks)
        rows, lengths = upload([[chunk.sequence.row for chunk in chunks], [chunk.start for chunk in chunks]])
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
            mode=_sampling_mode(sequences),
            next_tokens=successors,
        )
        return batch, packed


def _sampling_mode(sequences: list[Sequence]) -> SamplingMode:
    params = [sequence.request.params for sequence in sequences]
    if all(p.temperature == 0 for p in params):
        return "greedy"
    return "full" if any(p.top_k or p.top_p < 1 or p.min_p for p in params) else "plain"
