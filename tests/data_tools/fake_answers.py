"""Runs of `slipstream regenerate`, answered by a stand-in for the engine or for an OpenAI-compatible endpoint."""

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
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
    """What both stand-ins answer."""
    return f"I am {hashlib.sha256(f'{question} {seed}'.encode()).hexdigest()[:6]}."


class FakeLLM:
    """Runs at most `room` requests at once and gives each three tokens per step."""

    def __init__(self, target: str, draft: str = "none", **options: Any) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(target)
        self.engine = SimpleNamespace(info=SimpleNamespace(max_model_len=options.pop("max_model_len", 200)))
        self.options = {"draft": draft, **options}
        self.requests: list[Request] = []
        self.most_running = 0
        self.room = 4

    def stream(self, requests: Iterable[Request]) -> Iterator[Output]:
        pending, running = iter(requests), dict[str, list[int]]()
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
                tokens, running[identity] = running[identity][:3], running[identity][3:]
                reason = None
                if not running[identity]:
                    del running[identity]
                    reason = "stop" if tokens[-1] == self.tokenizer.eos_token_id else "length"
                yield Output(request_id=identity, tokens=tokens, finish_reason=reason)  # type: ignore[arg-type]

    def _answer(self, request: Request) -> list[int]:
        assert len(request.prompt) + request.params.max_tokens <= self.engine.info.max_model_len
        question = self.tokenizer.decode(request.prompt).split("user\n")[-1].split("<|im_end|>")[0]
        text = reply(question, request.params.seed) + "<|im_end|>"
        return self.tokenizer(text)["input_ids"][: request.params.max_tokens]


class FakeEndpoint:
    """Serves /v1/models, /v1/chat/completions and /v1/completions on a free port. A context manager.

    Questions that hold "flaky" get 500, then 429, then a closed connection before their answer; "refused" gets 400,
    "broken" always 503, "odd" a body that is no completion; answers to "long" are cut. With `context` a prompt (in
    words, or token ids) and its max_tokens, or one token, must fit. Questions after the first `held_after` are answered
    once `go_on` is set.
    """

    def __init__(self, delay_s: float = 0.0, context: int | None = None, held_after: int | None = None) -> None:
        self.delay_s, self.context = delay_s, context
        self.held_after, self.go_on = held_after, threading.Event()
        self.bodies: list[dict[str, Any]] = []
        self.paths: Counter[str] = Counter()
        self.headers: list[str | None] = []
        self.open = self.most_open = 0
        self._seen: Counter[str] = Counter()
        self._lock = threading.Lock()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # head and body in one packet

            def do_GET(self) -> None:
                self.send(200, {"data": [{"id": "fake-model", "max_model_len": endpoint.context}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with endpoint._lock:
                    endpoint.open += 1
                    endpoint.most_open = max(endpoint.most_open, endpoint.open)
                    endpoint.bodies.append(body)
                    endpoint.paths[self.path] += 1
                    endpoint.headers.append(self.headers["Authorization"])
                    is_held = endpoint.held_after is not None and len(endpoint.bodies) > endpoint.held_after
                if is_held:
                    endpoint.go_on.wait(60)
                time.sleep(endpoint.delay_s)
                status, answer = endpoint.answer(body)
                with endpoint._lock:
                    endpoint.open -= 1
                if status == 0:
                    self.close_connection = True
                    return
                self.send(status, answer)

            def send(self, status: int, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> "FakeEndpoint":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Status (0: close the connection) and body."""
        question = body["messages"][-1]["content"] if "messages" in body else str(body["prompt"])
        with self._lock:
            self._seen[question] += 1
            attempt = self._seen[question]
        if "flaky" in question and attempt <= 3:
            return (500, 429, 0)[attempt - 1], {"error": "later"}
        for word, status in (("refused", 400), ("broken", 503), ("odd", 200)):
            if word in question:
                return status, {"error": f"{word} it is"}
        length = len(question.split()) if "messages" in body else len(body["prompt"])
        if self.context is not None and length + body.get("max_tokens", 1) > self.context:
            return 400, {"message": f"This model's maximum context length is {self.context} tokens."}
        reason = "length" if "long" in question else "stop"
        text = reply(question, body["seed"])
        content = {"message": {"role": "assistant", "content": text}} if "messages" in body else {"text": text}
        return 200, {"choices": [{**content, "finish_reason": reason}], "usage": {"completion_tokens": 7}}


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
    messages: list[dict[str, str]] = []
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
