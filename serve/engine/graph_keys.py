"""Keys of the passes that are captured as CUDA graphs, and which of them a step replays. Imports no torch.

A target pass is captured for (rows, rows with logits, sampling mode), a draft's for (requests, width, mode): every
number of nodes and prompt tokens that fits replays the same graph. Where proposals may be trees, passes over nodes
alone are captured for chains, too, which need neither tree masks nor moves of KV: they take 2 to 4 % less time.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from slipstream.serve.engine.plan import DraftKey, PromptChunk, SamplingMode, StepKey, StepPlan

# Sampling modes with graphs of their own. In the second a request without filters has neutral ones.
MODES: tuple[SamplingMode, ...] = ("plain", "all")
MOST_CHUNKS = 16  # chunks of a pass
# Pairs of a query and a key that it sees, above which kernels made for prompts are faster: 1,024 tokens after 16,384.
# They are launched one by one, which the kernels of longer steps hide sooner: 2,048 after 1,024.
MOST_PAIRS = 2**24
MOST_PAIRS_OF_MANY = 2**22
MANY_TOKENS = 2048
HEADS = (32, 128, 256, 512)  # rows with logits of passes with prompts, besides the most that a pass can have
MANY_ROWS = 1280  # rows of passes with prompts that take so long that few requests decode beside them
MOST_NODE_ROWS = 1024  # rows of a pass without prompts, if there are no more requests than that


@dataclass(frozen=True, slots=True)
class GraphKeys:
    """Captured passes, largest first: the later ones find memory in the pool."""

    steps: tuple[StepKey, ...] = ()
    drafts: tuple[DraftKey, ...] = ()
    num_chunks: int = 0  # chunks of a pass with prompts; 0: none is captured

    @classmethod
    def for_sizes(
        cls, max_running: int, node_rows: int, prompt_tokens: int, widths: Iterable[int], chain_rows: int | None = None
    ) -> "GraphKeys":
        """Returns the keys for passes of up to `node_rows` nodes alone, for passes with up to `prompt_tokens` tokens of
        prompts (0: none) and room for every running request's root, and for drafts of `widths` nodes. `chain_rows`:
        nodes of passes over chains alone, where other passes verify trees; None: none does."""
        most_rows = -(-(prompt_tokens + max_running) // 32) * 32 if prompt_tokens else 0
        num_chunks = min(MOST_CHUNKS, max_running) if most_rows else 0
        most_heads = node_rows + num_chunks
        branches = chain_rows is not None
        node_sizes = buckets(node_rows)
        sizes = [(rows, rows, False, branches) for rows in node_sizes]
        if chain_rows:
            sizes += [(rows, rows, False, False) for rows in node_sizes[: bisect_left(node_sizes, chain_rows) + 1]]
        sizes += [
            (rows, heads, True, branches) for rows in prompt_sizes(most_rows) for heads in head_sizes(rows, most_heads)
        ]
        drafting = sorted(width for width in widths if width > 1)
        pairs = [(requests, width) for requests in draft_sizes(max_running) for width in drafting]
        return cls(
            tuple(StepKey(*size, mode) for size in sorted(sizes, key=_place, reverse=True) for mode in reversed(MODES)),
            tuple(DraftKey(*pair, mode) for pair in reversed(pairs) for mode in reversed(MODES)),
            num_chunks,
        )

    @property
    def num_graphs(self) -> int:
        """CUDA graphs of these passes: those of a target share the first of their two with others of as many rows."""
        starts = {(key.rows, key.has_prompts, key.branches) for key in self.steps}
        return len(starts) + len(self.steps) + len(self.drafts)


class GraphTable:
    """Finds the smallest captured passes that hold a step. `takes_long_prompts`: whether the backend for prompts is
    there for those that it computes faster."""

    def __init__(self, keys: GraphKeys, takes_long_prompts: Callable[[], bool]) -> None:
        self.num_chunks = keys.num_chunks
        self._takes_long_prompts = takes_long_prompts
        self._steps: dict[tuple[bool, bool, SamplingMode], list[StepKey]] = {}
        self._drafts: dict[tuple[int, SamplingMode], list[DraftKey]] = {}
        for step in sorted(keys.steps):
            self._steps.setdefault((step.has_prompts, step.branches, step.mode), []).append(step)
        for draft in sorted(keys.drafts):
            self._drafts.setdefault((draft.width, draft.mode), []).append(draft)

    def step(self, plan: StepPlan) -> StepKey | None:
        """Returns the target's pass. None where none takes it: a prompt alone whose context is so long that kernels
        made for prompts are faster, one whose own log-probabilities are asked for, or memory held no graph."""
        chunks = plan.chunks
        if len(chunks) > self.num_chunks or any(chunk.num_scored for chunk in chunks):
            return None
        if chunks and not plan.slots and is_long(chunks) and self._takes_long_prompts():
            return None
        rows = plan.nodes + sum(len(chunk.tokens) for chunk in chunks)
        heads = plan.nodes + len(chunks)
        for branches in (plan.branches, True):  # passes over trees take chains, too
            keys = self._steps.get((bool(chunks), branches, variant_of(plan.mode, plan.logprobs)), [])
            start = bisect_left(keys, rows, key=lambda key: key.rows)
            for key in islice(keys, start, None):
                if key.heads >= heads:
                    return key
        return None

    def draft(self, plan: StepPlan) -> DraftKey | None:
        """Returns the draft's pass; None without one, or if memory held no graph."""
        count = len(plan.drafting)
        keys = self._drafts.get((plan.width, "all" if plan.mode == "all" else "plain"), []) if count else []
        start = bisect_left(keys, count, key=lambda key: key.requests)
        return next(islice(keys, start, None), None)


def _place(size: tuple[int, int, bool, bool]) -> tuple[int, bool, bool, int]:
    """Returns what sizes of passes are sorted by: those whose starts are equal follow one another."""
    rows, heads, has_prompts, branches = size
    return rows, has_prompts, branches, heads


def variant_of(mode: SamplingMode, logprobs: int | None) -> Literal["plain", "all"]:
    """Returns the mode of captured passes that take steps of a mode, with log-probabilities or without."""
    return "plain" if mode != "all" and logprobs is None else "all"


def is_long(chunks: Iterable[PromptChunk]) -> bool:
    """Whether kernels made for prompts take chunks faster than captured passes."""
    pairs = sum(len(chunk.tokens) * (chunk.start + chunk.end) // 2 for chunk in chunks)
    is_of_many = sum(len(chunk.tokens) for chunk in chunks) >= MANY_TOKENS
    return pairs > (MOST_PAIRS_OF_MANY if is_of_many else MOST_PAIRS)


def buckets(max_rows: int) -> list[int]:
    """Numbers of rows to capture: 1, 2, 4, then steps that waste at most a quarter of a pass, up to `max_rows`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 64), *range(512, max_rows, 128)]
    return [size for size in sizes if size < max_rows] + [max_rows]


def prompt_sizes(max_rows: int) -> list[int]:
    """Numbers of rows of passes with prompts, from the fourth on in steps that waste at most a fifth."""
    steps = [32, 64, 96, *(32 * base * 2**power for power in range(10) for base in (4, 5, 6, 7))]
    return [size for size in steps if size < max_rows] + [max_rows] * (max_rows > 0)


def head_sizes(rows: int, max_heads: int) -> list[int]:
    """Numbers of rows with logits of passes with prompts that have so many rows; at most `max_heads`."""
    max_heads = min(rows, max_heads)
    few = HEADS[:1] if rows >= MANY_ROWS else HEADS
    return [*(heads for heads in few if heads < max_heads), max_heads]


def draft_sizes(max_requests: int) -> list[int]:
    """Numbers of requests of a draft's pass."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, *range(64, 256, 32), *range(256, max_requests, 64)]
    return [size for size in sizes if size < max_requests] + [max_requests]


def most_node_rows(max_running: int, most_nodes: int) -> int:
    """Rows of the largest pass without prompts."""
    return max(max_running, min(max_running * most_nodes, MOST_NODE_ROWS))
