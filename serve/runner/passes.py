"""The two kinds of a target pass, captured ones, of fixed sizes, and those launched kernel by kernel; and the chunks of
prompts in them, which are packed on the host.

Nothing in a captured pass waits for the host. An eager one is as large as its work, and reads how many nodes each
request has, since its attention is planned by shapes.
Letters: B decoding requests, M chunks, S = B + M segments, T rows of the pass, W nodes that a request slot stores.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
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


def pack_chunks(chunks: Sequence[PromptChunk], num_chunks: int, num_tokens: int, padding: int, pinned: bool) -> Tensor:
    """One buffer on the host with room for so many chunks and tokens, for `split_chunks`; unused chunks have no tokens
    and the padding slot."""
    buffer = torch.zeros(sum(_places(num_chunks, num_tokens)), dtype=torch.int64, pin_memory=pinned)
    to = cast(Any, Chunks)(*(field.numpy() for field in split_chunks(buffer, num_chunks, num_tokens)))
    to.slots[:] = padding
    to.next_tokens[:] = -1
    start = 0
    for index, chunk in enumerate(chunks):
        end = start + len(chunk.tokens)
        to.slots[index] = chunk.slot
        to.starts[index] = chunk.start
        to.counts[index] = len(chunk.tokens)
        to.is_last[index] = chunk.is_last
        to.next_tokens[index] = -1 if chunk.next_token is None else chunk.next_token
        to.tokens[start:end] = chunk.tokens
        start = end
    return buffer


def split_chunks(buffer: Tensor, num_chunks: int, num_tokens: int) -> Chunks:
    """Views of a buffer."""
    sizes = [num_chunks] * 5 + [num_tokens]
    parts = buffer.split(_places(num_chunks, num_tokens))
    slots, starts, counts, is_last, next_tokens, tokens = (part[:size] for part, size in zip(parts, sizes, strict=True))
    return Chunks(slots, starts, counts, is_last, tokens, next_tokens)


def padding_prompts(state: RequestState, tokens: list[int]) -> list[PromptChunk]:
    """Tokens as prompts of the padding slot, each as long as a request can have: its page table has no more pages."""
    limit = max(1, state.pages.shape[-1] * state.page_size - 2 * state.proposals.shape[2])
    parts = [tokens[start : start + limit] for start in range(0, len(tokens), limit)]
    return [PromptChunk(state.padding, 0, part, None, is_last=True) for part in parts]


def _places(num_chunks: int, num_tokens: int) -> list[int]:
    """Numbers of each field, rounded up to 16 bytes: Triton compiles a kernel anew for others."""
    return [size + size % 2 for size in [num_chunks] * 5 + [num_tokens]]
