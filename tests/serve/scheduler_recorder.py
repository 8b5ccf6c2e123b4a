"""A scheduler with pages of 4 tokens, driven by hand, for the tests of its rules."""

from typing import Any

from slipstream.serve.cache import PageCache
from slipstream.serve.request import Output, Request, SamplingParams
from slipstream.serve.scheduler import Scheduler, Sequence

STOP_ID = 99
RESERVE = 4


class Recorder:
    """A scheduler, the calls it made, and an engine that samples token 1 behind every prompt."""

    def __init__(
        self,
        *,
        num_pages: int = 100,
        max_running: int = 4,
        prefill_budget: int = 1000,
        lookahead: int = 0,
        **limits: int,
    ) -> None:
        self.calls: list[tuple[str, str, int]] = []
        self.cache = PageCache(num_pages, page_size=4)
        self.scheduler = Scheduler(
            cache=self.cache,
            max_running=max_running,
            max_model_len=200,
            prefill_budget=prefill_budget,
            stop_ids=frozenset({STOP_ID}),
            lookahead=lookahead,
            max_reserve=RESERVE,
            on_admit=lambda sequence: self._record("admit", sequence),
            on_release=lambda sequence: self._record("release", sequence),
            **limits,
        )

    def _record(self, name: str, sequence: Sequence) -> None:
        assert sequence.pages, "pages are held at both calls"
        self.calls.append((name, sequence.request.id, sequence.row))

    def add(self, name: str, prompt: list[int], max_tokens: int = 50, **params: Any) -> None:
        self.scheduler.add(Request(id=name, prompt=prompt, params=SamplingParams(max_tokens=max_tokens, **params)))
        self.scheduler.check()

    def prefill(self) -> list[tuple[str, int, int]]:
        """One step; returns (request, start, end) of its chunks."""
        chunks = self.scheduler.next_prefill()
        self.scheduler.check()
        self.scheduler.launched(chunks)
        self.scheduler.check()
        self.outputs = self.scheduler.commit_prefill(chunks, [1 if chunk.is_last else None for chunk in chunks])
        self.scheduler.check()
        return [(chunk.sequence.request.id, chunk.start, chunk.end) for chunk in chunks]

    def round(self, *emitted: list[int], drafted: int = 3) -> list[Output]:
        sequences = self.scheduler.next_round(RESERVE)
        self.scheduler.check()
        outputs = self.scheduler.commit_round(sequences, list(emitted), [drafted] * len(sequences))
        self.scheduler.check()
        return outputs

    def decoding(self) -> list[str]:
        """Who would take part in a round; it is not launched."""
        sequences = self.scheduler.next_round(RESERVE)
        for sequence in sequences:
            sequence.in_flight.pop()
        return [sequence.request.id for sequence in sequences]


def count(start: int, length: int) -> list[int]:
    return list(range(start, start + length))
