"""Runs of `slipstream regenerate`, answered by a stand-in for the engine or for an OpenAI-compatible endpoint."""

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from slipstream.data_tools import regenerate
from slipstream.data_tools.dialogue import row_seed
from slipstream.serve.request import Output, Request
from slipstream.tests.data_tools.chats import chat, write_jsonl


def reply(question: str, seed: int) -> str:
    """The answer of both stand-ins."""
    return f"I am {hashlib.sha256(f'{question} {seed}'.encode()).hexdigest()[:6]}."


class FakeLLM:
    """Runs at most `room` requests at once and gives each three tokens per step."""

    def __init__(self, target: str, draft: str = "none", **options: Any):
        self.tokenizer = AutoTokenizer.from_pretrained(target)
        self.engine = SimpleNamespace(info=SimpleNamespace(max_model_len=options.pop("max_model_len", 200)))
        self.options = {"draft": draft, **options}
        self.requests: list[Request] = []
        self.most_running = 0
        self.room = 4

    def stream(self, requests: Iterable[Request]) -> Iterator[Output]:
        pending = iter(requests)
        running = {}
        more = True
        while more or running:
            while more and len(running) < self.room:
                request = next(pending, None)
                more = request is not None
                if request is not None:
                    self.requests.append(request)
                    running[request.id] = self._answer(request)
            self.most_running = max(self.most_running, len(running))
            for identity in reversed(list(running)):
                tokens = running[identity][:3]
                running[identity] = running[identity][3:]
                reason = None
                if not running[identity]:
                    del running[identity]
                    reason = "stop" if tokens[-1] == self.tokenizer.eos_token_id else "length"
                yield Output(request_id=identity, tokens=tokens, finish_reason=reason)

    def _answer(self, request: Request) -> list[int]:
        assert len(request.prompt) + request.params.max_tokens <= self.engine.info.max_model_len
        question = self.tokenizer.decode(request.prompt).split("user\n")[-1].split("<|im_end|>")[0]
        text = reply(question, request.params.seed) + "<|im_end|>"
        return self.tokenizer(text)["input_ids"][: request.params.max_tokens]


class EndpointHandler(BaseHTTPRequestHandler):
    endpoint: "FakeEndpoint"
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet

    def do_GET(self):
        self.send(200, {"data": [{"id": self.endpoint.model, "max_model_len": self.endpoint.context}]})

    def do_POST(self):
        endpoint = self.endpoint
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with endpoint._lock:
            endpoint.open += 1
            endpoint.most_open = max(endpoint.most_open, endpoint.open)
            endpoint.bodies.append(body)
            endpoint.paths[self.path] += 1
            endpoint.headers.append(self.headers["Authorization"])
            is_held = endpoint.held_after is not None and len(endpoint.bodies) > endpoint.held_after
        if is_held or "silent" in endpoint.question(body):
            endpoint.go_on.wait(60)
        time.sleep(endpoint.delay_s)
        status, answer = endpoint.answer(body)
        with endpoint._lock:
            endpoint.open -= 1
        if status == 0:
            self.close_connection = True
        elif status == 200 and endpoint.streams and "choices" in answer:
            self.send(status, events(answer), "text/event-stream")
        else:
            self.send(status, answer)

    def send(self, status: int, body: Any, kind: str = "application/json"):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any):
        pass


class FakeEndpoint:
    """Serves /v1/models, /v1/chat/completions and /v1/completions on a free port. A context manager.

    Questions that hold "flaky" get 500, then 429, then a closed connection, then half a stream before their answer;
    "refused" gets 400, "broken" always 503, "odd" a body that is no completion, "silent" none; answers to "long" are
    cut, to "thinks" cut before any content, to "calls" a call without content, to "filtered" and "aborted" ended.
    With `context` a prompt (in words, or token ids) and its max_tokens, or one token, must fit. Questions after the
    first `held_after` are answered once `go_on` is set. Prompts of token ids are answered by what `written` makes of
    their text, and `token_ids` come along if the endpoint knows that field: it refuses fields in `unknown`. With
    `status` it refuses every question.
    """

    def __init__(
        self,
        delay_s: float = 0.0,
        context: int | None = None,
        held_after: int | None = None,
        *,
        model: str = "fake-model",
        streams: bool = True,
        status: int = 200,
        tokenizer: Any = None,
        render: Callable[[str], str] | None = None,
        unknown: Sequence[str] = (),
    ):
        self.delay_s = delay_s
        self.context = context
        self.held_after = held_after
        self.go_on = threading.Event()
        self.model = model
        self.streams = streams
        self.status = status
        self.tokenizer = tokenizer
        self.render = render
        self.unknown = unknown
        self.bodies: list[dict[str, Any]] = []
        self.paths: Counter[str] = Counter()
        self.headers: list[str | None] = []
        self.open = self.most_open = 0
        self._seen: Counter[str] = Counter()
        self._lock = threading.Lock()
        handler = type("Handler", (EndpointHandler,), {"endpoint": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> "FakeEndpoint":
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object):
        self.go_on.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def questions(self) -> list[str]:
        """The questions, in the order in which they came."""
        return [self.question(body) for body in self.bodies]

    def question(self, body: dict[str, Any]) -> str:
        if "messages" in body:
            return str(body["messages"][-1]["content"])
        return str(body["prompt"]) if self.tokenizer is None else str(self.tokenizer.decode(body["prompt"]))

    def answer(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Status (0: close the connection) and body."""
        question = self.question(body)
        with self._lock:
            self._seen[question] += 1
            attempt = self._seen[question]
        field = next((name for name in self.unknown if name in body), None)
        if field is not None:
            return 400, {"error": f"{field} is not supported; leave it out"}
        if self.status != 200:
            return self.status, {"error": "no"}
        if "flaky" in question and attempt <= 4:
            half = {"choices": [{"message": {"role": "assistant", "content": "hal"}, "finish_reason": None}]}
            return (500, 429, 0, 200)[attempt - 1], half if attempt == 4 else {"error": "later"}
        for word, status in (("refused", 400), ("broken", 503), ("odd", 200)):
            if word in question:
                return status, {"error": f"{word} it is"}
        length = len(question.split()) if "messages" in body else len(body["prompt"])
        if self.context is not None and length + body.get("max_tokens", 1) > self.context:
            return 400, {"message": f"This model's maximum context length is {self.context} tokens."}
        choice = self._message(question, body) if "messages" in body else self._completion(question, body)
        return 200, {"model": self.model, "choices": [choice], "usage": {"completion_tokens": 7}}

    def _message(self, question: str, body: dict[str, Any]) -> dict[str, Any]:
        calls = [{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
        special = {
            "long": ({}, "length"),
            "thinks": ({"content": None, "reasoning_content": "hm hm"}, "length"),
            "calls": ({"content": None, "tool_calls": calls}, "tool_calls"),
            "filtered": ({"content": "I"}, "content_filter"),
            "aborted": ({"content": "I"}, "abort"),
        }
        content = reply(question, body["seed"])
        message, reason = next((fields for word, fields in special.items() if word in question), ({}, "stop"))
        return {"message": {"role": "assistant", "content": content, **message}, "finish_reason": reason}

    def _completion(self, question: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.render is None:
            return {"text": reply(question, body["seed"]), "finish_reason": "stop"}
        ids = self.tokenizer(self.render(question))["input_ids"] + [self.tokenizer.eos_token_id]
        text = self.tokenizer.decode(ids[:-1], skip_special_tokens=body.get("skip_special_tokens", True))
        exact = {"token_ids": ids} if body.get("return_token_ids") else {}
        return {"text": text, "finish_reason": "stop", **exact}


def events(body: dict[str, Any]) -> bytes:
    """The body as a stream: each text in two pieces, the finish reason and the usage at the end."""
    [choice] = body["choices"]
    message = choice.get("message", {})
    ids = choice.get("token_ids")
    pieces = []
    for name in ("reasoning_content", "content"):
        text = message.get(name) or ""
        pieces += [{"delta": {name: part}} for part in (text[:2], text[2:])]
    for index, call in enumerate(message.get("tool_calls", [])):
        arguments = call["function"]["arguments"]
        first = {**call, "index": index, "function": {**call["function"], "arguments": arguments[:3]}}
        pieces.append({"delta": {"tool_calls": [first]}})
        pieces.append({"delta": {"tool_calls": [{"index": index, "function": {"arguments": arguments[3:]}}]}})
    if "text" in choice:
        text = choice["text"]
        parts = ((text[:2], ids[:1]), (text[2:], ids[1:])) if ids else ((text[:2], None), (text[2:], None))
        pieces = [{"text": part} | ({"token_ids": tokens} if tokens else {}) for part, tokens in parts]
    if choice["finish_reason"] is not None:
        last = {"text": ""} if "text" in choice else {"delta": {}}
        pieces.append({**last, "finish_reason": choice["finish_reason"]})
    chunks = [
        {"model": body.get("model"), "choices": [{"index": 0, "finish_reason": None, **piece}]} for piece in pieces
    ]
    chunks.append({"choices": [], "usage": body.get("usage")})
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in chunks) + b"data: [DONE]\n\n"


ROWS: list[dict[str, Any]] = [{"id": f"row{n}", "messages": chat(f"What is {n}?", "unknown")} for n in range(30)]
ROWS[4]["messages"] = chat("Hello", "unknown", "How are you?", "unknown", "Are you?")
ROWS[9]["messages"] = [{"role": "system", "content": "You are fine."}, *chat("Hello")]


def run(folder: Path, *options: object, rows: list[Any] = ROWS) -> list[dict[str, Any]]:
    data = write_jsonl(folder / "rows.jsonl", rows)
    regenerate.main(["--data", str(data), "-o", str(folder / "out.jsonl"), *map(str, options)])
    return lines(folder)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "out.jsonl.report").read_text())


def answered(row: dict[str, Any], seed: int = 0) -> list[dict[str, str]]:
    """The conversation as the stand-ins complete it."""
    messages = []
    for message in row["messages"]:
        if message["role"] != "assistant":
            messages.append(message)
        if message["role"] == "user":
            text = reply(message["content"], row_seed(seed, row["id"]))
            messages.append({"role": "assistant", "content": text})
    return messages


EXPECTED = [answered(row) for row in ROWS]


def error(capsys: pytest.CaptureFixture[str], folder: Path, *options: object, rows: list[Any] = ROWS) -> str:
    with pytest.raises(SystemExit) as caught:
        run(folder, *options, rows=rows)
    assert caught.value.code != 0
    return capsys.readouterr().err.strip().splitlines()[-1]
