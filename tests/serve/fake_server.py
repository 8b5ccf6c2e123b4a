"""The real HTTP server around a FakeEngine process, a target for it (a tokenizer without weights), and what its tests
share."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slipstream.serve.http.engine_client import EngineClient, EngineFactory
from slipstream.serve.http.launch import Server, prepare
from slipstream.serve.listener import bind
from slipstream.serve.options import ServeConfig
from slipstream.tests.serve.fake_engine import FakeEngine

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MODEL = "byte-model"
HELLO = [{"role": "user", "content": "hello"}]
SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message.content == 'refuse me' %}{{ raise_exception('that is refused') }}{%- endif %}"
    "{{ '<|' + message.role + '|>' + message.content }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}{{ suffix }}"
)


# The prompt is the last message alone, which is the answer, too.
ECHO = """{%- if tools or enable_thinking is defined %}{% endif -%}{{ messages[-1].content }}{#
<tool_call>{"name": ..., "arguments": ...}</tool_call> <think> </think> #}"""
SHOWN = (
    "{%- for message in messages -%}{{ message.role }}:{{ message.reasoning_content }}:{{ message.content }}:"
    "{{ message.tool_call_id }}{%- for call in message.tool_calls or [] -%}{{ call.id }}{{ call.function | tojson }}"
    "{%- endfor -%};{%- endfor -%}{{ tools | tojson if tools }}{{ enable_thinking }}{{ reasoning_effort }}"
    "{%- for tool in tools or [] if tool.function.name == 'fails' -%}{{ 1 // 0 }}{%- endfor -%}"
    '{# <tool_call> "arguments" </think> #}'
)
MARKERS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
SCRIPT = """
from slipstream.serve.cli import run
from slipstream.serve.http.engine_client import EngineClient, EngineFactory
from slipstream.serve.options import ServeConfig
from slipstream.tests.serve.fake_engine import FakeEngine, never_start
raise SystemExit(run(ServeConfig(target={target!r}, port=0), EngineClient({engine})))
"""


def write_target(
    path: Path,
    generation: dict[str, object] | None = None,
    template: str | None = TEMPLATE,
    markers: Sequence[str] = (),
) -> Path:
    """A folder with a byte tokenizer (4 special tokens, then one id per byte, then `markers`) and a
    generation_config.json."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(SPECIAL + alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL[0], additional_special_tokens=SPECIAL[1:]
    )
    fast.chat_template = template
    fast.add_tokens([AddedToken(marker, special=False) for marker in markers])
    fast.save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps(generation or {}))
    return path


@contextmanager
def serving(config: ServeConfig, make_engine: EngineFactory = FakeEngine) -> Iterator[Server]:
    """A server with an engine process, a fake one unless told otherwise, on a thread of this process."""
    servers = []

    async def run():
        listener = bind(config.host, config.port)
        async with prepare(config, listener, EngineClient(make_engine)) as server:
            servers.append(server)
            await server.serve([server.listener])

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    while thread.is_alive() and not (servers and servers[0].started):
        time.sleep(0.01)
    assert thread.is_alive(), "the server did not start"
    try:
        yield servers[0]
    finally:
        servers[0].should_exit = True
        thread.join(120)
        assert not thread.is_alive(), "the server did not end"


def client_of(server: Server, **options: Any) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=120, **options)


@contextmanager
def engine_held(server: Server) -> Iterator[None]:
    """Stops the engine, so that no request ends however slow the block is."""
    engine = psutil.Process(server.api.engine.pid)
    engine.suspend()
    try:
        yield
    finally:
        engine.resume()


def send_post(server: Server, path: str, body: dict[str, Any]) -> socket.socket:
    """A connection on which a request has been sent, and no answer is read."""
    connection = socket.create_connection(server.listener.getsockname()[:2], timeout=120)
    payload = json.dumps(body)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}"
    connection.sendall(f"{head}\r\n\r\n{payload}".encode())
    return connection


def start(target: str, engine: str = "FakeEngine") -> subprocess.Popen[str]:
    """`serve` around a fake engine, in processes of their own."""
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(target=target, engine=engine)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell's background jobs ignore Ctrl-C, and so do their children, these tests' servers among them.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def read_banner(server: subprocess.Popen[str]) -> tuple[str, str, str]:
    """Returns the banner's two lines, which come once the server answers, and the address in the first."""
    first = server.stdout.readline()
    second = server.stdout.readline()
    return first, second, first.split(" at ")[1].split()[0]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON of every server-sent event; the stream must end with [DONE]."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def gauge(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(f"slipstream_{name} ")))


def wait_until(condition: Callable[[], bool], subject: str):
    deadline = time.monotonic() + 120  # far more than a busy machine takes
    while not condition():
        assert time.monotonic() < deadline, f"{subject} did not come true"
        time.sleep(0.02)
