"""The request body of /v1/responses, read into what the chat endpoint has: messages, tools and a grammar.

Nothing is kept between calls, so what refers to an earlier one is refused by name.
"""

import json
from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainValidator, ValidationInfo, model_validator

from slipstream.models.chat import messages as chat
from slipstream.models.chat.messages import Message
from slipstream.models.chat.quotes import json_type, quote
from slipstream.serve.chat.tools import ToolError, read_called
from slipstream.serve.http import limits
from slipstream.serve.http.limits import ApiError
from slipstream.serve.http.schemas import (
    NEUTRAL_BY_PLACE,
    Neutral,
    NumLogprobs,
    NumTokens,
    Options,
    SamplingBody,
    UnderstoodFields,
    check_length,
    check_parts,
    grammar_of_schema,
    grammars_of_kind,
    ignores_unknown,
    understood_fields,
)
from slipstream.serve.request import Grammar

Fields = dict[str, Any]  # of JSON
LOGPROBS = "message.output_text.logprobs"
# Reasoning is sent as plain text, which a client can send back, so nothing needs to be encrypted.
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")
ROLES = ("user", "assistant", "system", "developer")
TEXTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}  # kinds of parts, and the key of their text

NEUTRAL_IN_RESPONSES: Neutral = NEUTRAL_BY_PLACE["responses"]
ITEMS = NEUTRAL_BY_PLACE["items"]
NAMES_IN_CHAT = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": f"include: [{json.dumps(LOGPROBS)}]",
}


class ReasoningOptions(Options):
    neutral = {"summary": ("auto",), "generate_summary": ("auto",), "context": ("auto",), "mode": ("standard",)}
    place = "reasoning"

    effort: str | None = None


class TextOptions(Options):
    neutral = {"verbosity": ("medium",)}
    place = "text"

    format: Fields | None = None


class ResponseStreamOptions(Options):
    neutral = {"include_obfuscation": (False,)}
    place = "stream_options"


def read_input(value: Any, info: ValidationInfo) -> list[Message]:
    """Reads a text or items as messages for the chat template. Raises ApiError naming a wrong or unknown field."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise ApiError(400, "input must be a text, or a list of at least one item", "input")
    check_length(value, limits.MAX_MESSAGES, "input")
    items = [item for item in value if isinstance(item, dict)]
    check_parts((item.get(name) for item in items for name in ("content", "output")), "input")
    turns = Turns(ignore_unknown=ignores_unknown(info))
    for index, item in enumerate(value):
        turns.add(item, f"input.{index}")
    return chat.read_messages(turns.messages, "input")


class Turns:
    """Converts items to messages of a chat, in which an answer's reasoning, text and calls are one message."""

    def __init__(self, *, ignore_unknown: bool) -> None:
        self.messages: list[Message] = []
        self._ignore_unknown = ignore_unknown

    def add(self, item: Any, path: str) -> None:
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if not isinstance(kind, str) or kind not in ITEMS:
            fault = f".type is {quote(kind)}" if isinstance(item, dict) else f" is {json_type(item)}"
            message = f"{path}{fault}; this server reads items of type {', '.join(ITEMS)}"
            raise ApiError(400, message, f"{path}.type" if isinstance(item, dict) else path)
        form = ITEMS[kind]
        fields = self._known(item, {"type", *form["understood"]}, form["neutral"], path)
        getattr(self, f"_add_{kind}")(fields, path)

    def _add_message(self, item: Fields, path: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise ApiError(400, f"{path}.role is {quote(role)}; it must be one of {', '.join(ROLES)}", f"{path}.role")
        text = self._text(item.get("content"), f"{path}.content")
        if role != "assistant":
            self.messages.append({"role": role, "content": text})
            return
        answer = self._answer(follows=False)
        answer["content"] += text

    def _add_reasoning(self, item: Fields, path: str) -> None:
        text = self._text(item.get("content", ""), f"{path}.content", {"reasoning_text": "text"})
        answer = self._answer(follows=False)
        answer["reasoning_content"] = answer.get("reasoning_content", "") + text

    def _add_function_call(self, item: Fields, path: str) -> None:
        try:
            function = read_called(item, path)
        except ToolError as error:
            raise ApiError(400, str(error), error.field) from error
        call = {"id": call_id(item, path), "type": "function", "function": function}
        self._answer(follows=True).setdefault("tool_calls", []).append(call)

    def _add_function_call_output(self, item: Fields, path: str) -> None:
        text = self._text(item.get("output"), f"{path}.output")
        message = {"role": "tool", "tool_call_id": call_id(item, path), "content": text}
        name = item.get("name")
        if not isinstance(name, str | None):
            raise ApiError(400, f"{path}.name must be a string", f"{path}.name")
        self.messages.append(message | ({} if name is None else {"name": name}))

    def _answer(self, *, follows: bool) -> Message:
        """Returns the assistant's message that an item belongs to: the last message, unless its text has ended it.
        `follows`: the item may come after a text."""
        last = self.messages[-1] if self.messages else None
        is_open = last is not None and last["role"] == "assistant"
        if last is None or not is_open or (last["content"] and not last.get("tool_calls") and not follows):
            last = {"role": "assistant", "content": ""}
            self.messages.append(last)
        return last

    def _text(self, value: Any, path: str, kinds: dict[str, str] = TEXTS) -> str:
        """Returns a string, or the joined texts of parts."""
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            fault = "is missing" if value is None else f"is {json_type(value)}"
            raise ApiError(400, f"{path} {fault}; it must be a string or a list of text parts", path)
        texts = list[str]()
        for index, part in enumerate(value):
            place = f"{path}.{index}"
            kind = part.get("type") if isinstance(part, dict) else None
            if not isinstance(kind, str) or kind not in kinds:
                fault = f"{place}.type is {quote(kind)}" if isinstance(part, dict) else f"{place} is no object"
                message = f"{fault}; this server reads text alone: parts of type {', '.join(kinds)}"
                raise ApiError(400, message, f"{place}.type" if isinstance(part, dict) else place)
            key = kinds[kind]
            text = self._known(part, {"type", key}, NEUTRAL_BY_PLACE["part"], place).get(key)
            if not isinstance(text, str):
                raise ApiError(400, f"{place}.{key} must be a string", f"{place}.{key}")
            texts.append(text)
        return "".join(texts)

    def _known(self, value: Fields, understood: set[str], neutral: Neutral, path: str) -> Fields:
        return understood_fields(value, understood, neutral, f"{path}.", ignore_unknown=self._ignore_unknown)


def call_id(item: Fields, path: str) -> str:
    value = item.get("call_id")
    if not isinstance(value, str) or not value:
        raise ApiError(400, f"{path}.call_id is missing; it must be a string", f"{path}.call_id")
    return value


class ResponsesBody(SamplingBody):
    """POST /v1/responses."""

    neutral = NEUTRAL_IN_RESPONSES
    prompt_field = "input"
    length_field: ClassVar[str] = "max_output_tokens"
    effort_field: ClassVar[str] = "reasoning.effort"
    # Fields of chat that responses do not have.
    n: ClassVar[int] = 1
    add_generation_prompt: ClassVar[bool] = True
    all_prompt_logprobs: ClassVar[int | None] = None

    input: Annotated[list[Message], PlainValidator(read_input)]
    instructions: str | None = None
    max_output_tokens: Annotated[NumTokens, Field(ge=1)] | None = None
    tools: list[Any] = []
    tool_choice: str | Fields | None = None
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions = ReasoningOptions()
    text: TextOptions = TextOptions()
    include: list[str] = []
    top_logprobs: NumLogprobs = 0
    metadata: dict[str, str] = {}
    user: str | None = None
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: Fields = {}

    @model_validator(mode="before")
    @classmethod
    def check_names(cls, body: Fields) -> Fields:
        for name, field in NAMES_IN_CHAT.items():
            if body.get(name) is not None:
                raise ApiError(400, f"{name} is a field of other endpoints; send {field}", name)
        return {name: value for name, value in body.items() if name not in NAMES_IN_CHAT}

    @model_validator(mode="after")
    def check_include(self) -> "ResponsesBody":
        for index, name in enumerate(self.include):
            if name not in INCLUDABLE:
                message = f"include.{index} is {quote(name)}; this server can include {' and '.join(INCLUDABLE)}"
                raise ApiError(400, message, f"include.{index}")
        if self.top_logprobs and self.answer_logprobs is None:
            message = f"top_logprobs needs include: [{json.dumps(LOGPROBS)}]; add that or leave it out"
            raise ApiError(400, message, "top_logprobs")
        if self.asked_speculation.trace:
            message = "speculation.trace is true; it is not written here: use /v1/chat/completions, or leave it out"
            raise ApiError(400, message, "speculation.trace")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true; add that or leave it out", "stream_options")
        return self

    @property
    def max_tokens(self) -> int | None:
        return self.max_output_tokens

    @property
    def reasoning_effort(self) -> str | None:
        return self.reasoning.effort

    @property
    def messages(self) -> list[Message]:
        """The conversation, `instructions` before it."""
        first = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        return [*first, *self.input]

    @property
    def answer_logprobs(self) -> int | None:
        return self.top_logprobs if LOGPROBS in self.include else None

    def grammars_of_format(self, read_fields: UnderstoodFields) -> list[tuple[Grammar, str]]:
        value = self.text.format or {"type": "text"}
        path = "text.format"
        if value.get("type") != "json_schema":
            return grammars_of_kind(value, path, "text, json_object or json_schema", read_fields)
        if not isinstance(value.get("schema"), dict | bool):
            raise ApiError(400, f"{path}.schema must be an object", f"{path}.schema")
        return grammar_of_schema(value, path, {"type"}, read_fields)


class InputTokensBody(ResponsesBody):
    """POST /v1/responses/input_tokens, which counts the tokens of a prompt."""

    neutral = NEUTRAL_IN_RESPONSES | {"personality": []}
