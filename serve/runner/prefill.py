"""Prompt chunks as one pass: packed on the host, described to attention and drafter on the device.

A chunk fills whole blocks of `block` rows, the last one up with rows that nobody reads, whose KV goes to the dump page.
An eager pass has blocks of one row, and its attention is over chunks of known lengths. A captured pass has larger ones:
for its attention every block is a request that asks `block` nodes after those before it, so shapes depend on the number
of blocks alone, and the device itself reads slots, lengths and tokens.
Letters: S blocks, T = S * block rows, B requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from slipstream.serve.engine.plan import PromptChunk, SamplingMode
from slipstream.serve.runner.batch import AttentionMetadata
from slipstream.serve.runner.kv import KVSlots
from slipstream.serve.runner.request_state import RequestState

ArrayT = TypeVar("ArrayT")  # Tensor on the device, numpy's array on the host


class PrefillInputs(NamedTuple, Generic[ArrayT]):
    """What a pass reads, int64: views of one buffer."""

    tokens: ArrayT  # (T,)
    next_tokens: ArrayT  # (T,) -1: none, or not known yet
    block_requests: ArrayT  # (S,) request slots
    block_starts: ArrayT  # (S,) position of the first row
    block_counts: ArrayT  # (S,) rows that are tokens
    requests: ArrayT  # (B,) request slots
    starts: ArrayT  # (B,) tokens committed before
    ends: ArrayT  # (B,) tokens committed after
    last: ArrayT  # (B,) which of the T is the last token
    is_last: ArrayT  # (B,) whether the prompt ends


class PrefillShape(NamedTuple):
    """What a buffer of inputs has room for."""

    num_blocks: int  # S
    num_requests: int  # B
    block: int  # rows of each

    @classmethod
    def of(cls, chunks: Sequence[PromptChunk], block: int) -> "PrefillShape":
        """The smallest that holds the chunks."""
        return cls(sum(-(-len(chunk.tokens) // block) for chunk in chunks), len(chunks), block)

    @property
    def length(self) -> int:
        """Numbers in a buffer."""
        return sum(self._places)

    def split(self, buffer: Tensor) -> PrefillInputs[Tensor]:
        parts = buffer[: self.length].split(self._places)
        return PrefillInputs(*(part[:size] for part, size in zip(parts, self._sizes, strict=True)))

    @property
    def _sizes(self) -> list[int]:
        """Numbers in each field, in order."""
        return [self.num_blocks * self.block] * 2 + [self.num_blocks] * 3 + [self.num_requests] * 5

    @property
    def _places(self) -> list[int]:
        """The same, rounded up to 16 bytes: Triton compiles a kernel anew for arrays that are not so aligned."""
        return [size + size % 2 for size in self._sizes]


@dataclass(frozen=True, slots=True)
class PrefillPass:
    """A pass over prompt chunks."""

    inputs: PrefillInputs[Tensor]
    metadata: AttentionMetadata  # of the target's attention: by chunks or by blocks
    mode: SamplingMode


def pack(chunks: Sequence[PromptChunk], shape: PrefillShape, state: RequestState) -> Tensor:
    """PrefillInputs in one buffer on the host, pinned for a GPU; blocks and requests left over get the padding slot."""
    buffer = torch.zeros(shape.length, dtype=torch.int64, pin_memory=state.device.type == "cuda")
    to: PrefillInputs[Any] = PrefillInputs(*(field.numpy() for field in shape.split(buffer)))
    to.next_tokens[:], to.block_requests[:], to.requests[:] = -1, state.padding, state.padding
    first_block, block = 0, shape.block
    for index, chunk in enumerate(chunks):
        first, count = first_block * block, len(chunk.tokens)
        to.tokens[first : first + count] = chunk.tokens
        to.next_tokens[first : first + count - 1] = chunk.tokens[1:]
        to.next_tokens[first + count - 1] = -1 if chunk.next_token is None else chunk.next_token
        end_block = first_block - (-count // block)
        own = slice(first_block, end_block)
        to.block_requests[own] = chunk.slot
        to.block_starts[own] = range(chunk.start, chunk.end, block)
        to.block_counts[own] = block
        to.block_counts[end_block - 1] = count - (end_block - 1 - first_block) * block
        to.requests[index], to.starts[index], to.ends[index] = chunk.slot, chunk.start, chunk.end
        to.last[index], to.is_last[index] = first + count - 1, chunk.is_last
        first_block = end_block
    return buffer


def build_prefill(
    state: RequestState,
    inputs: PrefillInputs[Tensor],
    mode: SamplingMode,
    chunks: Sequence[PromptChunk] | None = None,
) -> PrefillPass:
    """`chunks`: those in `inputs`, where the host knows them. Attention is then over chunks, else over blocks, which
    verify's kernels take as they take nodes."""
    num_blocks, num_rows = len(inputs.block_starts), len(inputs.tokens)
    block = num_rows // num_blocks
    offsets = torch.arange(block, device=state.device)
    inside = offsets < inputs.block_counts[:, None]  # (S, block)
    positions = torch.where(inside, inputs.block_starts[:, None] + offsets, 0)
    owners = torch.where(inside, inputs.block_requests[:, None], state.padding)
    rows = positions.flatten(), KVSlots(lambda group: state.slots(owners, positions, group).flatten())
    if chunks is not None:
        lens, ends = tuple(len(chunk.tokens) for chunk in chunks), tuple(chunk.end for chunk in chunks)
        metadata = AttentionMetadata("prefill", state, inputs.requests, inputs.starts, *rows, lens, ends)
    else:
        lens, capacity = (block,) * num_blocks, state.pages.shape[-1] * state.page_size
        bounds, requests = (capacity,) * num_blocks, inputs.block_requests
        metadata = AttentionMetadata("verify", state, requests, inputs.block_starts, *rows, lens, bounds)
    return PrefillPass(inputs, metadata, mode)


def eager_prefill(state: RequestState, chunks: Sequence[PromptChunk], mode: SamplingMode) -> PrefillPass:
    """The chunks' pass, uploaded. The host does not wait."""
    shape = PrefillShape.of(chunks, block=1)
    inputs = shape.split(pack(chunks, shape, state).to(state.device, non_blocking=True))
    return build_prefill(state, inputs, mode, chunks)
