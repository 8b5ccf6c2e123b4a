"""Tools and reasoning over HTTP: what is sent and what is answered, by an engine that repeats its prompt."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from tokenizers import AddedToken
from transformers import AutoTokenizer

from slipstream.serve.http.frontend import Frontend
from slipstream.serve.http.schemas import ChatBody, read_body
from slipstream.serve.options import ServeConfig
from slipstream.serve.request import Grammar
from slipstream.tests.serve.fake_engine import info, logprobs_of
from slipstream.tests.serve.fake_server import CHAT, MODEL, events, serving, write_target
from slipstream.tests.serve.test_tools import NAMED, SCHEMAS, TOOLS, tool

# The prompt is the last message alone, which is the answer, too.
ECHO = """{%- if tools or enable_thinking is defined %}{% endif -%}{{ messages[-1].content }}{#
<tool_call>{"name": ..., "arguments": ...}</tool_call> <think> </think> #}"""
SHOWN = (
    "{%- for message in messages -%}{{ message.role }}:{{ message.reasoning_content }}:{{ message.content }}:"
    "{{ message.tool_call_id }}{%- for call in message.tool_calls or [] -%}{{ call.id }}{{ call.function | tojson }}"
    "{%- endfor -%};{%- endfor -%}{{ tools | tojson if tools }}{{ enable_thinking }}{{ reasoning_effort }}"
    "{%- for tool in tools or [] if tool.function.name == 'fails' -%}{{ 1 // 0 }}{%- endfor -%}"
    '{# <tool_call> "arguments" </think> #}'
)
MARKERS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
REASONED = "<think>\nhm\n</think>\n\n"
CALLS = (
    "I look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


def write(path: Path, template: str) -> str:
    write_target(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens([AddedToken(marker, special=False) for marker in MARKERS])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    target = write(tmp_path_factory.mktemp("echo") / "target", ECHO)
    with serving(ServeConfig(target=target, port=0, served_model_name=MODEL, max_model_len=1024)) as server:
        yield server.url


def question(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text + "<|end|>"}], **fields}


def test_an_answer_with_reasoning_content_and_calls(url: str) -> None:
    answer = httpx.post(url + CHAT, json=question(REASONED + CALLS, tools=TOOLS), timeout=120).json()
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("I look.", "hm", "hm")
    calls = [(call["type"], call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    assert calls == [("function", "weather", '{"days": 3}'), ("function", "now", "{}")]
    ids = {call["id"] for call in message["tool_calls"]}
    assert len(ids) == 2
    assert all(id.startswith("call_") for id in ids)
    # One token for each marker, and one for each byte of "\nhm\n".
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2 + 4


def test_a_stream_has_openais_order(url: str) -> None:
    client = OpenAI(base_url=url + "/v1", api_key="none")
    body: dict[str, Any] = question(REASONED + CALLS, tools=TOOLS, stream=True)
    chunks = list(client.chat.completions.create(**body))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hm"
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == "hm"
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    heads = [call for call in calls if call.id]
    assert [(call.index, call.type, call.function and call.function.name) for call in heads] == [
        (0, "function", "weather"),
        (1, "function", "now"),
    ]
    assert all(call.function is not None and call.function.arguments == "" for call in heads)
    arguments = [
        "".join(call.function.arguments or "" for call in calls if call.function and call.index == i) for i in (0, 1)
    ]
    assert arguments == ['{"days": 3}', "{}"]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]
    assert not deltas[-1].content
    assert not deltas[-1].tool_calls


def test_the_client_library_gathers_a_stream_as_the_whole_answer(url: str) -> None:
    client = OpenAI(base_url=url + "/v1", api_key="none")
    with client.chat.completions.stream(**question(CALLS, tools=TOOLS)) as stream:
        final = stream.get_final_completion().choices[0].message
    answer = client.chat.completions.create(**question(CALLS, tools=TOOLS)).choices[0].message
    assert final.content == answer.content == "I look."
    for message in (final, answer):
        assert [call.function.name for call in message.tool_calls or [] if call.type == "function"] == [
            "weather",
            "now",
        ]


def test_what_is_no_call_stays_content(url: str) -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": [tool("other")]}):
        [choice] = httpx.post(url + CHAT, json=question(CALLS, **fields), timeout=120).json()["choices"]
        assert choice["message"]["content"] == CALLS
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"
    [choice] = httpx.post(url + CHAT, json=question("a", tools=TOOLS), timeout=120).json()["choices"]
    assert choice["message"]["reasoning_content"] is None
    hidden = question(REASONED + "a", include_reasoning=False)
    [choice] = httpx.post(url + CHAT, json=hidden, timeout=120).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": "a", "refusal": None}
    parts = events(httpx.post(url + CHAT, json={**hidden, "stream": True}, timeout=120))
    assert not any("reasoning" in part["choices"][0]["delta"] for part in parts)


def test_stop_strings_and_lengths_end_a_call(url: str) -> None:
    for fields, reason in (
        ({"stop": "days"}, "tool_calls"),
        ({"max_tokens": 55}, "length"),
        ({"stop": "</tool_call>"}, "tool_calls"),
    ):
        [choice] = httpx.post(url + CHAT, json=question(CALLS, tools=TOOLS, **fields), timeout=120).json()["choices"]
        assert choice["finish_reason"] == reason, fields
        [call] = choice["message"]["tool_calls"]
        assert '{"days": 3}'.startswith(call["function"]["arguments"])


def scored(url: str, stream: bool, **body: Any) -> dict[int, tuple[str, list[float]]]:
    """The spelling of the tokens that have log-probabilities, and the log-probabilities, by choice."""
    answer = httpx.post(url + CHAT, json={**body, "logprobs": True, "top_logprobs": 1, "stream": stream}, timeout=120)
    assert answer.status_code == 200, answer.text
    choices: dict[int, tuple[str, list[float]]] = {}
    for event in events(answer) if stream else [answer.json()]:
        for choice in event["choices"]:
            entries = (choice["logprobs"] or {"content": []})["content"]
            is_shown = "message" in choice or choice["delta"] or choice["finish_reason"]
            assert is_shown or not entries or not body.get("include_reasoning", True)
            text, values = choices.get(choice["index"], ("", []))
            text += bytes(byte for entry in entries for byte in entry["bytes"]).decode()
            choices[choice["index"]] = text, values + [entry["logprob"] for entry in entries]
            assert all(len(entry["top_logprobs"]) == 1 for entry in entries)
    return choices


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_reasoning_and_calls(url: str, stream: bool) -> None:
    """Each token of each choice has an entry: markers, too, the end, and reasoning that is left out."""
    answer = REASONED + CALLS + "<|end|>"
    tokens = httpx.post(f"{url}/tokenize", json={"prompt": answer}, timeout=120).json()["tokens"]
    for fields in ({"n": 2}, {"include_reasoning": False}):
        choices = scored(url, stream, **question(REASONED + CALLS, tools=TOOLS, **fields))
        assert set(choices) == set(range(fields.get("n", 1)))
        for text, values in choices.values():
            assert text == answer
            assert values == logprobs_of(tokens, 1).tokens


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_call_that_is_cut(url: str, stream: bool) -> None:
    tokens = httpx.post(f"{url}/tokenize", json={"prompt": CALLS + "<|end|>"}, timeout=120).json()["tokens"]
    for fields, visible in (
        ({"stop": "days"}, CALLS[: CALLS.index("days")]),
        ({"stop": "</tool_call>"}, CALLS[: CALLS.index("</tool_call>")]),
        ({"max_tokens": 55}, None),
        ({"tool_choice": "none"}, CALLS + "<|end|>"),
    ):
        [(text, values)] = scored(url, stream, **question(CALLS, tools=TOOLS, **fields)).values()
        if visible is None:
            assert CALLS.startswith(text)
            assert len(values) == 55
        else:
            assert text == visible
        assert values == logprobs_of(tokens[: len(values)], 1).tokens


@pytest.fixture(scope="module")
def frontend(tmp_path_factory: pytest.TempPathFactory) -> Frontend:
    target = write(tmp_path_factory.mktemp("shown") / "target", SHOWN)
    return Frontend(ServeConfig(target=target, control_tokens_as_text=True), info(2048))


def prompt(frontend: Frontend, messages: list[Any], **fields: Any) -> str:
    body = read_body(ChatBody, {"messages": messages, **fields})
    [request], _ = frontend.read(body, "r")
    return frontend.tokenizer.decode(request.prompt)


def test_turns_with_calls_reach_the_template(frontend: Frontend) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"days": "<|end|>"}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sun <|end|>"},
    ]
    text = prompt(frontend, messages, tools=[tool("now", description="<|end|>")], reasoning_effort="none")
    assert 'assistant:hm::call_1{"name": "weather", "arguments": {"days": "<|end|>"}};' in text
    assert "tool::sun <|end|>:call_1;" in text
    assert '"description": "<|end|>"' in text
    assert text.endswith("Falsenone")
    body = read_body(ChatBody, {"messages": messages, "tools": [tool("now", description="<|end|>")]})
    [request], _ = frontend.read(body, "r")
    assert frontend.tokenizer.eos_token_id not in request.prompt, "what clients write is text, wherever it stands"


def test_grammars_reach_the_engine(frontend: Frontend) -> None:
    def grammar(**fields: Any) -> Grammar | None:
        body = read_body(ChatBody, {"messages": [{"role": "user", "content": "x"}], **fields})
        [request], _ = frontend.read(body, "r")
        return request.params.grammar

    assert grammar(tools=TOOLS) is grammar(tools=TOOLS, tool_choice="none") is None
    for fields in ({"tool_choice": "required"}, {"tool_choice": NAMED}, {"parallel_tool_calls": False}):
        constraint = grammar(tools=TOOLS, **fields)
        assert constraint is not None
        assert constraint.kind == "structural_tag"
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMAS["weather"]}}
    constraint = grammar(response_format=schema)
    assert constraint is not None
    think, content = json.loads(constraint.text)["format"]["elements"]
    assert think["type"] == "optional", "the answer may begin with reasoning"
    assert content["json_schema"] == SCHEMAS["weather"]
    tag = {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": {}}, "end": "</a>"}
    older = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]}
    newer = {"format": {"type": "triggered_tags", "triggers": ["<a"], "tags": [tag]}}
    for structure in (newer, older, json.dumps(newer)):
        assert grammar(structured_outputs={"structural_tag": structure}) == grammar(
            response_format={"type": "structural_tag", **newer}
        )
