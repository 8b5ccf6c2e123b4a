"""Ended conversations, computed once more as prompts while nothing else is to do. Imports no torch.

On a target with recurrent layers the answer to a prompt has other last bits than a longer prompt with the same tokens
(serve/engine/kv_states.py), so the next turn of a conversation finds its last prompt alone. Here the engine computes
prompt and answer as that turn would, up to the last multiple of the grid whose page has a key, and the prefix tree
gets KV and states. Nothing is sampled.

A call of `begin`, a pass, and a call of `end` are one chunk of one text. Between chunks nothing is held but a queue: a
request that comes in the middle waits for one chunk, and the next chunk begins with what the last one left in the
tree. Chunks take free pages only, and those that the answer had were given back, so there are enough of them. Of
windows and states they take what a prompt may.
"""

import math
from collections import deque
from dataclasses import dataclass

from slipstream.serve.engine.scheduler import Chunk, Scheduler, Sequence
from slipstream.serve.request import Request, SamplingParams

MOST_TEXTS = 64
CHUNK_MS = 20.0  # for which a request that arrives may wait, or so often
LEAST_CHUNKS = 1.5  # the least time of a chunk: a pass takes that however few its rows are
SLOW_MS = 100.0  # a chunk that takes longer is the last of its text, and most texts are left out, as after PATIENCE
PATIENCE = 16  # texts in a row that no request found, after which most texts are left out:
RARELY = 16  # all but one in so many
SLOT = 0  # no request runs, so it is free
UNSAMPLED = SamplingParams(max_tokens=1, temperature=0.0, seed=0, speculation={"enabled": False})


@dataclass(frozen=True, slots=True)
class Text:
    """The prompt and the answer of a request that has ended."""

    request: Request  # with the tokens to compute, and those that the last page needs after it, as the prompt
    start: int  # tokens of which the request has left a state, unless that was given up
    end: int  # tokens to compute; both are multiples of the grid


class IdlePrompts:
    """The newest text is computed first. The queue has at most MOST_TEXTS, with no more tokens than the cache holds."""

    def __init__(self, scheduler: Scheduler, grid: int, most_rows: int) -> None:
        """grid: chunks end at multiples of so many tokens. most_rows: tokens of a chunk."""
        self.num_tokens = 0  # computed so far
        self._cache = scheduler.cache
        self._lookahead = scheduler.lookahead
        self._num_keyed = max(scheduler.lookahead, 1)  # tokens after a page that it needs: see PageCache._key
        self._grid = grid
        self._most_rows = most_rows
        self._texts: deque[Text] = deque()
        self._rows = grid  # of the next chunk
        self._least_ms = math.inf  # of a chunk so far
        self._num_unused = 0  # texts in a row that no request found
        self._num_ended = 0  # requests

    def note(self, sequence: Sequence) -> None:
        """Queues the text of a request whose answer is whole, if that passes a multiple of the grid."""
        if sequence.stats.idle_tokens:
            self._num_unused = 0
        self._num_ended += 1
        request = sequence.request
        start = self._last_state(request.prompt)
        end = self._last_state(sequence.tokens)
        if end <= start or (self._num_unused >= PATIENCE and self._num_ended % RARELY):
            return
        tokens = sequence.tokens[: end + self._num_keyed]
        prompt = Request(
            id="idle",
            prompt=tokens,
            params=UNSAMPLED,
            namespace=request.namespace,
            adapter=request.adapter,
        )
        self._texts.append(Text(prompt, start, end))
        limit = self._cache.total_pages * self._cache.page_size
        while len(self._texts) > MOST_TEXTS or sum(text.end for text in self._texts) > limit:
            self._texts.popleft()

    def _last_state(self, tokens: list[int]) -> int:
        """Returns after how many tokens of a text the last state can be kept."""
        return (len(tokens) - self._num_keyed) // self._grid * self._grid

    def begin(self) -> Chunk | None:
        """Returns the next chunk, whose sequence has a slot, and pages until `end`. None if there is no text, or too
        few pages are free. No request may be running."""
        while self._texts:
            text = self._texts[-1]
            prompt = text.request.prompt
            num_cached, num_hit = self._cache.look_up(prompt, text.request.cache_namespace, self._lookahead)
            if num_cached < text.end and num_hit >= text.start:
                return self._admit(text)
            self._texts.pop()  # the next turn was faster, or there is too little room for states
        return None

    def _admit(self, text: Text) -> Chunk | None:
        cache = self._cache
        sequence = Sequence.of(text.request, frozenset(), self._lookahead)
        sequence.slot = SLOT
        table = sequence.table
        table.is_idle = True
        if not cache.admit(table, sequence.tokens, 0, 0, text.end):
            return None
        start = len(table.nodes) * cache.page_size
        most_tokens = min(self._rows, cache.num_free * cache.page_size)
        end = cache.reach(table, min(text.end, start + most_tokens)) // self._grid * self._grid
        if end <= start:
            cache.release(table, sequence.tokens, start, hands_over=start > 0)
            return None
        is_extended = cache.extend(table, end)
        assert is_extended, "free pages were counted"
        cache.extend_groups(table, end)
        return Chunk(sequence, start, end, is_last=False)

    def end(self, chunk: Chunk, ms: float, *, has_failed: bool = False) -> None:
        """Leaves a chunk that was computed to the tree. It took `ms`, with `begin`. A text whose chunk `has_failed` is
        given up."""
        sequence = chunk.sequence
        if has_failed:
            self._cache.release(sequence.table, sequence.tokens, chunk.start)
            self._texts.pop()
            return
        self._cache.slide(sequence.table, chunk.end)
        self._cache.release(sequence.table, sequence.tokens, chunk.end, hands_over=True)
        num_rows = chunk.end - chunk.start
        self.num_tokens += num_rows
        is_slow = ms > SLOW_MS
        if is_slow or chunk.end == self._texts[-1].end:
            self._texts.pop()
            self._num_unused += PATIENCE if is_slow else 1
        self._least_ms = min(self._least_ms, ms)
        if num_rows == self._rows:  # grows by blocks, since few rows may take as long: a pass reads all weights
            limit = max(CHUNK_MS, LEAST_CHUNKS * self._least_ms)
            rows = num_rows + self._grid if ms < limit else int(num_rows * limit / ms) // self._grid * self._grid
            self._rows = min(max(rows, self._grid), self._most_rows)
