"""Chunks of prompts, packed on the host into one buffer for the device."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from slipstream.kernels.speculation.ragged import Chunks
from slipstream.serve.engine.plan import PromptChunk
from slipstream.serve.runner.request_state import RequestState


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
