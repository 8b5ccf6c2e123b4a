"""The shapes of answers: OpenAI's objects and server-sent events."""

import json
import time
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

from slipstream.serve.completion import Delta
from slipstream.serve.protocol import Body, ChatBody

DONE = "data: [DONE]\n\n"


class Shape(NamedTuple):
    """How the answers of one call are dressed."""

    id: str
    created: int  # seconds since 1970
    model: str
    is_chat: bool
    include_usage: bool  # in the last event of a stream; the others then say null
    seed: int = 0  # of the call: the one that was asked for, or drawn

    @classmethod
    def of(cls, body: Body, model: str) -> "Shape":
        is_chat = isinstance(body, ChatBody)
        response_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        return cls(response_id, int(time.time()), model, is_chat, body.include_usage)

    def whole(self, texts: list[str], reasons: list[str], usage: Mapping[str, Any]) -> dict[str, Any]:
        choices = [self._choice(index, *ended) for index, ended in enumerate(zip(texts, reasons, strict=True))]
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": usage}

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        """Events before any text: a chat answer names its role."""
        if not self.is_chat:
            return []
        first = {"role": "assistant", "content": ""}
        return [self._event([self._part(index, first, None)]) for index in range(num_choices)]

    def piece(self, delta: Delta) -> dict[str, Any]:
        if self.is_chat:
            content = {"content": delta.text} if delta.text else {}
            return self._event([self._part(delta.index, content, delta.finish_reason)])
        return self._event([self._choice(delta.index, delta.text, delta.finish_reason)])

    def closing(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._event([]), "usage": usage}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "seed": self.seed}

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = self._head("chat.completion.chunk" if self.is_chat else "text_completion")
        return {**head, "choices": choices, **({"usage": None} if self.include_usage else {})}

    def _part(self, index: int, delta: dict[str, str], reason: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}

    def _choice(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        content: dict[str, Any] = {"text": text}
        if self.is_chat:
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"index": index, **content, "logprobs": None, "finish_reason": reason}


def sse(event: Mapping[str, Any]) -> str:
    """One server-sent event. ASCII: many readers would take U+2028, U+2029 or U+0085 for the end of the line."""
    return f"data: {json.dumps(event, separators=(',', ':'))}\n\n"
