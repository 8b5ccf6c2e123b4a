"""One HTTP call's sequences on their way: tokens in from the engine, text and counts out."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.serve.client import EngineClient, EngineError
from slipstream.serve.detokenize import Decoder, Text, TextStream, WholeText
from slipstream.serve.metrics import Metrics, add_stats
from slipstream.serve.request import FinishReason, Output, Request, RequestStats


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one choice; with a finish reason its last."""

    index: int
    text: str
    finish_reason: FinishReason | None


class RequestFailed(Exception):
    """The engine refused a request (`cause`: ValueError, QueueFull) or could not finish it (EngineError)."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Choice:
    """Receives one request's outputs and passes on what a client may see."""

    def __init__(self, index: int, request: Request, text: Text, completion: "Completion") -> None:
        self.request = request
        self.stats: RequestStats | None = None  # set by the last output
        self._index, self._text, self._completion = index, text, completion
        self._arrival = time.perf_counter()
        self._has_tokens = False

    def receive(self, output: Output) -> None:
        if output.error is not None:
            self.fail(EngineError(output.error))
            return
        self._measure(len(output.tokens))
        was_stopped = self._text.stopped
        text = self._text.push(output.tokens, output.finish_reason)
        reason = output.finish_reason
        if self._text.stopped and not was_stopped and reason is None:
            self._completion.engine.abort(self.request.id)  # its answer brings the counts and ends the choice
        if reason is not None:
            assert output.stats is not None, "the last Output carries the counts"
            reason = "stop" if self._text.stopped else reason
            self.stats = self._text.cut(output.stats)
            self._completion.metrics.count_finished(reason, self.stats)
        if text or reason is not None:
            self._completion.put(Delta(self._index, text, reason))

    def fail(self, error: Exception) -> None:
        if isinstance(error, EngineError):  # not one that the engine refused, which was never served
            self._completion.metrics.finished["error"] += 1
        self._completion.put(error)

    def _measure(self, num_tokens: int) -> None:
        if not num_tokens:
            return
        now = time.perf_counter()
        self._completion.metrics.count_tokens(num_tokens, now - self._arrival, is_first=not self._has_tokens)
        self._arrival, self._has_tokens = now, True


class Completion:
    """The choices of one call. Iterate `deltas` to the end, or call `abort`."""

    def __init__(self, engine: EngineClient, decoder: Decoder, metrics: Metrics, *, watched: bool) -> None:
        """`watched`: text is wanted as it comes (streaming), not at the end."""
        self.engine, self.metrics = engine, metrics
        self.choices: list[Choice] = []
        self._decoder, self._watched = decoder, watched
        self._news: deque[Delta | Exception] = deque()
        self._has_news = asyncio.Event()

    def submit(self, requests: Sequence[Request], stop: Sequence[str]) -> None:
        """Raises EngineError if there is no engine."""
        for index, request in enumerate(requests):
            is_piecewise = self._watched or stop
            text = TextStream(self._decoder, stop) if is_piecewise else WholeText(self._decoder)
            self.choices.append(Choice(index, request, text, self))
            self.engine.submit(request, self.choices[-1])

    def put(self, news: Delta | Exception) -> None:
        self._news.append(news)
        self._has_news.set()

    async def deltas(self) -> AsyncIterator[Delta]:
        """Until every choice has ended. Raises RequestFailed for the first that fails; the others are aborted.

        Text that comes while nobody takes it is joined: a client or a server that falls behind has fewer pieces to
        handle, not a longer queue of them.
        """
        num_open = len(self.choices)
        while num_open:
            if not self._news:
                self._has_news.clear()
                await self._has_news.wait()
            news = self._news.popleft()
            if isinstance(news, Exception):
                self.abort()
                raise RequestFailed(news)
            while self._news and isinstance(more := self._news[0], Delta) and more.index == news.index:
                news = Delta(news.index, news.text + more.text, more.finish_reason)
                self._news.popleft()
            num_open -= news.finish_reason is not None
            yield news

    def abort(self) -> None:
        """Frees what the engine still holds of this call; choices that have ended stay as they are."""
        for choice in self.choices:
            if choice.stats is None:
                self.engine.abort(choice.request.id)

    def usage(self, num_choices: int) -> dict[str, Any]:
        """Token counts of the call; a prompt with `num_choices` choices is counted once."""
        total, prompts = RequestStats(), RequestStats()
        for index, choice in enumerate(self.choices):
            assert choice.stats is not None
            add_stats(total, choice.stats)
            if index % num_choices == 0:
                add_stats(prompts, choice.stats)
        return usage(prompts, total)


def usage(prompts: RequestStats, total: RequestStats) -> dict[str, Any]:
    """OpenAI's usage, and `speculation`: rounds, tokens per round, and how often each draft position was accepted."""
    decoded = total.completion_tokens - total.prefills
    return {
        "prompt_tokens": prompts.prompt_tokens,
        "completion_tokens": total.completion_tokens,
        "total_tokens": prompts.prompt_tokens + total.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": prompts.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": total.accepted_tokens,
            "rejected_prediction_tokens": total.drafted_tokens - total.accepted_tokens,
        },
        "speculation": {
            "rounds": total.rounds,
            "accept_length": decoded / total.rounds if total.rounds else None,
            "accepted_by_position": total.accepted_by_position,
        },
    }
