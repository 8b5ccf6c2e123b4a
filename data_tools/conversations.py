"""A row's columns to an example, whatever the format.

Formats, in this order: `input_ids` + `loss_mask`; `messages` or `conversations` (OpenAI's role/content or ShareGPT's
from/value); `prompt` + `completion`; `text`. A malformed row raises RowError with its place and fault.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.data_tools.rows import Row, RowError
from slipstream.models.chat.messages import Message, check_text, read_messages

ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "observation": "tool",
}
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
        tools = _tools(columns.get("tools"))
        if "messages" in present or "conversations" in present:
            column = "messages" if "messages" in present else "conversations"
            messages = _system(columns) + _messages(columns[column], column)
            return Example(id=identity, messages=messages, tools=tools, is_cut=is_cut)
        if {"prompt", "completion"} <= present:
            example = _completion(identity, columns["prompt"], columns["completion"], tools, has_template)
            return replace(example, is_cut=is_cut)
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


def _completion(identity: str | None, prompt: Any, completion: Any, tools: Any, has_template: bool) -> Example:
    if isinstance(prompt, list) and isinstance(completion, list):
        return Example(id=identity, messages=_messages([*prompt, *completion], "prompt + completion"), tools=tools)
    prompt, completion = _string("prompt", prompt), _string("completion", completion)
    if not has_template:
        return Example(id=identity, prompt=prompt, text=completion)
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    return Example(id=identity, messages=turns, tools=tools)


def _tokens(input_ids: Any, loss_mask: Any) -> dict[str, Any]:
    if not isinstance(input_ids, list) or not isinstance(loss_mask, list) or not input_ids:
        raise ValueError("input_ids and loss_mask must be lists that are not empty")
    if len(input_ids) != len(loss_mask):
        raise ValueError(f"input_ids has {len(input_ids)} entries, loss_mask {len(loss_mask)}")
    wrong = next((value for value in loss_mask if value not in (0, 1)), None)
    if wrong is not None:
        raise ValueError(f"loss_mask holds {wrong!r}; it must be 0 or 1")
    return {"input_ids": input_ids, "loss_mask": loss_mask}


def _messages(listed: Any, column: str) -> list[Message]:
    return read_messages([_openai_form(entry) for entry in listed] if isinstance(listed, list) else listed, column)


def _openai_form(entry: Any) -> Any:
    """ShareGPT's `from` and `value` as `role` and `content`, and its roles by OpenAI's names."""
    if not isinstance(entry, dict):
        return entry
    message = {key: value for key, value in entry.items() if key not in SHAREGPT}
    for theirs, ours in SHAREGPT.items():
        if message.get(ours) is None and theirs in entry:
            message[ours] = entry[theirs]
    role = message.get("role")
    return message | {"role": ROLES.get(role, role)} if isinstance(role, str) else message


def _string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} holds a {type(value).__name__}, not text")
    check_text(name, value)
    return value


def _system(columns: Mapping[str, Any]) -> list[Message]:
    """ShareGPT rows may have a column for the system prompt."""
    system = columns.get("system")
    return [{"role": "system", "content": _string("system", system)}] if system else []


def _tools(tools: Any) -> list[Any] | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except json.JSONDecodeError as error:
            raise ValueError(f"tools is not valid JSON: {error}") from error
    if not tools:
        return None
    if not isinstance(tools, list):
        raise ValueError(f"tools holds a {type(tools).__name__}, not a list")
    wrong = next((tool for tool in tools if not isinstance(tool, dict)), None)
    if wrong is not None:
        raise ValueError(f"tools lists a {type(wrong).__name__}, not an object")
    check_text("tools", tools)
    return tools
