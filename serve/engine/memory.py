"""Sizes the KV cache, and the longest request that it allows."""

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from slipstream.kernels.compile_ahead import dry_run
from slipstream.serve.engine.host_memory import available_bytes
from slipstream.serve.engine.kv_windows import pages_of_window
from slipstream.serve.options import EngineConfig
from slipstream.serve.runner.chunks import pack_chunks, padding_prompts, split_chunks
from slipstream.serve.runner.cuda_graphs import Capturer, StepKey, make_graphs
from slipstream.serve.runner.kv import Windows
from slipstream.serve.runner.step import HostShape, Runner, StepInputs

logger = logging.getLogger(__name__)

GRAPH_BYTES = 16 * 2**20  # memory of the driver for one captured pass, beside the pool that all share


@dataclass(frozen=True, slots=True)
class Sizing:
    config: EngineConfig
    windows: Windows
    page_bytes: list[int]  # by group
    device: torch.device
    reserve: int  # KV rows behind a request's tokens, for drafting and verifying

    def pages_for(self, num_tokens: int) -> int:
        """Returns the pages of a request of that many tokens."""
        return -(-(num_tokens + self.reserve) // self.config.page_size)

    def num_pages(self, max_model_len: int, workspace: int) -> list[int]:
        """Returns the pages of each group's pool, dump pages included: by option, else as many as fit and requests use.

        `workspace`: bytes to leave for everything else. Raises ValueError where nothing is left for the cache.
        """
        config = self.config
        if config.kv_cache_tokens is not None:
            return [1 + pages for pages in self._pools(-(-config.kv_cache_tokens // config.page_size), copies=2)]
        free = free_bytes(self.device, config.mem_fraction) - workspace
        smallest = sum(self.page_bytes)
        if free < smallest and self.device.type == "cpu":
            raise ValueError(
                f"no memory for the KV cache: a quarter of what is free, {free / 1e6:.3g} MB, holds no page of "
                f"{config.page_size} tokens, {smallest / 1e6:.3g} MB; free some, or set kv_cache_tokens"
            )
        if free < smallest:
            raise ValueError(
                f"mem_fraction {config.mem_fraction} leaves no memory for the KV cache: beside the weights, passes and "
                f"CUDA graphs need {workspace / 1e9:.1f} GB; raise mem_fraction or lower max_running or prefill_budget"
            )
        counts = range(config.max_running * self.pages_for(max_model_len) + 1)
        fitting = bisect_right(counts, free, key=lambda pages: self._bytes(self._pools(pages, copies=1))) - 1
        doubled = self._pools(fitting, copies=2)
        return [1 + pages for pages in (doubled if self._bytes(doubled) <= free else self._pools(fitting, copies=1))]

    def _pools(self, pages: int, copies: int) -> list[int]:
        """Returns the pages by group, if the first has `pages`. Windows get those of all running requests, `copies`
        times, so that ended ones stay cached, and those of the chunks of a prefill."""
        config = self.config
        pools = [pages]
        chunks = -(-config.prompt_tokens // config.page_size) + config.max_running
        for window in filter(None, self.windows):
            window_pages = pages_of_window(window, self.reserve, config.page_size)
            pools.append(min(pages, copies * config.max_running * window_pages + chunks))
        return pools

    def _bytes(self, pools: list[int]) -> int:
        return sum(size * pages for size, pages in zip(self.page_bytes, pools, strict=True))

    def fit_to_cache(self, max_model_len: int, num_pages: int) -> int:
        """Returns the longest request that the cache can hold, at most `max_model_len`."""
        fitting = (num_pages - 1) * self.config.page_size - self.reserve
        if fitting >= max_model_len:
            return max_model_len
        if self.config.max_model_len is not None or fitting < 2:
            size = "kv_cache_tokens" if self.device.type == "cpu" else "kv_cache_tokens or mem_fraction"
            raise ValueError(
                f"the KV cache holds {max(fitting, 0)} tokens of one request and max_model_len is {max_model_len}; "
                f"lower max_model_len, or raise {size}"
            )
        logger.warning("max_model_len is %d instead of %d: the KV cache holds no more", fitting, max_model_len)
        return fitting


def log_kv_cache(windows: Windows, num_pages: Sequence[int], page_bytes: Sequence[int], page_size: int) -> None:
    for window, pages, size in zip(windows, num_pages, page_bytes, strict=True):
        span = "all" if window is None else f"the last {window}"
        message = "KV cache of layers that see %s tokens: %d tokens, %.2f GB"
        if size:
            logger.info(message, span, (pages - 1) * page_size, pages * size / 1e9)


def free_bytes(device: torch.device, mem_fraction: float) -> int:
    """Returns the memory that we may still take once weights are loaded: on the CPU a quarter of the free memory."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return int(free - (1.0 - mem_fraction) * total)
    return available_bytes() // 4


def measure_workspace(runner: Runner, config: EngineConfig, widths: Sequence[int], node_rows: int) -> int:
    """Measures the bytes that the largest passes and, with captured passes that propose `widths` nodes, the graphs need
    beyond those in use.

    Runs them on padding, which reads and writes the dump page only. Passes to be captured run dry: their kernels, which
    are not compiled yet, allocate nothing.
    """
    before = torch.cuda.memory_allocated()

    def peak(run: Callable[[], object]) -> int:
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    torch.cuda.synchronize()
    if not widths:
        return peak(lambda: _prefill_padding(runner, config.prompt_tokens))
    steps, drafts = make_graphs(runner, config, widths, node_rows, Capturer())
    keys = steps.keys()
    with dry_run():
        captured = max(peak(partial(steps.pass_of, key)) for key in (keys[0], _largest(keys)))
        if drafts is not None:
            captured = max(captured, peak(partial(drafts.pass_of, drafts.keys()[0])))
    largest = captured
    if not config.captured_tokens:
        largest = peak(lambda: _prefill_padding(runner, config.prompt_tokens))
    num_graphs = sum(len(steps.parts_of(key)) for key in keys) + (len(drafts.keys()) if drafts is not None else 0)
    return largest + captured + GRAPH_BYTES * num_graphs


def _largest(keys: Sequence[StepKey]) -> StepKey:
    """Returns the pass with the most rows with logits."""
    return max(keys, key=lambda key: (key[1], key[0]))


def _prefill_padding(runner: Runner, num_tokens: int) -> None:
    state = runner.state
    chunks = padding_prompts(runner.state, [0] * num_tokens)
    packed = pack_chunks(chunks, len(chunks), num_tokens, state.padding, pinned=False).to(state.device)
    inputs = StepInputs(state.upload([0]), state.upload([]), split_chunks(packed, len(chunks), num_tokens))
    runner.step(inputs, 0, 0, "greedy", HostShape((), tuple(chunks)))
    state.lengths.zero_()
