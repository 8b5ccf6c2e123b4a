"""Joins the events of a streamed answer to the answer that comes whole. AssertionError: they break OpenAI's form."""

import json
from functools import partial, reduce
from itertools import groupby
from typing import Any

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"

Fields = dict[str, Any]
PARTS = ("content_part.added", "{}.delta", "{}.done", "content_part.done")
EVENTS_OF_ITEM = {  # between output_item.added and output_item.done
    "message": [name.format("output_text") for name in PARTS],
    "reasoning": [name.format("reasoning_text") for name in PARTS],
    "function_call": [name.format("function_call_arguments") for name in PARTS[1:3]],
}


def read_events(path: str, text: str) -> list[Fields]:
    """Returns the data of server-sent events, as a reader sees them that knows all of Unicode's line ends."""
    blocks = "\n".join(text.splitlines()).strip().split("\n\n")
    failed = '"error":' in blocks[-1]
    if path != RESPONSES and not failed:
        assert blocks.pop() == "data: [DONE]", "the stream does not end with [DONE]"
    events = []
    for block in blocks:
        *names, line = block.split("\n")
        events.append(json.loads(line.removeprefix("data: ")))
        assert line.startswith("data: "), block
        assert names == ([f"event: {events[-1]['type']}"] if path == RESPONSES else []), block
    return events


def join(path: str, events: list[Fields], *, is_whole: bool = True) -> Fields:
    """Returns the answer, or the error with which the stream ends. `is_whole`: all text is shown, reasoning, too."""
    if path == RESPONSES:
        return join_items(events)
    return events[-1] if "error" in events[-1] else join_choices(path, events, is_whole)


def merge(old: Any, new: Any) -> Any:
    """Joins two pieces of a value: texts and lists one after the other, objects field by field."""
    if old is None or new is None:
        return new if old is None else old
    if isinstance(new, dict):
        return old | {name: merge(old.get(name), value) for name, value in new.items()}
    return old + new if isinstance(new, str | list) else new


def join_choices(path: str, events: list[Fields], is_whole: bool) -> Fields:
    """Joins the chunks of chats and completions."""
    assert len({event["id"] for event in events}) == 1, "events have different ids"
    pieces = {}
    for event in events if events[-1]["choices"] else events[:-1]:
        [piece] = event["choices"]
        pieces.setdefault(piece["index"], []).append(piece)
        check_usage_so_far(event.get("usage"), pieces[piece["index"]])
    for parts in pieces.values():
        assert [bool(part["finish_reason"]) for part in parts] == [False] * (len(parts) - 1) + [True]
        for part in parts:
            is_told = part["finish_reason"] or any(part["delta"].values() if path == CHAT else part["text"])
            has_entries = any((part.get("logprobs") or {}).values())
            assert is_told or not has_entries or not is_whole, "log-probabilities come without their text"
    joined = join_message if path == CHAT else partial(reduce, merge)
    choices = [joined(parts) for _, parts in sorted(pieces.items())]
    return {**events[-1], "choices": choices}


def check_usage_so_far(usage: Fields | None, parts: list[Fields]):
    """With continuous_usage_stats the counts of a choice are those of its token ids so far."""
    if usage:
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        ids = [token for part in parts for token in part.get("token_ids", [])]
        assert usage["completion_tokens"] == len(ids), "usage differs from the token ids so far"


def join_message(parts: list[Fields]) -> Fields:
    """Joins the deltas of a chat's choice."""
    first, *deltas = [part["delta"] for part in parts]
    assert (first.get("role"), first.get("content", "")) == ("assistant", ""), "a message begins with its role"
    calls = {}
    for delta in deltas:
        for piece in delta.get("tool_calls", []):
            calls.setdefault(piece["index"], []).append(piece)
    texts = [{name: value for name, value in delta.items() if name != "tool_calls"} for delta in deltas]
    message = {"refusal": None, **reduce(merge, texts, first)}
    if calls:
        assert not deltas[-1], "the finish reason of calls comes in an event of its own"
        assert all(head["function"]["arguments"] == "" for head, *_ in calls.values()), "a call begins with its name"
        joined = [reduce(merge, pieces) for _, pieces in sorted(calls.items())]
        message["tool_calls"] = [{name: call[name] for name in call if name != "index"} for call in joined]
        message["content"] = message["content"] or None
    choice = reduce(merge, parts)
    del choice["delta"]
    return {**choice, "index": parts[0]["index"], "message": message}


def join_items(events: list[Fields]) -> Fields:
    """Returns the last Response, after a look at the events of its items."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = [event["type"].removeprefix("response.") for event in events]
    answer = events[-1]["response"]
    expected = ["created", "in_progress"]
    for item in answer["output"]:
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        inner = [name for name in EVENTS_OF_ITEM[item["type"]] if text or not name.endswith(".delta")]
        expected += ["output_item.added", *inner, "output_item.done"]
    assert [name for name, _ in groupby(names)] == [*expected, answer["status"]]
    assert {event["response"]["id"] for event in events if "response" in event} == {answer["id"]}
    assert events[0]["response"]["status"] == "in_progress"
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert items == answer["output"]
    for index, item in enumerate(items):
        parts = [event for event in events if event.get("output_index") == index]
        assert {event["item_id"] for event in parts if "item_id" in event} == {item["id"]}
        content = item if item["type"] == "function_call" else item["content"][0]
        deltas = [event for event in parts if event["type"].endswith(".delta")]
        assert "".join(event["delta"] for event in deltas) == content.get("arguments", content.get("text"))
        entries = [entry for event in deltas for entry in event.get("logprobs", [])]
        assert entries == content.get("logprobs", []), "log-probabilities of deltas differ from those of the item"
    return answer
