"""What clients may ask: the bodies of /v1/completions and /v1/chat/completions, checked field by field.

A field is understood, or known and without effect at the value sent, or refused by name: none is silently ignored.
"""

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from slipstream.models import messages as chat
from slipstream.models.messages import TEXT_PARTS, Message, MessageError

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's for /v1/completions; a chat answer may fill the context
ROLES = ("system", "developer", "user", "assistant")


class ApiError(Exception):
    """An error in OpenAI's shape; `param` names the field at fault."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": "1"} if self.status in (429, 503) else {}

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error"
        if self.status >= 500:
            kind = "server_error"
        elif self.status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


# OpenAI's fields beyond those implemented, with the values that ask for nothing; null always does.
# None: no value changes anything here.
NEUTRAL: dict[str, tuple[Any, ...] | None] = {
    "metadata": None,
    "parallel_tool_calls": None,
    "prompt_cache_key": None,
    "prompt_cache_retention": None,
    "safety_identifier": None,
    "service_tier": None,
    "store": None,
    "user": None,
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
MESSAGE_FIELDS = {"role", "content", "name", "refusal"}
NEUTRAL_IN_MESSAGE: dict[str, tuple[Any, ...] | None] = {  # what an answer carries when it is sent back as a turn
    "annotations": None,
    "audio": (),
    "function_call": (),
    "tool_calls": ([],),
}


def understood_fields(
    body: dict[str, Any], understood: set[str], neutral: dict[str, tuple[Any, ...] | None], where: str = ""
) -> dict[str, Any]:
    """`body` without nulls and without fields that ask for nothing. Raises ApiError naming any other field."""
    unknown = sorted(body.keys() - understood - neutral.keys())
    if unknown:
        raise ApiError(400, f"unknown field: {', '.join(where + name for name in unknown)}", where + unknown[0])
    for name in body.keys() & neutral.keys():
        allowed = neutral[name]
        if allowed is not None and body[name] is not None and not is_one_of(body[name], allowed):
            remedy = " or ".join(["leave it out", *(f"send {json.dumps(value)}" for value in allowed)])
            raise ApiError(400, f"{where}{name} is not supported by this server; {remedy}", where + name)
    return {name: value for name, value in body.items() if name in understood and value is not None}


def is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Equality that tells False from 0: `logprobs: 0` asks for something, `logprobs: false` does not."""
    return any(value == other and (type(value) is bool) == (type(other) is bool) for other in allowed)


def read_messages(value: Any) -> list[Message]:
    """What the chat template gets. Raises ApiError naming the field that is wrong or unknown."""
    if isinstance(value, list):
        value = [known_message(message, f"messages.{index}") for index, message in enumerate(value)]
    try:
        return chat.read_messages(value)
    except MessageError as error:
        raise ApiError(400, str(error), error.field) from error


def known_message(message: Any, where: str) -> Any:
    """`message` without the fields that ask for nothing. Raises ApiError for fields and roles that this server does not
    know; the rest is the reader's business."""
    if not isinstance(message, dict):
        return message
    understood_fields(message, MESSAGE_FIELDS, NEUTRAL_IN_MESSAGE, f"{where}.")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ApiError(400, f"{where}.role is {role!r}; it must be one of {', '.join(ROLES)}", f"{where}.role")
    for index, part in enumerate(content if isinstance(content, list) else []):
        if isinstance(part, dict) and part.get("type") in TEXT_PARTS:
            understood_fields(part, {"type", part["type"]}, {}, f"{where}.content.{index}.")
    return {name: entry for name, entry in message.items() if name in MESSAGE_FIELDS}


def read_prompts(value: Any) -> list[str | list[int]]:
    """A string, a list of token ids, or a list of either."""
    prompts = value if isinstance(value, list) and not all(type(item) is int for item in value) else [value]
    for index, prompt in enumerate(prompts):
        is_tokens = isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt)
        if not is_tokens and not isinstance(prompt, str):
            where = f"prompt.{index}" if isinstance(value, list) else "prompt"
            raise ApiError(400, f"{where} must be a string or a list of token ids, and not empty", "prompt")
    return prompts


def read_stop(value: Any) -> list[str]:
    strings = value if isinstance(value, list) else [value]
    if not all(isinstance(string, str) and string for string in strings):
        raise ApiError(400, "stop must be a string or a list of strings, none of them empty", "stop")
    return strings


def check_text(text: str, field: str) -> str:
    """JSON can carry halves of characters, which neither tokenizers nor the engine take."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ApiError(400, f"{field} is not valid text: {error}", field) from error
    return text


def check_salt(value: str) -> str:
    return check_text(value, "cache_salt")


class Body(BaseModel):
    """Fields that both endpoints share. The ranges of sampling values are SamplingParams' business."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    stream: bool = False
    stream_options: "StreamOptions | None" = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(lt=2**31)] | None = None
    min_p: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    stop: Annotated[list[str], BeforeValidator(read_stop)] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    # Requests share cached prompt prefixes only with requests of the same salt.
    cache_salt: Annotated[str, AfterValidator(check_salt)] = ""

    @model_validator(mode="before")
    @classmethod
    def check_fields(cls, body: Any) -> dict[str, Any]:
        if isinstance(body, bytes):
            raise ApiError(415, "send the body as JSON, with the header Content-Type: application/json")
        if not isinstance(body, dict):
            raise ApiError(400, "the body must be a JSON object")
        return understood_fields(body, set(cls.model_fields), NEUTRAL)

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = False


class ChatBody(Body):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], BeforeValidator(read_messages)]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def merge_alias(self) -> "ChatBody":
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise ApiError(400, "max_tokens and max_completion_tokens differ; send one of them", "max_tokens")
            self.max_tokens = self.max_completion_tokens
        return self


class CompletionBody(Body):
    """POST /v1/completions."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(read_prompts)]

    @property
    def num_prompts(self) -> int:
        return len(self.prompt)
