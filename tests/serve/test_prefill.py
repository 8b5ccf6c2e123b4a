"""Prompt chunks packed for a pass, and the pass built from them, against a loop over their tokens."""

import random
from collections.abc import Iterator

import pytest
import torch

from slipstream.serve.engine.plan import PromptChunk
from slipstream.serve.runner.prefill import PrefillPass, PrefillShape, build_prefill, eager_prefill, pack
from slipstream.serve.runner.request_state import RequestState

PAGE_SIZE, NUM_PAGES = 4, 40


def random_state(num_slots: int = 6) -> RequestState:
    state = RequestState(num_slots, NUM_PAGES, PAGE_SIZE, 1, torch.device("cpu"))
    state.pages[0, :num_slots] = 1 + torch.randperm(num_slots * NUM_PAGES).view(num_slots, NUM_PAGES)
    return state


def random_chunks(rng: random.Random, num_slots: int = 6) -> list[PromptChunk]:
    chunks = []
    for slot in rng.sample(range(num_slots), rng.randint(1, num_slots)):
        tokens, goes_on = [rng.randrange(90) for _ in range(rng.choice([1, 2, 7, 8, 9, 16, 30]))], rng.random() < 0.5
        next_token = rng.randrange(90) if goes_on else None
        chunks.append(PromptChunk(slot, rng.randrange(100), tokens, next_token, is_last=not goes_on))
    return chunks


def rows_of(chunks: list[PromptChunk], state: RequestState) -> Iterator[list[tuple[int, int, int, int]]]:
    """Token, next token, position and KV slot of each row, by chunk."""
    for chunk in chunks:
        following = [*chunk.tokens[1:], -1 if chunk.next_token is None else chunk.next_token]
        positions = range(chunk.start, chunk.end)
        slots = state.slots(torch.tensor(chunk.slot), torch.tensor(positions)).tolist()
        yield list(zip(chunk.tokens, following, positions, slots, strict=True))


def check(prompts: PrefillPass, chunks: list[PromptChunk], state: RequestState, block: int) -> None:
    """Each chunk begins a block; rows that fill up a block have no next token and lie in the dump page."""
    inputs, metadata = prompts.inputs, prompts.metadata
    assert all(values.storage_offset() % 2 == 0 for values in inputs), "another alignment is another kernel"
    rows = torch.stack((inputs.tokens, inputs.next_tokens, metadata.positions, metadata.slots.of(0)), dim=1).tolist()
    start = 0
    for index, (chunk, expected) in enumerate(zip(chunks, rows_of(chunks, state), strict=True)):
        end = start + len(expected)
        assert [tuple(row) for row in rows[start:end]] == expected
        assert [int(values[index]) for values in inputs[5:]] == [
            chunk.slot, chunk.start, chunk.end, end - 1, chunk.is_last
        ]  # fmt: skip
        start += -(-len(expected) // block) * block
        assert all(row == [0, -1, 0, 0] for row in rows[end:start])
    assert all(row == [0, -1, 0, 0] for row in rows[start:])
    assert (inputs.requests[len(chunks) :] == state.padding).all()
    assert not inputs.is_last[len(chunks) :].any()


@pytest.mark.parametrize("seed", range(20))
def test_chunks_of_known_lengths(seed: int) -> None:
    rng, state = random.Random(seed), random_state()
    chunks = random_chunks(rng)
    prompts = eager_prefill(state, chunks, "greedy")
    check(prompts, chunks, state, block=1)
    metadata = prompts.metadata
    assert metadata.phase == "prefill"
    assert metadata.query_lens == tuple(len(chunk.tokens) for chunk in chunks)
    assert metadata.kv_bounds == tuple(metadata.lengths + torch.tensor(metadata.query_lens))
    assert metadata.requests.tolist() == [chunk.slot for chunk in chunks]
    assert metadata.per_query(metadata.requests).tolist() == [chunk.slot for chunk in chunks for _ in chunk.tokens]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("block", [1, 4, 8])
def test_blocks_of_a_larger_pass(seed: int, block: int) -> None:
    """As the device sees them: each block is a request with `block` queries from its first position on."""
    rng, state = random.Random(seed), random_state()
    chunks = random_chunks(rng)
    num_blocks, num_requests, _ = PrefillShape.of(chunks, block)
    shape = PrefillShape(num_blocks + rng.randrange(3), num_requests + rng.randrange(3), block)
    prompts = build_prefill(state, shape.split(pack(chunks, shape, state)), "greedy")
    check(prompts, chunks, state, block)
    metadata, starts = prompts.metadata, [list(range(chunk.start, chunk.end, block)) for chunk in chunks]
    owners = [chunk.slot for chunk, own in zip(chunks, starts, strict=True) for _ in own]
    assert metadata.phase == "verify"
    assert metadata.query_lens == (block,) * shape.num_blocks
    assert metadata.lengths.tolist()[:num_blocks] == [start for own in starts for start in own]
    assert metadata.requests.tolist() == owners + [state.padding] * (shape.num_blocks - num_blocks)
