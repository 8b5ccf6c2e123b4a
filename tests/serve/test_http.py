"""Answers of the HTTP server over a fake engine process, which repeats the prompt's own tokens again and again."""

import json
from itertools import cycle, islice
from typing import Any

import httpx
import openai
import pytest

from slipstream.serve.http.launch import Server
from slipstream.tests.serve.fake_engine import CONTEXT, ROUND
from slipstream.tests.serve.fake_server import CHAT, COMPLETIONS, HELLO, MODEL, events, gauge, wait_until


def repeated(prompt: str, num_tokens: int) -> str:
    """Returns the answer of the fake engine; each byte is one token."""
    return bytes(islice(cycle(prompt.encode()), num_tokens)).decode(errors="replace")


def test_completion(client: httpx.Client) -> None:
    body = client.post(COMPLETIONS, json={"prompt": "Zoë 👍!", "max_tokens": 23}).json()
    assert body["object"] == "text_completion"
    assert body["model"] == MODEL
    [choice] = body["choices"]
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    assert choice["text"] == repeated("Zoë 👍!", 23)
    prompt_len = len("Zoë 👍!".encode())
    assert body["usage"] == {
        "prompt_tokens": prompt_len,
        "completion_tokens": 23,
        "total_tokens": prompt_len + 23,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    rounds = -(-22 // ROUND)
    assert body["metrics"]["speculative_decoding"] == {
        "mean_acceptance_length": 1 + 15 / rounds,
        "draft_acceptance_rate": 15 / 16,
        "acceptance_histogram": [0, 1, 7],
        "num_spec_steps": rounds,
        "num_accepted_draft_tokens": 15,
        "num_draft_tokens": 16,
        "num_spec_tokens": ROUND - 1,
    }


def test_chat_renders_the_template(client: httpx.Client) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": [], "annotations": []},
    ]
    num_tokens = len("be briefabc") + 4  # a special token before each message and one before the answer
    body = client.post(CHAT, json={"messages": messages, "max_tokens": num_tokens}).json()
    assert body["object"] == "chat.completion"
    assert body["usage"]["prompt_tokens"] == num_tokens
    message = body["choices"][0]["message"]
    assert (message["role"], message["content"]) == ("assistant", "be briefabc")
    request = {"messages": HELLO, "add_generation_prompt": False, "chat_template_kwargs": {"suffix": "??"}}
    body = client.post(CHAT, json={**request, "max_tokens": 8}).json()
    assert body["choices"][0]["message"]["content"] == "hello??"


@pytest.mark.parametrize("prompt", ["hello", [104, 101, 108], ["abc", "defg"], [[104, 105], [106]], ["a", [104]]])
def test_prompt_forms_and_n(client: httpx.Client, prompt: Any) -> None:
    body = client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 4, "n": 2}).json()
    single = isinstance(prompt, str) or isinstance(prompt[0], int)
    prompts = [prompt] if single else prompt
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(prompts)))
    lengths = [len(part) for part in prompts]
    assert body["usage"]["prompt_tokens"] == sum(lengths)
    assert body["usage"]["completion_tokens"] == 8 * len(prompts)
    texts = [choice["text"] for choice in body["choices"]]
    assert texts[::2] == texts[1::2]
    expected = [client.post(COMPLETIONS, json={"prompt": part, "max_tokens": 4}).json() for part in prompts]
    assert texts[::2] == [answer["choices"][0]["text"] for answer in expected]


def streamed(client: httpx.Client, path: str, request: dict[str, Any]) -> tuple[list[str], list[str], dict[str, Any]]:
    """Texts and finish reasons by choice, and usage and metrics, of a stream of many pieces."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *pieces, last = events(client.post(path, json={**request, **options}))
    assert last["choices"] == []
    assert len({event["id"] for event in pieces}) == 1
    if path == CHAT:
        assert pieces[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    texts = [""] * request.get("n", 1)
    reasons = [""] * request.get("n", 1)
    for event in pieces:
        assert event["usage"] is None
        [choice] = event["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "") if path == CHAT else choice["text"]
        reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    assert len(pieces) > 1, "text comes round by round, but for what had to wait"
    return texts, reasons, {name: last[name] for name in ("usage", "metrics")}


@pytest.mark.parametrize(("path", "extra"), [(CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "héllo 👍"})])
def test_streams_equal_whole_answers(client: httpx.Client, path: str, extra: dict[str, Any]) -> None:
    request = {**extra, "max_tokens": 26, "n": 2, "cache_salt": "slow"}
    answer = client.post(path, json=request).json()
    texts, reasons, counts = streamed(client, path, request)
    assert texts == [choice["message"]["content"] if path == CHAT else choice["text"] for choice in answer["choices"]]
    assert reasons == [choice["finish_reason"] for choice in answer["choices"]]
    assert counts == {"usage": answer["usage"], "metrics": answer["metrics"]}
    for event in events(client.post(path, json={**request, "stream": True})):
        assert not {"usage", "metrics"} & event.keys(), "only when it is asked for"


@pytest.mark.parametrize(("path", "prompt"), [(CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "hello"})])
def test_usage_in_every_event(client: httpx.Client, path: str, prompt: dict[str, Any]) -> None:
    """As GuideLLM asks for it; the counts of a choice are those of its token ids so far."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**prompt, "n": 2, "max_tokens": 13, "cache_salt": "slow", "return_token_ids": True, "stream": True}
    *pieces, last = events(client.post(path, json={**body, "stream_options": options}))
    num_prompt = last["usage"]["prompt_tokens"]
    counts = [0, 0]
    for event in pieces:
        [choice] = event["choices"]
        counts[choice["index"]] += len(choice.get("token_ids", []))
        count = counts[choice["index"]]
        expected = {"prompt_tokens": num_prompt, "completion_tokens": count, "total_tokens": num_prompt + count}
        assert event["usage"] == expected
    assert counts == [13, 13]
    assert last["usage"]["completion_tokens"] == 26
    for options in ({"include_usage": False, "continuous_usage_stats": True}, {"continuous_usage_stats": True}):
        usage_events = events(client.post(path, json={**body, "stream_options": options}))
        assert not any("usage" in event for event in usage_events), "as vLLM: only with include_usage"


@pytest.mark.parametrize("stop", ["lo w", ["zzz", "o wo", "lo w"], ["d", "ld"]])
def test_stop_strings(client: httpx.Client, stop: str | list[str]) -> None:
    full = repeated("hello world", 200)
    strings = [stop] if isinstance(stop, str) else stop
    end, start = min((full.find(s) + len(s), full.find(s)) for s in strings if s in full)
    request = {"prompt": "hello world", "max_tokens": 200, "stop": stop, "cache_salt": "slow"}
    answer = client.post(COMPLETIONS, json=request).json()
    [choice] = answer["choices"]
    usage = answer["usage"]
    assert (choice["text"], choice["finish_reason"]) == (full[:start], "stop")
    assert usage["completion_tokens"] == end, "tokens up to the one that completes the stop string; one byte each"
    assert answer["metrics"]["speculative_decoding"]["num_spec_steps"] == -(-(end - 1) // ROUND)
    counts = {"usage": usage, "metrics": answer["metrics"]}
    assert streamed(client, COMPLETIONS, request) == ([full[:start]], ["stop"], counts)
    wait_until(lambda: gauge(client, "engine_running") == 0, "the engine is free")


def test_stop_ids(client: httpx.Client) -> None:
    eos = 0
    assistant = 3
    prompt = [104, 105, assistant, 106, eos, 107]
    for request, num_tokens in (
        ({}, 5),
        ({"stop_token_ids": [assistant]}, 3),
        ({"ignore_eos": True}, 20),
        ({"ignore_eos": True, "stop_token_ids": [105]}, 2),
    ):
        body = client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 20, **request}).json()
        assert body["usage"]["completion_tokens"] == num_tokens
        assert body["choices"][0]["finish_reason"] == ("length" if num_tokens == 20 else "stop")
    assert (
        body["choices"][0]["text"]
        == client.post(COMPLETIONS, json={"prompt": [104], "max_tokens": 1}).json()["choices"][0]["text"]
    ), "the stop id is counted and not shown"


def test_models(client: httpx.Client) -> None:
    [model] = client.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == (MODEL, CONTEXT)
    assert model["num_spec_tokens"] == 2
    assert (model["exact"], model["inexact_reason"], model["system_fingerprint"]) == (False, "not known", "fp_fake")
    assert client.get(f"/v1/models/{MODEL}").json() == model
    assert client.get("/health").json()["status"] == "ok"


def test_openai_client_works_unchanged(server: Server) -> None:
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
    assert chunks[-1].usage is not None
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


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_events_are_whole_for_readers_that_know_more_line_ends(client: httpx.Client, separator: str) -> None:
    body = {"prompt": f"a{separator}b", "max_tokens": 12, "stream": True}
    with client.stream("POST", COMPLETIONS, json=body) as response:
        lines = [line for line in response.iter_lines() if line]  # splits as str.splitlines does
    assert lines.pop() == "data: [DONE]"
    pieces = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines]
    assert "".join(pieces) == repeated(f"a{separator}b", 12)
