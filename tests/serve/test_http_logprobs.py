"""Log-probabilities over HTTP: spellings and places of tokens, whatever the tokenizer."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.serve.chat.answers import AnswerFormat
from slipstream.serve.detokenize import Decoder, TextStream, TokenTexts
from slipstream.serve.http.logprobs import LEAST, Scored, completion_logprobs
from slipstream.serve.http.schemas import ChatBody
from slipstream.serve.llm import Answer
from slipstream.serve.options import ServeConfig
from slipstream.serve.request import Output, Request, RequestStats, SamplingParams
from slipstream.tests.serve.check_server import Case, faults_of
from slipstream.tests.serve.fake_server import CHAT, COMPLETIONS, client_of, serving, write_target
from slipstream.tests.serve.test_detokenize import TEXTS, TOKENIZERS, byte_fallback, byte_level, push_in_chunks


def test_what_cannot_be_is_a_number():
    """JSON has no infinity."""
    texts = TokenTexts(byte_level())
    entry = Scored(5, 0, float("-inf"), 9, (-0.1, float("-inf")), (6, 7))
    columns = completion_logprobs([entry], 2, texts)
    assert columns["token_logprobs"] == [LEAST]
    assert sorted(columns["top_logprobs"][0].values()) == [LEAST, LEAST, -0.1]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS)
@settings(max_examples=60, deadline=None)
def test_bytes_of_tokens_join_to_the_text(name, text):
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


def test_special_and_unused_ids():
    tokenizer = byte_level()
    texts = TokenTexts(tokenizer)
    assert texts(tokenizer.eos_token_id) == "</s>"
    assert texts.bytes_of(tokenizer.eos_token_id) == b"</s>"
    assert (texts(10**6), texts.bytes_of(10**6)) == ("", b"")
    ids = [tokenizer.bos_token_id, *tokenizer("ab", add_special_tokens=False).input_ids]
    assert texts.starts(ids, "ab")[:2] == [0, 0]


@given(tokens=st.lists(st.integers(0, len(byte_level()) - 1), min_size=1, max_size=40), seed=st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_tokens_settle_with_their_text(tokens, seed):
    """However they are split over calls; those from the stop string on never do."""
    decoded = byte_level().decode(tokens, skip_special_tokens=True)
    rng = random.Random(seed)
    stop = [decoded[(at := rng.randrange(len(decoded))) : at + 2]] if decoded and rng.random() < 0.7 else []
    stream = TextStream(Decoder(byte_level()), stop)
    returned = 0
    settled = []

    def push(part, finish):
        nonlocal returned
        text = real(part, finish)
        returned += len(text)
        settled.append(stream.num_settled)
        assert all(start < returned for start in stream.starts[: settled[-1]]) or finish
        return text

    real = stream.push
    stream.push = push
    push_in_chunks(stream, tokens, seed)
    assert settled == sorted(settled)
    if stream.stopped:
        assert settled[-1] == sum(start < returned for start in stream.starts)
    else:
        assert settled[-1] == len(tokens)


def test_a_completion_keeps_the_space_that_its_tokenizer_drops_at_the_beginning_of_a_text(tmp_path):
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
        client_of(server) as client,
    ):
        body = {"prompt": "the the", "max_tokens": count, "logprobs": 0}
        for stream in (False, True):
            for echo, choice in (
                (False, {"text": text}),
                (True, {"text": decoded, "logprobs": {"text_offset": starts}}),
            ):
                fields = {**body, "stream": stream, "echo": echo}
                assert faults_of(Case("a text", COMPLETIONS, fields, answer={"choices": [choice]}), client) == []
        assert client.post(COMPLETIONS, json={**body, "logprobs": None}).json()["choices"][0]["text"] == text
        front = server.api.frontend
        chat = {"messages": [{"role": "user", "content": "the the"}], "max_tokens": count}
        ids = front.read(ChatBody(**chat), "r")[0][0].prompt
        answer = client.post(CHAT, json=chat).json()["choices"][0]["message"]["content"]
    assert answer == tokenizer.decode((ids * count)[:count])
    request = Request(id="r", prompt=prompt, params=SamplingParams(max_tokens=count))
    form = AnswerFormat(front.decoder, continues=True)
    offline = Answer(request, form, (), 0)
    stats = RequestStats(completion_tokens=count)
    ended = Output(request_id="r", tokens=tokens[len(prompt) :], finish_reason="length", stats=stats)
    offline.add(ended)
    assert offline.generation(ended).text == text
