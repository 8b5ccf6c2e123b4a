"""Reads chat messages in OpenAI's form, and the date of chat templates, for serving and training data alike.

Invariant: serving and data tools pass a message to the chat template with the same content. Imports nothing heavy.
"""

import datetime
import json
from typing import Any

from slipstream.models.chat.quotes import json_type, quote

Message = dict[str, Any]
DEFAULT_DATE = "2024-07-26"  # the default of Llama 3.1's template
TODAY = "today"
TEXT_PARTS = ("text", "refusal")  # types of content parts; also the key of the text
ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING_FIELDS = ("reasoning_content", "reasoning")  # the first is the one that templates get


class FieldError(ValueError):
    """A wrong field of a request or a row. `field` is its path, such as messages.0.content."""

    def __init__(self, field: str, fault: str) -> None:
        super().__init__(f"{field} {fault}")
        self.field = field


class MessageError(FieldError):
    """An invalid message."""


def read_messages(value: Any, field: str = "messages") -> list[Message]:
    """The messages of a conversation as passed to a chat template. Raises MessageError.

    Contents become plain text, `developer` becomes `system` and `reasoning` `reasoning_content`, null fields and empty
    lists are dropped; other fields, such as `name` and `tool_calls`, are kept.
    """
    if not isinstance(value, list) or not value:
        raise MessageError(field, "must be a list of at least one message")
    return [read_message(message, f"{field}.{index}") for index, message in enumerate(value)]


def read_message(value: Any, field: str) -> Message:
    if not isinstance(value, dict):
        raise MessageError(field, f"is {json_type(value)}; it must be an object with role and content")
    message = {name: entry for name, entry in value.items() if entry is not None and entry != []}
    role = message.get("role")
    if not isinstance(role, str):
        raise MessageError(f"{field}.role", "is missing" if role is None else f"is {quote(role)}; it must be a string")
    if role not in ROLES:
        raise MessageError(f"{field}.role", f"is {quote(role)}; it must be one of {', '.join(ROLES)}")
    if not isinstance(message.get("name", ""), str):
        raise MessageError(f"{field}.name", "must be a string")
    message["role"] = "system" if role == "developer" else role  # OpenAI's newer role; templates know the older one
    message["content"] = _text(value, message, field)
    message.pop("refusal", None)
    _unify_reasoning(message, field)
    check_text(field, message)
    return message


def _unify_reasoning(message: Message, field: str) -> None:
    """Leaves the reasoning, which servers and data call by two names, under one."""
    texts = [message.pop(name, "") for name in REASONING_FIELDS]
    for name, text in zip(REASONING_FIELDS, texts, strict=True):
        if not isinstance(text, str):
            raise MessageError(f"{field}.{name}", "must be a string")
    if all(texts) and texts[0] != texts[1]:
        raise MessageError(f"{field}.reasoning", "and reasoning_content differ; send one of them")
    if any(texts):
        message[REASONING_FIELDS[0]] = texts[0] or texts[1]


def _text(value: Message, message: Message, field: str) -> str:
    """The content, or an assistant's refusal in its place. An assistant's content may be null, with or without tool
    calls, since OpenAI's clients send it back as received."""
    refusal = message.get("refusal", "")
    if not isinstance(refusal, str):
        raise MessageError(f"{field}.refusal", "must be a string")
    content = value.get("content")
    if content is None:
        for name in ("audio", "function_call"):
            if name in message:
                raise MessageError(f"{field}.{name}", "has no form in chat templates; send content or tool_calls")
        is_empty_answer = message["role"] == "assistant" and ("content" in value or "tool_calls" in message)
        if not refusal and not is_empty_answer:
            raise MessageError(f"{field}.content", "is missing; it must be a string or a list of text parts")
        return refusal
    text = read_content(content, f"{field}.content")
    if text and refusal:
        raise MessageError(f"{field}.refusal", "stands beside a content; send one of them")
    return text or refusal


def read_content(value: Any, field: str) -> str:
    """A string, or the concatenated text of a list of parts, without separators, as in templates that accept such lists
    (Llama 3.2, Qwen2-VL, Gemma 3)."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        actual = "an empty list" if value == [] else json_type(value)
        raise MessageError(field, f"is {actual}; it must be a string or a list of text parts")
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(kind) if kind in TEXT_PARTS else None
        if not isinstance(text, str):
            is_other = isinstance(kind, str) and kind not in TEXT_PARTS
            fault = f"has type {kind!r}, which is not read" if is_other else "is not a text part"
            fault += '; parts must have the form {"type": "text", "text": ...}'
            raise MessageError(f"{field}.{index}", fault)
        texts.append(text)
    return "".join(texts)


def check_text(field: str, value: Any) -> None:
    """Raises MessageError if a string in `value`, at any depth, holds half of a surrogate pair: no encoding."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(value[error.start]):04x}"
            raise MessageError(field, f"holds {half} at character {error.start}, half of a surrogate pair") from error
    elif isinstance(value, dict):
        for key, inner in value.items():
            check_text(field, key)
            check_text(field, inner)
    elif isinstance(value, list):
        for inner in value:
            check_text(field, inner)


def joined_pairs(value: Any) -> Any:
    """A JSON value in which a surrogate pair that came in two pieces is one character, and half of one U+FFFD."""
    text = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass")
    return json.loads(text.decode("utf-16", "replace"))


def check_date(date: str) -> None:
    """Raises ValueError unless `date` is year-month-day or `today`."""
    try:
        date_of(date)
    except ValueError as error:
        raise ValueError(f"date is {date!r}; write year-month-day, such as {DEFAULT_DATE}, or {TODAY}") from error


def date_of(date: str) -> datetime.date:
    return datetime.date.today() if date == TODAY else datetime.date.fromisoformat(date)
