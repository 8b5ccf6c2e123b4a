"""Connections of a real uvicorn server around an application that answers when it is told to."""

import asyncio
import errno
import json
import logging
import resource
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from slipstream.serve import connections
from slipstream.serve.connections import (
    RESERVED_FILES,
    ConnectionTracker,
    LoopErrors,
    connection_limit,
    raise_file_limit,
)

WHOLE = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
SLOW = WHOLE.replace(b"/ ", b"/slow ", 1)
HALF_BODY = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
HALF_HEAD = b"POST / HTT"
NOTHING = b""
UNFINISHED = (HALF_BODY, HALF_HEAD, NOTHING)


class AppServer:
    """A server, and the clients' ends of its connections."""

    def __init__(self, limit: int) -> None:
        self.tracker = ConnectionTracker(limit)
        self.may_answer = asyncio.Event()
        self.address = ("", 0)

    async def app(self, scope: Any, receive: Callable, send: Callable) -> None:
        if scope["path"] == "/slow":
            await self.may_answer.wait()
        elif (await receive())["more_body"] and (await receive())["type"] == "http.disconnect":
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def send(self, sent: bytes) -> asyncio.Task[bytes]:
        """All that will come back. The server has read what was sent when this returns."""
        reader, writer = await asyncio.open_connection(*self.address)
        writer.write(sent)
        for _ in range(20):  # turns of the loop, which is the server's, too
            await asyncio.sleep(0.001)
        return asyncio.create_task(read_all(reader, writer))


async def read_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


@asynccontextmanager
async def serving_app(limit: int) -> AsyncIterator[AppServer]:
    app_server = AppServer(limit)
    tracker = app_server.tracker
    with socket.create_server(("127.0.0.1", 0)) as listener:
        app_server.address = listener.getsockname()
        options = {"interface": "asgi3", "lifespan": "off", "log_level": "warning"}
        config = uvicorn.Config(app_server.app, http=tracker.protocol(), **options)
        server = uvicorn.Server(config)
        serving, closing = asyncio.create_task(server.serve([listener])), asyncio.create_task(tracker.close_late())
        while not server.started:
            await asyncio.sleep(0.01)
        yield app_server
        server.should_exit = True
        await serving
        closing.cancel()


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_new_connection_replaces_the_one_that_has_waited_longest() -> None:
    async def run() -> None:
        async with serving_app(limit=3) as app_server:
            waiting = [await app_server.send(sent) for sent in UNFINISHED]
            assert (await (await app_server.send(WHOLE))).endswith(b"ok")
            assert await waiting[0] == b""
            answered = [await app_server.send(SLOW) for _ in range(3)]
            assert await asyncio.gather(*waiting) == [b"", b"", b""]
            head, _, body = (await (await app_server.send(WHOLE))).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
            assert "all 3 connections are busy" in json.loads(body)["error"]["message"]
            app_server.may_answer.set()
            assert all(answer.endswith(b"ok") for answer in await asyncio.gather(*answered))
            assert (await (await app_server.send(WHOLE))).endswith(b"ok")

    in_loop(run)


def test_unfinished_requests_time_out_and_answers_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.2)

    async def run() -> None:
        async with serving_app(limit=9) as app_server:
            slow = await app_server.send(SLOW)
            for answer in await asyncio.gather(*[await app_server.send(sent) for sent in UNFINISHED]):
                assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
            assert not slow.done()
            app_server.may_answer.set()
            assert (await slow).endswith(b"ok")

    in_loop(run)


def test_a_shutdown_waits_for_answers_alone() -> None:
    async def run() -> None:
        async with serving_app(limit=9) as app_server:
            slow, *waiting = [await app_server.send(sent) for sent in (SLOW, *UNFINISHED)]
            app_server.tracker.close_waiting()
            assert await asyncio.gather(*waiting) == [b"", b"", b""]
            app_server.may_answer.set()
            assert (await slow).endswith(b"ok")

    in_loop(run)


def test_files_that_may_be_open(caplog: pytest.LogCaptureFixture) -> None:
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


def test_a_thousand_failing_accepts_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    errors, loop = LoopErrors(), asyncio.new_event_loop()
    for _ in range(1000):
        errors(loop, {"message": "no", "exception": OSError(errno.EMFILE, "Too many open files"), "socket": None})
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "Too many open files; raise `ulimit -n`" in caplog.text
    errors(loop, {"message": "another fault", "exception": OSError(errno.EIO, "I/O error")})
    assert "another fault" in caplog.text
    loop.close()
