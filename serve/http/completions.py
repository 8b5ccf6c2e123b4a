"""One HTTP call in progress: turns the engine's tokens into text and counts, as OpenAI's objects and events."""

import asyncio
import json
import time
import uuid
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from slipstream.serve.chat.answers import AnswerFormat
from slipstream.serve.chat.parser import AnswerParser, CallPiece, Piece, TextPiece, calls_of, text_of
from slipstream.serve.detokenize import TextStream, TokenTexts
from slipstream.serve.http.engine_client import EngineClient, EngineError
from slipstream.serve.http.frontend import Frontend
from slipstream.serve.http.limits import ApiError
from slipstream.serve.http.logprobs import (
    Echo,
    Scored,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
    scored_prompt,
    scored_tokens,
)
from slipstream.serve.http.metrics import Metrics
from slipstream.serve.http.request_log import NOTES, note_choice
from slipstream.serve.http.schemas import ChatBody, CompletionBody
from slipstream.serve.request import FinishReason, Logprobs, Output, Request, RequestStats, TokenTrace

DONE = "data: [DONE]\n\n"


class TracedToken(NamedTuple):
    token: int
    trace: TokenTrace


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one choice. The last delta has a finish reason."""

    index: int
    pieces: Sequence[Piece]
    finish_reason: FinishReason | Literal["tool_calls"] | None
    scored: Sequence[Scored] = ()  # tokens of the pieces, if the client wants log-probabilities
    traced: Sequence[TracedToken] = ()  # the same for traces, with tokens that have no text
    tokens: Sequence[int] = ()  # new ones, whether their text is held back or not
    num_tokens: int = 0  # of the choice so far, these included

    @property
    def text(self) -> str:
        return text_of(self.pieces, "content")

    @property
    def reasoning(self) -> str:
        return text_of(self.pieces, "reasoning")

    @property
    def calls(self) -> list[CallPiece]:
        return calls_of(self.pieces)

    @classmethod
    def join(cls, deltas: "Sequence[Delta]") -> "Delta":
        """Joins several deltas of a choice, in order."""
        pieces = [piece for delta in deltas for piece in delta.pieces]
        scored = [token for delta in deltas for token in delta.scored]
        traced = [token for delta in deltas for token in delta.traced]
        tokens = [token for delta in deltas for token in delta.tokens]
        last = deltas[-1]
        return cls(last.index, pieces, last.finish_reason, scored, traced, tokens, last.num_tokens)


class RequestFailed(Exception):
    """The engine refused a request (`cause` is a ValueError) or could not finish it (EngineError)."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


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
        self._num_chars = 0 if echo is None else len(echo.text)
        self._waiting: list[Scored] = []  # tokens whose text is held back
        self._num_scored = 0  # tokens whose text is sent
        self._pending_traces: list[TracedToken] = []  # tokens whose trace is not sent yet
        self._num_traced = 0  # tokens whose trace is sent
        self._tokens: list[int] = []  # ids that are not sent yet
        self._num_sent = 0  # tokens whose ids are sent

    def receive(self, output: Output) -> None:
        self._measure(len(output.tokens))
        self._tokens += output.tokens
        was_stopped = self._text.stopped
        text = self._text.push(output.tokens, output.finish_reason)
        reason = output.finish_reason
        scored = list[Scored]()
        pieces = self._pieces(text, is_last=reason is not None)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if self._echo is not None:
            pieces = [TextPiece("content", self._echo.text, 0, 0), *pieces]
            scored = self._echoed(self._echo)
            self._echo = None
        self._keep(output)
        if self._text.stopped and not was_stopped and reason is None:
            self._completion.engine.abort(self.request.id)  # the reply has the counts and ends the choice
        if reason is not None:
            assert output.stats is not None, "the last Output carries the counts"
            reason = "stop" if self._text.stopped else reason
            self.stats = self._text.cut(output.stats)
            self._completion.metrics.count_finished(reason, self.stats, time.perf_counter() - self._asked)
            note_choice(reason, self.stats, self._notes)
        has_calls = reason == "stop" and self.parser is not None and self.parser.num_calls > 0
        if pieces or scored or reason is not None:
            finish_reason = "tool_calls" if has_calls else reason
            scored += self._settled(output)
            traced = self._traced(is_last=reason is not None)
            tokens = self._new_tokens()
            self._completion.put(Delta(self._index, pieces, finish_reason, scored, traced, tokens, self._num_sent))

    def _new_tokens(self) -> list[int]:
        """Returns the new tokens up to the end of a stop string, with a stop id at the end."""
        tokens = self._tokens[: self._text.num_tokens - self._num_sent]
        self._tokens.clear()
        self._num_sent += len(tokens)
        return tokens

    def _pieces(self, text: str, *, is_last: bool) -> list[Piece]:
        if self.parser is not None:
            return self.parser.feed(text, is_last).pieces
        end = self._text.num_returned
        return [TextPiece("content", text, end - len(text), end)] if text else []

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self.parser is None else self.parser.num_reasoning(self._text.starts)

    def _keep(self, output: Output) -> None:
        """Stores the log-probabilities and traces of an output's tokens until their text is sent."""
        if output.trace is not None:
            self._pending_traces += map(TracedToken, output.tokens, output.trace)
        if output.logprobs is None:
            return
        starts = self._text.starts[self._num_scored + len(self._waiting) :][: len(output.tokens)]
        count = len(starts)  # a stop id, and what follows a stop string, has no text
        places = [self._num_chars + start for start in starts]
        self._waiting += scored_tokens(output.tokens[:count], places, output.logprobs[:count])

    def _num_settled(self, *, is_last: bool) -> int:
        """Counts the tokens whose text is sent, including reasoning, calls and markers. The count may fall, if the
        parser has taken something back."""
        if self.parser is not None and not is_last:
            return bisect_left(self._text.starts, self.parser.num_consumed)
        return self._text.num_settled

    def _traced(self, *, is_last: bool) -> list[TracedToken]:
        """Returns the tokens whose text is sent now, if the client wants traces. At the end also those without text, up
        to the end of a stop string."""
        if not self.request.params.wants_trace:
            return []
        num_due = self._text.num_tokens if is_last else self._num_settled(is_last=False)
        count = max(num_due - self._num_traced, 0)
        traced = self._pending_traces[:count]
        self._pending_traces = self._pending_traces[count:]
        self._num_traced += count
        return traced

    def _settled(self, output: Output) -> list[Scored]:
        """Returns the tokens whose text is sent now, if the client wants log-probabilities."""
        if self.request.params.logprobs is None:
            return []
        num_settled = max(self._num_settled(is_last=output.finish_reason is not None), self._num_scored)
        num_new = num_settled - self._num_scored
        settled = self._waiting[:num_new]
        self._waiting = self._waiting[num_new:]
        self._num_scored = num_settled
        is_ended = output.finish_reason == "stop" and not self._text.stopped
        if is_ended and output.logprobs is not None:
            place = self._num_chars + self._text.num_returned
            settled += scored_tokens(output.tokens[-1:], [place], output.logprobs[-1:])
        return settled

    def _echoed(self, echo: Echo) -> list[Scored]:
        if self.request.params.logprobs is None or self.prompt_logprobs is None:
            return []
        return scored_prompt(echo.tokens, echo.starts, self.prompt_logprobs)

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


@dataclass(frozen=True, slots=True)
class Deadline:
    """The time limit of a call: `seconds` after its arrival. `at`: by time.monotonic. None: no limit."""

    seconds: float | None = None
    at: float | None = None

    @classmethod
    def after(cls, seconds: float | None) -> "Deadline":
        return cls(seconds, None if seconds is None else time.monotonic() + seconds)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Raises TimeoutError if the block does not end in time."""
        remaining = None if self.at is None else max(self.at - time.monotonic(), 0)
        try:
            async with asyncio.timeout(remaining):
                yield
        except TimeoutError as error:
            message = f"the answer did not end within {self.seconds:g} s (request_timeout); ask for less"
            raise TimeoutError(message) from error


class Completion:
    """The choices of one call. Iterate over `deltas` to the end, or call `abort`."""

    def __init__(
        self,
        engine: EngineClient,
        metrics: Metrics,
        *,
        watched: bool,
        deadline: Deadline = Deadline(),
    ) -> None:
        """`watched`: the client wants text as it comes (streaming), not at the end."""
        self.engine = engine
        self.metrics = metrics
        self._deadline = deadline
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
        """Yields until every choice has ended. If one fails, aborts the others and raises RequestFailed; TimeoutError
        when the time is up.

        Joins text that arrived since the last one was taken: a slow client gets fewer and longer pieces, not a growing
        queue.
        """
        num_open = len(self.choices)
        while num_open:
            if not self._news:
                self._has_news.clear()
                await self._wait()
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

    async def _wait(self) -> None:
        if self._deadline.at is None:
            await self._has_news.wait()
            return
        try:
            async with self._deadline.watched():
                await self._has_news.wait()
        except TimeoutError:
            self.abort()
            raise

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


class Call(NamedTuple):
    """The parts of a body that its answers need, and OpenAI's objects and events for the answers."""

    id: str
    created: int  # seconds since 1970
    model: str
    fingerprint: str
    is_chat: bool
    stream: bool
    include_usage: bool  # in the last event of a stream
    continuous_usage: bool  # of the choice, in every event before; otherwise null
    stop: Sequence[str]
    num_choices: int  # per prompt
    requests: Sequence[Request]  # the first has the seed of the call
    answers: AnswerFormat
    shows_reasoning: bool
    echoes: Sequence[Echo]  # prompts that the choices repeat, if they do
    logprobs: int | None  # likeliest tokens to list for each token of the answer; None: no log-probabilities
    prompt_logprobs: int | None  # the same for the prompt
    wants_trace: bool
    num_spec_tokens: int  # most tokens that a round drafts for a choice
    texts: TokenTexts
    wants_token_ids: bool

    @classmethod
    def of(cls, body: ChatBody | CompletionBody, frontend: Frontend) -> "Call":
        is_chat = isinstance(body, ChatBody)
        call_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        requests, answers = frontend.read(body, call_id)
        speculation = body.asked_speculation
        return cls(
            id=call_id,
            created=int(time.time()),
            model=frontend.model_name,
            fingerprint=frontend.fingerprint,
            is_chat=is_chat,
            stream=body.stream,
            include_usage=body.include_usage,
            continuous_usage=body.continuous_usage,
            stop=body.stop,
            num_choices=body.n,
            requests=requests,
            answers=answers,
            shows_reasoning=isinstance(body, ChatBody) and body.include_reasoning,
            echoes=frontend.echoes(body, requests),
            logprobs=body.answer_logprobs,
            prompt_logprobs=body.prompt_logprobs,
            wants_trace=speculation.trace,
            num_spec_tokens=frontend.num_spec_tokens if speculation.enabled else 0,
            texts=frontend.texts,
            wants_token_ids=body.return_token_ids,
        )

    def whole(self, answers: Sequence[Delta], completion: Completion) -> dict[str, Any]:
        """Returns the whole answer. `answers`: all text of each choice."""
        choices = [self._choice(answer) for answer in answers]
        kind = "chat.completion" if self.is_chat else "text_completion"
        body = {**self._head(kind), "choices": choices, **self.counts(completion)}
        if self.prompt_logprobs is not None:
            scored = [self._scored_prompt(choice) for choice in completion.choices]
            owners = [body] if self.is_chat else choices  # a chat has one prompt
            for owner, entries in zip(owners, scored, strict=False):
                owner["prompt_logprobs"] = entries
        return body

    def _scored_prompt(self, choice: Choice) -> list[dict[str, Any] | None] | None:
        if choice.prompt_logprobs is None or self.prompt_logprobs is None:
            return None
        tokens = choice.request.prompt
        return prompt_logprobs(
            scored_prompt(tokens, [0] * len(tokens), choice.prompt_logprobs), self.prompt_logprobs, self.texts
        )

    def opening(self) -> list[dict[str, Any]]:
        """Returns the events before any text: chat answers begin with the role."""
        if not self.is_chat:
            return []
        first = {"role": "assistant", "content": ""}
        return [self._event([self._part(index, first)], 0) for index in range(len(self.requests))]

    def pieces(self, delta: Delta) -> list[dict[str, Any]]:
        """Returns the events of a delta in the order of a message: reasoning, content, calls. The last event has the
        finish reason, which follows calls in a separate event; the last event with text has log-probabilities and
        traces."""
        if not self.is_chat:
            return [self._event([self._choice(delta)], delta.num_tokens)]
        parts = list[dict[str, Any]]()
        text = delta.text
        calls = delta.calls
        if self.shows_reasoning and delta.reasoning:
            parts.append(self._reasoning(delta))
        parts += [{"content": text}] if text else []
        for call in calls:
            parts += [{"tool_calls": [event]} for event in call_events(call)]
        place = max(len(parts) - 1, 0)  # of the log-probabilities
        has_more = delta.finish_reason or delta.scored or delta.traced or (delta.tokens and self.wants_token_ids)
        if (delta.finish_reason is not None and calls) or (not parts and has_more):
            parts.append({})
        choices = [self._part(delta.index, part) for part in parts]
        if choices:
            choices[place] |= self._details(delta)
            choices[-1]["finish_reason"] = delta.finish_reason
        return [self._event([choice], delta.num_tokens) for choice in choices]

    def closing(self, completion: Completion) -> list[dict[str, Any]]:
        """Returns the events after all text."""
        return [{**self._event([]), **self.counts(completion)}] if self.include_usage else []

    def counts(self, completion: Completion) -> dict[str, Any]:
        """Returns OpenAI's usage and vLLM's metrics."""
        return {"usage": completion.usage(self.num_choices), "metrics": completion.vllm_metrics(self.num_spec_tokens)}

    def failed(self, error: ApiError) -> list[dict[str, Any]]:
        return [error.body]

    def _head(self, kind: str) -> dict[str, Any]:
        seed = self.requests[0].seed
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "system_fingerprint": self.fingerprint, "seed": seed}

    def _event(self, choices: list[dict[str, Any]], num_tokens: int = 0) -> dict[str, Any]:
        """Returns an event of a stream. `num_tokens`: tokens of the choice so far."""
        event = {**self._head("chat.completion.chunk" if self.is_chat else "text_completion"), "choices": choices}
        if self.include_usage:
            event["usage"] = (
                self._usage_of(choices[0]["index"], num_tokens) if self.continuous_usage and choices else None
            )
        return event

    def _usage_of(self, index: int, num_tokens: int) -> dict[str, int]:
        """Returns the usage of one choice so far, as vLLM does."""
        num_prompt = len(self.requests[index].prompt)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt + num_tokens,
        }

    def _reasoning(self, answer: Delta) -> dict[str, Any]:
        """Returns the reasoning by both names that clients read."""
        return dict.fromkeys(("reasoning_content", "reasoning"), answer.reasoning or None)

    def _part(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _choice(self, answer: Delta) -> dict[str, Any]:
        content: dict[str, Any] = {"text": answer.text}
        if self.is_chat:
            text = answer.text or (None if answer.calls else "")
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if self.answers.has_reasoning and self.shows_reasoning:
                message |= self._reasoning(answer)
            if answer.calls:
                message["tool_calls"] = [whole_call(call) for call in answer.calls]
            content = {"message": message}
        reason = answer.finish_reason
        return {"index": answer.index, **content, **self._details(answer), "finish_reason": reason}

    def _details(self, answer: Delta) -> dict[str, Any]:
        """Returns the fields about single tokens."""
        details: dict[str, Any] = {"logprobs": None}
        if self.logprobs is not None:
            describe = chat_logprobs if self.is_chat else completion_logprobs
            details["logprobs"] = describe(answer.scored, self.logprobs, self.texts)
        if self.wants_trace:
            details["speculation"] = {"trace": trace_entries(answer.traced, self.texts)}
        if self.wants_token_ids:
            details["token_ids"] = list(answer.tokens)
        return details


def trace_entries(traced: Sequence[TracedToken], texts: TokenTexts) -> list[dict[str, Any]]:
    def described(token: int | None) -> dict[str, Any]:
        return {"id": token, "token": None if token is None else texts(token)}

    return [
        {
            **described(token),
            "source": trace.source,
            "position": trace.position,
            "round": trace.round,
            "refused": [described(other) for other in trace.refused],
            "drafted": trace.drafted,
            "rows": trace.rows,
        }
        for token, trace in traced
    ]


def whole_call(call: CallPiece) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def call_events(call: CallPiece) -> list[dict[str, Any]]:
    """Returns a call's id and name, once and without arguments, and then its arguments."""
    head = {"index": call.index, **whole_call(replace(call, arguments=""))}
    more = {"index": call.index, "function": {"arguments": call.arguments}}
    return [*([head] if call.name else []), *([more] if call.arguments else [])]


def sse(event: Mapping[str, Any]) -> str:
    """Writes a server-sent event, named if it has a type. ASCII, since many readers take U+2028, U+2029 and U+0085 for
    line ends."""
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event, separators=(',', ':'))}\n\n"
