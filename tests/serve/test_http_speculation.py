"""`speculation` over HTTP: traces come with their tokens, streamed or not; figures as vLLM sends them."""

from itertools import cycle, islice
from typing import Any

import httpx
import openai
import pytest

from slipstream.serve.http.launch import Server
from slipstream.tests.serve.fake_engine import ROUND, trace_of
from slipstream.tests.serve.fake_server import CHAT, COMPLETIONS, HELLO, MODEL, RESPONSES, events

Entry = dict[str, Any]
TRACE = {"speculation": {"trace": True}}


def traces(client: httpx.Client, path: str, body: dict[str, Any], *, stream: bool) -> list[list[Entry]]:
    """Returns the trace of each choice; streamed pieces are joined."""
    response = client.post(path, json={**body, "stream": stream})
    assert response.status_code == 200, response.text
    if not stream:
        return [choice["speculation"]["trace"] for choice in response.json()["choices"]]
    entries: list[list[Entry]] = [[] for _ in range(body.get("n", 1))]
    for event in events(response):
        for piece in event["choices"]:
            text = piece["delta"].get("content", "") if path == CHAT else piece["text"]
            trace = piece.get("speculation", {"trace": []})["trace"]
            assert text == "".join(entry["token"] for entry in trace)[: len(text)]
            entries[piece["index"]] += trace
    return entries


def expected(client: httpx.Client, prompt: str, count: int) -> list[Entry]:
    """The fake engine's answer of `count` bytes."""
    ids = client.post("/tokenize", json={"prompt": "".join(map(chr, range(256)))[:128]}).json()["tokens"]
    names: dict[int | None, str | None] = {token: chr(code) for code, token in enumerate(ids)}
    names[None] = None  # withheld
    tokens = [ids[ord(letter)] for letter in islice(cycle(prompt), count)]
    entries = trace_of(tokens[:1], 0)
    for number, start in enumerate(range(1, count, ROUND), 1):
        entries += trace_of(tokens[start : start + ROUND], number)
    return [
        {
            "id": token,
            "token": names[token],
            "source": entry.source,
            "position": entry.position,
            "round": entry.round,
            "refused": [{"id": other, "token": names.get(other, "")} for other in entry.refused],
            "drafted": entry.drafted,
            "rows": entry.rows,
        }
        for token, entry in zip(tokens, entries, strict=True)
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_choices", [1, 2])
def test_completions(client: httpx.Client, num_choices: int, stream: bool) -> None:
    body = {"prompt": "abcdef", "n": num_choices, "max_tokens": 11, "cache_salt": "slow", **TRACE}
    assert traces(client, COMPLETIONS, body, stream=stream) == [expected(client, "abcdef", 11)] * num_choices


def test_chat(client: httpx.Client) -> None:
    """Special tokens, which have no text, and parts of characters have entries, too."""
    body = {"messages": HELLO, "add_generation_prompt": False, "chat_template_kwargs": {"suffix": "a你"}}
    [entries] = traces(client, CHAT, {**body, "max_tokens": 12, **TRACE}, stream=False)
    names = ["<|user|>", *"helloa", "bytes:\\xe4", "bytes:\\xbd", "bytes:\\xa0", "<|user|>", "h"]
    assert [entry["token"] for entry in entries] == names
    assert [entry["round"] for entry in entries] == [0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4]
    assert [entry["position"] for entry in entries] == [0, *[1, 2, 0] * 3, 1, 2]
    response = client.post(CHAT, json={**body, "max_tokens": 12, "stream": True, **TRACE})
    pieces = [event["choices"][0] for event in events(response)]
    assert [entry for piece in pieces for entry in piece.get("speculation", {"trace": []})["trace"]] == entries


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["efa", "c", "b"])
def test_entries_end_with_the_tokens_that_count(client: httpx.Client, stop: str, stream: bool) -> None:
    """With the one that completes a stop string, or the id that ends the answer."""
    text = "abcdef" * 3
    count = text.index(stop) + len(stop)
    body = {"prompt": "abcdef", "max_tokens": 20, "stop": stop, "cache_salt": "slow", **TRACE}
    [entries] = traces(client, COMPLETIONS, body, stream=stream)
    assert entries == expected(client, "abcdef", 20)[:count]
    usage = client.post(COMPLETIONS, json=body).json()
    assert usage["usage"]["completion_tokens"] == count
    accepted = sum(entry["position"] > 0 for entry in entries)
    assert usage["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] == accepted


@pytest.mark.parametrize("stream", [False, True])
def test_the_id_that_ends_an_answer_has_an_entry(client: httpx.Client, stream: bool) -> None:
    ids = client.post("/tokenize", json={"prompt": "hij"}).json()["tokens"]
    body = {"prompt": [*ids, 0], "max_tokens": 9, **TRACE}
    [entries] = traces(client, COMPLETIONS, body, stream=stream)
    assert [(entry["id"], entry["token"], entry["position"]) for entry in entries[-1:]] == [(0, "<|end|>", 0)]
    assert len(entries) == 4


def test_without_drafts(client: httpx.Client) -> None:
    """No figures, since there is no speculation to judge; a trace may still be asked for."""
    body = {"prompt": "abc", "max_tokens": 7}
    answer = client.post(COMPLETIONS, json=body).json()
    plain = client.post(COMPLETIONS, json={**body, "speculation": {"enabled": False, "trace": True}}).json()
    assert plain["metrics"] == {"speculative_decoding": None}
    assert plain["usage"] == answer["usage"]
    assert plain["choices"][0]["text"] == answer["choices"][0]["text"]
    assert len(plain["choices"][0]["speculation"]["trace"]) == 7
    assert "speculation" not in answer["choices"][0]


def test_responses_have_figures_and_refuse_traces(client: httpx.Client) -> None:
    answer = client.post(RESPONSES, json={"input": "abc", "max_output_tokens": 7}).json()
    chat = client.post(CHAT, json={"messages": [{"role": "user", "content": "abc"}], "max_tokens": 7}).json()
    assert answer["metrics"] == chat["metrics"]
    assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    refused = client.post(RESPONSES, json={"input": "abc", **TRACE})
    assert refused.status_code == 400
    assert "speculation.trace is true; it is not written here" in refused.text


def test_figures_of_several_choices_are_sums(client: httpx.Client) -> None:
    one_choice, three = (
        client.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 8, "n": n}).json()["metrics"] for n in (1, 3)
    )
    single = one_choice["speculative_decoding"]
    sums = three["speculative_decoding"]
    assert sums["acceptance_histogram"] == [3 * count for count in single["acceptance_histogram"]]
    assert sums["mean_acceptance_length"] == single["mean_acceptance_length"]
    assert sum(single["acceptance_histogram"]) == single["num_spec_steps"] == 3


def test_openais_client(server: Server) -> None:
    options = {"include_usage": True}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as client:
        chat = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=9, extra_body=TRACE)
        stream = client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=9, extra_body=TRACE, stream=True, stream_options=options
        )
        *pieces, last = list(stream)
    trace = chat.choices[0].speculation["trace"]
    assert len(trace) == chat.usage.completion_tokens == 9
    parts = [getattr(piece.choices[0], "speculation", {"trace": []})["trace"] for piece in pieces]
    assert [entry for part in parts for entry in part] == trace
    assert last.metrics == chat.metrics
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as client,
        pytest.raises(openai.BadRequestError) as error,
    ):
        client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=9, extra_body={"speculation": {"traces": True}}
        )
    assert error.value.param == "speculation.traces"
