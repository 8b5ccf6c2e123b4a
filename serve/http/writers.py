"""Writes answers as OpenAI's objects and events: chats and completions here, /v1/responses in responses.py.

A writer writes the answer of one call, whole or as the events of a stream: `opening` before any text, `pieces` of each
delta, `closing` after all text, or `failed`; and then its `ending`.
"""

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from slipstream.serve.chat.answers import AnswerFormat
from slipstream.serve.chat.parser import CallPiece
from slipstream.serve.detokenize import TokenTexts
from slipstream.serve.http.completions import Choice, Completion, Delta, TracedToken
from slipstream.serve.http.frontend import Frontend
from slipstream.serve.http.limits import ApiError
from slipstream.serve.http.logprobs import (
    Echo,
    Scored,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
    scored_prompt,
)
from slipstream.serve.http.schemas import ChatBody, CompletionBody
from slipstream.serve.request import Request

Fields = dict[str, Any]  # of JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoicesWriter:
    """The parts of a body that its answers need, and what chats and completions share of their objects and events."""

    prefix: ClassVar[str]  # of ids
    kind: ClassVar[str]  # of a whole answer
    kind_of_event: ClassVar[str]
    ending: ClassVar[str] = "data: [DONE]\n\n"

    id: str
    created: int  # seconds since 1970
    model: str
    fingerprint: str
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
    def of(cls, body: ChatBody | CompletionBody, frontend: Frontend) -> Self:
        call_id = f"{cls.prefix}-{uuid.uuid4().hex}"
        requests, answers = frontend.read(body, call_id)
        speculation = body.asked_speculation
        return cls(
            id=call_id,
            created=int(time.time()),
            model=frontend.model_name,
            fingerprint=frontend.fingerprint,
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

    def whole(self, answers: Sequence[Delta], completion: Completion) -> Fields:
        """Returns the whole answer. `answers`: all text of each choice."""
        choices = [self.choice(answer) for answer in answers]
        return {**self.head(self.kind), "choices": choices, **self.counts(completion)}

    def opening(self) -> list[Fields]:
        return []

    def pieces(self, delta: Delta) -> list[Fields]:
        return [self.event([self.choice(delta)], delta.num_tokens)]

    def closing(self, completion: Completion) -> list[Fields]:
        return [{**self.event([]), **self.counts(completion)}] if self.include_usage else []

    def counts(self, completion: Completion) -> Fields:
        """Returns OpenAI's usage and vLLM's metrics."""
        return {"usage": completion.usage(self.num_choices), "metrics": completion.vllm_metrics(self.num_spec_tokens)}

    def failed(self, error: ApiError) -> list[Fields]:
        return [error.body]

    def choice(self, answer: Delta) -> Fields:
        """Returns a choice with all of `answer`."""
        raise NotImplementedError

    def logprobs_of(self, scored: Sequence[Scored], k: int) -> Fields:
        """Returns the log-probabilities of tokens, with those of the `k` likeliest at the place of each."""
        raise NotImplementedError

    def head(self, kind: str) -> Fields:
        seed = self.requests[0].seed
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "system_fingerprint": self.fingerprint, "seed": seed}

    def event(self, choices: list[Fields], num_tokens: int = 0) -> Fields:
        """Returns an event of a stream. `num_tokens`: tokens of the choice so far."""
        event = {**self.head(self.kind_of_event), "choices": choices}
        if self.include_usage:
            event["usage"] = None
            if self.continuous_usage and choices:  # of one choice so far, as vLLM does
                num_prompt = len(self.requests[choices[0]["index"]].prompt)
                event["usage"] = {
                    "prompt_tokens": num_prompt,
                    "completion_tokens": num_tokens,
                    "total_tokens": num_prompt + num_tokens,
                }
        return event

    def scored_prompt_of(self, choice: Choice) -> list[Fields | None] | None:
        if choice.prompt_logprobs is None or self.prompt_logprobs is None:
            return None
        tokens = choice.request.prompt
        return prompt_logprobs(
            scored_prompt(tokens, [0] * len(tokens), choice.prompt_logprobs), self.prompt_logprobs, self.texts
        )

    def details(self, answer: Delta) -> Fields:
        """Returns the fields about single tokens."""
        details: Fields = {"logprobs": None}
        if self.logprobs is not None:
            details["logprobs"] = self.logprobs_of(answer.scored, self.logprobs)
        if self.wants_trace:
            details["speculation"] = {"trace": trace_entries(answer.traced, self.texts)}
        if self.wants_token_ids:
            details["token_ids"] = list(answer.tokens)
        return details


class CompletionWriter(ChoicesWriter):
    """Answers of /v1/completions."""

    __slots__ = ()
    prefix = "cmpl"
    kind = kind_of_event = "text_completion"

    def whole(self, answers: Sequence[Delta], completion: Completion) -> Fields:
        body = super().whole(answers, completion)
        if self.prompt_logprobs is not None:
            for choice, source in zip(body["choices"], completion.choices, strict=True):
                choice["prompt_logprobs"] = self.scored_prompt_of(source)
        return body

    def choice(self, answer: Delta) -> Fields:
        reason = answer.finish_reason
        return {"index": answer.index, "text": answer.content, **self.details(answer), "finish_reason": reason}

    def logprobs_of(self, scored: Sequence[Scored], k: int) -> Fields:
        return completion_logprobs(scored, k, self.texts)


class ChatWriter(ChoicesWriter):
    """Answers of /v1/chat/completions."""

    __slots__ = ()
    prefix = "chatcmpl"
    kind = "chat.completion"
    kind_of_event = "chat.completion.chunk"

    def whole(self, answers: Sequence[Delta], completion: Completion) -> Fields:
        body = super().whole(answers, completion)
        if self.prompt_logprobs is not None:  # a chat has one prompt
            body["prompt_logprobs"] = self.scored_prompt_of(completion.choices[0])
        return body

    def opening(self) -> list[Fields]:
        """Returns the role of each choice."""
        first = {"role": "assistant", "content": ""}
        return [self.event([self._part(index, first)]) for index in range(len(self.requests))]

    def pieces(self, delta: Delta) -> list[Fields]:
        """Returns the events of a delta in the order of a message: reasoning, content, calls. The last event has the
        finish reason, which follows calls in a separate event; the last event with text has log-probabilities and
        traces."""
        parts = list[Fields]()
        text = delta.content
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
            choices[place] |= self.details(delta)
            choices[-1]["finish_reason"] = delta.finish_reason
        return [self.event([choice], delta.num_tokens) for choice in choices]

    def choice(self, answer: Delta) -> Fields:
        calls = answer.calls
        message: Fields = {
            "role": "assistant",
            "content": answer.content or (None if calls else ""),
            "refusal": None,
        }
        if self.answers.has_reasoning and self.shows_reasoning:
            message |= self._reasoning(answer)
        if calls:
            message["tool_calls"] = [call.to_json() for call in calls]
        reason = answer.finish_reason
        return {"index": answer.index, "message": message, **self.details(answer), "finish_reason": reason}

    def logprobs_of(self, scored: Sequence[Scored], k: int) -> Fields:
        return chat_logprobs(scored, k, self.texts)

    def _reasoning(self, answer: Delta) -> Fields:
        """Returns the reasoning by both names that clients read."""
        return dict.fromkeys(("reasoning_content", "reasoning"), answer.reasoning or None)

    def _part(self, index: int, delta: Fields) -> Fields:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def trace_entries(traced: Sequence[TracedToken], texts: TokenTexts) -> list[Fields]:
    def described(token: int | None) -> Fields:
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


def call_events(call: CallPiece) -> list[Fields]:
    """Returns a call's id and name, once and without arguments, and then its arguments."""
    head = {"index": call.index, **replace(call, arguments="").to_json()}
    more = {"index": call.index, "function": {"arguments": call.arguments}}
    return [*([head] if call.name else []), *([more] if call.arguments else [])]


def sse(event: Mapping[str, Any]) -> str:
    """Writes a server-sent event, named if it has a type. ASCII, since many readers take U+2028, U+2029 and U+0085 for
    line ends."""
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event, separators=(',', ':'))}\n\n"
