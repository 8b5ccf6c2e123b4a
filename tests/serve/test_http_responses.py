"""/v1/responses against the chat endpoint, as OpenAI's client reads both, over an engine that repeats its prompt."""

import json
import time
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from slipstream.serve.http.frontend import Frontend
from slipstream.serve.http.launch import Server
from slipstream.serve.http.responses_body import ResponsesBody
from slipstream.serve.http.schemas import ChatBody, read_body
from slipstream.serve.options import ServeConfig
from slipstream.serve.request import Grammar
from slipstream.tests.serve.fake_engine import info
from slipstream.tests.serve.fake_server import (
    CHAT,
    MODEL,
    RESPONSES,
    engine_held,
    gauge,
    send_post,
    serving,
    wait_until,
)
from slipstream.tests.serve.test_http_tools import CALLS, ECHO, REASONED, SHOWN, write
from slipstream.tests.serve.test_tools import FLAT, SCHEMAS, TOOLS

LOGPROBS = "message.output_text.logprobs"
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
ANSWERS = {
    "text": "I look.",
    "reasoning": REASONED + "I look.",
    "calls": REASONED + CALLS,
    "only a call": CALL,
    "text after a call": CALLS + " Done.\n" + CALL + "So.",
    "nothing": "",
    "only reasoning": "<think>\nhm\n</think>",
    "characters of several tokens": "你好 👍 Zoë",
}


@pytest.fixture(scope="module")
def echoing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    target = write(tmp_path_factory.mktemp("echo") / "target", ECHO)
    with serving(ServeConfig(target=target, port=0, served_model_name=MODEL, max_model_len=1024)) as server:
        yield server


@pytest.fixture(scope="module")
def api(echoing: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{echoing.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def asked(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": text + "<|end|>", "tools": FLAT, **fields}


def told(output: list[Any]) -> list[Any]:
    """Items without their ids."""
    return [
        (item.type, item.status, item.name, item.arguments)
        if item.type == "function_call"
        else (item.type, item.status, [(part.type, part.text) for part in item.content or []])
        for item in output
    ]


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_says_what_the_chat_endpoint_does(api: openai.OpenAI, name: str) -> None:
    text = ANSWERS[name]
    answer = api.responses.create(**asked(text), extra_body={"seed": 5})
    messages: Any = [{"role": "user", "content": text + "<|end|>"}]
    chat = api.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, seed=5)
    [choice] = chat.choices
    assert answer.output_text == (choice.message.content or "")
    reasoning = [part.text for item in answer.output if item.type == "reasoning" for part in item.content or []]
    assert "".join(reasoning) == (getattr(choice.message, "reasoning_content", None) or "")
    calls = [(item.name, item.arguments) for item in answer.output if item.type == "function_call"]
    functions = [call.function for call in choice.message.tool_calls or [] if call.type == "function"]
    assert calls == [(function.name, function.arguments) for function in functions]
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert answer.usage is not None
    assert chat.usage is not None
    assert chat.usage.completion_tokens_details is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
        chat.usage.total_tokens,
    )
    assert answer.usage.input_tokens_details.cached_tokens == 1
    details = chat.usage.completion_tokens_details
    assert answer.usage.output_tokens_details.reasoning_tokens == details.reasoning_tokens
    body = answer.to_dict()
    assert (body["seed"], body["system_fingerprint"], body["store"]) == (5, "fp_fake", False)


def test_items_come_in_the_order_in_which_they_were_written(api: openai.OpenAI) -> None:
    answer = api.responses.create(**asked(ANSWERS["text after a call"]))
    assert told(answer.output) == [
        ("message", "completed", [("output_text", "I look.")]),
        ("function_call", "completed", "weather", '{"days": 3}'),
        ("function_call", "completed", "now", "{}"),
        ("message", "completed", [("output_text", "Done.")]),
        ("function_call", "completed", "now", "{}"),
        ("message", "completed", [("output_text", "So.")]),
    ]
    assert len({item.id for item in answer.output}) == 6


OF_ITEM = {
    "message": ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"],
    "reasoning": ["content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done"],
    "function_call": ["function_call_arguments.delta", "function_call_arguments.done"],
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_stream_has_openais_events(api: openai.OpenAI, name: str) -> None:
    answer = api.responses.create(**asked(ANSWERS[name]))
    events = list(api.responses.create(**asked(ANSWERS[name], stream=True), extra_body={"cache_salt": "slow"}))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [kind for kind, _ in groupby(event.type.removeprefix("response.") for event in events)]
    expected = ["created", "in_progress"]
    for item in answer.output:
        inner = [kind for kind in OF_ITEM[item.type] if answer.output_text or not kind.startswith("output_text.delta")]
        expected += ["output_item.added", *inner, "output_item.done"]
    assert kinds == [*expected, "completed"]
    assert events[0].response.status == events[1].response.status == "in_progress"
    final = events[-1].response
    assert told(final.output) == told(answer.output)
    assert final.usage == answer.usage
    done = {event.output_index: event.item for event in events if event.type == "response.output_item.done"}
    assert [done[index] for index in range(len(done))] == final.output
    for index, item in done.items():
        events_of_item = [event for event in events if getattr(event, "output_index", None) == index]
        assert {event.item_id for event in events_of_item if hasattr(event, "item_id")} == {item.id}
        text = item.arguments if item.type == "function_call" else (item.content or [])[0].text
        assert "".join(event.delta for event in events_of_item if event.type.endswith(".delta")) == text
    assert {event.response.id for event in events if hasattr(event, "response")} == {final.id}


@pytest.mark.parametrize("name", ANSWERS)
def test_the_client_gathers_a_stream_and_can_send_the_answer_back(api: openai.OpenAI, name: str) -> None:
    with api.responses.stream(**asked(ANSWERS[name])) as stream:
        final = stream.get_final_response()
    assert told(final.output) == told(api.responses.create(**asked(ANSWERS[name])).output)
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "7"}
        for item in final.output
        if item.type == "function_call"
    ]
    more: Any = [{"role": "user", "content": "x"}, *final.output, *outputs, {"role": "user", "content": "so?<|end|>"}]
    assert api.responses.create(model=MODEL, input=more, tools=FLAT).output_text == "so?"


def test_events_are_named(echoing: Server) -> None:
    text = httpx.post(echoing.url + RESPONSES, json=asked("a", stream=True), timeout=120).text
    for event in text.strip().split("\n\n"):
        name, data = event.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


class Weather(BaseModel):
    days: int


def test_parse(api: openai.OpenAI) -> None:
    text = '{"days": 3}'
    answer = api.responses.parse(model=MODEL, input=text + "<|end|>", text_format=Weather)
    assert answer.output_parsed == Weather(days=3)
    with api.responses.stream(model=MODEL, input=text + "<|end|>", text_format=Weather) as stream:
        assert stream.get_final_response().output_parsed == Weather(days=3)
    tools: Any = [openai.pydantic_function_tool(Weather)]
    calling = '<tool_call>\n{"name": "Weather", "arguments": {"days": 3}}\n</tool_call><|end|>'
    [call] = api.responses.parse(model=MODEL, input=calling, tools=tools).output
    assert call.type == "function_call"
    assert call.parsed_arguments == Weather(days=3)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("text", "count"), [("I look.", 3), (REASONED + "I look.", 3), (CALLS, 55)])
def test_an_answer_that_is_cut_is_incomplete(api: openai.OpenAI, text: str, count: int, stream: bool) -> None:
    answer = api.responses.create(**asked(text, max_output_tokens=count, stream=stream))
    if stream:
        *_, last = answer
        assert last.type == "response.incomplete"
        answer = last.response
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == count
    assert [item.status for item in answer.output] == ["completed"] * (len(answer.output) - 1) + ["incomplete"]


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("name", ["text", "calls", "text after a call", "characters of several tokens"])
def test_log_probabilities_are_those_of_the_text(api: openai.OpenAI, name: str, k: int) -> None:
    """As the chat endpoint has them, where they are of markers and calls, too."""
    fields = {"include": [LOGPROBS], "top_logprobs": k}
    answer = api.responses.create(**asked(ANSWERS[name], **fields))
    assert answer.top_logprobs == k
    parts = [part for item in answer.output if item.type == "message" for part in item.content]
    entries = [logprob.to_dict() for part in parts for logprob in part.logprobs]
    assert bytes(
        byte for entry in entries for byte in entry["bytes"]
    ).decode().split() == answer.output_text.split() or (
        name == "text after a call"  # its texts are joined without the space between them
    )
    messages: Any = [{"role": "user", "content": ANSWERS[name] + "<|end|>"}]
    chat = api.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, logprobs=True, top_logprobs=k)
    [choice] = chat.choices
    assert choice.logprobs is not None
    rest = iter([entry.to_dict() for entry in choice.logprobs.content or []])
    assert all(entry in rest for entry in entries), "in their order"
    events = list(api.responses.create(**asked(ANSWERS[name], stream=True, **fields)))
    streamed = [logprob for event in events if event.type == "response.output_text.delta" for logprob in event.logprobs]
    assert [entry.token for entry in streamed] == [entry["token"] for entry in entries]
    assert [entry.logprob for entry in streamed] == [entry["logprob"] for entry in entries]
    assert {len(entry.top_logprobs or []) for entry in streamed} == {k}


@pytest.mark.parametrize(("salt", "code", "status"), [("fail", "server_error", 500), ("refuse", "invalid_prompt", 400)])
def test_what_fails_says_so(echoing: Server, api: openai.OpenAI, salt: str, code: str, status: int) -> None:
    body = asked("I look around.")
    with pytest.raises(openai.APIStatusError) as caught:
        api.responses.create(**body, extra_body={"cache_salt": salt})
    assert caught.value.status_code == status
    *_, last = api.responses.create(**body, stream=True, extra_body={"cache_salt": salt})
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error is not None
    assert last.response.error.code == code
    with api.responses.stream(**body, extra_body={"cache_salt": salt}) as stream:
        assert [event.type for event in stream][-1] == "response.failed"
    wait_until(lambda: echoing.api.engine.num_open == 0, "nothing is open")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_request(echoing: Server, stream: bool) -> None:
    body = {"input": "x" * 100, "cache_salt": "slow", "ignore_eos": True, "stream": stream}
    with (
        httpx.Client(base_url=echoing.url, timeout=120) as client,
        httpx.Client(base_url=echoing.url, timeout=120) as leaving,
    ):
        aborted = gauge(client, "engine_aborted")
        if stream:
            with leaving.stream("POST", RESPONSES, json=body) as response:
                assert next(response.iter_lines())
        else:
            with engine_held(echoing), send_post(echoing, RESPONSES, body):
                wait_until(lambda: echoing.api.engine.num_open == 1, "the request is open")
        wait_until(lambda: gauge(client, "engine_aborted") == aborted + 1, "the request was aborted")


def test_what_was_asked_is_repeated(api: openai.OpenAI) -> None:
    before = time.time()
    choice: Any = {"type": "function", "name": "now"}
    form: Any = {"format": {"type": "json_object"}}
    settings: dict[str, Any] = {"top_p": 0.9, "max_output_tokens": 300, "parallel_tool_calls": False, "user": "me"}
    settings |= {"instructions": "be brief", "metadata": {"a": "b"}, "temperature": 0.5, "truncation": "disabled"}
    answer = api.responses.create(**asked(CALL), **settings, text=form, tool_choice=choice, store=False)
    assert answer.instructions == "be brief"
    assert (answer.metadata, answer.user, answer.truncation) == ({"a": "b"}, "me", "disabled")
    assert (answer.temperature, answer.top_p, answer.max_output_tokens) == (0.5, 0.9, 300)
    body = answer.to_dict()
    assert (body["tool_choice"], body["text"], body["tools"]) == (choice, form, FLAT)
    assert (answer.parallel_tool_calls, answer.background, answer.previous_response_id) == (False, False, None)
    assert before - 1 <= answer.created_at <= (answer.completed_at or 0) <= time.time()


def test_fields_without_effect_are_accepted(client: httpx.Client) -> None:
    body = {"input": "hello", "max_output_tokens": 2, "store": None, "background": False, "conversation": None}
    body |= {"include": ["reasoning.encrypted_content"], "max_tool_calls": 3, "service_tier": "auto", "prompt": None}
    body |= {
        "reasoning": {"effort": None, "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
    }
    body |= {"tools": [], "tool_choice": "auto", "top_k": -1, "min_p": 0, "seed": 1, "stop": None, "messages": None}
    assert client.post(RESPONSES, json=body).status_code == 200
    options = {"include_obfuscation": False}
    assert client.post(RESPONSES, json={**body, "stream": True, "stream_options": options}).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["embeddings", "responses/resp_1", "responses/resp_1/cancel", "responses/input_tokens", "conversations", "files"]
    + ["audio/speech", "audio/transcriptions", "images/generations", "moderations", "rerank", "score", "batches"]
    + ["fine_tuning/jobs", "assistants", "threads", "messages", "realtime/sessions", "vector_stores"],
)
def test_what_this_server_lacks_is_named(client: httpx.Client, path: str) -> None:
    for method in ("GET", "POST"):
        response = client.request(method, f"/v1/{path}")
        assert response.status_code == 404
        message = response.json()["error"]["message"]
        assert f"{method} /v1/{path} is not supported" in message
        assert f"{CHAT}, /v1/completions, {RESPONSES}" in message


@pytest.fixture(scope="module")
def frontend(tmp_path_factory: pytest.TempPathFactory) -> Frontend:
    return Frontend(ServeConfig(target=write(tmp_path_factory.mktemp("shown") / "target", SHOWN)), info(2048))


def prompt(frontend: Frontend, kind: Any, **fields: Any) -> str:
    [request], _ = frontend.read(read_body(kind, fields), "r")
    return frontend.tokenizer.decode(request.prompt)


CALL_1 = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"days": 3}'}}
CALL_2 = {"id": "c2", "type": "function", "function": {"name": "now", "arguments": "{}"}}
ITEM_1, ITEM_2 = ({"type": "function_call", "call_id": call["id"], **call["function"]} for call in (CALL_1, CALL_2))
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "sun"}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "sun"}
SAID = {"type": "message", "id": "m", "role": "assistant", "status": "completed"}
LOOKED = {**SAID, "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]}
THOUGHT = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ("hi", [USER]),
        ([USER], [USER]),
        ([{"type": "message", **USER, "phase": None}], [USER]),
        (
            [
                {
                    "role": "developer",
                    "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
                }
            ],
            [{"role": "system", "content": "ab"}],
        ),
        (
            [USER, THOUGHT, LOOKED, ITEM_1, ITEM_2, OUTPUT],
            [
                USER,
                {"role": "assistant", "content": "I look.", "reasoning": "hm", "tool_calls": [CALL_1, CALL_2]},
                RESULT,
            ],
        ),
        ([USER, ITEM_1, OUTPUT], [USER, {"role": "assistant", "content": None, "tool_calls": [CALL_1]}, RESULT]),
        (
            [USER, ITEM_1, LOOKED, ITEM_2, OUTPUT],
            [USER, {"role": "assistant", "content": "I look.", "tool_calls": [CALL_1, CALL_2]}, RESULT],
        ),
        (
            [USER, LOOKED, THOUGHT, LOOKED],
            [
                USER,
                {"role": "assistant", "content": "I look."},
                {"role": "assistant", "content": "I look.", "reasoning": "hm"},
            ],
        ),
        (
            [{**SAID, "content": [{"type": "refusal", "refusal": "no"}]}, {**OUTPUT, "output": []}],
            [{"role": "assistant", "content": "no"}, {**RESULT, "content": ""}],
        ),
        (
            [
                {**OUTPUT, "output": [{"type": "input_text", "text": "sun"}], "caller": {"type": "direct"}},
                THOUGHT,
                USER,
            ],
            [RESULT, {"role": "assistant", "content": "", "reasoning": "hm"}, USER],
        ),
    ],
)
def test_items_are_messages(frontend: Frontend, items: Any, messages: list[Any]) -> None:
    tools = {"reasoning": {"effort": "none"}, "tools": FLAT}, {"reasoning_effort": "none", "tools": TOOLS}
    expected = prompt(frontend, ChatBody, messages=messages, **tools[1])
    assert prompt(frontend, ResponsesBody, input=items, **tools[0]) == expected
    first = {"role": "system", "content": "be brief"}
    expected = prompt(frontend, ChatBody, messages=[first, *messages])
    assert prompt(frontend, ResponsesBody, input=items, instructions="be brief") == expected


def test_what_is_asked_reaches_the_engine(frontend: Frontend) -> None:
    def params(kind: Any, **fields: Any) -> Any:
        [request], _ = frontend.read(read_body(kind, {**fields, "seed": 1}), "r")
        return request.params

    shared = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 0.5, "bad_words": ["x"]}
    shared |= {"frequency_penalty": 0.25, "repetition_penalty": 1.5, "logit_bias": {"5": 1}, "min_tokens": 2}
    chat = params(ChatBody, messages=[USER], max_tokens=7, logprobs=True, top_logprobs=3, **shared)
    fields = {"include": [LOGPROBS], "top_logprobs": 3, "max_output_tokens": 7}
    assert params(ResponsesBody, input="hi", **fields, **shared) == chat
    unset = params(ChatBody, messages=[USER])
    assert params(ResponsesBody, input="hi") == unset, "an answer may fill the context"
    schema = {"type": "json_schema", "name": "n", "schema": SCHEMAS["weather"], "strict": True, "description": "d"}
    response_format = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMAS["weather"]}}
    for form, chats in ((schema, response_format), ({"type": "json_object"},) * 2, ({"type": "text"},) * 2):
        expected = params(ChatBody, messages=[USER], response_format=chats).grammar
        assert params(ResponsesBody, input="hi", text={"format": form}).grammar == expected
    assert isinstance(params(ResponsesBody, input="hi", regex="a+").grammar, Grammar)
    for choice, chats in (
        ("required", "required"),
        ({"type": "function", "name": "now"}, {"type": "function", "function": {"name": "now"}}),
        ("none", "none"),
    ):
        expected = params(ChatBody, messages=[USER], tools=TOOLS, tool_choice=chats).grammar
        assert params(ResponsesBody, input="hi", tools=FLAT, tool_choice=choice).grammar == expected
