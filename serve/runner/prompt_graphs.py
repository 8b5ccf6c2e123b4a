"""Prefills captured as CUDA graphs: launched one by one, the kernels of a short prompt cost the host several times what
they cost the device.

A captured pass holds blocks of BLOCK queries. A chunk of a prompt fills whole blocks, the last one up with queries that
nobody reads, whose KV goes to the dump page; for the target's attention every block is a request of its own that asks
BLOCK nodes behind those before. So shapes depend on the number of blocks alone, and the device itself reads rows,
lengths and tokens.
Letters: S blocks, T = S * BLOCK queries, B requests.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from slipstream import runtime
from slipstream.kernels.compile_ahead import compile_ahead
from slipstream.serve.engine.plan import PromptChunk, SamplingMode
from slipstream.serve.options import PREFILL_BLOCK as BLOCK
from slipstream.serve.options import EngineConfig
from slipstream.serve.runner.batch import Batch
from slipstream.serve.runner.cuda_graphs import MODES, Capturer, RoundGraphs
from slipstream.serve.runner.round import Runner

MOST_REQUESTS = 16  # of a captured pass
MOST_PAIRS = 2**24  # of a query and a key that it sees, 1,024 after 16,384: beyond, kernels made for prompts are faster

ArrayT = TypeVar("ArrayT")  # Tensor on the device, numpy's array on the host


class Fields(NamedTuple, Generic[ArrayT]):
    """What a pass reads, int64: views of one buffer."""

    tokens: ArrayT  # (T,)
    next_tokens: ArrayT  # (T,)
    block_requests: ArrayT  # (S,) request slots
    block_starts: ArrayT  # (S,) position of the first query
    block_counts: ArrayT  # (S,) queries that are tokens
    requests: ArrayT  # (B,) request slots
    starts: ArrayT  # (B,) tokens committed before
    ends: ArrayT  # (B,) tokens committed after
    last: ArrayT  # (B,) which of the T is the last query
    is_last: ArrayT  # (B,) whether the prompt ends


def field_sizes(num_blocks: int, num_requests: int) -> list[int]:
    return [num_blocks * BLOCK] * 2 + [num_blocks] * 3 + [num_requests] * 5


def sizes(most_tokens: int) -> list[int]:
    """Numbers of blocks to capture, up to `most_tokens`: from the fourth on, steps that waste at most a fifth."""
    most = most_tokens // BLOCK
    steps = [1, 2, 3, 4, 5, 6, *(base * 2**power for power in range(1, 16) for base in (4, 5, 6, 7))]
    return [size for size in steps if size < most] + [most] * (most > 0)


class PromptGraphs:
    """Runs `runner.prefill` by replay. `width`: nodes proposed behind a prompt."""

    def __init__(self, runner: Runner, most_tokens: int, width: int, capturer: Capturer) -> None:
        state = runner.state
        self.runner, self.width, self.capturer = runner, width, capturer
        self.sizes, self.num_requests = sizes(most_tokens), min(MOST_REQUESTS, state.padding)
        length = sum(field_sizes(self.sizes[-1], self.num_requests))
        self.inputs = torch.zeros(length, dtype=torch.int64, device=state.device)
        self.sampled = torch.zeros(self.num_requests, dtype=torch.int64, device=state.device)
        self._graphs: dict[tuple[int, SamplingMode], torch.cuda.CUDAGraph] = {}

    def run_all(self) -> None:
        """Runs every size on padding, uncaptured, and once in the modes whose kernels are the same at every size."""
        for size, mode in self._keys():
            if mode == MODES[0] or size == self.sizes[-1]:
                self._hold([], size)
                self.run(size, mode)

    def capture_all(self) -> None:
        """Captures every size in every mode, largest first."""
        sizes = ", ".join(str(size * BLOCK) for size in self.sizes)
        self.capturer.capture_all("prefills", f"tokens {sizes}", self._keys(), self._capture)

    def prefill(self, chunks: Sequence[PromptChunk], mode: SamplingMode) -> Tensor | None:
        """The tokens (B,) int64 sampled after the chunks, on the device. None where no graph takes them: the context is
        so long that kernels made for prompts are faster (and compiled by now), or memory held no graph."""
        mode = "full" if mode == "full" else "plain"
        size = self._find(chunks, mode)
        if size is None:
            return None
        self._hold(chunks, size)
        self._graphs[size, mode].replay()
        return self.sampled[: len(chunks)]

    def _keys(self) -> list[tuple[int, SamplingMode]]:
        return [(size, mode) for size in reversed(self.sizes) for mode in reversed(MODES)]

    def _find(self, chunks: Sequence[PromptChunk], mode: SamplingMode) -> int | None:
        pairs = sum((chunk.end - chunk.start) * (chunk.start + chunk.end) // 2 for chunk in chunks)
        is_long = pairs > MOST_PAIRS and self.runner.attention["prefill"].is_ready
        if is_long or len(chunks) > self.num_requests:
            return None
        needed = num_blocks(chunks)
        return next((size for size in self.sizes if size >= needed and (size, mode) in self._graphs), None)

    def _hold(self, chunks: Sequence[PromptChunk], size: int) -> None:
        """Uploads what a pass of `size` blocks reads."""
        lengths = field_sizes(size, self.num_requests)
        packed = torch.zeros(sum(lengths), dtype=torch.int64, pin_memory=self.inputs.is_cuda)
        pack(chunks, Fields(*(field.numpy() for field in packed.split(lengths))), self.runner.state.padding)
        self.inputs[: len(packed)].copy_(packed, non_blocking=True)

    def _capture(self, size: int, mode: SamplingMode) -> bool:
        self._hold([], size)
        what = f"a prefill of {size * BLOCK} tokens ({mode} sampling)"
        remedy = "lower prefill_graph_tokens or mem_fraction"
        graph = self.capturer.capture(partial(self.run, size, mode), what, remedy)
        if graph is not None:
            self._graphs[size, mode] = graph
        return graph is not None

    def run(self, size: int, mode: SamplingMode) -> None:
        """The pass that is captured, on what `self.inputs` holds."""
        state, lengths = self.runner.state, field_sizes(size, self.num_requests)
        fields = Fields(*self.inputs[: sum(lengths)].split(lengths))
        offsets = torch.arange(BLOCK, device=state.device)
        inside = offsets < fields.block_counts[:, None]  # (S, BLOCK)
        positions = torch.where(inside, fields.block_starts[:, None] + offsets, 0)
        slots = state.slots(torch.where(inside, fields.block_requests[:, None], state.padding), positions)
        capacity = state.pages.shape[1] * state.page_size
        blocks = Batch(
            state=state,
            requests=fields.block_requests,
            lengths=fields.block_starts,
            positions=positions.flatten(),
            slots=slots.flatten(),
            query_lens=(BLOCK,) * size,
            kv_bounds=(capacity,) * size,
            mode=mode,
        )
        batch = Batch(
            state=state,
            requests=fields.requests,
            lengths=fields.starts,
            positions=blocks.positions,
            slots=blocks.slots,
            query_lens=(1,) * self.num_requests,  # how many is known on the device only
            kv_bounds=(capacity,) * self.num_requests,
            mode=mode,
            next_tokens=fields.next_tokens,
            last=fields.last,
            real=inside.flatten(),
        )
        is_last = fields.is_last.bool()
        sampled = self.runner.prefill(batch, fields.tokens, fields.ends, is_last, self.width, attended=blocks)
        self.sampled.copy_(sampled)


def capture_all(runner: Runner, config: EngineConfig, widths: Sequence[int]) -> tuple[RoundGraphs, PromptGraphs | None]:
    """Rounds and, if any are asked for, prefills. Their kernels are compiled first, in parallel."""
    capturer, prompts = Capturer(), None
    if config.captured_tokens >= BLOCK:
        prompts = PromptGraphs(runner, config.captured_tokens, max(widths), capturer)
    graphs = RoundGraphs(runner, config.max_running, widths, capturer)
    try:
        with runtime.stage("compiling kernels"), compile_ahead("compiling kernels"):
            if prompts is not None:
                prompts.run_all()
            graphs.run_all()
    except torch.cuda.OutOfMemoryError as error:
        remedy = "lower max_running, prefill_graph_tokens or mem_fraction"
        raise ValueError(f"the largest passes do not fit into memory; {remedy}") from error
    if prompts is not None:  # first: the largest passes of all
        prompts.capture_all()
    graphs.capture_all()
    return graphs, prompts


def num_blocks(chunks: Sequence[PromptChunk]) -> int:
    return sum(-(-(chunk.end - chunk.start) // BLOCK) for chunk in chunks)


def pack(chunks: Sequence[PromptChunk], to: Fields[Any], padding: int) -> None:
    """Enters the chunks into `to`, on the host and zero; blocks and requests left over get the padding slot."""
    to.block_requests[:], to.requests[:] = padding, padding
    block = 0
    for index, chunk in enumerate(chunks):
        start, end = chunk.start, chunk.end
        first, count = block * BLOCK, end - start
        to.tokens[first : first + count] = chunk.tokens
        to.next_tokens[first : first + count] = [*chunk.tokens[1:], chunk.next_token or 0]
        number = -(-count // BLOCK)
        own = slice(block, block + number)
        to.block_requests[own] = chunk.slot
        to.block_starts[own] = range(start, end, BLOCK)
        to.block_counts[own] = BLOCK
        to.block_counts[block + number - 1] = count - (number - 1) * BLOCK
        to.requests[index], to.starts[index], to.ends[index] = chunk.slot, start, end
        to.last[index], to.is_last[index] = first + count - 1, chunk.is_last
        block += number
