"""Passes captured as CUDA graphs at start-up; a replay waits for nothing, and nothing is captured while serving.

A target pass is captured for (rows, rows with logits, sampling mode), a draft's for (requests, width, mode): every
number of nodes and prompt tokens that fits replays the same graph. A target pass is two graphs: passes of as many rows
share the first, up to where they sample, and the host may find masks while that runs. All graphs share one memory pool.
Target passes write the tokens that they emit to the host's memory, since a copy after a graph would take 9 us, and take
turns there, since two may be in flight. Their log-probabilities must be copied away before the next replay, in stream
order.
"""

import gc
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from slipstream import runtime
from slipstream.kernels.compile_ahead import compile_ahead
from slipstream.kernels.speculation.ragged import Chunks
from slipstream.models.layers.linear import Linear
from slipstream.models.targets.decoder import Target
from slipstream.serve.engine.graph_keys import MODES, GraphKeys
from slipstream.serve.engine.plan import (
    MAX_STEPS_IN_FLIGHT,
    DraftKey,
    PromptChunk,
    StepKey,
    StepPlan,
)
from slipstream.serve.runner.chunks import pack_chunks, padding_prompts, split_chunks
from slipstream.serve.runner.step import CapturedPass, Results, StepInputs, StepPasses

logger = logging.getLogger(__name__)

TIMED_PASSES = 2  # passes of each key at start-up: the faster one counts
Key = TypeVar("Key", bound=tuple[Any, ...])
Part = Callable[[Any], Any]  # part of a pass: gets the value of the part before it
REMEDY = "lower max_running, prefill_graph_tokens or mem_fraction"


@contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage that owns device memory, such as another engine's graphs, would break a capture by being freed in it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Capturer:
    """Captures passes with `target` that share one memory pool."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._has_warned = False
        self._is_memory_short = False
        # A thread of NCCL asks for events at any time, which a "global" capture would not survive.
        self._error_mode = "global" if target.ranks is None else "thread_local"

    def capture_all(
        self, kind: str, sizes: str, groups: Sequence[Sequence[Any]], capture: Callable[[Sequence[Any]], int]
    ) -> None:
        """Calls `capture`, which says how many passes memory held, with the keys of each group. Logs what it took;
        `sizes` names the keys."""
        gc.collect()
        torch.cuda.empty_cache()
        start = time.monotonic()
        before = torch.cuda.mem_get_info()[0]
        count = 0
        with tqdm(desc=f"capturing {kind}", total=sum(map(len, groups)), unit="pass", leave=False) as bar:
            for keys in groups:
                count += capture(keys)
                bar.update(len(keys))
        torch.cuda.empty_cache()  # of the warm-ups
        seconds = time.monotonic() - start
        num_bytes = before - torch.cuda.mem_get_info()[0]
        message = "captured %d %s (%s; with and without filters) in %.1f s, %.2f GB"
        logger.info(message, count, kind, sizes, seconds, num_bytes / 1e9)

    def capture(self, part: Part, value: Any, description: str, remedy: str) -> tuple[torch.cuda.CUDAGraph, Any] | None:
        """Returns a graph of a part of a pass, and the part's value, which the caller holds until the last part is
        captured: nothing else may get its memory. `value`: that of the part before. None, and once a warning with the
        pass's `description` and the `remedy`, where memory does not hold the graph.

        Raises ValueError in the same words where it does not even hold the pass.
        """
        run = partial(part, value)
        try:
            self._warm_up(run)
        except torch.cuda.OutOfMemoryError as error:
            raise ValueError(f"{description} does not fit into memory; {remedy}") from error
        for _ in range(2):
            graph = torch.cuda.CUDAGraph()
            with suppress(torch.cuda.OutOfMemoryError), _no_collection():
                with self._capturing(graph):
                    captured = run()
                return graph, captured
            self._is_memory_short = True
        if self._target.ranks is not None:  # the others have captured it, and would wait
            raise ValueError(f"the CUDA graph of {description} does not fit into memory; {remedy}")
        if not self._has_warned:
            message = "no memory is left for the CUDA graph of %s: it runs kernel by kernel, as may others; %s"
            logger.warning(message, description, remedy)
        self._has_warned = True
        return None

    @contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """`torch.cuda.graph` empties the allocator's cache first, so that every warm-up allocates anew: that takes most
        of the time of captures. So it comes in once memory was lacking."""
        if self._is_memory_short:
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode=self._error_mode):
                yield
            return
        torch.cuda.synchronize()  # sync
        with torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool, capture_error_mode=self._error_mode)
            try:
                yield
            finally:
                graph.capture_end()

    def _warm_up(self, run: Callable[[], Any]) -> None:
        """Loads kernels, and gives libraries their workspaces on the stream of the captures."""
        torch.cuda.synchronize()  # sync
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), self._target.short_run():
            run()
        torch.cuda.current_stream().wait_stream(self._stream)


class Graphs(ABC, Generic[Key]):
    """Passes of one kind, captured by key, in the order of `keys`. `requests` (B,) int64 is the buffer that they read
    slots from."""

    def __init__(self, step_passes: StepPasses, keys: Iterable[Key], requests: Tensor, capturer: Capturer) -> None:
        self.step_passes = step_passes
        self.keys = list(keys)
        self.requests = requests
        self.capturer = capturer
        self._graphs: dict[Key, list[torch.cuda.CUDAGraph]] = {}  # of a pass's parts

    @property
    def captured(self) -> tuple[Key, ...]:
        """The keys of the passes that memory held."""
        return tuple(self._graphs)

    @abstractmethod
    def parts_of(self, key: Key) -> Sequence[Part]:
        """The pass on what the buffers hold, in one part or two that are captured apart."""

    def start_of(self, key: Key) -> tuple[Any, ...]:
        """Passes whose starts are equal have the same first part, and follow one another."""
        return key

    def pass_of(self, key: Key) -> None:
        value = None
        for part in self.parts_of(key):
            value = part(value)

    @abstractmethod
    def hold_padding(self) -> None:
        """Fills the buffers so that a pass writes nothing but the dump page."""

    @abstractmethod
    def describe(self, key: Key) -> str:
        """The pass by its sizes, for messages."""

    def _capture_all(self, kind: str, sizes: str) -> None:
        groups = [list(keys) for _, keys in groupby(self.keys, self.start_of)]
        self.capturer.capture_all(kind, sizes, groups, self._capture)

    def _capture(self, keys: Sequence[Key]) -> int:
        """Captures passes that start alike. Returns how many memory held."""
        self.hold_padding()
        parts = self.parts_of(keys[0])
        start = self.capturer.capture(parts[0], None, self.describe(keys[0]), REMEDY)
        if start is None:
            return 0
        graph, value = start
        if len(parts) == 1:
            self._graphs[keys[0]] = [graph]
            return 1
        graph.replay()  # so that `value` holds something
        count = 0
        for key in keys:
            end = self.capturer.capture(self.parts_of(key)[1], value, self.describe(key), REMEDY)
            if end is not None:
                self._graphs[key] = [graph, end[0]]
                count += 1
        return count

    def _replay(self, key: Key) -> None:
        for graph in self._graphs[key]:
            graph.replay()

    def _time(self, key: Key) -> float:
        """Milliseconds of the best of a few passes."""
        state = self.step_passes.state
        run = partial(self._replay if key in self._graphs else self.pass_of, key)
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(TIMED_PASSES + 1)]
        proposals = state.proposals.clone()
        for start, end in pairs:
            state.lengths.zero_()
            start.record()
            run()
            end.record()
            state.proposals.copy_(proposals)  # a target's pass leaves roots, all of them alike
        torch.cuda.synchronize()  # sync
        return min(start.elapsed_time(end) for start, end in pairs[1:])  # the first is slower


class StepGraphs(Graphs[StepKey]):
    """Runs `step_passes.step` by replay."""

    def __init__(self, step_passes: StepPasses, keys: GraphKeys, capturer: Capturer) -> None:
        state = step_passes.state
        self.max_running = state.padding
        super().__init__(step_passes, keys.steps, state.listed[: self.max_running], capturer)
        self.sizes = sorted({key.rows for key in keys.steps if not key.has_prompts})
        self.prompt_sizes = sorted({key.rows for key in keys.steps if key.has_prompts})
        self.num_chunks = keys.num_chunks
        self.most_prompt_rows = max(self.prompt_sizes, default=0)
        self.packed = self._pack((), self.most_prompt_rows).to(state.device)
        num_segments = self.max_running + self.num_chunks
        self.results = step_passes.empty_results(
            num_segments, has_logprobs=True, branches=step_passes.branches, num_passes=MAX_STEPS_IN_FLIGHT + 1
        )
        self.passes = torch.zeros(1, dtype=torch.int64, device=state.device)  # number of passes that were launched
        self._num_launched: int | None = None  # `passes`, once nothing but `launch` adds to it

    def run_all(self) -> None:
        """Runs every size on padding, uncaptured, and the largest ones in every mode."""
        self._num_launched = None
        for key in self.keys:
            if key.mode == MODES[0] or key.rows in (self.sizes[-1], *self.prompt_sizes[-1:]):
                self.hold_padding()
                self.pass_of(key)

    def capture_all(self) -> None:
        """Captures every size in every mode, largest first."""
        self._num_launched = None
        sizes = f"rows {', '.join(map(str, self.sizes))}; with prompts {', '.join(map(str, self.prompt_sizes))}"
        self._capture_all("target passes", sizes)

    def time_all(self) -> dict[str, dict[Any, float]]:
        """Milliseconds of passes with random tokens and no committed ones to read, by mode and rows: over chains, up
        to as many rows as they can have. Where a pass has more rows than it can have nodes, the others are a
        prompt's."""
        tables: dict[str, dict[Any, float]] = {mode: {} for mode in MODES}
        chain_sizes = {key.rows for key in self.keys if not key.branches}
        self._num_launched = None
        with self.step_passes.state.random_requests(self.step_passes.target.config.vocab_size):
            for key in self.keys:
                rows = key.rows
                if key.branches and rows in chain_sizes:
                    continue
                if not key.has_prompts or (rows > self.sizes[-1] and key.heads == self._heads(rows)[-1]):
                    nodes = min(rows, self.sizes[-1])
                    self.step_passes.state.send(tuple(range(min(rows, self.max_running))), nodes)
                    self._hold_chunks(self._random_chunks(rows - nodes))
                    tables[key.mode][rows] = self._time(key)
        return tables

    @property
    def timed_sizes(self) -> list[int]:
        """Numbers of rows that `time_all` has times of."""
        return [*self.sizes, *(rows for rows in self.prompt_sizes if rows > self.sizes[-1])]

    def drop(self, sizes: Iterable[int]) -> None:
        """Frees passes of these numbers of rows, in whose place larger ones are as fast. Not the largest over nodes
        alone: passes with prompts do not take its place."""
        sizes = set(sizes) - {self.sizes[-1]}
        self.sizes = [size for size in self.sizes if size not in sizes]
        self.prompt_sizes = [size for size in self.prompt_sizes if size not in sizes]
        self.keys = [key for key in self.keys if key.rows not in sizes]
        self._graphs = {key: graphs for key, graphs in self._graphs.items() if key.rows not in sizes}

    def launch(self, plan: StepPlan) -> int:
        """Launches the plan's target pass up to where it samples. Returns the pass's number."""
        assert plan.graph is not None
        self.step_passes.state.send(plan.slots, plan.nodes, plan.drafting)
        if plan.chunks:
            self._hold_chunks(plan.chunks)
        if self._num_launched is None:
            self._num_launched = int(self.passes)  # sync
        self._num_launched += 1
        self._graphs[plan.graph][0].replay()
        return self._num_launched

    def finish(self, plan: StepPlan, number: int) -> tuple[Results, int]:
        """Launches the rest of a pass. Returns the results, and the index of the first chunk's."""
        assert plan.graph is not None
        self._graphs[plan.graph][1].replay()
        first = min(plan.graph.rows, self.max_running)
        count = first + len(plan.chunks) if plan.chunks else len(plan.slots)
        tokens = self.results.tokens[number % len(self.results.tokens)]  # of trees, and of chains in fewer columns
        return Results(tokens[:count], self.results.logprobs if plan.logprobs is not None else None), first

    def parts_of(self, key: StepKey) -> Sequence[Part]:
        rows, heads, has_prompts, branches, mode = key
        chunks = split_chunks(self.packed, self.num_chunks, self.most_prompt_rows)
        if not has_prompts:
            chunks = Chunks(*(field[:0] for field in chunks))
        requests = self.requests[: min(rows, self.max_running)]
        inputs = StepInputs(self.step_passes.state.budget[:1], requests, chunks, self.passes)
        num_segments = len(requests) + len(chunks.slots)
        columns = self.step_passes.result_columns(branches=branches)
        logprobs = self.results.logprobs if mode == "all" else None
        results = Results(
            self.results.tokens[:, :num_segments, :columns],
            None if logprobs is None else logprobs[:, :num_segments],
        )
        target_pass = CapturedPass(inputs, mode, results, rows, heads, branches)
        return [lambda _: self.step_passes.forward(target_pass), partial(self.step_passes.verify, target_pass)]

    def start_of(self, key: StepKey) -> tuple[int, bool, bool]:
        return key.rows, key.has_prompts, key.branches

    def hold_padding(self) -> None:
        self.step_passes.state.send((), 0)
        self._hold_chunks(())

    def describe(self, key: StepKey) -> str:
        return f"a pass of {key.rows} rows ({key.mode} sampling)"

    def _heads(self, rows: int) -> list[int]:
        """Numbers of rows with logits that passes with prompts of so many rows are captured for, ascending."""
        return sorted({key.heads for key in self.keys if key.has_prompts and key.rows == rows})

    def _pack(self, chunks: Sequence[Any], num_tokens: int) -> Tensor:
        state = self.step_passes.state
        return pack_chunks(chunks, self.num_chunks, num_tokens, state.padding, state.device.type == "cuda")

    def _random_chunks(self, num_tokens: int) -> list[PromptChunk]:
        vocab_size = self.step_passes.target.config.vocab_size
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(vocab_size, (num_tokens,), generator=generator).tolist()
        return padding_prompts(self.step_passes.state, tokens)[: self.num_chunks]

    def _hold_chunks(self, chunks: Sequence[Any]) -> None:
        if self.num_chunks:
            num_tokens = self.most_prompt_rows if not chunks else sum(len(chunk.tokens) for chunk in chunks)
            packed = self._pack(chunks, num_tokens)
            self.packed[: len(packed)].copy_(packed, non_blocking=True)


class DraftGraphs(Graphs[DraftKey]):
    """Runs `step_passes.draft` by replay."""

    def __init__(self, step_passes: StepPasses, keys: GraphKeys, capturer: Capturer) -> None:
        super().__init__(step_passes, keys.drafts, step_passes.state.drafting[: step_passes.state.padding], capturer)
        self.sizes = sorted({key.requests for key in keys.drafts})

    def run_all(self) -> None:
        self.hold_padding()
        for key in self.keys:
            self.pass_of(key)

    def capture_all(self) -> None:
        widths = sorted({key.width for key in self.keys})
        sizes = f"requests {', '.join(map(str, self.sizes))}; width {', '.join(map(str, widths))}"
        self._capture_all("draft passes", sizes)

    def time_all(self) -> dict[str, dict[Any, float]]:
        """Milliseconds by mode and (requests, width)."""
        tables: dict[str, dict[Any, float]] = {mode: {} for mode in MODES}
        with self.step_passes.state.random_requests(self.step_passes.target.config.vocab_size):
            for key in self.keys:
                self.step_passes.state.send_drafting(tuple(range(key.requests)))
                tables[key.mode][key.requests, key.width] = self._time(key)
        return tables

    @property
    def timed_sizes(self) -> list[tuple[int, int]]:
        """Requests and widths that `time_all` has times of."""
        return list(dict.fromkeys((key.requests, key.width) for key in self.keys))

    def run(self, plan: StepPlan) -> None:
        """Launches the plan's draft pass."""
        assert plan.draft_graph is not None
        self.step_passes.state.send_drafting(plan.drafting)
        self._replay(plan.draft_graph)

    def parts_of(self, key: DraftKey) -> Sequence[Part]:
        size, width, mode = key
        return [lambda _: self.step_passes.draft(self.requests[:size], mode, width, 0)]

    def hold_padding(self) -> None:
        self.step_passes.state.send_drafting(())

    def describe(self, key: DraftKey) -> str:
        size, width, mode = key
        return f"a draft pass of {size} requests at width {width} ({mode} sampling)"


def make_graphs(
    step_passes: StepPasses, keys: GraphKeys, capturer: Capturer | None = None
) -> tuple[StepGraphs, DraftGraphs | None]:
    """Makes the graphs, not captured yet."""
    capturer = capturer or Capturer(step_passes.target)
    return StepGraphs(step_passes, keys, capturer), DraftGraphs(step_passes, keys, capturer) if keys.drafts else None


def capture_all(step_passes: StepPasses, keys: GraphKeys) -> tuple[StepGraphs, DraftGraphs | None]:
    """Captures all graphs, after compiling their kernels in parallel."""
    steps, drafts = make_graphs(step_passes, keys)
    if step_passes.order is not None:
        check_order(step_passes.target, keys.steps)
    try:
        with (
            runtime.stage("compiling kernels"),
            step_passes.target.short_run(),
            compile_ahead("compiling kernels"),
        ):
            steps.run_all()
            if drafts is not None:
                drafts.run_all()
    except torch.cuda.OutOfMemoryError as error:
        raise ValueError(f"the largest passes do not fit into memory; {REMEDY}") from error
    steps.capture_all()
    if drafts is not None:
        drafts.capture_all()
    return steps, drafts


@torch.inference_mode()
def check_order(target: Target, keys: Sequence[StepKey]) -> None:
    """Lets the library multiply where it adds like our kernels, for the numbers of rows that captured passes have."""
    rows = {key.rows for key in keys}
    heads = {key.heads for key in keys}
    linears = [linear for linear in target.modules() if isinstance(linear, Linear)]
    products = {
        (type(linear), linear.out_features, linear.in_features, linear.bias is None, linear.is_gated): linear
        for linear in linears
    }
    for linear in tqdm(products.values(), desc="checking products", unit="shape", leave=False):
        linear.check_order(heads if linear is target.lm_head else rows)
