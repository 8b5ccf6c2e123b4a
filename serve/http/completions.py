"""One HTTP call in progress: turns the engine's tokens into text and counts. Writers make OpenAI's objects of both."""

import asyncio
import time
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from slipstream.serve.chat.answers import AnswerFormat
from slipstream.serve.chat.parser import AnswerParser, Parts, Piece, TextPiece
from slipstream.serve.detokenize import TextStream
from slipstream.serve.http.answer_log import AnswerLog
from slipstream.serve.http.engine_client import Engine, EngineError
from slipstream.serve.http.logprobs import Echo, Scored, scored_prompt, scored_tokens
from slipstream.serve.http.metrics import Metrics
from slipstream.serve.http.request_log import NOTES, note_choice
from slipstream.serve.request import FinishReason, Logprobs, Output, Request, RequestStats, TokenTrace

Value = TypeVar("Value")


class TracedToken(NamedTuple):
    token: int
    trace: TokenTrace


@dataclass(frozen=True, slots=True)
class Delta(Parts):
    """New text of one choice. The last delta has a finish reason."""

    index: int
    finish_reason: FinishReason | Literal["tool_calls"] | None
    scored: Sequence[Scored] = ()  # tokens of the pieces, if the client wants log-probabilities
    traced: Sequence[TracedToken] = ()  # the same for traces, with tokens that have no text
    tokens: Sequence[int] = ()  # new ones, whether their text is held back or not
    num_tokens: int = 0  # of the choice so far, these included

    @classmethod
    def join(cls, deltas: "Sequence[Delta]") -> "Delta":
        """Joins several deltas of a choice, in order."""
        pieces = [piece for delta in deltas for piece in delta.pieces]
        scored = [token for delta in deltas for token in delta.scored]
        traced = [token for delta in deltas for token in delta.traced]
        tokens = [token for delta in deltas for token in delta.tokens]
        last = deltas[-1]
        return cls(pieces, last.index, last.finish_reason, scored, traced, tokens, last.num_tokens)


class RequestFailed(Exception):
    """The engine refused a request (`cause` is a ValueError) or could not finish it (EngineError)."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Released(NamedTuple):
    """Tokens that go out with a piece of an answer."""

    scored: list[Scored]
    traced: list[TracedToken]
    ids: list[int]


class TokenLedger:
    """The tokens of one choice whose text is not out yet, with their log-probabilities and traces.

    A token goes out once, in order, with the piece of its first character; special tokens with what follows. At the end
    those without text go out, too: the id that ends the answer and, as traces alone, the tokens of a stop string. Ids
    do not wait for text: they go out with the next piece, up to the end of a stop string.
    """

    def __init__(self, text: TextStream, offset: int) -> None:
        """`offset`: characters before the answer, of an echo."""
        self.num_ids = 0  # tokens whose ids are out
        self._text = text
        self._offset = offset
        self._num_out = 0
        self._held: list[tuple[Scored | None, TracedToken | None]] = []  # of the tokens from `_num_out` on
        self._ids: list[int] = []  # of the tokens from `num_ids` on

    def add(self, output: Output) -> None:
        """Takes an output whose tokens were pushed to the text."""
        tokens = output.tokens
        self._ids += tokens
        if output.logprobs is None and output.trace is None:
            return
        first = self._num_out + len(self._held)
        starts = self._text.starts[first : first + len(tokens)]
        starts += [self._text.num_returned] * (len(tokens) - len(starts))  # of an id that ends the answer
        scored: Sequence[Scored | None] = [None] * len(tokens)
        traced: Sequence[TracedToken | None] = [None] * len(tokens)
        if output.logprobs is not None:
            scored = scored_tokens(tokens, [self._offset + start for start in starts], output.logprobs)
        if output.trace is not None:
            traced = [*map(TracedToken, tokens, output.trace)]
        self._held += zip(scored, traced, strict=True)

    def release(self, parser: AnswerParser | None, *, is_last: bool) -> Released:
        """Returns the tokens that go out with the text that the parser, if there is one, has now passed on."""
        text = self._text
        num_due = num_scored = text.num_settled if parser is None else bisect_left(text.starts, parser.num_consumed)
        if is_last:
            num_due = text.num_tokens
            num_scored = text.num_settled if text.stopped else num_due
        out, self._held = split(self._held, num_due - self._num_out)
        scored = [token for token, _ in split(out, num_scored - self._num_out)[0] if token is not None]
        traced = [token for _, token in out if token is not None]
        self._num_out += len(out)
        ids, _ = split(self._ids, text.num_tokens - self.num_ids)
        self._ids = []
        self.num_ids += len(ids)
        return Released(scored, traced, ids)


def split(values: list[Value], count: int) -> tuple[list[Value], list[Value]]:
    """Returns the first `count` values, none if that is negative, and the others."""
    place = max(count, 0)
    return values[:place], values[place:]


class Choice:
    """Receives one request's outputs and passes its text on."""

    def __init__(
        self,
        index: int,
        request: Request,
        text: TextStream,
        parser: AnswerParser | None,
        completion: "Completion",
        echo: Echo | None = None,
    ) -> None:
        self.request = request
        self.parser = parser
        self.prompt_logprobs: Logprobs | None = None
        self.stats: RequestStats | None = None  # set by the last output
        self._index = index
        self._text = text
        self._completion = completion
        self._asked = self._arrival = time.perf_counter()
        self._notes = NOTES.get()  # of the HTTP request, whose context the engine's outputs do not have
        self._has_tokens = False
        self._echo = echo  # until it is sent
        self._ledger = TokenLedger(text, 0 if echo is None else len(echo.text))
        self._answer: list[int] = []  # for the log of answers

    def receive(self, output: Output) -> None:
        self._measure(len(output.tokens))
        was_stopped = self._text.stopped
        text = self._text.push(output.tokens, output.finish_reason)
        reason = output.finish_reason
        scored = list[Scored]()
        pieces = self._pieces(text, is_last=reason is not None)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if self._echo is not None:
            echo = self._echo
            pieces = [TextPiece("content", echo.text, 0, 0), *pieces]
            if self.request.params.logprobs is not None and self.prompt_logprobs is not None:
                scored = scored_prompt(echo.tokens, echo.starts, self.prompt_logprobs)
            self._echo = None
        self._ledger.add(output)
        if self._text.stopped and not was_stopped and reason is None:
            # The reply has the counts and ends the choice.
            self._completion.engine.abort(self.request.id, is_whole=True)
        if reason is not None:
            assert output.stats is not None, "the last Output carries the counts"
            reason = "stop" if self._text.stopped else reason
            self.stats = self._text.cut(output.stats)
            self._completion.metrics.count_finished(reason, self.stats, time.perf_counter() - self._asked)
            note_choice(reason, self.stats, self._notes)
        has_calls = reason == "stop" and self.parser is not None and self.parser.num_calls > 0
        if pieces or scored or reason is not None:
            finish_reason = "tool_calls" if has_calls else reason
            released = self._ledger.release(self.parser, is_last=reason is not None)
            scored += released.scored
            log = self._completion.answer_log
            if log is not None:
                self._answer += released.ids
                if reason is not None:
                    log.add(self.request, self._answer, reason)
            num_ids = self._ledger.num_ids
            delta = Delta(pieces, self._index, finish_reason, scored, released.traced, released.ids, num_ids)
            self._completion.put(delta)

    def _pieces(self, text: str, *, is_last: bool) -> Sequence[Piece]:
        if self.parser is not None:
            return self.parser.feed(text, is_last).pieces
        end = self._text.num_returned
        return [TextPiece("content", text, end - len(text), end)] if text else []

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self.parser is None else self.parser.num_reasoning(self._text.starts)

    def fail(self, error: Exception) -> None:
        if isinstance(error, EngineError):  # refused requests do not count: they never ran
            self._completion.metrics.count_failed()
        note_choice("error", None, self._notes)
        self._completion.put(error)

    def _measure(self, num_tokens: int) -> None:
        if not num_tokens:
            return
        now = time.perf_counter()
        self._completion.metrics.count_tokens(num_tokens, now - self._arrival, is_first=not self._has_tokens)
        self._arrival = now
        self._has_tokens = True


class Completion:
    """The choices of one call. Iterate over `deltas` to the end, or call `abort`."""

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        *,
        watched: bool,
        answer_log: AnswerLog | None = None,
    ) -> None:
        """`watched`: the client wants text as it comes (streaming), not at the end."""
        self.engine = engine
        self.metrics = metrics
        self.answer_log = answer_log
        self.choices: list[Choice] = []
        self._watched = watched
        self._news: deque[Delta | Exception] = deque()
        self._has_news = asyncio.Event()

    def submit(
        self, requests: Sequence[Request], stop: Sequence[str], answers: AnswerFormat, echoes: Sequence[Echo] = ()
    ) -> None:
        """Sends requests to the engine. `echoes`: the prompts that the choices repeat, if they do. Raises EngineError
        if there is no engine."""
        stop = answers.stops(stop)
        is_counted = self._watched or answers.has_reasoning
        for index, request in enumerate(requests):
            params = request.params
            watched = is_counted or params.logprobs is not None  # log-probabilities need the tokens' places in the text
            prompt = request.prompt if answers.continues else ()
            text = TextStream(answers.decoder, stop, watched=watched, min_tokens=params.min_tokens, prompt=prompt)
            parser = None if answers.parser is None else answers.parser()
            self.choices.append(Choice(index, request, text, parser, self, echoes[index] if echoes else None))
            self.engine.submit(request, self.choices[-1])

    def put(self, news: Delta | Exception) -> None:
        self._news.append(news)
        self._has_news.set()

    async def deltas(self) -> AsyncIterator[Delta]:
        """Yields until every choice has ended. If one fails, aborts the others and raises RequestFailed.

        Joins text that arrived since the last one was taken: a slow client gets fewer and longer pieces, not a growing
        queue.
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
            waited = [news]
            while self._news and isinstance(more := self._news[0], Delta) and more.index == news.index:
                waited.append(more)
                self._news.popleft()
            delta = waited[0] if len(waited) == 1 else Delta.join(waited)
            num_open -= delta.finish_reason is not None
            yield delta

    def abort(self) -> None:
        """Aborts the choices that have not ended."""
        for choice in self.choices:
            if choice.stats is None:
                self.engine.abort(choice.request.id)

    def stats(self, every: int = 1) -> RequestStats:
        """Sums over the choices, or over the first of each `every`."""
        total = RequestStats()
        for choice in self.choices[::every]:
            assert choice.stats is not None
            total.add(choice.stats)
        return total

    def usage(self, num_choices: int) -> dict[str, Any]:
        """Returns OpenAI's usage. Each prompt has `num_choices` choices and is counted once."""
        total = self.stats()
        prompts = self.stats(every=num_choices)
        return {
            "prompt_tokens": prompts.prompt_tokens,
            "completion_tokens": total.completion_tokens,
            "total_tokens": prompts.prompt_tokens + total.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": prompts.cached_tokens},
            "completion_tokens_details": {
                "reasoning_tokens": sum(choice.reasoning_tokens for choice in self.choices),
            },
        }

    def vllm_metrics(self, num_spec_tokens: int) -> dict[str, Any]:
        """Returns vLLM's metrics, summed over all choices; vLLM sends them for single choices only. `num_spec_tokens`:
        most tokens that a round drafts for a choice."""
        return {"speculative_decoding": self.stats().speculative_decoding(num_spec_tokens)}
