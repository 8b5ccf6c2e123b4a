"""Prefills captured as CUDA graphs: launched one by one, the kernels of a short prompt cost the host several times what
they cost the device.

A captured pass holds blocks of BLOCK rows (serve/runner/prefill.py), so one graph serves all chunks that fit.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from slipstream import runtime
from slipstream.kernels.compile_ahead import compile_ahead
from slipstream.serve.engine.plan import PromptChunk, SamplingMode
from slipstream.serve.options import PREFILL_BLOCK as BLOCK
from slipstream.serve.options import EngineConfig
from slipstream.serve.runner.cuda_graphs import MODES, Capturer, RoundGraphs
from slipstream.serve.runner.prefill import PrefillShape, build_prefill, pack
from slipstream.serve.runner.round import Runner

MOST_REQUESTS = 16  # of a captured pass
MOST_PAIRS = 2**24  # of a query and a key that it sees, 1,024 after 16,384: beyond, kernels made for prompts are faster


def sizes(most_tokens: int) -> list[int]:
    """Numbers of blocks to capture, up to `most_tokens`: from the fourth on, steps that waste at most a fifth."""
    most = most_tokens // BLOCK
    steps = [1, 2, 3, 4, 5, 6, *(base * 2**power for power in range(1, 16) for base in (4, 5, 6, 7))]
    return [size for size in steps if size < most] + [most] * (most > 0)


class PromptGraphs:
    """Runs `runner.prefill` by replay. `width`: nodes proposed after a prompt."""

    def __init__(self, runner: Runner, most_tokens: int, width: int, capturer: Capturer) -> None:
        state = runner.state
        self.runner, self.width, self.capturer = runner, width, capturer
        self.sizes, self.num_requests = sizes(most_tokens), min(MOST_REQUESTS, state.padding)
        self.inputs = pack([], self._shape(self.sizes[-1]), state).to(state.device)
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
        mode = "all" if mode == "all" else "plain"
        size = self._find(chunks, mode)
        if size is None:
            return None
        self._hold(chunks, size)
        self._graphs[size, mode].replay()
        return self.sampled[: len(chunks)]

    def _keys(self) -> list[tuple[int, SamplingMode]]:
        return [(size, mode) for size in reversed(self.sizes) for mode in reversed(MODES)]

    def _shape(self, size: int) -> PrefillShape:
        return PrefillShape(size, self.num_requests, BLOCK)

    def _find(self, chunks: Sequence[PromptChunk], mode: SamplingMode) -> int | None:
        pairs = sum(len(chunk.tokens) * (chunk.start + chunk.end) // 2 for chunk in chunks)
        is_long = pairs > MOST_PAIRS and self.runner.attention["prefill"].is_ready
        if is_long or len(chunks) > self.num_requests:
            return None
        needed = PrefillShape.of(chunks, BLOCK).num_blocks
        return next((size for size in self.sizes if size >= needed and (size, mode) in self._graphs), None)

    def _hold(self, chunks: Sequence[PromptChunk], size: int) -> None:
        """Uploads what a pass of `size` blocks reads."""
        packed = pack(chunks, self._shape(size), self.runner.state)
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
        prompts = build_prefill(self.runner.state, self._shape(size).split(self.inputs), mode)
        self.sampled.copy_(self.runner.prefill(prompts, self.width))


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
