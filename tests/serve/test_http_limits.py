"""Requests that are too large are refused by name, before they cost anything; those at the limit are served."""

import json
import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.responses import JSONResponse
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from slipstream.serve.http import connections, limits
from slipstream.serve.http.app import PiecewiseResponse
from slipstream.serve.http.frontend import Frontend
from slipstream.serve.http.limits import ApiError, longest_text
from slipstream.serve.http.schemas import CompletionBody
from slipstream.serve.options import ServeConfig
from slipstream.tests.serve.fake_engine import info
from slipstream.tests.serve.fake_server import COMPLETIONS
from slipstream.tests.serve.test_detokenize import byte_fallback, byte_level
from slipstream.tests.sources import ROOT

JSON = {"Content-Type": "application/json"}
BODY_BYTES = 4 * 2**20
COMPOSED = "\u1f82"  # of four characters, the most that become one
PLACES = 64 + 256  # max_running and max_waiting


def chunks(size: int) -> Iterator[bytes]:
    """A body of exactly `size` bytes, without its length in the header."""
    head = b'{"prompt": "x", "max_tokens": 1, "user": "'
    yield head
    yield b"x" * (size - len(head) - 2)
    yield b'"}'


def test_a_body_that_is_too_long_is_refused_while_it_is_read_or_before(client, server):
    assert client.post(COMPLETIONS, content=chunks(BODY_BYTES), headers=JSON).status_code == 200
    response = client.post(COMPLETIONS, content=chunks(BODY_BYTES + 1), headers=JSON)
    assert response.status_code == 413
    assert str(BODY_BYTES) in response.json()["error"]["message"]
    assert client.post(COMPLETIONS, content=chunks(10 * BODY_BYTES), headers=JSON).status_code == 413
    assert server.api.bodies.num_bytes == 0
    with socket.create_connection(server.listener.getsockname()[:2], timeout=120) as connection:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {BODY_BYTES + 1}\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413 "), "before it is sent"


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize(
    ("path", "kind", "status"),
    [(COMPLETIONS, "application/json", 413), (COMPLETIONS, "text/plain", 415), ("/x", "", 404)],
)
def test_clients_that_send_all_before_they_read_see_why(server, path, kind, status, is_chunked):
    """As urllib and requests do: a connection that is closed with unread data is reset, and the answer is lost."""
    size = 2 * BODY_BYTES
    length = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {size}"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: {kind}\r\n{length}\r\n\r\n"
    with socket.create_connection(server.listener.getsockname()[:2], timeout=60) as connection:
        connection.sendall(head.encode())
        connection.sendall(b"%x\r\n" % size + b" " * size + b"\r\n0\r\n\r\n" if is_chunked else b" " * size)
        answer = connection.makefile("rb").read()
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_a_body_without_end_is_read_to_a_bound(server, monkeypatch):
    monkeypatch.setattr(connections, "MAX_UNREAD_BYTES", BODY_BYTES // 2)
    for length in (f"Content-Length: {10**9}", "Transfer-Encoding: chunked"):
        head = f"POST /x HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n"
        with socket.create_connection(server.listener.getsockname()[:2], timeout=60) as connection:
            connection.sendall(head.encode())
            assert connection.recv(100).startswith(b"HTTP/1.1 404 ")
            chunk = b"1000\r\n" + b" " * 2**12 + b"\r\n"
            with pytest.raises(OSError, match=r"reset|[Bb]roken"):
                connection.sendall(10**5 * chunk)


def test_a_message_stays_short_whatever_it_quotes(client):
    response = client.post(COMPLETIONS, json={f"field{index}": 1 for index in range(10**4)})
    assert response.status_code == 400
    assert len(response.content) < 5000


def test_limits_follow_the_context():
    tokenizer = byte_level()
    small, large = (limits.HttpLimits.of(ServeConfig(), context, tokenizer) for context in (2048, 2**20))
    assert (small.body_bytes, small.choices) == (BODY_BYTES, PLACES // 2)
    assert large.body_bytes == 16 * 2**20
    assert large.values > 2**20, "a context full of token ids"
    assert limits.HttpLimits.of(ServeConfig(max_running=1, max_waiting=0), 2048, tokenizer).choices == 1


def with_parts(normalizer: Any = None, pre_tokenizer: Any = None, added: list[AddedToken] | None = None) -> Any:
    """GPT-2 style: one token per byte, one for COMPOSED, and `<e>`."""
    byte_level_step = pre_tokenizers.ByteLevel(add_prefix_space=False)
    [(composed, _)] = byte_level_step.pre_tokenize_str(COMPOSED)
    first, second, third = composed
    vocabulary = ["<e>", *sorted(pre_tokenizers.ByteLevel.alphabet()), first + second, composed]
    merges = [(first, second), (first + second, third)]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(vocabulary)}, merges))
    tokenizer.normalizer = normalizer
    steps = [byte_level_step] if pre_tokenizer is None else [pre_tokenizer, byte_level_step]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>")
    fast.add_tokens(added or [])
    return fast


BUNDLED = AutoTokenizer.from_pretrained(ROOT / "assets/tiny-target")
SOUND: dict[str, Any] = {
    "bundled": BUNDLED,
    "byte_level": byte_level(),
    "byte_fallback": byte_fallback(),
    "NFC": with_parts(normalizers.NFC()),
    "NFKC": with_parts(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "replace": with_parts(normalizers.Replace("abcd", "x")),
}
# Composed from up to four characters, from one of more bytes, ligatures; runs that are one token; special tokens.
PIECES = ["\u03b1\u0313\u0300\u0345", "e\u0301", "\u1100\u1161\u11a8", "\u212b", "\ufb03", "abcd", " " * 40, "\n" * 9]
PIECES += ["<e>", "<|im_start|>", "querywithlocation", "▁the▁", "\U0001f9ff", "a", "\0"]
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.characters(codec="utf-8")), max_size=60).map("".join)


@pytest.mark.parametrize("name", SOUND)
@given(text=TEXTS)
@settings(max_examples=60, deadline=None)
def test_no_text_that_fits_is_refused(name, text):
    tokens = SOUND[name](text, add_special_tokens=False, verbose=False).input_ids
    bound = longest_text(SOUND[name], len(tokens))
    assert bound is not None
    assert len(text) <= bound


def test_the_bound_is_near():
    assert longest_text(BUNDLED, 2048) == 2048 * len("querywithlocation")
    assert longest_text(with_parts(normalizers.NFC()), 10) == 10 * 4 * len("<e>")


class Trimming(PreTrainedTokenizerFast):
    """A model's tokenizer with an encoding of its own."""

    def _encode_plus(self, text: Any, *arguments: Any, **options: Any) -> Any:
        return super()._encode_plus(text.strip(), *arguments, **options)


@pytest.mark.parametrize(
    "tokenizer",
    [
        with_parts(normalizers.Strip()),
        with_parts(normalizers.Replace("a", "")),
        with_parts(pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
        with_parts(pre_tokenizer=pre_tokenizers.Split(" ", "removed")),
        with_parts(added=[AddedToken("<pad>", lstrip=True)]),
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<u>": 0}, unk_token="<u>"))),
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0}, []))),
        Trimming(tokenizer_object=byte_level().backend_tokenizer),
        object(),
    ],
)
def test_where_text_may_vanish_there_is_no_bound(tokenizer):
    assert longest_text(tokenizer, 10) is None


def test_a_prompt_that_is_too_long_is_told_to_the_client_alone(caplog):
    """transformers would warn of it, in the log."""
    front = Frontend(ServeConfig(target=str(ROOT / "assets/tiny-target")), info(2048, 4096))
    logger = logging.getLogger("transformers")  # which hands nothing on to its parents
    logger.addHandler(caplog.handler)
    with pytest.raises(ApiError, match="has 3000 tokens"):
        front.read(CompletionBody(prompt="a\n" * 1500), "r")[0]
    logger.removeHandler(caplog.handler)
    assert not caplog.records


def test_a_long_body_of_json_is_read_as_json_does(client):
    """Whatever stands in strings is no structure."""
    text = '[{"\\"\\\\' * 5000
    body = json.dumps({"prompt": "ab", "max_tokens": 4, "user": text, "metadata": {text: [text]}})
    assert client.post(COMPLETIONS, content=body, headers=JSON).json()["choices"][0]["text"] == "abab"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values),
    max_leaves=20,
)


@given(VALUES)
def test_an_answer_in_pieces_is_the_same_json(value):
    assert PiecewiseResponse(value).body == JSONResponse(value).body


ENTRY = {"token": "a", "logprob": -0.5, "top_logprobs": [{"token": "a", "logprob": -0.5}] * 20}


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": [{"index": 0, "logprobs": {"content": [ENTRY] * 50}}] * 50},
        {"choices": [{"index": 0, "prompt_logprobs": [None, *[ENTRY] * 50]}]},
        {"output": [{"type": "message", "content": [{"text": "a", "logprobs": [ENTRY] * 50}]}]},
    ],
)
def test_a_piece_of_an_answer_has_a_token(answer):
    """Other streams wait for one piece at most."""
    pieces = [*PiecewiseResponse(None)._pieces(answer, 3)]
    assert max(map(len, pieces)) <= len(JSONResponse(ENTRY).body)
