"""A row's columns to an example, whatever the format.

Formats, in this order: `input_ids` + `loss_mask`; `messages` or `conversations` (OpenAI's role/content or ShareGPT's
from/value); `prompt` + `completion`; `text`. A malformed row raises RowError with its place and fault.

Invariant: a row passes the checks that the server makes of a request's messages; only other names of roles are read
beyond, and calls in forms that came before `tool_calls`.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.data_tools.rows import Row, RowError
from slipstream.models.chat.messages import ROLES, Message, check_text, read_messages
from slipstream.serve.chat.tools import read_calls, read_tools

ROLE_ALIASES = {  # in lower case
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function": "tool",  # OpenAI's older name
    "function_response": "tool",
    "tool_response": "tool",
}
CALLING_ROLES = ("function_call", "tool_call")  # the content of such a turn is an assistant's call, as JSON
SHAREGPT = {"from": "role", "value": "content"}
FORMATS = "messages, conversations, prompt + completion, text or input_ids + loss_mask"


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """Exactly one of `input_ids`, `messages` and `text` is set."""

    id: str | None = None
    input_ids: Sequence[int] | None = None
    loss_mask: Sequence[int] = ()  # as long as input_ids
    tokenizer_hash: str | None = None  # of the tokenizer that input_ids come from, where the row says so
    messages: list[Message] | None = None
    unsupervised: frozenset[int] = frozenset()  # indices of answers whose `weight` is 0
    tools: list[Any] | None = None
    text: str | None = None
    prompt: str = ""  # precedes `text`, not supervised
    is_cut: bool = False  # max_tokens ended the last answer: it has no end token


def to_example(row: Row, columns: Mapping[str, Any], *, has_template: bool = True) -> Example:
    """The example that `columns` hold. A `prompt` and `completion` of plain text are a user and an assistant turn, or,
    for a target without a chat template, two texts that follow each other."""
    identity = None if columns.get("id") is None else str(columns["id"])
    is_cut = columns.get("finish_reason") == "length"
    present = {name for name, value in columns.items() if value is not None}
    try:
        check_text("id", identity)
        if {"input_ids", "loss_mask"} <= present:
            tokens = _tokens(columns["input_ids"], columns["loss_mask"])
            return Example(id=identity, tokenizer_hash=columns.get("tokenizer_hash"), **tokens)
        check_weight("weight", columns.get("weight", 1), (1,))
        conversation = _conversation(columns, present, has_template)
        if conversation is not None:
            messages, unsupervised = _messages(*conversation)
            tools = _tools(columns.get("tools"))
            return Example(id=identity, messages=messages, unsupervised=unsupervised, tools=tools, is_cut=is_cut)
        if {"prompt", "completion"} <= present:
            texts = {name: _string(name, columns[name]) for name in ("prompt", "completion")}
            return Example(id=identity, prompt=texts["prompt"], text=texts["completion"], is_cut=is_cut)
        if "text" in present:
            return Example(id=identity, text=_string("text", columns["text"]))
    except ValueError as error:
        raise RowError(f"{row.place}: {error}") from error
    except RecursionError as error:
        raise RowError(f"{row.place}: is nested too deep") from error
    raise RowError(f"{row.place}: has {', '.join(sorted(present)) or 'no column'}; expected {FORMATS}")


def content_hash(messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
    """Hash of a conversation's content."""
    text = json.dumps([messages, tools], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _conversation(columns: Mapping[str, Any], present: set[str], has_template: bool) -> tuple[Any, str] | None:
    """The messages of a row and the column that holds them; None if it is no conversation."""
    for column in ("messages", "conversations"):
        if column in present:
            messages = _parse_json(columns[column], column)
            return (_system(columns) + messages if isinstance(messages, list) else messages), column
    if not {"prompt", "completion"} <= present:
        return None
    prompt = columns["prompt"]
    completion = columns["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        return [*prompt, *completion], "prompt + completion"
    if not has_template:
        return None
    turns = (("user", "prompt", prompt), ("assistant", "completion", completion))
    return [{"role": role, "content": _string(name, text)} for role, name, text in turns], "prompt + completion"


def _tokens(input_ids: Any, loss_mask: Any) -> dict[str, Any]:
    if not isinstance(input_ids, list) or not isinstance(loss_mask, list) or not input_ids:
        raise ValueError("input_ids and loss_mask must be lists that are not empty")
    if len(input_ids) != len(loss_mask):
        raise ValueError(f"input_ids has {len(input_ids)} entries, loss_mask {len(loss_mask)}")
    wrong = next((value for value in loss_mask if value not in (0, 1)), None)
    if wrong is not None:
        raise ValueError(f"loss_mask holds {wrong!r}; it must be 0 or 1")
    return {"input_ids": input_ids, "loss_mask": loss_mask}


def _messages(entries: Any, column: str) -> tuple[list[Message], frozenset[int]]:
    """Messages as the server reads them, and the indices of answers that must not be supervised."""
    if not isinstance(entries, list):
        return read_messages(entries, column), frozenset()
    messages = [_openai_form(entry, f"{column}.{index}") for index, entry in enumerate(entries)]
    unsupervised = set()
    for index, message in enumerate(messages):
        if isinstance(message, dict):
            weight = message.pop("weight", 1)
            check_weight(f"{column}.{index}.weight", weight, (0, 1))
            unsupervised |= {index} if weight == 0 else set()
    return read_messages(messages, column), frozenset(unsupervised)


def check_weight(field: str, value: Any, weights: Sequence[int]) -> None:
    """OpenAI's weight of an answer; rows have none."""
    if value is not None and value not in weights:
        allowed = " or ".join(map(str, weights))
        raise ValueError(f"{field} is {value!r}; this program knows only {allowed}: leave the row out, or repeat it")


def _openai_form(entry: Any, field: str) -> Any:
    """ShareGPT's `from` and `value` as `role` and `content`, roles by OpenAI's names, and calls as `tool_calls`."""
    if not isinstance(entry, dict):
        return entry
    message = {key: value for key, value in entry.items() if key not in SHAREGPT}
    for key, name in SHAREGPT.items():
        if message.get(name) is None and key in entry:
            message[name] = entry[key]
    role = message.get("role")
    if isinstance(role, str) and role not in ROLES:
        role = role.strip().lower()
        message["role"] = ROLE_ALIASES.get(role, role if role in ROLES else message["role"])
    calls = message.get("tool_calls")
    if role in CALLING_ROLES:
        calls = _parse_json(message.get("content"), f"{field}.content")
        if not calls:
            raise ValueError(f"{field}.content is empty; a turn of {message['role']} holds a call as JSON")
        message |= {"role": "assistant", "content": ""}
    elif message.get("function_call") is not None and not calls:
        calls = message.pop("function_call")
    if calls:
        calls = [_with_function_key(call) for call in (calls if isinstance(calls, list) else [calls])]
        message["tool_calls"] = read_calls(calls, f"{field}.tool_calls", ignore_unknown=True)
    return message


def _with_function_key(function: Any) -> Any:
    """A call or a tool in OpenAI's form; older and home-made data have the function alone."""
    is_bare = isinstance(function, dict) and "name" in function and "function" not in function
    return {"function": function} if is_bare else function


def _string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} holds a {type(value).__name__}, not text")
    check_text(name, value)
    return value


def _system(columns: Mapping[str, Any]) -> list[Message]:
    """ShareGPT rows may have a column for the system prompt."""
    system = columns.get("system")
    return [{"role": "system", "content": _string("system", system)}] if system else []


def _tools(value: Any) -> list[Any] | None:
    """Tools as the server reads them and shows them to the template."""
    tools = _parse_json(value, "tools")
    if not tools:
        return None
    functions = [_with_function_key(tool) for tool in tools] if isinstance(tools, list) else tools
    check_text("tools", functions)
    return [tool.definition for tool in read_tools(functions, ignore_unknown=True)]


def _parse_json(value: Any, column: str) -> Any:
    """The value that JSON text holds; other values as they are."""
    if not isinstance(value, str) or not value.strip():
        return None if isinstance(value, str) else value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"{column} is not valid JSON: {error}") from error
