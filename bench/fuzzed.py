"""Random bodies of requests, most of them a little wrong, for tests and for soaks of a real server."""

import json
import random
from copy import deepcopy
from typing import Any

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MODEL = "byte-model"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
MESSAGES: list[Any] = [
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "x"}]}],
    [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    + [{"role": "tool", "tool_call_id": "c", "content": "7"}],
]
PROMPTS: list[Any] = ["x", [5, 6], ["a", "b"], [[5], [6]]]
FIELDS: dict[str, list[Any]] = {  # values that are right in some body
    "model": [MODEL],
    "max_tokens": [1, 3, 0],
    "max_completion_tokens": [2],
    "temperature": [0, 0.7, 2],
    "top_p": [1, 0.5],
    "top_k": [-1, 0, 20],
    "min_p": [0, 0.1],
    "n": [1, 2],
    "seed": [0, 2**63],
    "stop": ["x", ["a", "b"], None],
    "stop_token_ids": [[5], []],
    "stream": [True, False],
    "stream_options": [{"include_usage": True}, None],
    "logit_bias": [{"5": 3}, {}],
    "presence_penalty": [0.5],
    "frequency_penalty": [-1],
    "repetition_penalty": [1.2],
    "min_tokens": [0, 2],
    "bad_words": [["x"], []],
    "ignore_eos": [True],
    "logprobs": [True, 3, 0],
    "top_logprobs": [2, 0],
    "prompt_logprobs": [1],
    "echo": [True],
    "response_format": [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    ],
    "structured_outputs": [{"regex": "[ab]+"}, {"choice": ["x", "y"]}, {"json": SCHEMA}, {"grammar": 'root ::= "a"'}],
    "regex": ["a+"],
    "ebnf": ['root ::= "x"'],
    "json_schema": [json.dumps(SCHEMA)],
    "tools": [[TOOL], [TOOL, TOOL], []],
    "tool_choice": ["auto", "none", "required", {"type": "function", "function": {"name": "f"}}],
    "parallel_tool_calls": [True, False],
    "reasoning_effort": ["low"],
    "chat_template_kwargs": [{"enable_thinking": False}],
    "include_reasoning": [False],
    "cache_salt": ["a"],
    "speculation": [{"enabled": False}, {"trace": True}, {}, None],
    "user": ["u"],
    "add_generation_prompt": [True],
    "best_of": [1],
    "suffix": [None],
    "priority": [0],
}
FLAT = {"type": "function", **TOOL["function"]}
ITEMS: list[Any] = [
    {"role": "user", "content": "hello"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "y", "annotations": []}]},
    {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
    {"type": "function_call_output", "call_id": "c", "output": "7"},
]
OF_RESPONSES: dict[str, list[Any]] = {
    **{name: FIELDS[name] for name in ("model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stream")},
    **{name: FIELDS[name] for name in ("logit_bias", "min_tokens", "bad_words", "structured_outputs", "regex", "user")},
    "max_output_tokens": [1, 3],
    "instructions": ["be brief", None],
    "tools": [[FLAT], []],
    "tool_choice": ["auto", "none", "required", {"type": "function", "name": "f"}]
    + [{"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}],
    "parallel_tool_calls": [True, False],
    "reasoning": [{"effort": None, "summary": "auto"}, {"effort": "low"}],
    "text": [{"format": {"type": "json_object"}}, {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}],
    "include": [["message.output_text.logprobs"], []],
    "top_logprobs": [2, 0],
    "metadata": [{"a": "b"}],
    "store": [False],
    "truncation": ["disabled"],
    "previous_response_id": [None],
}
ODD: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**64, -(2**70), 1.5, 1e308, "", "x", "é\ud83d", "\u0000", "7", "(" * 60, "[" * 300,
    [], [[]], [{}], [None], ["x"] * 20, [1, "x"], [-1], [2**40],
    {}, {"a": {}}, {"type": "x"}, {"type": None}, {"": ""}, {"5": "x"},
]  # fmt: skip


def body(rng: random.Random, path: str) -> dict[str, Any]:
    known = OF_RESPONSES if path == RESPONSES else FIELDS
    fields = {name: rng.choice(known[name]) for name in rng.sample(list(known), rng.randrange(7))}
    if path == RESPONSES:
        fields["input"] = rng.choice(["x", rng.sample(ITEMS, rng.randrange(1, 5))])
        fields.setdefault("max_output_tokens", 3)
    else:
        fields |= {"messages": rng.choice(MESSAGES)} if path == CHAT else {"prompt": rng.choice(PROMPTS)}
        fields.setdefault("max_tokens", 3)
    made: dict[str, Any] = json.loads(json.dumps(fields))
    for _ in range(rng.choice((0, 1, 1, 2))):
        mutate(made, rng)
    return made


def mutate(made: dict[str, Any], rng: random.Random) -> None:
    """Replaces, drops or adds something at a random place."""
    place: Any = made
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys or rng.random() < 0.1:
            break
        key = rng.choice(keys)
        if isinstance(place[key], dict | list) and rng.random() < 0.7:
            place = place[key]
            continue
        if rng.random() < 0.15:
            del place[key]
        else:
            place[key] = deepcopy(rng.choice(ODD))
        return
    if isinstance(place, dict):
        place[rng.choice(["type", "name", "unknown", "function", "strict", "content", "schema"])] = deepcopy(
            rng.choice(ODD)
        )
    else:
        place.append(deepcopy(rng.choice(ODD)))
