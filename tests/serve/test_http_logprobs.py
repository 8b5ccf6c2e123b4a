"""Log-probabilities over HTTP: entries for the tokens whose text is returned, in the forms of OpenAI and vLLM."""

import json
import random
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.serve.chat.answers import AnswerFormat
from slipstream.serve.detokenize import Decoder, TextStream, TokenTexts
from slipstream.serve.http.launch import Server
from slipstream.serve.http.logprobs import LEAST, Scored, completion_logprobs
from slipstream.serve.http.schemas import ChatBody
from slipstream.serve.llm import Answer
from slipstream.serve.options import ServeConfig
from slipstream.serve.request import Output, Request, RequestStats, SamplingParams
from slipstream.tests.serve.fake_engine import logprobs_of
from slipstream.tests.serve.fake_server import CHAT, COMPLETIONS, HELLO, MODEL, events, serving, write_target
from slipstream.tests.serve.test_detokenize import TEXTS, TOKENIZERS, byte_fallback, byte_level, push_in_chunks

Entry = dict[str, Any]


@pytest.fixture(scope="module")
def ids(client: httpx.Client) -> dict[str, int]:
    """Ids of printable characters."""
    text = "".join(map(chr, range(32, 127)))
    return dict(zip(text, client.post("/tokenize", json={"prompt": text}).json()["tokens"], strict=True))


def answered(client: httpx.Client, path: str, body: dict[str, Any], *, stream: bool) -> list[Entry]:
    """The choices of an answer, streamed pieces joined."""
    response = client.post(path, json={**body, "stream": stream})
    assert response.status_code == 200, response.text
    if not stream:
        return response.json()["choices"]
    joined: dict[int, Entry] = {}
    for event in events(response):
        for piece in event["choices"]:
            text = piece["delta"].get("content", "") if path == CHAT else piece["text"]
            choice = joined.setdefault(piece["index"], {"index": piece["index"], "text": "", "logprobs": {}})
            choice["text"] += text
            choice["finish_reason"] = piece["finish_reason"]
            is_told = text or piece["finish_reason"]
            assert is_told or not any((piece["logprobs"] or {}).values()), "entries come with text"
            for name, values in (piece["logprobs"] or {}).items():
                if values is not None:
                    choice["logprobs"].setdefault(name, []).extend(values)
    return [joined[index] for index in sorted(joined)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", [[], ["efa"], ["c"]])
def test_completions(client: httpx.Client, ids: dict[str, int], stop: list[str], stream: bool) -> None:
    """Two choices of two prompts."""
    prompts = ["abcdef", "fed"]
    body = {"prompt": prompts, "n": 2, "max_tokens": 20, "logprobs": 2, "stop": stop}
    for index, choice in enumerate(answered(client, COMPLETIONS, body, stream=stream)):
        text = choice["text"]
        logprobs = choice["logprobs"]
        repeated = (prompts[index // 2] * 20)[:20]
        cut = min([repeated.find(word) for word in stop if word in repeated], default=20)
        assert text == repeated[:cut]
        assert logprobs["tokens"] == list(text)
        assert logprobs["text_offset"] == list(range(len(text)))
        expected = logprobs_of([ids[letter] for letter in text], 2)
        assert logprobs["token_logprobs"] == expected.tokens
        names = {token: letter for letter, token in ids.items()}
        columns = zip(text, expected.tokens, expected.top, expected.top_ids, logprobs["top_logprobs"], strict=True)
        for letter, logprob, top, top_ids, alternatives in columns:
            names_of_top = [names[token] for token in top_ids]
            assert alternatives == dict(zip(names_of_top, top, strict=True)) | {letter: logprob}


@pytest.mark.parametrize("stream", [False, True])
def test_chat(client: httpx.Client, ids: dict[str, int], stream: bool) -> None:
    body = {"messages": HELLO, "add_generation_prompt": False, "chat_template_kwargs": {"suffix": "a你"}}
    body |= {"max_tokens": 12, "logprobs": True}
    for k in (0, 3):
        [choice] = answered(client, CHAT, {**body, "top_logprobs": k}, stream=stream)
        text = choice["text"] if stream else choice["message"]["content"]
        assert text == "helloa你h", "special tokens have no text"
        content = choice["logprobs"]["content"]
        names = [entry["token"] for entry in content]
        assert names == ["<|user|>", *"helloa", "bytes:\\xe4", "bytes:\\xbd", "bytes:\\xa0", "<|user|>", "h"]
        assert b"".join(bytes(entry["bytes"]) for entry in content) == "<|user|>helloa你<|user|>h".encode()
        tokens = [ids.get(name, 2) for name in names]
        for scored, token, name in zip(content, tokens, names, strict=True):
            assert len(scored["top_logprobs"]) == k
            if not name.startswith("bytes"):
                expected = logprobs_of([token], k)
                assert scored["logprob"] == expected.tokens[0]
                assert [top["logprob"] for top in scored["top_logprobs"]] == expected.top[0]
    [choice] = answered(client, CHAT, {**body, "logprobs": False}, stream=stream)
    assert not choice["logprobs"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 7])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_echo(client: httpx.Client, ids: dict[str, int], logprobs: int | None, max_tokens: int, stream: bool) -> None:
    """As programs that score texts ask, by text and by token ids."""
    prompt = "I say hi"
    tokens = [ids[letter] for letter in prompt]
    for question in (prompt, tokens):
        body = {"prompt": question, "echo": True, "max_tokens": max_tokens, "logprobs": logprobs}
        [choice] = answered(client, COMPLETIONS, body, stream=stream)
        text = prompt + prompt[:max_tokens]
        assert (choice["text"], choice["finish_reason"]) == (text, "length")
        figures = choice["logprobs"]
        if logprobs is None:
            assert not figures
            continue
        expected = logprobs_of([ids[letter] for letter in text], logprobs)
        assert figures["tokens"] == list(text)
        assert figures["text_offset"] == list(range(len(text)))
        assert figures["token_logprobs"] == [None, *expected.tokens[1:]]
        assert figures["top_logprobs"][0] is None
        assert all(len(top) == logprobs + 1 for top in figures["top_logprobs"][1:])
    usage = client.post(COMPLETIONS, json=body).json()["usage"]
    assert (usage["completion_tokens"], usage["total_tokens"]) == (max_tokens, len(prompt) + max_tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_the_id_that_ends_an_answer(client: httpx.Client, ids: dict[str, int], stream: bool) -> None:
    """It has an entry and no text: entries are as many as tokens, and add up to the answer's log-probability."""
    end = 0
    for prompt in ([ids["a"], ids["b"], end], [end]):
        text = "ab" if len(prompt) > 1 else ""
        body = {"prompt": prompt, "max_tokens": 9, "logprobs": 1}
        [choice] = answered(client, COMPLETIONS, body, stream=stream)
        assert (choice["text"], choice["finish_reason"]) == (text, "stop")
        assert choice["logprobs"]["tokens"] == [*text, "<|end|>"]
        assert choice["logprobs"]["text_offset"] == list(range(len(text) + 1))
        assert choice["logprobs"]["token_logprobs"] == logprobs_of(prompt, 1).tokens
        [choice] = answered(client, COMPLETIONS, {**body, "echo": True}, stream=stream)
        assert choice["text"] == f"{text}<|end|>{text}"
        assert choice["logprobs"]["tokens"] == [*text, "<|end|>", *text, "<|end|>"]
        count = len(text)
        places = [*range(count + 1), *range(count + 7, 2 * count + 8)]
        assert choice["logprobs"]["text_offset"] == places


def test_prompt_logprobs(client: httpx.Client, ids: dict[str, int]) -> None:
    """vLLM's: of a completion by choice, of a chat for its one prompt."""
    body = {"prompt": ["abc", "x"], "n": 2, "max_tokens": 2, "prompt_logprobs": 1}
    for index, choice in enumerate(client.post(COMPLETIONS, json=body).json()["choices"]):
        assert choice["logprobs"] is None
        prompt = body["prompt"][index // 2]
        first, *entries = choice["prompt_logprobs"]
        assert first is None
        expected = logprobs_of([ids[letter] for letter in prompt[1:]], 1)
        columns = zip(prompt[1:], entries, expected.tokens, expected.ranks, expected.top, expected.top_ids, strict=True)
        for letter, alternatives, logprob, rank, (value,), (token,) in columns:
            assert alternatives[str(token)]["logprob"] == value
            assert alternatives[str(token)]["rank"] == 1
            assert alternatives[str(ids[letter])] == {"logprob": logprob, "rank": rank, "decoded_token": letter}
    chat = {"messages": HELLO, "max_tokens": 2, "prompt_logprobs": 0}
    answer = client.post(CHAT, json=chat).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in answer["choices"][0]
    assert "prompt_logprobs" not in client.post(CHAT, json={"messages": HELLO, "max_tokens": 2}).json()


def test_long_answers_are_written_on_a_thread(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "ab" * 120}], "max_tokens": 10, "logprobs": True}
    long = {"prompt": "abc", "n": 100, "max_tokens": 20, "logprobs": 1}
    choices = client.post(COMPLETIONS, json=long).json()["choices"]
    assert {json.dumps(choice["logprobs"]) for choice in choices} == {json.dumps(choices[0]["logprobs"])}
    echoed = {"prompt": "abcd" * 60, "max_tokens": 5, "echo": True, "logprobs": 1}
    answer, streamed = (answered(client, COMPLETIONS, echoed, stream=stream)[0] for stream in (False, True))
    assert answer["logprobs"] == streamed["logprobs"]
    assert client.post(CHAT, json=body).status_code == 200


def test_openais_client(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as client:
        chat = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=6,
            logprobs=True,
            top_logprobs=2,
        )
        content = chat.choices[0].logprobs.content
        assert [len(entry.top_logprobs) for entry in content] == [2] * 6
        stream = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=6, logprobs=True, stream=True
        )
        pieces = [piece.choices[0].logprobs for piece in stream]
        assert [entry.token for piece in pieces if piece for entry in piece.content] == [
            entry.token for entry in content
        ]
        completion = client.completions.create(model=MODEL, prompt="hi", max_tokens=0, echo=True, logprobs=1)
        assert completion.choices[0].logprobs.tokens == ["h", "i"]


def test_what_cannot_be_is_a_number() -> None:
    """JSON has no infinity."""
    texts = TokenTexts(byte_level())
    entry = Scored(5, 0, float("-inf"), 9, (-0.1, float("-inf")), (6, 7))
    columns = completion_logprobs([entry], 2, texts)
    assert columns["token_logprobs"] == [LEAST]
    assert sorted(columns["top_logprobs"][0].values()) == [LEAST, LEAST, -0.1]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS)
@settings(max_examples=60, deadline=None)
def test_bytes_of_tokens_join_to_the_text(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]()
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    texts = TokenTexts(tokenizer)
    joined = b"".join(map(texts.bytes_of, tokens)).decode()
    expected = tokenizer.decode(tokens)
    assert joined in (expected, f" {expected}"), "one tokenizer begins texts with a space of its own"
    before = [b"".join(map(texts.bytes_of, tokens[:index])) for index in range(len(tokens))]
    stripped = len(joined) - len(expected)
    lengths = [len(spelling.decode(errors="ignore")) for spelling in before]
    assert texts.starts(tokens, expected) == [max(count - stripped, 0) for count in lengths]


def test_special_and_unused_ids() -> None:
    tokenizer = byte_level()
    texts = TokenTexts(tokenizer)
    assert texts(tokenizer.eos_token_id) == "</s>"
    assert texts.bytes_of(tokenizer.eos_token_id) == b"</s>"
    assert (texts(10**6), texts.bytes_of(10**6)) == ("", b"")
    ids = [tokenizer.bos_token_id, *tokenizer("ab", add_special_tokens=False).input_ids]
    assert texts.starts(ids, "ab")[:2] == [0, 0]


@given(tokens=st.lists(st.integers(0, len(byte_level()) - 1), min_size=1, max_size=40), seed=st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_tokens_settle_with_their_text(tokens: list[int], seed: int) -> None:
    """However they are split over calls; those from the stop string on never do."""
    decoded = byte_level().decode(tokens, skip_special_tokens=True)
    rng = random.Random(seed)
    stop = [decoded[(at := rng.randrange(len(decoded))) : at + 2]] if decoded and rng.random() < 0.7 else []
    stream = TextStream(Decoder(byte_level()), stop)
    returned = 0
    settled = list[int]()

    def push(part: list[int], finish: Any) -> str:
        nonlocal returned
        text = real(part, finish)
        returned += len(text)
        settled.append(stream.num_settled)
        assert all(start < returned for start in stream.starts[: settled[-1]]) or finish
        return text

    real = stream.push
    stream.push = push  # type: ignore[method-assign]
    push_in_chunks(stream, tokens, seed)
    assert settled == sorted(settled)
    if stream.stopped:
        assert settled[-1] == sum(start < returned for start in stream.starts)
    else:
        assert settled[-1] == len(tokens)


def test_a_completion_keeps_the_space_that_its_tokenizer_drops_at_the_beginning_of_a_text(tmp_path: Path) -> None:
    """As Llama-2's does: text of a completion goes on from its prompt's; a chat's answer is a text of its own."""
    tokenizer = byte_fallback()
    target = write_target(tmp_path)
    tokenizer.save_pretrained(target)
    prompt = tokenizer("the the", add_special_tokens=False).input_ids
    count = 5
    tokens = prompt + (prompt * count)[:count]
    starts = [len(tokenizer.decode(tokens[:index])) for index in range(len(tokens))]
    decoded = tokenizer.decode(tokens)
    text = decoded[starts[len(prompt)] :]
    assert text.startswith(" "), "or this proves nothing"
    with (
        serving(ServeConfig(target=str(target), port=0)) as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
    ):
        body = {"prompt": "the the", "max_tokens": count, "logprobs": 0}
        for stream in (False, True):
            [choice] = answered(client, COMPLETIONS, body, stream=stream)
            assert choice["text"] == text
            [choice] = answered(client, COMPLETIONS, {**body, "echo": True}, stream=stream)
            assert (choice["text"], choice["logprobs"]["text_offset"]) == (decoded, starts)
        assert client.post(COMPLETIONS, json={**body, "logprobs": None}).json()["choices"][0]["text"] == text
        front = server.api.frontend
        chat = {"messages": [{"role": "user", "content": "the the"}], "max_tokens": count}
        ids = front.requests(ChatBody(**chat), "r")[0].prompt
        answer = client.post(CHAT, json=chat).json()["choices"][0]["message"]["content"]
    assert answer == tokenizer.decode((ids * count)[:count])
    request = Request(id="r", prompt=prompt, params=SamplingParams(max_tokens=count))
    form = AnswerFormat(front.decoder, continues=True)
    offline = Answer(request, form, (), 0)
    stats = RequestStats(completion_tokens=count)
    ended = Output(request_id="r", tokens=tokens[len(prompt) :], finish_reason="length", stats=stats)
    offline.add(ended)
    assert offline.generation(ended).text == text
