"""Which requests the server takes, which it refuses and how, and what reaches the engine."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from slipstream.serve.http.frontend import Frontend
from slipstream.serve.http.limits import ApiError
from slipstream.serve.http.responses_body import ResponsesBody
from slipstream.serve.http.schemas import (
    NEUTRAL,
    NEUTRAL_IN_STREAM_OPTIONS,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from slipstream.serve.options import ServeConfig
from slipstream.serve.request import Grammar
from slipstream.tests.serve.fake_engine import CONTEXT, VOCABULARY, info
from slipstream.tests.serve.fake_server import CHAT, COMPLETIONS, HELLO, MODEL, events, write_target

NEUTRAL_FIELDS: dict[str, Any] = {
    **{"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": True},
    **{"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "logprobs": False, "top_logprobs": None},
    **{
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "auto",
        "functions": [],
        "modalities": ["text"],
    },
    **{"n": 1, "stop": None, "seed": None, "temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "model": MODEL},
    **{"repetition_penalty": 1.0, "length_penalty": 1.0, "min_tokens": 0, "skip_special_tokens": True, "priority": 0},
    **{"include_stop_str_in_output": False, "guided_json": None, "continue_final_message": False},
}


def test_fields_without_effect_are_accepted(client: httpx.Client) -> None:
    body = {"messages": HELLO, "max_completion_tokens": 3, **NEUTRAL_FIELDS}
    response = client.post(CHAT, json={**body, "tool_choice": "none", "stream_options": None})
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == 3
    options = {"include_obfuscation": False}
    assert client.post(CHAT, json={**body, "stream": True, "stream_options": options}).status_code == 200


def user(content: Any, **fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content, **fields}]


REFUSE_ME = user("refuse me")
TEXT = {"type": "text", "text": "x"}
CONTEXT_NAMED = ["300", str(CONTEXT)]
# (fields, param, what the message must hold): status 400 unless they name a model
REFUSED: list[tuple[dict[str, Any], str | None, list[str]]] = [
    ({"prompt": "x" * 300}, "prompt", CONTEXT_NAMED),
    ({"prompt": "x" * 200, "max_tokens": 100}, "prompt", ["200", "100", *CONTEXT_NAMED]),
    ({"messages": user("x" * 298)}, "messages", CONTEXT_NAMED),
    ({"prompt": "x", "beam_width": 3, "abc": None}, "abc", ["beam_width"]),
    ({"prompt": "x", "messages": HELLO}, "messages", ["unknown"]),
    ({}, "prompt", ["required"]),
    ({"messages": None}, "messages", ["required"]),
    ({"prompt": "x", "model": "other"}, "model", ["other", MODEL]),
    ({"prompt": "x", "temperature": "hot"}, "temperature", ["number"]),
    ({"prompt": "x", "temperature": -1}, "temperature", ["-1"]),
    ({"prompt": "x", "top_k": -2}, "top_k", ["-2"]),
    ({"prompt": "x", "top_k": 2**40}, "top_k", ["less"]),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens", ["0"]),
    ({"prompt": "x", "max_tokens": True}, "max_tokens", ["integer"]),
    ({"prompt": "x", "max_tokens": 10**4300 - 1}, "max_tokens", ["less"]),  # one more has too many digits to be shown
    ({"prompt": "x", "min_tokens": 2**31}, "min_tokens", ["less"]),
    ({"messages": HELLO, "max_completion_tokens": 2**31}, "max_completion_tokens", ["less"]),
    ({"prompt": "x", "n": 0}, "n", ["1"]),
    ({"prompt": ["x"] * 100, "n": 100}, "n", ["10000"]),
    ({"prompt": "x", "seed": 2**64}, "seed", ["less"]),
    ({"prompt": "x", "stream": "yes"}, "stream", ["boolean"]),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", ["stream: true"]),
    ({"prompt": "x", "stream": True, "stream_options": {"usage": True}}, "stream_options.usage", ["unknown"]),
    ({"prompt": "x", "logprobs": 21}, "logprobs", ["21", "between 0 and 20"]),
    ({"prompt": "x", "logprobs": -1}, "logprobs", ["-1", "between 0 and 20"]),
    ({"prompt": "x", "logprobs": True}, "logprobs", ["integer"]),
    ({"prompt": "x", "top_logprobs": 2}, "top_logprobs", ["not supported", "send 0"]),
    ({"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs", ["21", "between 0 and 20"]),
    ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs", ["stream: true", "leave one"]),
    ({"prompt": "x" * 200, "n": 128, "prompt_logprobs": 20, "max_tokens": 1}, "prompt_logprobs", ["537600", "262144"]),
    ({"prompt": "x" * 200, "n": 128, "logprobs": 20, "echo": True, "max_tokens": 1}, "logprobs", ["537600"]),
    ({"prompt": "x", "echo": 1}, "echo", ["boolean"]),
    ({"prompt": "x", "max_tokens": -1, "echo": True}, "max_tokens", ["-1", "at least 1"]),
    ({"messages": HELLO, "logprobs": 5}, "logprobs", ["boolean"]),
    ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs", ["21", "between 0 and 20"]),
    ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs", ["logprobs: true"]),
    ({"messages": HELLO, "echo": True}, "echo", ["not supported"]),
    ({"prompt": "x", "best_of": 2}, "best_of", ["not supported", "send 1"]),
    ({"prompt": "x", "repetition_penalty": 0}, "repetition_penalty", ["0", "between"]),
    ({"prompt": "x", "repetition_penalty": 1e308}, "repetition_penalty", ["1e+308", "10000"]),
    ({"prompt": "x", "frequency_penalty": 2.5}, "frequency_penalty", ["2.5", "between -2 and 2"]),
    ({"prompt": "x", "presence_penalty": "no"}, "presence_penalty", ["number"]),
    ({"prompt": "x", "logit_bias": [1]}, "logit_bias", ["object"]),
    ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", ["'a'", "token id"]),
    ({"prompt": "x", "logit_bias": {"-5": 1}}, "logit_bias", ["'-5'"]),
    ({"prompt": "x", "logit_bias": {"9999": 1}}, "logit_bias", ["9999", str(VOCABULARY - 1)]),
    ({"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias", ["101", "between -100 and 100"]),
    ({"prompt": "x", "logit_bias": {"5": True}}, "logit_bias", ["token 5", "number"]),
    ({"prompt": "x", "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", ["1025", "1024"]),
    ({"prompt": "x", "response_format": {"type": "xml"}}, "response_format.type", ["xml", "json_schema"]),
    ({"prompt": "x", "response_format": {"type": "text", "a": 1}}, "response_format.a", ["unknown"]),
    ({"prompt": "x", "response_format": {"type": "json_schema"}}, "response_format.json_schema", ["schema"]),
    (
        {
            "prompt": "x",
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}},
        },
        "response_format.json_schema.schema",
        ['"not" at the root is not supported'],
    ),
    ({"prompt": "x", "regex": "(a"}, "regex", ["cannot be used"]),
    ({"prompt": "x", "json_schema": "{"}, "json_schema", ["cannot be used"]),
    ({"prompt": "x", "regex": "a", "ebnf": 'root ::= "a"'}, "ebnf", ["regex and ebnf both", "send one"]),
    ({"prompt": "x", "structured_outputs": {"choice": []}}, "structured_outputs.choice", ["must be"]),
    ({"prompt": "x", "structured_outputs": {"lark": "x"}}, "structured_outputs.lark", ["unknown"]),
    ({"prompt": "x", "structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", ["not"]),
    ({"prompt": "x", "regex": "a", "ignore_eos": True}, "ignore_eos", ["grammar"]),
    ({"prompt": "x", "min_tokens": 20}, "min_tokens", ["20", "max_tokens"]),
    ({"prompt": "x", "min_tokens": -1}, "min_tokens", ["-1"]),
    ({"prompt": "x", "bad_words": [""]}, "bad_words", ["empty"]),
    ({"prompt": "x", "bad_words": ["y" * 300]}, "bad_words", ["300"]),
    ({"prompt": "x", "bad_words": ["y"] * 200}, "bad_words", ["200"]),
    ({"prompt": "x", "guided_json": {}}, "guided_json", ["leave it out"]),
    ({"prompt": "x", "stop": ""}, "stop", ["empty"]),
    ({"prompt": "x", "stop": [1]}, "stop", ["strings"]),
    ({"prompt": "x", "stop_token_ids": ["a"]}, "stop_token_ids.0", ["integer"]),
    ({"prompt": "x", "stop_token_ids": [5, -1], "regex": "a+"}, "stop_token_ids", ["-1", "from 0 up"]),
    ({"prompt": "x", "stop_token_ids": [VOCABULARY]}, "stop_token_ids", [str(VOCABULARY), str(VOCABULARY - 1)]),
    ({"messages": HELLO, "stop_token_ids": [2**32], "min_tokens": 1}, "stop_token_ids", [str(2**32)]),
    ({"prompt": "x", "speculation": {"enable": True}}, "speculation.enable", ["unknown"]),
    ({"prompt": "x", "speculation": {"enabled": 0}}, "speculation.enabled", ["boolean"]),
    ({"prompt": "x", "speculation": {"trace": "yes"}}, "speculation.trace", ["boolean"]),
    ({"prompt": "x", "speculation": False}, "speculation", ["must be an object"]),
    ({"prompt": "x", "cache_salt": 5}, "cache_salt", ["string"]),
    ({"prompt": "x", "cache_salt": "\ud800"}, None, ["not valid JSON"]),
    ({"prompt": "x", "cache_salt": "refuse"}, None, ["refused"]),
    ({"prompt": ""}, "prompt", ["empty"]),
    ({"prompt": []}, "prompt", ["empty"]),
    ({"prompt": ["a", 3]}, "prompt", ["prompt.1"]),
    ({"prompt": [1, 9999]}, "prompt", ["9999", str(VOCABULARY - 1)]),
    ({"prompt": [-1]}, "prompt", ["-1"]),
    ({"messages": HELLO, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", ["differ"]),
    ({"messages": []}, "messages", ["at least one"]),
    ({"messages": "hello"}, "messages", ["list"]),
    ({"messages": ["hello"]}, "messages.0", ["object"]),
    ({"messages": [{"role": "user"}]}, "messages.0.content", ["string"]),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.role", ["function", "assistant"]),
    ({"messages": [*HELLO, *user(5)]}, "messages.1.content", ["string"]),
    ({"messages": user("x", mood=1)}, "messages.0.mood", ["unknown"]),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        "messages.0.tool_calls.0",
        ["function"],
    ),
    ({"messages": [{"role": "assistant"}]}, "messages.0.content", ["missing"]),
    ({"messages": user(None)}, "messages.0.content", ["missing"]),
    ({"messages": user([])}, "messages.0.content", ["an empty list"]),
    ({"messages": user("x\ud800")}, None, ["not valid JSON"]),
    ({"messages": user("x", name=5)}, "messages.0.name", ["string"]),
    ({"messages": user([TEXT, {"type": "image_url", "image_url": {"url": "data:"}}])}, "messages.0.content.1", []),
    ({"messages": user([{**TEXT, "cache_control": {}}])}, "messages.0.content.0.cache_control", ["unknown"]),
    ({"messages": user("x", refusal="y")}, "messages.0.refusal", ["beside a content"]),
    ({"messages": REFUSE_ME}, "messages", ["that is refused"]),
    *(
        ({"messages": HELLO, "chat_template_kwargs": {name: []}}, "chat_template_kwargs", [name])
        for name in ("tokenize", "self", "messages", "conversations", "conversation", "tools", "strftime_now")
    ),
    (
        {"messages": REFUSE_ME, "chat_template_kwargs": {"raise_exception": 5}},
        "chat_template_kwargs",
        ["failed on a value"],
    ),
    # Any value of a field without a meaning here but those that ask for nothing.
    *(
        ({"prompt": "x", name: ["?"]}, name, ["not supported"])
        for name, allowed in NEUTRAL.items()
        if allowed is not None
    ),
    *(
        ({"prompt": "x", "stream": True, "stream_options": {name: True}}, f"stream_options.{name}", ["send false"])
        for name in NEUTRAL_IN_STREAM_OPTIONS
    ),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
def test_refused(client: httpx.Client, fields: dict[str, Any], param: str | None, words: list[str]) -> None:
    # httpx would send what has no UTF-8 form as it is; json.dumps escapes it, as clients can.
    path = CHAT if "messages" in fields and "prompt" not in fields else COMPLETIONS
    response = client.post(path, content=json.dumps(fields), headers={"Content-Type": "application/json"})
    assert response.status_code == (404 if "model" in fields else 400), response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert all(word in error["message"] for word in words), error["message"]


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


def test_paths_and_methods(client: httpx.Client) -> None:
    message = f"/v1/nothing is not supported; this server has {CHAT}"
    for method, path, status, words in (
        ("GET", CHAT, 405, ""),
        ("POST", "/v1/models", 405, ""),
        ("GET", "/v1/nothing", 404, message),
        ("GET", "/v1/models/other", 404, MODEL),
    ):
        response = client.request(method, path)
        assert response.status_code == status
        assert response.json()["error"]["type"] == "invalid_request_error"
        assert words in response.json()["error"]["message"]
    head = client.head("/health")  # load balancers
    assert (head.status_code, head.content) == (200, b"")


def test_errors_of_a_stream_are_events(client: httpx.Client) -> None:
    text = client.post(COMPLETIONS, json={"prompt": "x", "stream": True, "cache_salt": "refuse"}).text
    [event] = [json.loads(line[6:]) for line in text.split("\n\n") if line]
    assert event["error"]["message"] == "prompt is refused; ask for less"


def frontend(path: Path, generation: dict[str, object], chat: bool = True) -> Frontend:
    return Frontend(ServeConfig(target=str(write_target(path, generation, chat))), info())


def test_sampling_defaults_come_from_the_target(tmp_path: Path) -> None:
    generation = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "eos_token_id": [0, 3]}
    front = frontend(tmp_path / "generation", generation)
    [default] = front.requests(CompletionBody(prompt="ab"), "r")
    [explicit] = front.requests(CompletionBody(prompt="ab", temperature=0.0, top_k=0), "r")
    for params, expected in ((default.params, (0.6, 20, 0.95, 0.0)), (explicit.params, (0.0, 0, 0.95, 0.0))):
        assert (params.temperature, params.top_k, params.top_p, params.min_p) == expected
        assert params.max_tokens == 16
    silent = frontend(tmp_path / "silent", {"do_sample": False})
    [request] = silent.requests(ChatBody(messages=HELLO), "r")
    assert request.params.temperature == 1.0
    assert request.params.max_tokens == CONTEXT - len(request.prompt), "a chat answer may fill the context"
    assert silent.model_name == "silent"


def test_what_changes_logits_reaches_the_engine(tmp_path: Path) -> None:
    front = frontend(tmp_path, {"repetition_penalty": 1.05})
    settings = {"frequency_penalty": 0.5, "presence_penalty": -1, "logit_bias": {"7": -100, "9": 1.5}, "min_tokens": 3}
    [request] = front.requests(CompletionBody(prompt="ab", bad_words=["q", " zz"], **settings), "r")
    params = request.params
    assert params.repetition_penalty == 1.05, "the target's default"
    assert (params.frequency_penalty, params.presence_penalty, params.min_tokens) == (0.5, -1, 3)
    assert dict(params.logit_bias) == {7: -100, 9: 1.5}
    assert [front.decoder(list(word)) for word in params.bad_words] == ["q", " q", " zz"]
    [request] = front.requests(CompletionBody(prompt="ab", repetition_penalty=1.0), "r")
    assert not request.params.changes_logits


def test_grammars_reach_the_engine_by_the_names_of_all_servers(tmp_path: Path) -> None:
    front = frontend(tmp_path, {})
    schema = {"type": "object"}
    text = json.dumps(schema)

    def grammar(**fields: Any) -> Grammar | None:
        [request] = front.requests(CompletionBody(prompt="ab", **fields), "r")
        return request.params.grammar

    json_schema = {"name": "n", "schema": schema, "strict": True, "description": "d"}
    for fields in (
        {"response_format": {"type": "json_schema", "json_schema": json_schema}},
        {"structured_outputs": {"json": schema, "disable_any_whitespace": False}},
        {"structured_outputs": {"json": text}},
        {"json_schema": text},
    ):
        assert grammar(**fields) == Grammar("json_schema", text)
    for fields in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        assert grammar(**fields) == Grammar("json_object")
    assert grammar(regex="a+") == grammar(structured_outputs={"regex": "a+"}) == Grammar("regex", "a+")
    ebnf = 'root ::= "a"'
    assert grammar(ebnf=ebnf) == grammar(structured_outputs={"grammar": ebnf}) == Grammar("ebnf", ebnf)
    assert grammar(structured_outputs={"choice": ["a", "b"]}) == Grammar("choice", '["a", "b"]')
    assert grammar(response_format={"type": "text"}) is grammar(structured_outputs={}) is grammar() is None


def test_prompts_of_a_call_have_seeds_of_their_own(tmp_path: Path) -> None:
    front = frontend(tmp_path, {})

    def keys(**fields: Any) -> list[tuple[int, int]]:
        return [(request.seed, request.choice) for request in front.requests(CompletionBody(**fields), "r")]

    call = keys(prompt=["ab", "ab", "c"], n=2, seed=7)
    assert len(set(call)) == 6, "equal prompts draw different noise"
    assert call == keys(prompt=["ab", "ab", "c"], n=2, seed=7), "a call repeats"
    assert call[:2] == keys(prompt="ab", n=2, seed=7) == [(7, 0), (7, 1)], "the first prompt is like a prompt alone"
    assert keys(prompt="ab", seed=-5) == [(-5, 0)]
    seeds = keys(prompt=["ab", "ab"])
    assert len({seeds[0], seeds[1], *keys(prompt="ab")}) == 3, "drawn anew for each call"
    assert all(0 <= seed < 2**53 for seed, _ in seeds), "JSON readers keep it"


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
    [first] = seeds()
    [second] = seeds()
    assert first != second


def test_chat_needs_a_template(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match="/v1/completions") as caught:
        frontend(tmp_path, {}, chat=False).requests(ChatBody(messages=HELLO), "r")
    assert caught.value.status == 400


def test_the_page_names_every_field() -> None:
    page = (Path(__file__).parents[2] / "docs" / "http_api.md").read_text()
    names = {name for code in re.findall(r"`([^`\n]+)`", page) for name in re.findall(r"\w+", code)}
    for body in (ChatBody, CompletionBody, ResponsesBody, TokenizeBody, DetokenizeBody):
        assert names.issuperset(body.model_fields), body
