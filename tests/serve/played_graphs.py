"""Captured passes without a GPU: a capture is played by calling the pass anew."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from slipstream.serve.engine.build import Builder
from slipstream.serve.engine.engine import Engine
from slipstream.serve.engine.plan import PromptChunk, SamplingMode
from slipstream.serve.options import PREFILL_BLOCK, EngineConfig
from slipstream.serve.runner.cuda_graphs import MODES, Capturer, RoundGraphs, TimeTables, buckets
from slipstream.serve.runner.prefill import PrefillShape
from slipstream.serve.runner.prompt_graphs import PromptGraphs
from slipstream.serve.runner.round import Runner


class Replay:
    """Stands for a captured graph."""

    def __init__(self, replay: Callable[[], None]) -> None:
        self.replay = replay


class PlayedGraphs(RoundGraphs):
    def __init__(self, runner: Runner, max_batch: int, widths: Sequence[int]) -> None:
        state = runner.state
        self.runner, self.sizes, self.widths = runner, buckets(max_batch), sorted(widths)
        self.requests = torch.full((max_batch,), state.padding)
        self.results = torch.zeros(max_batch, 1 + 2 * state.tokens.shape[1], dtype=torch.int32)
        self._graphs, self._columns, self._held = {}, {}, ([], 0)
        self.num_rounds: dict[tuple[int, int, str], int] = {}
        for key in self._keys():
            self._capture(*key)

    def round(self, rows: list[int], mode: SamplingMode, width: int) -> Tensor | None:
        results = super().round(rows, mode, width)
        return None if results is None else results.clone()  # a GPU copies them away before the next replay

    def _capture(self, size: int, width: int, mode: SamplingMode) -> None:
        state = self.runner.state
        bound = state.pages.shape[-1] * state.page_size - width  # SDPA sizes its gathers by it

        def play() -> None:
            key = size, width, mode
            self.num_rounds[key] = self.num_rounds.get(key, 0) + 1
            results = self.runner.round(self.requests[:size], (bound,) * size, mode, width)
            self._columns[width] = results.shape[1]
            self.results[:size, : results.shape[1]] = results

        self._graphs[size, width, mode] = Replay(play)  # type: ignore[assignment]

    def time_all(self) -> TimeTables:
        """As if passes of more than 16 rows cost by the row: widths then change with the load."""
        ms = {(size, width): max(1.0, size * width / 16) for size in self.sizes for width in self.widths}
        return dict.fromkeys(MODES, ms)


class PlayedPrompts(PromptGraphs):
    def __init__(self, runner: Runner, most_tokens: int, width: int) -> None:
        super().__init__(runner, most_tokens, width, Capturer.__new__(Capturer))
        self.passes: list[tuple[int, int]] = []  # blocks and chunks of each
        for size in self.sizes:
            for mode in MODES:
                self._capture(size, mode)

    def prefill(self, chunks: Sequence[PromptChunk], mode: SamplingMode) -> Tensor | None:
        sampled = super().prefill(chunks, mode)
        if sampled is None:
            return None
        self.passes.append((PrefillShape.of(chunks, PREFILL_BLOCK).num_blocks, len(chunks)))
        return sampled.clone()

    def _capture(self, size: int, mode: SamplingMode) -> None:
        self._graphs[size, mode] = Replay(lambda: self.run(size, mode))  # type: ignore[assignment]


class PlayingBuilder(Builder):
    def pick_modes(self, phases: Iterable[str]) -> tuple[bool, bool]:
        return True, not self.stages

    def capture(self, runner: Runner) -> tuple[RoundGraphs, PromptGraphs | None]:
        graphs = PlayedGraphs(runner, self.config.max_running, self.widths.offered)
        most_tokens = self.config.captured_tokens
        return graphs, PlayedPrompts(runner, most_tokens, self.widths.most) if most_tokens >= PREFILL_BLOCK else None


def play(config: EngineConfig) -> Engine:
    return PlayingBuilder(config).build()
