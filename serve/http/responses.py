"""One call of /v1/responses in progress: the parts of an answer as OpenAI's output items, and their events.

The items come in the order in which the model wrote them: a run of reasoning, a run of text, a call. At most one is
open at a time. Invariant: the items of a stream are those of the whole answer, however it is cut into pieces.
"""

import time
import uuid
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar, Literal

from slipstream.serve.chat.answers import AnswerFormat
from slipstream.serve.chat.parser import CallPiece, Piece, TextPiece, joined
from slipstream.serve.detokenize import TokenTexts
from slipstream.serve.http.completions import Completion, Delta
from slipstream.serve.http.frontend import Frontend
from slipstream.serve.http.limits import ApiError
from slipstream.serve.http.logprobs import Echo, Scored, chat_logprobs
from slipstream.serve.http.responses_body import ResponsesBody
from slipstream.serve.request import Request

Fields = dict[str, Any]  # of JSON
Kind = Literal["reasoning", "content", "call"]
TOLD = {"reasoning": "reasoning_text", "content": "output_text", "call": "function_call_arguments"}  # names in events
PROMPT_DETAILS = "prompt_tokens_details"
DETAILS = "completion_tokens_details"


@dataclass(slots=True)
class ResponseWriter:
    """The parts of a body that are kept while it is answered, and the answer so far: a Writer (writers.py)."""

    ending: ClassVar[str] = ""
    head: Fields  # fields of the Response that do not change
    stream: bool
    stop: Sequence[str]
    requests: Sequence[Request]  # one
    answers: AnswerFormat
    writer: "ItemWriter"
    num_spec_tokens: int  # most tokens that a round drafts
    echoes: Sequence[Echo] = ()
    prompt_logprobs: int | None = None

    @classmethod
    def of(cls, body: ResponsesBody, frontend: Frontend) -> "ResponseWriter":
        response_id = f"resp_{uuid.uuid4().hex}"
        requests, answers = frontend.read(body, response_id)
        head = {"id": response_id, "object": "response", "created_at": int(time.time()), "model": frontend.model_name}
        head |= {"system_fingerprint": frontend.fingerprint, "seed": requests[0].seed, **settings(body, requests[0])}
        writer = ItemWriter(body.answer_logprobs, frontend.texts)
        num_spec_tokens = frontend.num_spec_tokens if body.asked_speculation.enabled else 0
        return cls(head, body.stream, body.stop, requests, answers, writer, num_spec_tokens)

    def whole(self, answers: Sequence[Delta], completion: Completion) -> Fields:
        """`answers`: all of the one choice."""
        [answer] = answers
        self.writer.take(answer)
        return self._ended(completion)

    def opening(self) -> list[Fields]:
        """Returns the events before any text."""
        response = self._response("in_progress")
        return [self.writer.event(name, response=response) for name in ("created", "in_progress")]

    def pieces(self, delta: Delta) -> list[Fields]:
        return self.writer.take(delta)

    def closing(self, completion: Completion) -> list[Fields]:
        """Returns the last event."""
        response = self._ended(completion)
        return [self.writer.event(response["status"], response=response)]

    def failed(self, error: ApiError) -> list[Fields]:
        """Returns the last events of an answer that fails."""
        codes = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
        fault = {"code": codes.get(error.status, "server_error"), "message": error.message}
        closing = self.writer.close("incomplete")
        return [*closing, self.writer.event("failed", response=self._response("failed", error=fault))]

    def _ended(self, completion: Completion) -> Fields:
        """Returns the Response with its usage, after the last piece."""
        usage = completion.usage(1)
        # The cache gets the tokens that were not read from it.
        num_written = usage["prompt_tokens"] - usage[PROMPT_DETAILS]["cached_tokens"]
        counts = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage[PROMPT_DETAILS], "cache_write_tokens": num_written},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage[DETAILS],
            "total_tokens": usage["total_tokens"],
        }
        totals = {"usage": counts, "metrics": completion.vllm_metrics(self.num_spec_tokens)}
        if self.writer.is_cut:
            return self._response("incomplete", incomplete_details={"reason": "max_output_tokens"}, **totals)
        return self._response("completed", completed_at=int(time.time()), **totals)

    def _response(self, status: str, **changes: Any) -> Fields:
        empty = dict.fromkeys(("completed_at", "error", "incomplete_details", "usage", "metrics"))
        return {**self.head, "status": status, "output": list(self.writer.items), **empty, **changes}


def settings(body: ResponsesBody, request: Request) -> Fields:
    """Returns the request's options with their defaults, which OpenAI repeats in the answer."""
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "store": False,
        "temperature": request.params.temperature,
        "text": {"format": body.text.format or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools,
        "top_logprobs": body.top_logprobs,
        "top_p": request.params.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


@dataclass(slots=True)
class OpenItem:
    """An output item in progress. `head`: its fields except its content."""

    kind: Kind
    head: Fields
    texts: list[str] = field(default_factory=list)
    entries: list[Fields] = field(default_factory=list)  # log-probabilities of its tokens

    @classmethod
    def of(cls, piece: Piece) -> "OpenItem":
        name = uuid.uuid4().hex
        if isinstance(piece, CallPiece):
            head = {"id": f"fc_{name}", "type": "function_call", "call_id": piece.id, "name": piece.name}
            return cls("call", head)
        if piece.kind == "reasoning":
            return cls("reasoning", {"id": f"rs_{name}", "type": "reasoning", "summary": []})
        return cls("content", {"id": f"msg_{name}", "type": "message", "role": "assistant"})

    @property
    def content(self) -> Fields:
        """The content of the item, as its last event has it."""
        text = "".join(self.texts)
        if self.kind == "call":
            return {"arguments": text}
        return {"text": text, **({"logprobs": self.entries} if self.kind == "content" else {})}

    @property
    def part(self) -> Fields:
        return {"type": TOLD[self.kind], **({"annotations": []} if self.kind == "content" else {}), **self.content}

    def item(self, status: str, parts: Sequence[Fields]) -> Fields:
        body = self.content if self.kind == "call" else {"content": list(parts)}
        return {**self.head, "status": status, **body}


class ItemWriter:
    """Writes the output items of one answer."""

    def __init__(self, logprobs: int | None, texts: TokenTexts) -> None:
        """`logprobs`: likeliest tokens to list for each token of the text; None: no log-probabilities."""
        self.items: list[Fields] = []  # finished items
        self.is_cut = False  # the answer ended at max_output_tokens
        self._logprobs = logprobs
        self._texts = texts
        self._num_events = 0
        self._open: OpenItem | None = None
        self._scored: list[Scored] = []  # all tokens so far
        self._num_told = 0  # tokens that belong to a text so far, and all before them

    def event(self, name: str, **fields: Any) -> Fields:
        self._num_events += 1
        return {"type": f"response.{name}", "sequence_number": self._num_events - 1, **fields}

    def take(self, delta: Delta) -> list[Fields]:
        """Writes the next pieces of the answer and returns their events."""
        events = list[Fields]()
        self._scored += delta.scored
        for piece in joined(delta.pieces):
            kind: Kind = "call" if isinstance(piece, CallPiece) else piece.kind
            is_new_call = isinstance(piece, CallPiece) and bool(piece.id)
            if self._open is None or self._open.kind != kind or is_new_call:
                events += [*self.close("completed"), *self._begin(piece)]
            if isinstance(piece, CallPiece):
                events += self._write(piece.arguments, [])
            else:
                entries = self._entries(delta, piece) if kind == "content" else []
                events += self._write(piece.text, entries)
        if delta.finish_reason is not None:
            self.is_cut = delta.finish_reason == "length"
            if not self.items and self._open is None:
                events += self._begin(TextPiece("content", "", 0, 0))  # an answer without any text
            events += self.close("incomplete" if self.is_cut else "completed")
        return events

    def close(self, status: str) -> list[Fields]:
        """Ends the open item, if there is one, and returns its events."""
        if self._open is None:
            return []
        open_item = self._open
        place = self._place
        item = open_item.item(status, [open_item.part])
        self._open = None
        self.items.append(item)
        events = [self.event(f"{TOLD[open_item.kind]}.done", **place, **open_item.content)]
        if open_item.kind != "call":
            events.append(self.event("content_part.done", **place, part=open_item.part))
        return [*events, self.event("output_item.done", output_index=place["output_index"], item=item)]

    def _begin(self, piece: Piece) -> list[Fields]:
        open_item = self._open = OpenItem.of(piece)
        item = open_item.item("in_progress", [])
        place = self._place
        events = [self.event("output_item.added", output_index=place["output_index"], item=item)]
        if open_item.kind != "call":
            events.append(self.event("content_part.added", **place, part=open_item.part))
        return events

    def _write(self, text: str, entries: list[Fields]) -> list[Fields]:
        assert self._open is not None
        self._open.texts.append(text)
        self._open.entries += entries
        if not text and not entries:
            return []
        logprobs = {"logprobs": entries} if self._open.kind == "content" else {}
        return [self.event(f"{TOLD[self._open.kind]}.delta", **self._place, delta=text, **logprobs)]

    @property
    def _place(self) -> Fields:
        """The fields that locate the open item and its content part."""
        assert self._open is not None
        place = {"item_id": self._open.head["id"], "output_index": len(self.items)}
        return place if self._open.kind == "call" else {**place, "content_index": 0}

    def _entries(self, delta: Delta, run: TextPiece) -> list[Fields]:
        """Returns the log-probabilities of a run of text. Some of its tokens may have come before it, if they looked
        like the beginning of a call."""
        if self._logprobs is None:
            return []
        tokens = list[Scored]()
        for piece in delta.pieces:
            if isinstance(piece, TextPiece) and piece.kind == run.kind and run.start <= piece.start < run.end:
                tokens += self._tokens(piece.start, piece.end)
        return chat_logprobs(tokens, self._logprobs, self._texts)["content"]

    def _tokens(self, start: int, end: int) -> list[Scored]:
        """Returns the tokens with a character in this range of the answer, each once."""
        first, after = (bisect_left(self._scored, place, key=attrgetter("start")) for place in (start, end))
        is_begun = first == len(self._scored) or self._scored[first].start > start  # by the token before
        first = max(first - is_begun, self._num_told)
        self._num_told = max(after, self._num_told)
        return self._scored[first:after]
