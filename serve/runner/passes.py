"""The two kinds of a target pass: captured ones, of fixed sizes, and those launched kernel by kernel.

Nothing in a captured pass waits for the host. An eager one is as large as its work, and reads how many nodes each
request has, since its attention is planned by shapes.
Letters: B decoding requests, M chunks, S = B + M segments, T rows of the pass, W nodes that a request slot stores.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from slipstream.kernels.speculation.ragged import Chunks
from slipstream.serve.engine.plan import PromptChunk, PromptPhase, SamplingMode
from slipstream.serve.runner.request_state import RequestState


class StepInputs(NamedTuple):
    """The inputs of a target pass besides request state."""

    budget: Tensor  # (1,) int64 nodes to verify, roots included
    requests: Tensor  # (B,) int64 slots of decoding requests
    chunks: Chunks
    passes: Tensor | None = None  # (1,) int64 counts passes whose results take turns: see `verify_rows`


class Results(NamedTuple):
    """The results of a target pass for the host, for S segments of W tokens."""

    tokens: Tensor  # ([N,] S, 2 + 2 * W) int32, for trees 2 + 3 * W: see `verify_rows`; N passes take turns
    logprobs: Tensor | None  # (COLUMNS, S, W) int32: see `emitted_logprobs`
    prompt_logprobs: Tensor | None = None  # (2 + 2 * K, N) int32: see `token_logprobs`


class HostShape(NamedTuple):
    """The segments of a pass, as the host knows them."""

    counts: tuple[int, ...]  # nodes of each decoding request
    bounds: tuple[int, ...]  # most tokens that each of them can have committed before
    chunks: tuple[PromptChunk, ...]
    prompts_by: PromptPhase  # verify: its backend computes all rows in one ragged pass


class PassSizes(NamedTuple):
    """The sizes of a target pass."""

    rows: int  # T
    heads: int  # rows with logits: all nodes, and the last row of each chunk
    host: HostShape | None = None  # of a pass that is not captured


@dataclass(frozen=True, slots=True)
class CapturedPass:
    """A pass of fixed sizes over static buffers, filled up with padding."""

    inputs: StepInputs
    mode: SamplingMode
    results: Results  # the buffers; log-probabilities are taken only if there is one for them
    rows: int
    heads: int

    def write_changes(self, state: RequestState) -> None:
        """Writes what the host has changed in requests."""
        state.write_sent()

    def sizes(self, counts: Tensor) -> PassSizes:
        """Returns the sizes of the pass if its requests have counts (B,) nodes."""
        return PassSizes(self.rows, self.heads)


@dataclass(frozen=True, slots=True)
class EagerPass:
    """A pass launched kernel by kernel, as large as its work."""

    inputs: StepInputs
    mode: SamplingMode
    results: Results  # as in CapturedPass
    bounds: tuple[int, ...]  # as in HostShape
    chunks: tuple[PromptChunk, ...]
    prompts_by: PromptPhase

    def write_changes(self, state: RequestState) -> None:
        """Writes what the host has changed in requests."""
        state.write_changes()

    def sizes(self, counts: Tensor) -> PassSizes:
        """Returns the sizes of the pass if its requests have counts (B,) nodes."""
        node_counts = tuple(counts.tolist()) if len(counts) else ()  # sync
        num_nodes = sum(node_counts)
        rows = num_nodes + sum(len(chunk.tokens) for chunk in self.chunks)
        host = HostShape(node_counts, self.bounds, self.chunks, self.prompts_by)
        return PassSizes(rows, num_nodes + len(self.chunks), host)


TargetPass = CapturedPass | EagerPass
