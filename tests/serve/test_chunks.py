"""Prompt chunks packed for a pass, and the pass laid out from them, against a loop over their tokens."""

import random

import pytest
import torch

from slipstream.kernels.speculation.ragged import Chunks, Layout, lay_out, select_heads
from slipstream.serve.engine.plan import PromptChunk
from slipstream.serve.runner.batch import AttentionMetadata, HostShape
from slipstream.serve.runner.chunks import pack_chunks, split_chunks
from slipstream.serve.runner.request_state import RequestState
from slipstream.serve.runner.step import StepPasses
from slipstream.tests.pairwise import grouped

PAGE_SIZE = 4
NUM_PAGES = 40


def random_state(num_slots: int = 6) -> RequestState:
    """Returns a state with two page tables."""
    state = RequestState(num_slots, NUM_PAGES, PAGE_SIZE, 1, torch.device("cpu"), num_groups=2)
    for pages in state.pages:
        pages[:num_slots] = 1 + torch.randperm(num_slots * NUM_PAGES).view(num_slots, NUM_PAGES)
    return state


def random_chunks(rng: random.Random, num_slots: int = 6) -> list[PromptChunk]:
    chunks = []
    for slot in rng.sample(range(num_slots), rng.randint(1, num_slots)):
        tokens = [rng.randrange(90) for _ in range(rng.choice([1, 2, 7, 8, 9, 16, 30]))]
        goes_on = rng.random() < 0.5
        next_token = rng.randrange(90) if goes_on else None
        chunks.append(PromptChunk(slot, rng.randrange(100), tokens, next_token, is_last=not goes_on))
    return chunks


def laid_out(chunks: Chunks, state: RequestState, num_rows: int) -> Layout:
    nobody = torch.zeros(0, dtype=torch.int64)
    stored = state.stored
    return lay_out(stored, nobody.int(), nobody, chunks, state.pages[0], PAGE_SIZE, num_rows, False, state.padding)


def check(chunks: list[PromptChunk], packed: Chunks, state: RequestState, num_rows: int) -> Layout:
    """Chunk after chunk; what nobody uses lies in the dump page."""
    assert all(values.storage_offset() % 2 == 0 for values in packed), "another alignment is another kernel"
    layout = laid_out(packed, state, num_rows)
    rows = zip(*(x.tolist() for x in (layout.requests, layout.tokens, layout.places, layout.kv_slots)), strict=True)
    expected = [
        (chunk.slot, token, place, int(state.slots(torch.tensor(chunk.slot), torch.tensor(place))))
        for chunk in chunks
        for place, token in enumerate(chunk.tokens, chunk.start)
    ]
    assert list(rows) == expected + [(state.padding, 0, 0, 0)] * (num_rows - len(expected))
    assert torch.equal(layout.positions, layout.places)
    following = [-1 if chunk.next_token is None else chunk.next_token for chunk in chunks]
    unused = len(packed.slots) - len(chunks)
    assert packed.next_tokens.tolist() == following + [-1] * unused
    assert packed.is_last.tolist() == [chunk.is_last for chunk in chunks] + [False] * unused
    assert layout.segment_slots.tolist() == [chunk.slot for chunk in chunks] + [state.padding] * unused
    assert layout.segment_lengths.tolist() == [chunk.start for chunk in chunks] + [0] * unused
    heads = select_heads(layout, 0, len(packed.slots), state.padding)
    ends = torch.tensor([len(chunk.tokens) for chunk in chunks]).cumsum(0) - 1
    assert heads.rows.tolist() == ends.tolist() + [0] * unused
    assert heads.requests.tolist() == layout.segment_slots.tolist()
    return layout


@grouped()
@pytest.mark.parametrize("seed", range(20))
def test_chunks_of_known_lengths(seed):
    rng = random.Random(seed)
    state = random_state()
    chunks = random_chunks(rng)
    lens = [len(chunk.tokens) for chunk in chunks]
    packed = split_chunks(pack_chunks(chunks, len(chunks), sum(lens), state.padding, False), len(chunks), sum(lens))
    layout = check(chunks, packed, state, sum(lens))
    runner = StepPasses(None, {}, None, state, ())
    metadata = runner._prompts(layout, HostShape((), (), tuple(chunks), "prefill"))
    assert isinstance(metadata, AttentionMetadata)
    assert metadata.phase == "prefill"
    assert metadata.query_lens == tuple(lens)
    assert metadata.kv_bounds == tuple(metadata.lengths + torch.tensor(lens))
    assert metadata.requests.tolist() == [chunk.slot for chunk in chunks]
    for group in (0, 1):
        slots = [state.slots(torch.tensor(chunk.slot), torch.arange(chunk.start, chunk.end), group) for chunk in chunks]
        assert torch.equal(metadata.slots.of(group), torch.cat(slots))


@grouped()
@pytest.mark.parametrize("seed", range(20))
def test_chunks_of_a_larger_pass(seed):
    """In buffers that held others before, as captured passes read them."""
    rng = random.Random(seed)
    state = random_state()
    most_chunks = 6 + rng.randrange(3)
    most_tokens = 180 + rng.randrange(9)
    buffer = pack_chunks((), most_chunks, most_tokens, state.padding, False)
    for _ in range(3):
        chunks = random_chunks(rng)
        num_tokens = sum(len(chunk.tokens) for chunk in chunks)
        packed = pack_chunks(chunks, most_chunks, num_tokens, state.padding, False)
        buffer[: len(packed)] = packed
        check(chunks, split_chunks(buffer, most_chunks, most_tokens), state, num_tokens + rng.randrange(9))
