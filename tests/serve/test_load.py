"""The load client against the real server over a fake engine, and its figures against plain arithmetic."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from slipstream.serve import load
from slipstream.serve.load import Answer, LoadResult, percentile, run_load
from slipstream.tests.serve.fake_engine import ROUND
from slipstream.tests.serve.fake_server import HELLO
from slipstream.tests.user_errors import user_error


@pytest.mark.parametrize(("stream", "concurrency"), [(False, 5), (True, 1), (True, 5)])
def test_answers_come_in_the_order_of_the_prompts(server, stream, concurrency):
    prompts = [*(f"prompt {index}" for index in range(7)), [104, 105], HELLO]
    options = {"concurrency": concurrency, "stream": stream, "num_warmup": 2}
    result = run_load(server.url, prompts, max_tokens=10, **options)
    assert result.errors == []
    texts = [answer.text for answer in result.answers]
    assert texts[:7] == [(f"prompt {index}" * 2)[:10] for index in range(7)]
    assert texts[8] == "hellohe"  # three of its ten tokens are the template's and leave no text
    assert [answer.completion_tokens for answer in result.answers] == [10] * 9
    assert result.completion_tokens == 90
    assert result.accept_length == 9 / 3
    assert result.accept_rate_by_position == [1.0] * (ROUND - 1)
    for answer in result.answers:
        assert answer.arrivals_s == sorted(answer.arrivals_s)
        assert bool(answer.arrivals_s) == stream
        assert all(0 < arrival <= answer.latency_s for arrival in answer.arrivals_s)
    url = server.url + "/v1/"  # as OpenAI's clients take it
    uneven = run_load(url, prompts[:3], prompt_fields=[{"max_tokens": length} for length in (3, 9, 5)], **options)
    assert [answer.completion_tokens for answer in uneven.answers] == [3, 9, 5]


@pytest.mark.parametrize("stream", [False, True])
def test_failures_are_counted_not_hidden(server, stream):
    result = run_load(server.url, ["fine", "x" * 300], stream=stream, max_tokens=4)
    assert [answer.error is None for answer in result.answers] == [True, False]
    assert "300" in result.errors[0]
    assert result.completion_tokens == 4


class Foreign(BaseHTTPRequestHandler):
    """Some other server, which gives the answer `status` and `content` to every request."""

    status = 200
    content = ""
    kind = "application/octet-stream"
    is_silent = False
    go_on = threading.Event()

    def do_GET(self):
        self.go_on.wait(60)

    def do_POST(self):
        if self.is_silent:
            self.go_on.wait(60)
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(self.status)
        self.send_header("Content-Type", self.kind)
        self.send_header("Content-Length", str(len(self.content.encode())))
        self.end_headers()
        self.wfile.write(self.content.encode())

    def log_message(self, *_: object):
        pass


@pytest.fixture(scope="module")
def foreign() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Foreign) as server, ThreadPoolExecutor() as pool:
        pool.submit(server.serve_forever, 0.01)
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


# the first end lines for some readers
SEPARATORS = "a\u2028b\u2029c\x85d"
LONG = "a" * 300_000
OVERLOADED = (
    *('{"detail": "overloaded"}', '["overloaded"]', '{"choices": null, "why": "overloaded"}', "<html>overloaded"),
    *('{"choices": ["overloaded"]}', '{"choices": [{"text": ["overloaded"]}]}'),
    '{"choices": [], "usage": ["overloaded"]}',
)
# of surrogate pairs
HALVES = r"""data: {"choices": [{"text": "a\ud83d"}]}
data: {"choices": [{"text": "\ude00\ud800", "finish_reason": "stop"}]}
"""


def event(text: str, **fields: object) -> str:
    body = {"choices": [{"text": text, "finish_reason": "stop"}], **fields}
    return f"data: {json.dumps(body, ensure_ascii=False)}"


@pytest.mark.parametrize(
    ("stream", "content", "text", "error"),
    [
        (False, event("a", error=None)[6:], "a", None),
        (True, "\n".join(["event: piece", event(SEPARATORS), "", "data: [DONE]", "", ""]), SEPARATORS, None),
        (True, "\r\n".join(["event: piece", event(SEPARATORS), "", "data: [DONE]", "", ""]), SEPARATORS, None),
        (True, f"{event(LONG)}\n\ndata: [DONE]\n\n", LONG, None),
        (True, f"{event(8 * LONG)}\n\n", "", "bytes"),
        (True, 'data: {"choices": [{"text": "a"}]}\n\n', "a", "the answer broke off"),
        (False, "no JSON", "", "JSON"),
        *((stream, odd, "", "overloaded") for stream in (False, True) for odd in OVERLOADED),
        (True, HALVES, "a\U0001f600\ufffd", None),
    ],
)
def test_answers_of_other_servers(foreign, stream, content, text, error, monkeypatch):
    monkeypatch.setattr(Foreign, "content", content)
    monkeypatch.setattr(Foreign, "status", 503 if error == "overloaded" else 200)
    [answer] = run_load(foreign, ["x"], model="m", stream=stream).answers
    assert answer.text == text
    assert error in answer.error if error else answer.error is None
    assert ("status 503" in str(answer.error)) == (error == "overloaded")


def test_a_page_in_place_of_a_stream_is_quoted(foreign, monkeypatch):
    monkeypatch.setattr(Foreign, "content", "<html>log in")
    monkeypatch.setattr(Foreign, "kind", "text/html")
    assert "<html>log in" in run_load(foreign, ["x"], model="m", stream=True).errors[0]


def test_a_silent_server_is_given_up(foreign, monkeypatch):
    """One that does not list its models, and one that takes a request, with its answer in pieces or in one."""
    monkeypatch.setattr(Foreign, "is_silent", True)
    for limit in ("SILENCE_S", "ANSWER_SILENCE_S", "WHOLE_ANSWER_S"):
        monkeypatch.setattr(load, limit, 0.1)
    with user_error("is not an OpenAI-compatible server .*Timeout"):
        run_load(foreign, ["x"])
    for stream in (True, False):
        with user_error(r"accepted a request and sent nothing for 0\.1 seconds"):
            run_load(foreign, ["x"], model="m", stream=stream)
    Foreign.go_on.set()


def test_a_server_that_is_not_there():
    with user_error(r"^http://127\.0\.0\.1:9 is not an OpenAI-compatible server .* give one like http"):
        run_load("http://127.0.0.1:9", ["x"])


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_comes_in_pieces_too(foreign, name, monkeypatch):
    deltas = [{"role": "assistant"}, {name: "hm"}, {name: ", so"}, {"content": "yes"}]
    bodies = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    bodies.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    monkeypatch.setattr(Foreign, "content", "".join(f"data: {json.dumps(body)}\n\n" for body in bodies))
    [answer] = run_load(foreign, [HELLO], model="m", stream=True).answers
    assert (answer.reasoning, answer.text, len(answer.arrivals_s)) == ("hm, so", "yes", 3)


def test_figures():
    answers = [
        Answer(completion_tokens=11, latency_s=1.0, rounds=5, decoded_tokens=10, accepted_by_position=[4, 1]),
        Answer(completion_tokens=31, latency_s=3.0, rounds=10, decoded_tokens=30, accepted_by_position=[9, 7, 4]),
        Answer(completion_tokens=99, latency_s=9.0, error="broken"),
    ]
    result = LoadResult(concurrency=2, wall_s=4.0, answers=answers)
    assert result.tokens_per_second == 42 / 4
    assert result.accept_length == 40 / 15
    assert result.accept_rate_by_position == [13 / 15, 8 / 15, 4 / 15]
    assert [percentile(range(1, 101), percent) for percent in (50, 95, 99)] == [50, 95, 99]
    assert percentile([7.0], 99) == 7.0
    assert percentile([], 99) is None
