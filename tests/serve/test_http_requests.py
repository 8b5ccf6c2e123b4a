"""Which requests the server takes, which it refuses and how, and what reaches the engine."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from slipstream.serve.frontend import Frontend
from slipstream.serve.limits import ApiError
from slipstream.serve.options import ServeConfig
from slipstream.serve.protocol import ChatBody, CompletionBody
from slipstream.tests.serve.fake_engine import CONTEXT, VOCABULARY, FakeInfo
from slipstream.tests.serve.fake_server import CHAT, COMPLETIONS, HELLO, MODEL, events, write_target


@pytest.mark.parametrize(
    "extra",
    [
        {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": True},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "logprobs": False, "top_logprobs": None},
        {"response_format": {"type": "text"}, "tools": None, "tool_choice": "none", "n": 1, "stream_options": None},
        {"tools": [], "tool_choice": "auto", "functions": [], "modalities": ["text"], "stop": None, "seed": None},
        {"max_completion_tokens": 3, "temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "model": MODEL},
        {"top_k": -1, "repetition_penalty": 1.0, "length_penalty": 1.0, "min_tokens": 0, "skip_special_tokens": True},
        {"include_stop_str_in_output": False, "guided_json": None, "priority": 0, "continue_final_message": False},
        {"stream_options": {"include_obfuscation": False, "continuous_usage_stats": False}, "stream": True},
    ],
)
def test_fields_without_effect_are_accepted(client: httpx.Client, extra: dict[str, Any]) -> None:
    response = client.post(CHAT, json={"messages": HELLO, "max_tokens": 3, **extra})
    assert response.status_code == 200, response.text
    if "stream" not in extra:
        assert response.json()["usage"]["completion_tokens"] == 3


REFUSE_ME = [{"role": "user", "content": "refuse me"}]
REFUSED = [
    # (path, fields, status, param, what the message must hold)
    (COMPLETIONS, {"prompt": "x" * 300}, 400, "prompt", ["300", str(CONTEXT)]),
    (COMPLETIONS, {"prompt": "x" * 200, "max_tokens": 100}, 400, "prompt", ["200", "100", "300", str(CONTEXT)]),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 300}]}, 400, "messages", ["302", str(CONTEXT)]),
    (COMPLETIONS, {"prompt": "x", "beam_width": 3, "abc": None}, 400, "abc", ["beam_width"]),
    (COMPLETIONS, {"prompt": "x", "messages": HELLO}, 400, "messages", ["unknown"]),
    (COMPLETIONS, {}, 400, "prompt", ["required"]),
    (CHAT, {}, 400, "messages", ["required"]),
    (COMPLETIONS, {"prompt": "x", "model": "other"}, 404, "model", ["other", MODEL]),
    (COMPLETIONS, {"prompt": "x", "temperature": "hot"}, 400, "temperature", ["number"]),
    (COMPLETIONS, {"prompt": "x", "temperature": -1}, 400, "temperature", ["-1"]),
    (COMPLETIONS, {"prompt": "x", "top_p": 0}, 400, "top_p", ["0"]),
    (COMPLETIONS, {"prompt": "x", "top_k": -2}, 400, "top_k", ["-2"]),
    (COMPLETIONS, {"prompt": "x", "top_k": 2**40}, 400, "top_k", ["less"]),
    (COMPLETIONS, {"prompt": "x", "min_p": 2}, 400, "min_p", ["2"]),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens", ["0"]),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 2.5}, 400, "max_tokens", ["integer"]),
    (COMPLETIONS, {"prompt": "x", "max_tokens": True}, 400, "max_tokens", ["integer"]),
    (COMPLETIONS, {"prompt": "x", "n": 0}, 400, "n", ["1"]),
    (COMPLETIONS, {"prompt": ["x"] * 100, "n": 100}, 400, "n", ["10000"]),
    (COMPLETIONS, {"prompt": "x", "seed": 2**64}, 400, "seed", ["less"]),
    (COMPLETIONS, {"prompt": "x", "stream": "yes"}, 400, "stream", ["boolean"]),
    (COMPLETIONS, {"prompt": "x", "stream_options": {"include_usage": True}}, 400, "stream_options", ["stream: true"]),
    *(
        (
            COMPLETIONS,
            {"prompt": "x", "stream": True, "stream_options": {name: True}},
            400,
            f"stream_options.{name}",
            words,
        )
        for name, words in (
            ("usage", ["unknown"]),
            ("include_obfuscation", ["not supported", "false"]),
            ("continuous_usage_stats", ["not supported", "false"]),
        )
    ),
    (COMPLETIONS, {"prompt": "x", "repetition_penalty": 1.1}, 400, "repetition_penalty", ["not supported", "1"]),
    (COMPLETIONS, {"prompt": "x", "skip_special_tokens": False}, 400, "skip_special_tokens", ["send true"]),
    (COMPLETIONS, {"prompt": "x", "min_tokens": 3}, 400, "min_tokens", ["send 0"]),
    (COMPLETIONS, {"prompt": "x", "guided_json": {}}, 400, "guided_json", ["leave it out"]),
    (COMPLETIONS, {"prompt": "x", "stop": ""}, 400, "stop", ["empty"]),
    (COMPLETIONS, {"prompt": "x", "stop": [1]}, 400, "stop", ["strings"]),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": ["a"]}, 400, "stop_token_ids.0", ["integer"]),
    (COMPLETIONS, {"prompt": "x", "cache_salt": 5}, 400, "cache_salt", ["string"]),
    (COMPLETIONS, {"prompt": "x", "cache_salt": "\ud800"}, 400, None, ["not valid JSON"]),
    (COMPLETIONS, {"prompt": ""}, 400, "prompt", ["empty"]),
    (COMPLETIONS, {"prompt": []}, 400, "prompt", ["empty"]),
    (COMPLETIONS, {"prompt": ["a", 3]}, 400, "prompt", ["prompt.1"]),
    (COMPLETIONS, {"prompt": [1, 9999]}, 400, "prompt", ["9999", str(VOCABULARY - 1)]),
    (COMPLETIONS, {"prompt": [-1]}, 400, "prompt", ["-1"]),
    (COMPLETIONS, {"prompt": "x", "best_of": 2}, 400, "best_of", ["not supported"]),
    (COMPLETIONS, {"prompt": "x", "echo": True}, 400, "echo", ["not supported"]),
    (COMPLETIONS, {"prompt": "x", "suffix": "y"}, 400, "suffix", ["not supported"]),
    (COMPLETIONS, {"prompt": "x", "logprobs": 0}, 400, "logprobs", ["not supported"]),
    (CHAT, {"messages": HELLO, "logprobs": True}, 400, "logprobs", ["not supported"]),
    (CHAT, {"messages": HELLO, "top_logprobs": 5}, 400, "top_logprobs", ["not supported"]),
    (CHAT, {"messages": HELLO, "presence_penalty": 0.5}, 400, "presence_penalty", ["not supported"]),
    (CHAT, {"messages": HELLO, "frequency_penalty": 1}, 400, "frequency_penalty", ["not supported"]),
    (CHAT, {"messages": HELLO, "logit_bias": {"5": 1}}, 400, "logit_bias", ["not supported"]),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}}, 400, "response_format", ["not supported"]),
    (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, 400, "tools", ["not supported"]),
    (CHAT, {"messages": HELLO, "tool_choice": "required"}, 400, "tool_choice", ["not supported"]),
    (CHAT, {"messages": HELLO, "modalities": ["audio"]}, 400, "modalities", ["not supported"]),
    (CHAT, {"messages": HELLO, "max_tokens": 3, "max_completion_tokens": 4}, 400, "max_tokens", ["differ"]),
    (CHAT, {"messages": []}, 400, "messages", ["at least one"]),
    (CHAT, {"messages": "hello"}, 400, "messages", ["list"]),
    (CHAT, {"messages": ["hello"]}, 400, "messages.0", ["object"]),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages.0.content", ["string"]),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, 400, "messages.0.role", ["tool", "assistant"]),
    (CHAT, {"messages": [*HELLO, {"role": "user", "content": 5}]}, 400, "messages.1.content", ["string"]),
    (CHAT, {"messages": [{"role": "user", "content": "x", "mood": 1}]}, 400, "messages.0.mood", ["unknown"]),
    (CHAT, {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, 400, "messages.0.tool_calls", []),
    (CHAT, {"messages": [{"role": "assistant"}]}, 400, "messages.0.content", ["missing"]),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, 400, "messages.0.content", ["missing"]),
    (CHAT, {"messages": [{"role": "user", "content": []}]}, 400, "messages.0.content", ["an empty list"]),
    (CHAT, {"messages": [{"role": "user", "content": "x\ud800"}]}, 400, None, ["not valid JSON"]),
    (CHAT, {"messages": [{"role": "user", "content": "x", "name": 5}]}, 400, "messages.0.name", ["string"]),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}]},
        400,
        "messages.0.content.0.cache_control",
        ["unknown"],
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "content": "x", "refusal": "y"}]},
        400,
        "messages.0.refusal",
        ["beside a content"],
    ),
    (CHAT, {"messages": REFUSE_ME}, 400, "messages", ["that is refused"]),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"tokenize": True}}, 400, "chat_template_kwargs", ["tokenize"]),
    *(
        (CHAT, {"messages": HELLO, "chat_template_kwargs": {name: []}}, 400, "chat_template_kwargs", [name])
        for name in ("self", "messages", "conversations", "conversation", "tools", "strftime_now")
    ),
    (
        CHAT,
        {"messages": REFUSE_ME, "chat_template_kwargs": {"raise_exception": 5}},
        400,
        "chat_template_kwargs",
        ["can not work with"],
    ),
    (COMPLETIONS, {"prompt": "x", "cache_salt": "refuse"}, 400, None, ["refused"]),
]


@pytest.mark.parametrize(("path", "fields", "status", "param", "words"), REFUSED)
def test_refused(
    client: httpx.Client, path: str, fields: dict[str, Any], status: int, param: str | None, words: list[str]
) -> None:
    # httpx would send what has no UTF-8 form as it is; json.dumps escapes it, as clients can.
    response = client.post(path, content=json.dumps(fields), headers={"Content-Type": "application/json"})
    assert response.status_code == status, response.text
    assert ("Retry-After" in response.headers) == (status == 429)
    assert response.json().keys() == {"error"}
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param
    for word in words:
        assert word in error["message"]


def test_images_are_refused(client: httpx.Client) -> None:
    parts = [{"type": "text", "text": "what is it"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    response = client.post(CHAT, json={"messages": [{"role": "user", "content": parts}]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages.0.content.1"


@pytest.mark.parametrize(
    ("content", "kind", "status", "word"),
    [
        ('{"prompt": "x"', "application/json", 400, "JSON"),
        ("[1, 2]", "application/json", 400, "object"),
        ("", "application/json", 400, "object"),
        ('{"prompt": "\\ud800"}', "application/json", 400, "JSON"),
        ('{"prompt": "x", "temperature": NaN}', "application/json", 400, "JSON"),
        (b'{"prompt": "\xff"}', "application/json", 400, "utf-8"),
        ('{"prompt": "x", "max_tokens": 1' + "0" * 5000 + "}", "application/json", 400, "range"),
        ('{"prompt": "x"}', "text/plain", 415, "Content-Type"),
    ],
)
def test_broken_bodies(client: httpx.Client, content: str | bytes, kind: str, status: int, word: str) -> None:
    response = client.post(COMPLETIONS, content=content, headers={"Content-Type": kind})
    assert response.status_code == status
    assert word in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", CHAT, 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/responses", 404),
        ("GET", "/v1/models/other", 404),
    ],
)
def test_wrong_paths(client: httpx.Client, method: str, path: str, status: int) -> None:
    response = client.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"
    if path in ("/v1/nothing", "/v1/responses"):
        assert f"{path} is not supported; this server has {CHAT}" in response.json()["error"]["message"]


def test_load_balancers_may_ask_for_the_head_alone(client: httpx.Client) -> None:
    response = client.head("/health")
    assert (response.status_code, response.content) == (200, b"")


def test_errors_of_a_stream_are_events(client: httpx.Client) -> None:
    text = client.post(COMPLETIONS, json={"prompt": "x", "stream": True, "cache_salt": "refuse"}).text
    [event] = [json.loads(line[6:]) for line in text.split("\n\n") if line]
    assert event["error"]["message"] == "prompt is refused; ask for less"


def frontend(path: Path, generation: dict[str, object], chat: bool = True) -> Frontend:
    return Frontend(ServeConfig(target=str(write_target(path, generation, chat))), FakeInfo(CONTEXT, VOCABULARY))


def test_sampling_defaults_come_from_the_target(tmp_path: Path) -> None:
    generation = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "eos_token_id": [0, 3]}
    front = frontend(tmp_path, generation)
    [request] = front.requests(CompletionBody(prompt="ab"), "r")
    params = request.params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.6, 20, 0.95, 0.0)
    assert params.max_tokens == 16
    [request] = front.requests(CompletionBody(prompt="ab", temperature=0.0, top_k=0), "r")
    assert (request.params.temperature, request.params.top_k, request.params.top_p) == (0.0, 0, 0.95)


def test_defaults_without_a_word_of_the_target(tmp_path: Path) -> None:
    front = frontend(tmp_path, {"do_sample": False})
    [request] = front.requests(ChatBody(messages=HELLO), "r")
    assert request.params.temperature == 1.0
    assert request.params.max_tokens == CONTEXT - len(request.prompt), "a chat answer may fill the context"
    assert front.model_name == tmp_path.name


def test_prompts_of_a_call_have_seeds_of_their_own(tmp_path: Path) -> None:
    front = frontend(tmp_path, {})

    def keys(**fields: Any) -> list[tuple[int, int]]:
        return [(request.seed, request.choice) for request in front.requests(CompletionBody(**fields), "r")]

    call = keys(prompt=["ab", "ab", "c"], n=2, seed=7)
    assert len(set(call)) == 6, "equal prompts draw different noise"
    assert call == keys(prompt=["ab", "ab", "c"], n=2, seed=7), "a call repeats"
    assert call[:2] == keys(prompt="ab", n=2, seed=7) == [(7, 0), (7, 1)], "the first prompt is like a prompt alone"
    assert keys(prompt="ab", seed=-5) == [(-5, 0)]
    drawn = keys(prompt=["ab", "ab"])
    assert len({drawn[0], drawn[1], *keys(prompt="ab")}) == 3, "drawn anew for each call"
    assert all(0 <= seed < 2**53 for seed, _ in drawn), "JSON readers keep it"


def test_choices_share_a_salt_and_differ_in_id(tmp_path: Path) -> None:
    front = frontend(tmp_path, {})
    requests = front.requests(CompletionBody(prompt=["ab", "c"], n=2, cache_salt="tenant"), "r")
    assert len({request.id for request in requests}) == 4
    [namespace] = {request.namespace for request in requests}
    [long] = {request.namespace for request in front.requests(CompletionBody(prompt="ab", cache_salt="s" * 10**6), "r")}
    assert len(long) == len(namespace) == 32, "the engine keeps a digest with every cached prefix"
    assert long != namespace
    assert front.requests(CompletionBody(prompt="ab"), "r")[0].namespace == ""


@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_names_its_seed(client: httpx.Client, stream: bool) -> None:
    body = {"messages": HELLO, "max_tokens": 3, "stream": stream}

    def seeds(**fields: Any) -> set[int]:
        response = client.post(CHAT, json={**body, **fields})
        return {event["seed"] for event in (events(response) if stream else [response.json()])}

    assert seeds(seed=-(2**63)) == {-(2**63)}
    [first], [second] = seeds(), seeds()
    assert first != second


def test_chat_needs_a_template(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match="/v1/completions") as caught:
        frontend(tmp_path, {}, chat=False).requests(ChatBody(messages=HELLO), "r")
    assert caught.value.status == 400
