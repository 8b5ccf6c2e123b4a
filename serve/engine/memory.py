"""Sizes the KV cache, and the longest request that it allows."""

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from slipstream.kernels.compile_ahead import dry_run
from slipstream.serve.engine.engine_plan import EnginePlan, Space
from slipstream.serve.engine.host_memory import available_bytes
from slipstream.serve.engine.kv_windows import pages_of_window
from slipstream.serve.engine.plan import PromptPhase
from slipstream.serve.runner.chunks import pack_chunks, padding_prompts, split_chunks
from slipstream.serve.runner.cuda_graphs import make_graphs
from slipstream.serve.runner.step import EagerPass, StepInputs, StepPasses

logger = logging.getLogger(__name__)

# Of the driver, for one layer of a captured pass, beside the pool that all share: measured are 74 KB, of an 8B Llama.
GRAPH_BYTES = 128 << 10
TEXT_TOKENS = 8192  # of the KV cache for each snapshot of a state: hits on a text need its KV and one of these


class Room(NamedTuple):
    """Bytes of a device."""

    free: int  # for the KV cache
    workspace: int  # for everything else beside the weights


def find_space(plan: EnginePlan, room: Room) -> Space:
    """Returns the size of the KV cache: by option, else as much as fits and requests use. `room`: of the device that
    has the least. Raises ValueError where nothing is left for the cache."""
    config = plan.config
    if config.kv_cache_tokens is not None:
        pools = pools_of(plan, -(-config.kv_cache_tokens // config.page_size), copies=2)
    else:
        free, workspace = room
        smallest = sum(plan.page_bytes)
        if free < smallest and plan.device.type == "cpu":
            raise ValueError(
                f"no memory for the KV cache: a quarter of what is free, {free / 1e6:.3g} MB, holds no page of "
                f"{config.page_size} tokens, {smallest / 1e6:.3g} MB; free some, or set kv_cache_tokens"
            )
        if free < smallest:
            raise ValueError(
                f"mem_fraction {config.mem_fraction} leaves no memory for the KV cache: beside the weights, passes and "
                f"CUDA graphs need {workspace / 1e9:.1f} GB; raise mem_fraction or lower max_running or prefill_budget"
            )
        pools = fitting_pools(plan, free, config.max_running * plan.pages_for(plan.max_model_len))
    num_pages = tuple(1 + pages for pages in pools)
    return Space(num_pages, fit_to_cache(plan, num_pages[0]))


def fitting_pools(plan: EnginePlan, free: int, most_pages: int) -> list[int]:
    """Returns the pages by group that fit into `free` bytes, of the first group at most `most_pages`."""

    def size(pools: Sequence[int]) -> int:
        return sum(num_bytes * pages for num_bytes, pages in zip(page_bytes, pools, strict=True))

    def pools(pages: int, copies: int) -> list[int]:
        return pools_of(plan, pages, copies, snapshots=pages * plan.config.page_size // TEXT_TOKENS)

    page_bytes = plan.page_bytes
    fitting = bisect_right(range(most_pages + 1), free, key=lambda pages: size(pools(pages, copies=1))) - 1
    doubled = pools(fitting, copies=2)
    return doubled if size(doubled) <= free else pools(fitting, copies=1)


def pools_of(plan: EnginePlan, pages: int, copies: int, snapshots: int = 0) -> list[int]:
    """Returns the pages by group, if the first has `pages`. Windows get those of all running requests, `copies` times,
    so that ended ones stay cached, and those of the chunks of a prefill; states likewise, and at least `snapshots`
    beside those of running requests."""
    config = plan.config
    pools = []
    chunks = -(-config.prompt_tokens // config.page_size) + config.max_running
    for retention in plan.groups:
        if retention == "all":
            pools.append(pages)
        elif retention == "state":
            pools.append(min(pages, config.max_running + max(snapshots, (copies - 1) * config.max_running)))
        else:
            window_pages = pages_of_window(retention, plan.window_reserve, config.page_size)
            pools.append(min(pages, copies * config.max_running * window_pages + chunks))
    return pools


def fit_to_cache(plan: EnginePlan, num_pages: int) -> int:
    """Returns the longest request that the cache can hold, at most the plan's `max_model_len`."""
    longest = plan.max_model_len
    fitting = (num_pages - 1) * plan.config.page_size - plan.max_reserve
    if fitting >= longest:
        return longest
    if plan.config.max_model_len is not None or fitting < 2:
        size = "kv_cache_tokens" if plan.device.type == "cpu" else "kv_cache_tokens or mem_fraction"
        raise ValueError(
            f"the KV cache holds {max(fitting, 0)} tokens of one request and max_model_len is {longest}; lower "
            f"max_model_len, or raise {size}"
        )
    logger.warning("max_model_len is %d instead of %d: the KV cache holds no more", fitting, longest)
    return fitting


def log_kv_cache(plan: EnginePlan, space: Space) -> None:
    page_size = plan.config.page_size
    for retention, pages, size in zip(plan.groups, space.num_pages, plan.page_bytes, strict=True):
        if retention == "state":
            logger.info("states of recurrent layers: %d, %.2f GB", pages - 1, pages * size / 1e9)
            continue
        span = "all" if retention == "all" else f"the last {retention}"
        message = "KV cache of layers that see %s tokens: %d tokens, %.2f GB"
        if size:
            logger.info(message, span, (pages - 1) * page_size, pages * size / 1e9)


def find_room(plan: EnginePlan, workspace: int) -> Room:
    """Returns what this rank's device has, of which passes need `workspace`. Ranks on a CPU share its memory."""
    free = free_bytes(plan.device.device, plan.config.mem_fraction)
    return Room((free // plan.config.tp if plan.device.type == "cpu" else free) - workspace, workspace)


def free_bytes(device: torch.device, mem_fraction: float) -> int:
    """Returns the memory that we may still take once weights are loaded: on the CPU a quarter of the free memory."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return int(free - (1.0 - mem_fraction) * total)
    return available_bytes() // 4


def measure_workspace(step_passes: StepPasses, plan: EnginePlan) -> int:
    """Measures the bytes that the largest passes and the graphs need beyond those in use.

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
    if not plan.captures:
        return peak(lambda: _prefill_padding(step_passes, plan.config.prompt_tokens, plan.limits.prompts_by))
    steps, drafts = make_graphs(step_passes, plan.graphs)
    with step_passes.target.short_run(), dry_run():
        most_logits = max(steps.keys, key=lambda key: (key.heads, key.rows))
        captured = max(peak(partial(steps.pass_of, key)) for key in (steps.keys[0], most_logits))
        if drafts is not None:
            captured = max(captured, peak(partial(drafts.pass_of, drafts.keys[0])))
    largest = captured
    if not plan.config.captured_tokens:
        largest = peak(lambda: _prefill_padding(step_passes, plan.config.prompt_tokens, plan.limits.prompts_by))
    return largest + captured + graph_bytes(plan)


def graph_bytes(plan: EnginePlan) -> int:
    """Returns the bytes of the driver for all captured passes."""
    return GRAPH_BYTES * len(plan.part.layers) * plan.graphs.num_graphs


def _prefill_padding(step_passes: StepPasses, num_tokens: int, prompts_by: PromptPhase) -> None:
    state = step_passes.state
    chunks = padding_prompts(step_passes.state, [0] * num_tokens)
    packed = pack_chunks(chunks, len(chunks), num_tokens, state.padding, pinned=False).to(state.device)
    inputs = StepInputs(state.upload([0]), state.upload([]), split_chunks(packed, len(chunks), num_tokens))
    results = step_passes.empty_results(len(chunks), has_logprobs=False)
    step_passes.step(EagerPass(inputs, "greedy", results, (), tuple(chunks), prompts_by))
    state.lengths.zero_()
