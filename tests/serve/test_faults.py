"""Faults beside those of test_http_failures.py: each ends requests of its own, with a sentence, and no others."""

import ast
import io
import json
import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import httpx
import psutil
import pytest

from slipstream.serve.detokenize import TextStream
from slipstream.serve.http import connections
from slipstream.serve.logs import LogHandler
from slipstream.serve.options import ServeConfig
from slipstream.tests.serve.fake_server import COMPLETIONS, SCRIPT, client_of, gauge, read_banner, serving, wait_until
from slipstream.tests.sources import ROOT

SLOW = {"prompt": "x", "max_tokens": 250, "cache_salt": "slow", "ignore_eos": True}


class PanicException(BaseException):
    """The exception that pyo3 raises where Rust code panics."""


@pytest.mark.parametrize("error", [ValueError("no such token"), RuntimeError("broken"), PanicException("index")])
def test_a_tokenizer_that_breaks_down_ends_one_request(client, server, error, monkeypatch):
    """While the prompt is encoded, and while the answer's tokens become text."""
    encode = server.api.frontend.encode
    push = TextStream.push

    def encode_or_break(text, *arguments, **options):
        if text == "break":
            raise error
        return encode(text, *arguments, **options)

    def push_or_break(stream, tokens, *arguments):
        if broken in tokens:
            raise error
        return push(stream, tokens, *arguments)

    broken = encode("Z", "prompt", False)[0]
    monkeypatch.setattr(server.api.frontend, "encode", encode_or_break)
    monkeypatch.setattr(TextStream, "push", push_or_break)
    for prompt, status in (("break", 500), ("Z", 500), ("good", 200)):
        answer = client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 4})
        assert (answer.status_code, "error" in answer.json()) == (status, status == 500)
    assert gauge(client, "open_requests") == 0


def test_a_client_that_never_reads_is_disconnected(byte_target, monkeypatch, caplog):
    """Its request ends, and others are answered meanwhile."""
    monkeypatch.setattr(connections, "STALL_SECONDS", 1.0)
    config = ServeConfig(target=byte_target, port=0, max_model_len=1_000_000)
    with serving(config) as server, client_of(server) as client:
        body = json.dumps({"prompt": "x", "max_tokens": 900_000, "ignore_eos": True, "stream": True})
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # what the kernel takes at most
            deaf.connect(server.listener.getsockname()[:2])
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            deaf.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            wait_until(lambda: gauge(client, "open_requests") == 1, "its request is open")
            assert client.post(COMPLETIONS, json={"prompt": "abc"}).status_code == 200
            wait_until(lambda: gauge(client, "open_requests") == 0, "its request has ended")
        assert client.post(COMPLETIONS, json={"prompt": "abc"}).status_code == 200
        assert gauge(client, "engine_aborted") == 1
    [line] = [record.getMessage() for record in caplog.records if record.name.endswith("connections")]
    assert "has read nothing of its answer for 1 s" in line


def test_a_clock_that_jumps_ends_nothing(client, monkeypatch):
    now = time.time()
    with client.stream("POST", COMPLETIONS, json=SLOW | {"stream": True}) as stream:
        lines = stream.iter_lines()
        assert next(lines)
        for jump in (86_400, -86_400):
            monkeypatch.setattr(time, "time", lambda jump=jump: now + jump)
            assert client.get("/ready").status_code == 200
            assert client.post(COMPLETIONS, json={"prompt": "abc"}).json()["choices"][0]["finish_reason"]
        monkeypatch.undo()
        assert list(lines)[-2] == "data: [DONE]"


def test_no_time_is_measured_by_the_wall_clock():
    """It says when an answer or the server was created, and nothing else."""
    files = []
    for file in (ROOT / "serve").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("time.time", "time.time_ns"):
                files.append(file.relative_to(ROOT).as_posix())
    assert set(files) == {"serve/http/app.py", "serve/http/writers.py", "serve/http/responses.py"}


@pytest.mark.slow
def test_sigterm_under_load_loses_nothing(byte_target):
    """A request that was taken is answered to its end; one that comes later is told, or finds nobody."""
    with running(script(byte_target, "max_model_len=4096")) as process, ThreadPoolExecutor(48) as pool:
        client = httpx.Client(base_url=read_banner(process)[2], timeout=120)

        def ask(index):
            body = {**SLOW, "max_tokens": 300, "stream": index % 2 == 0}
            try:
                answer = client.post(COMPLETIONS, json=body)
            except httpx.TransportError:
                return "nobody"
            if answer.status_code != 200:
                return str(answer.status_code)
            return "done" if '"finish_reason":"length"' in answer.text else answer.text

        children = psutil.Process(process.pid).children()
        for child in children:  # the engine, so that no request ends before all are open
            child.suspend()
        answers = [pool.submit(ask, index) for index in range(24)]
        wait_until(lambda: client.get("/health").json()["open_requests"] == 24, "all are open")
        process.send_signal(signal.SIGTERM)
        for child in children:
            child.resume()
        late = [pool.submit(ask, index) for index in range(24)]
        assert [answer.result() for answer in answers] == ["done"] * 24
        assert {answer.result() for answer in late} <= {"503", "nobody", "done"}, "before or after the signal came"
        assert process.wait(120) == -signal.SIGTERM


@contextmanager
def running(code: str, **streams: Any) -> Iterator[subprocess.Popen[str]]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL} | streams
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore Ctrl-C
    process = subprocess.Popen([sys.executable, "-c", code], text=True, preexec_fn=heeds, **pipes)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def script(target: str, options: str) -> str:
    return SCRIPT.replace("port=0", options if "port" in options else f"port=0, {options}").format(
        target=target, engine="FakeEngine"
    )


@pytest.mark.slow
def test_a_full_disk_costs_lines_of_the_log_and_no_request(byte_target):
    """/dev/full fails every write, as a full disk does."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code = script(byte_target, f"port={port}, log_format='json'")
    head, run, tail = code.partition("raise SystemExit")
    code = f"{head}from slipstream.serve.logs import release_streams\nstatus = {tail}release_streams()\n{run}(status)"
    with (
        open("/dev/full", "w") as full,
        running(code, stdout=full, stderr=full) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client,
    ):
        wait_until(lambda: answers(client), "the server answers")
        for salt, status in (("a", 200), ("fail", 500), ("fault", 400), ("a", 200)):
            body = {"prompt": "abc", "max_tokens": 5, "cache_salt": salt}
            assert client.post(COMPLETIONS, json=body).status_code == status
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0


@pytest.mark.slow
def test_answers_are_logged_whole_before_a_signal_ends_the_server(byte_target, tmp_path):
    """The disk is slow, and the drain is over before the line is written."""
    log = tmp_path / "answers.jsonl"
    slow = """
import time
from slipstream.serve.http import answer_log
answer_log.private = lambda *words, private=answer_log.private: time.sleep(1) or private(*words)
"""
    with running(slow + script(byte_target, f"answer_log={str(log)!r}")) as process:
        answer = httpx.post(f"{read_banner(process)[2]}{COMPLETIONS}", json={"prompt": "abc", "max_tokens": 5})
        assert answer.status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == -signal.SIGTERM
    assert len(log.read_text().splitlines()) == 1


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


def test_lost_lines_are_told_once_there_is_room_again(tmp_path):
    handler = LogHandler()
    log = logging.Logger("test")
    log.addHandler(handler)
    with open("/dev/full", "wb", buffering=0) as full, open(tmp_path / "log", "w") as roomy:
        handler.stream = io.TextIOWrapper(full, write_through=True)
        for _ in range(3):
            log.warning("lost")
        handler.stream = roomy
        log.warning("kept")
    assert handler.num_lost == 3
    assert (tmp_path / "log").read_text().splitlines() == ["kept", "3 lines of the log could not be written"]
