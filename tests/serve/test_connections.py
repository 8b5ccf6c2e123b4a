"""Connections of a real server: clients that send no whole request, and more of them than there may be."""

import asyncio
import errno
import json
import logging
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from slipstream.serve.http import connections
from slipstream.serve.http.connections import RESERVED_FILES, LoopErrors, connection_limit, raise_file_limit
from slipstream.serve.http.launch import Server
from slipstream.serve.options import ServeConfig
from slipstream.tests.serve.fake_server import COMPLETIONS, engine_held, serving, wait_until

WHOLE = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
BODY = json.dumps({"prompt": "x", "max_tokens": 1})
HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
SLOW = f"{HEAD}Content-Length: {len(BODY)}\r\n\r\n{BODY}".encode()
UNFINISHED = (SLOW[:-1], SLOW[:10], b"")


@pytest.fixture(scope="module")
def own_server(byte_target) -> Iterator[Server]:
    with serving(ServeConfig(target=byte_target, port=0)) as server:
        yield server


def send(server: Server, request: bytes) -> socket.socket:
    connection = socket.create_connection(server.listener.getsockname()[:2], timeout=120)
    connection.sendall(request)
    return connection


def rest(connection: socket.socket) -> bytes:
    """All that comes back."""
    with connection, connection.makefile("rb") as file:
        try:
            return file.read()
        except ConnectionResetError:
            return b""


@contextmanager
def answers_held_back(server: Server, num_requests: int) -> Iterator[list[socket.socket]]:
    """Connections whose requests the engine answers once the block ends."""
    with engine_held(server):
        connections = [send(server, SLOW) for _ in range(num_requests)]
        wait_until(lambda: server.api.engine.num_open == num_requests, "the requests are open")
        yield connections
    assert all(rest(connection).startswith(b"HTTP/1.1 200 ") for connection in connections)


def test_a_new_connection_replaces_the_one_that_has_waited_longest(own_server, monkeypatch):
    monkeypatch.setattr(own_server.connections, "limit", 3)
    waiting = [send(own_server, request) for request in UNFINISHED]
    assert rest(send(own_server, WHOLE)).startswith(b"HTTP/1.1 200 ")
    assert rest(waiting[0]) == b""
    with answers_held_back(own_server, 3):
        assert [rest(connection) for connection in waiting[1:]] == [b"", b""]
        head, _, body = rest(send(own_server, b"")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert "all 3 connections are busy" in json.loads(body)["error"]["message"]
    assert rest(send(own_server, WHOLE)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("cause", ["timeout", "shutdown"])
def test_what_ends_unfinished_requests_leaves_answers_alone(own_server, cause, monkeypatch):
    with answers_held_back(own_server, 1):
        waiting = [send(own_server, request) for request in UNFINISHED]
        if cause == "timeout":
            monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.2)
        else:
            wait_until(lambda: len(own_server.server_state.connections) == 4, "all are connected")
            loop = next(iter(own_server.server_state.connections)).loop
            loop.call_soon_threadsafe(own_server.connections.close_waiting)
        expected = b"HTTP/1.1 408 Request Timeout\r\n" if cause == "timeout" else b""
        assert all(rest(connection)[: len(expected) or None] == expected for connection in waiting)


def test_an_idle_connection_waits_for_its_next_request(own_server, monkeypatch):
    """It is no request that comes too late; the time for one begins with its first byte."""
    keep = WHOLE.replace(b"Connection: close\r\n", b"")
    end = b"HTTP/1.1 408 Request Timeout\r\n"
    with send(own_server, b"") as connection:
        for _ in range(2):
            connection.sendall(keep)
            while not connection.recv(10_000).endswith(b"}"):
                pass
            [state] = [
                connection_of_server
                for connection_of_server in own_server.server_state.connections
                if connection_of_server.client == connection.getsockname()
            ]
            with monkeypatch.context() as patch:  # not before: a request that is being read would be too late, too
                patch.setattr(connections, "REQUEST_SECONDS", 0.0)
                asyncio.run_coroutine_threadsafe(close_late_once(own_server), state.loop).result(20)
        assert state.is_idle
        monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.0)
        connection.sendall(keep[:9])
        wait_until(lambda: not state.is_idle, "the request has begun")
        assert rest(connection).startswith(end)
    assert state.timeout_keep_alive >= 75, "as long as proxies keep theirs"


async def close_late_once(server: Server):
    task = asyncio.create_task(server.connections.close_late())
    await asyncio.sleep(0.01)
    task.cancel()


def test_files_that_may_be_open(caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        assert connection_limit(max_open=100) == 256 - RESERVED_FILES
        assert not caplog.records
        assert connection_limit(max_open=320) == 256 - RESERVED_FILES
        assert "ulimit -n" in caplog.text
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_thousand_failing_accepts_are_one_line(caplog):
    errors = LoopErrors()
    loop = asyncio.new_event_loop()
    for _ in range(1000):
        errors(loop, {"message": "no", "exception": OSError(errno.EMFILE, "Too many open files"), "socket": None})
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "Too many open files; raise `ulimit -n`" in caplog.text
    errors(loop, {"message": "another fault", "exception": OSError(errno.EIO, "I/O error")})
    assert "another fault" in caplog.text
    loop.close()


def test_a_hundred_requests_that_are_no_http_are_one_line(own_server, caplog, monkeypatch):
    monkeypatch.setattr(connections, "REPORT_SECONDS", -1)
    assert rest(send(own_server, b"?\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
    assert rest(send(own_server, b"?\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
    line = "Invalid HTTP request received."
    assert [record.message for record in caplog.records] == [line, line]
    monkeypatch.setattr(connections, "REPORT_SECONDS", 1e9)
    for _ in range(100):
        assert rest(send(own_server, b"?\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
    assert len(caplog.records) == 2
    logging.getLogger("uvicorn.error").warning("another")
    logging.getLogger("uvicorn.error").error("a fault")
    logging.getLogger("uvicorn.error").error("a fault")
    assert [record.message for record in caplog.records[2:]] == ["another", "a fault", "a fault"]


def test_a_hundred_events_for_a_client_that_has_left_are_one_line(own_server, caplog):
    connections_of_server = own_server.server_state.connections
    with send(own_server, b""):
        wait_until(lambda: len(connections_of_server) == 1, "the server has accepted it")
        [state] = connections_of_server
    wait_until(lambda: not connections_of_server, "the client has left")

    async def write():
        for _ in range(100):
            state.transport.write(b"data: {}\n\n")

    asyncio.run_coroutine_threadsafe(write(), state.loop).result(20)
    assert [record.message for record in caplog.records] == ["socket.send() raised exception."]
