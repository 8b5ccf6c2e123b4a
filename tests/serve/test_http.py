"""OpenAI's client, the requests that a call becomes, and the documentation of its fields."""

import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from slipstream.serve.chat import notations, tools
from slipstream.serve.grammar import grammars, json_schema, work
from slipstream.serve.http import connections, limits
from slipstream.serve.http.frontend import Frontend
from slipstream.serve.http.launch import Server
from slipstream.serve.http.limits import ApiError
from slipstream.serve.http.responses_body import NEUTRAL_IN_RESPONSES, ResponsesBody
from slipstream.serve.http.schemas import NEUTRAL, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from slipstream.serve.options import ServeConfig
from slipstream.tests.serve.check_server import FOLDER, cases_of
from slipstream.tests.serve.fake_engine import info
from slipstream.tests.serve.fake_server import (
    CHAT,
    COMPLETIONS,
    ECHO,
    HELLO,
    MARKERS,
    MODEL,
    RESPONSES,
    client_of,
    engine_held,
    gauge,
    send_post,
    serving,
    wait_until,
    write_target,
)
from slipstream.tests.serve.test_tools import FLAT, TOOLS
from slipstream.tests.sources import ROOT

REASONED = "<think>\nhm\n</think>\n\n"
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
CALLS = f'I look.\n<tool_call>\n{{"name": "weather", "arguments": {{"days": 3}}}}\n</tool_call>\n{CALL}'
ANSWERS = {"text": "I look.", "reasoning": REASONED + "I look.", "calls": REASONED + CALLS, "nothing": ""} | {
    "text after a call": CALLS + " Done.\n" + CALL + "So."
}


@pytest.fixture(scope="module")
def echoing(tmp_path_factory) -> Iterator[Server]:
    """A server whose answer is the last message."""
    target = write_target(tmp_path_factory.mktemp("echo") / "target", template=ECHO, markers=MARKERS)
    with serving(ServeConfig(target=str(target), port=0, served_model_name=MODEL, max_model_len=1024)) as server:
        yield server


@pytest.fixture(scope="module")
def api(echoing) -> Iterator[openai.OpenAI]:
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


def test_openai_client_works_unchanged(server):
    api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in api.models.list()] == [MODEL]
    assert api.models.retrieve(MODEL).id == MODEL
    assert api.models.retrieve(MODEL).created > 10**9, "seconds since 1970"
    chat = api.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=13, n=2, seed=1, user="me")
    assert chat.system_fingerprint == "fp_fake"
    assert [choice.message.content for choice in chat.choices] == ["hellohello"] * 2
    assert chat.usage is not None
    assert chat.metrics["speculative_decoding"]["num_accepted_draft_tokens"] == 2 * 8
    options = {"include_usage": True}
    chunks = list(
        api.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=13, stream=True, stream_options=options)
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hellohello"
    assert chunks[-1].usage.completion_tokens == 13
    text = api.completions.create(model=MODEL, prompt="abc", max_tokens=5, stop=["z"])
    assert text.choices[0].text == "abcab"
    pieces = api.completions.create(model=MODEL, prompt="abc", max_tokens=5, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == "abcab"
    turns = [*HELLO, chat.choices[0].message, {"role": "user", "content": "more"}]
    assert api.chat.completions.create(model=MODEL, messages=turns, max_tokens=1).choices
    with pytest.raises(openai.BadRequestError, match="300"):
        api.completions.create(model=MODEL, prompt="x" * 300)
    with pytest.raises(openai.NotFoundError):
        api.completions.create(model="other", prompt="x")


def test_the_client_gathers_a_chats_stream_as_the_whole_answer(api):
    messages = [{"role": "user", "content": CALLS + "<|end|>"}]
    with api.chat.completions.stream(model=MODEL, messages=messages, tools=TOOLS) as stream:
        final = stream.get_final_completion().choices[0].message
    answer = api.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0].message
    for message in (final, answer):
        assert message.content == "I look."
        calls = [call.function for call in message.tool_calls or [] if call.type == "function"]
        assert [(call.name, call.arguments) for call in calls] == [("weather", '{"days": 3}'), ("now", "{}")]


@pytest.mark.parametrize("name", ANSWERS)
def test_the_client_gathers_a_stream_and_can_send_the_answer_back(api, name):
    with api.responses.stream(**asked(ANSWERS[name])) as stream:
        final = stream.get_final_response()
    assert told(final.output) == told(api.responses.create(**asked(ANSWERS[name])).output)
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "7"}
        for item in final.output
        if item.type == "function_call"
    ]
    more = [{"role": "user", "content": "x"}, *final.output, *outputs, {"role": "user", "content": "so?<|end|>"}]
    answer = api.responses.create(model=MODEL, input=more, tools=FLAT)
    assert answer.output_text == "so?"
    counted = api.responses.input_tokens.count(model=MODEL, input=more, tools=FLAT)
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", answer.usage.input_tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_response(echoing, stream):
    body = {"input": "x" * 100, "cache_salt": "slow", "ignore_eos": True, "stream": stream}
    with (
        client_of(echoing) as client,
        client_of(echoing) as leaving,
    ):
        aborted = gauge(client, "engine_aborted")
        if stream:
            with leaving.stream("POST", RESPONSES, json=body) as response:
                assert next(response.iter_lines())
        else:
            with engine_held(echoing), send_post(echoing, RESPONSES, body):
                wait_until(lambda: echoing.api.engine.num_open == 1, "the request is open")
        wait_until(lambda: gauge(client, "engine_aborted") == aborted + 1, "the request was aborted")


def test_prompts_of_a_call_have_seeds_of_their_own(server):
    front = server.api.frontend

    def keys(**fields):
        return [(request.seed, request.choice) for request in front.read(CompletionBody(**fields), "r")[0]]

    call = keys(prompt=["ab", "ab", "c"], n=2, seed=7)
    assert len(set(call)) == 6, "equal prompts draw different noise"
    assert call == keys(prompt=["ab", "ab", "c"], n=2, seed=7), "a call repeats"
    assert call[:2] == keys(prompt="ab", n=2, seed=7) == [(7, 0), (7, 1)], "the first prompt is like a prompt alone"
    assert keys(prompt="ab", seed=-5) == [(-5, 0)]
    seeds = keys(prompt=["ab", "ab"])
    assert len({seeds[0], seeds[1], *keys(prompt="ab")}) == 3, "drawn anew for each call"
    assert all(0 <= seed < 2**53 for seed, _ in seeds), "JSON readers keep it"


def test_choices_share_a_salt_and_differ_in_id(server):
    front = server.api.frontend
    requests = front.read(CompletionBody(prompt=["ab", "c"], n=2, cache_salt="tenant"), "r")[0]
    assert len({request.id for request in requests}) == 4
    [namespace] = {request.namespace for request in requests}
    [long] = {request.namespace for request in front.read(CompletionBody(prompt="ab", cache_salt="s" * 10**6), "r")[0]}
    assert len(long) == len(namespace) == 32, "the engine keeps a digest with every cached prefix"
    assert long != namespace
    assert front.read(CompletionBody(prompt="ab"), "r")[0][0].namespace == ""


def test_a_seed_is_drawn_for_each_call(client):
    first, second = (client.post(CHAT, json={"messages": HELLO, "max_tokens": 3}).json()["seed"] for _ in range(2))
    assert first != second


def test_too_many_biases(client):
    body = {"prompt": "x", "logit_bias": {str(number): 1 for number in range(1025)}}
    error = client.post(COMPLETIONS, json=body).json()["error"]
    assert error["param"] == "logit_bias"
    assert "1025" in error["message"]
    assert "1024" in error["message"]


def test_every_field_without_effect_is_refused_with_another_value():
    cases = [case for case in cases_of(FOLDER / "refusals.yaml") if case.status == 400 and isinstance(case.body, dict)]
    for path, fields in ((COMPLETIONS, NEUTRAL), (RESPONSES, NEUTRAL_IN_RESPONSES)):
        refused = {name for case in cases if case.path == path for name, value in case.body.items() if value == ["?"]}
        assert refused == {name for name, allowed in fields.items() if allowed is not None}


def test_chat_needs_a_template(tmp_path):
    config = ServeConfig(target=str(write_target(tmp_path, template=None)))
    with pytest.raises(ApiError, match="/v1/completions") as caught:
        Frontend(config, info()).read(ChatBody(messages=HELLO), "r")[0]
    assert caught.value.status == 400


def test_the_page_names_every_limit():
    """By its number, with its unit where it counts bytes."""
    page = (ROOT / "docs" / "http_api.md").read_text()
    limit_rows = page[page.index("\n## Limits") : page.index("\n## Errors")]
    numbers = set(re.findall(r"[0-9][0-9,]*(?: [KM]iB)?", limit_rows))
    values = {}
    for module in (limits, connections, grammars, json_schema, notations, tools, work):
        values |= {name: value for name, value in vars(module).items() if re.match("(MAX|MOST)_", name)}
    elsewhere = {"MAX_CHOICES_PER_PROMPT", "MAX_ERROR_CHARS", "MAX_UNREAD_BYTES", "MOST_COMPILED", "MOST_PREFIXES"}
    seconds = {"MOST_SECONDS", "MOST_CHANGE"}
    beyond_integers = {"MOST_INTEGER", "MOST_DOUBLE"}
    assert values.keys() >= elsewhere | seconds | beyond_integers
    for name in sorted(values.keys() - elsewhere - seconds - beyond_integers):
        value = values[name]
        spellings = {f"{value:,}", f"{value // 2**10} KiB", f"{value // 2**20} MiB"}
        assert numbers & spellings, f"{name} is {value}"


def test_the_page_names_every_field():
    page = (ROOT / "docs" / "http_api.md").read_text()
    names = {name for code in re.findall(r"`([^`\n]+)`", page) for name in re.findall(r"\w+", code)}
    for body in (ChatBody, CompletionBody, ResponsesBody, TokenizeBody, DetokenizeBody):
        assert names.issuperset(body.model_fields), body
