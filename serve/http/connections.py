"""Limits on connections: how many are open, and how long a client may take to send a request.

Invariant: /health can be reached unless every connection is being answered. There are fewer connections than file
descriptors; a client that does not complete its request in time is disconnected; and at the limit, a new connection
replaces the one that has waited longest for its client. A client that reads nothing of its answer for STALL_SECONDS is
disconnected, too, and its request ends. What a client sends is parsed in small portions.
"""

import asyncio
import errno
import json
import logging
import math
import re
import resource
import sys
import time
from collections import defaultdict
from contextlib import suppress
from http import HTTPStatus
from typing import Any, ClassVar

import h11
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from slipstream.models.chat.quotes import PLACE_CHARS, shorten
from slipstream.serve.http.limits import ApiError

MIN_CONNECTION_LIMIT = 4096  # about 15 kB each
CONNECTIONS_PER_REQUEST = 2  # times max_running + max_waiting, since clients also keep idle connections
# Most that is read at once: asyncio would read 256 KiB, and the parser takes about 10 us for each header and chunk,
# which may have few bytes; meanwhile no stream goes on.
READ_BYTES = 2**12
KEEP_ALIVE_SECONDS = 120  # for an idle connection: proxies keep theirs 60 s or more and must be the first to close
MAX_HEAD_BYTES = 2**16  # of a request's line and headers
MAX_CHUNKS = 2**14  # of a body; one of 4 MiB may have chunks of 256 bytes
RESERVED_FILES = 64  # file descriptors left for everything else
REQUEST_SECONDS = 60.0  # to receive a request: 4 MB at 70 kB/s
MAX_UNREAD_BYTES = 64 * 2**20  # of the body of a refused request, that are read and thrown away
UNREAD_SECONDS = 10.0
STALL_SECONDS = 120.0  # without a byte of an answer taken
REPORT_SECONDS = 60.0  # between equal lines in the log
ABSOLUTE = re.compile(rb"https?://[^/?]*/?(.*)", re.IGNORECASE)  # a target with a host (RFC 9112, section 3.2.2)
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

logger = logging.getLogger(__name__)


def raise_file_limit() -> None:
    """Raises the limit of open files, usually 1,024, to the hard limit, for this process and the engine's."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else 1 << 20, hard))


def connection_limit(max_open: int) -> int:
    """Returns the number of connections that a server with at most `max_open` open requests accepts."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    demand = max(MIN_CONNECTION_LIMIT, CONNECTIONS_PER_REQUEST * max_open)
    limit = max(1, min(demand, soft - RESERVED_FILES)) if soft != resource.RLIM_INFINITY else demand
    if limit < max_open:
        message = "only %d files can be open: accepting %d connections, fewer than max_running + max_waiting = %d; %s"
        logger.warning(message, soft, limit, max_open, "raise `ulimit -n`")
    return limit


class Parser(h11.Connection):
    """h11's parser, which also takes targets with a host, and refuses bodies with too many chunks or with two
    statements of their length.

    A proxy that goes by Content-Length would see another end of such a request than a server that goes by its chunks,
    and so take a part of one client's body for the next client's request (RFC 9112, section 6.1).
    """

    _num_chunks = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = 0
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                raise h11.RemoteProtocolError("send either Content-Length or Transfer-Encoding, not both")
            if absolute := ABSOLUTE.fullmatch(event.target):  # of a client that takes this server for a proxy
                target = b"/" + absolute[1]
                event = h11.Request(
                    method=event.method, target=target, headers=event.headers, http_version=event.http_version
                )
        elif isinstance(event, h11.Data) and event.chunk_end:
            self._num_chunks += 1
            if self._num_chunks > MAX_CHUNKS:
                raise h11.RemoteProtocolError(f"a body may have {MAX_CHUNKS} chunks; send fewer and larger ones")
        return event


class Connection(H11Protocol):
    """uvicorn's connection, known to the server's tracker."""

    tracker: ClassVar["ConnectionTracker"]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = Parser(h11.SERVER, MAX_HEAD_BYTES)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        super().connection_made(transport)
        self.tracker.admit(self)

    def data_received(self, data: bytes) -> None:
        if self.is_idle:  # a request begins
            self.tracker.await_request(self)
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.tracker.forget(self)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.tracker.stall(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.tracker.go_on(self)

    def on_response_complete(self) -> None:
        self.tracker.await_request(self)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's own is no JSON, and fails where an answer has begun. Called where h11's error is handled."""
        self.refuse(ApiError(400, f"{msg} {shorten(str(sys.exception()), PLACE_CHARS)}"))

    def _get_upgrade(self) -> None:
        """No protocol, whichever is asked for, as RFC 9110 (section 7.8) allows. uvicorn would log two lines for each
        request that asks, or, where a package for websockets is installed, hand over a connection that nobody tracks.
        """

    @property
    def is_idle(self) -> bool:
        """Whether nothing of a request has come since the last answer; KEEP_ALIVE_SECONDS later uvicorn closes it."""
        return self.timeout_keep_alive_task is not None

    @property
    def is_answering(self) -> bool:
        """Whether a request has been received and its answer is not complete."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def refuse(self, error: ApiError) -> None:
        """Sends an error, whatever has been received, and closes the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error.body).encode()
            headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
            headers |= error.headers
            phrase = HTTPStatus(error.status).phrase
            head = h11.Response(status_code=error.status, headers=list(headers.items()), reason=phrase)
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:  # its own answer would be one too many
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()
        self.tracker.stall(self)  # until it is sent


class ConnectionTracker:
    """The connections of one server that wait for their clients."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        # When each began to wait, oldest first. Those that have received their request since are removed lazily.
        self._waiting: dict[Connection, float] = {}
        # Answers that their clients do not take: since when, and how many bytes were left then.
        self._stalled: dict[Connection, tuple[float, int]] = {}

    def protocol(self) -> type[Connection]:
        """The class that uvicorn instantiates for every connection."""

        class TrackedConnection(Connection):
            tracker = self

        return TrackedConnection

    def admit(self, connection: Connection) -> None:
        if len(connection.connections) > self.limit and not self._close_oldest():
            connection.refuse(ApiError(503, f"all {self.limit} connections are busy; try again later"))
            return
        self.await_request(connection)

    def await_request(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)
        self._waiting[connection] = time.monotonic()

    def forget(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)
        self._stalled.pop(connection, None)

    def stall(self, connection: Connection) -> None:
        self._stalled[connection] = time.monotonic(), connection.transport.get_write_buffer_size()

    def go_on(self, connection: Connection) -> None:
        self._stalled.pop(connection, None)

    def _close_oldest(self) -> bool:
        """Closes the connection that has waited longest for its client. Returns False if none waits."""
        while self._waiting:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            if not oldest.is_answering:
                oldest.transport.abort()
                return True
        return False

    def close_waiting(self) -> None:
        """Closes all connections but those being answered."""
        while self._close_oldest():
            pass

    def _close_stalled(self) -> None:
        """Closes connections whose clients read nothing. A client that still takes bytes gets more time."""
        now = time.monotonic()
        for connection, (since, size) in list(self._stalled.items()):
            if connection.transport.get_write_buffer_size() < size:
                self.stall(connection)
            elif now - since > STALL_SECONDS:
                del self._stalled[connection]
                message = "a client (%s) has read nothing of its answer for %g s; closing its connection"
                logger.warning(message, (connection.client or ("unknown",))[0], STALL_SECONDS)
                connection.transport.abort()

    async def close_late(self) -> None:
        """Refuses requests that do not arrive in time and drops answers that nobody reads. Runs as a task."""
        while True:
            await asyncio.sleep(min(1.0, REQUEST_SECONDS / 4, STALL_SECONDS / 4))
            self._close_stalled()
            latest = time.monotonic() - REQUEST_SECONDS
            for connection, since in list(self._waiting.items()):
                if since >= latest or connection.is_idle:
                    continue
                del self._waiting[connection]
                if not connection.is_answering:
                    connection.refuse(ApiError(408, f"the request was not received within {REQUEST_SECONDS:.0f} s"))


class Report:
    """A line of the log that may come once in REPORT_SECONDS."""

    def __init__(self) -> None:
        self._written_at = -math.inf

    def is_due(self) -> bool:
        """Whether the line may be written now. A line that may counts as written."""
        is_due = time.monotonic() - self._written_at > REPORT_SECONDS
        if is_due:
            self._written_at = time.monotonic()
        return is_due


class RareWarnings(logging.Filter):
    """Drops equal warnings of uvicorn and asyncio: they have one for each request that is no HTTP, and for each event
    that is written after a client has left, so a client could fill the disk."""

    def __init__(self) -> None:
        super().__init__()
        self._reports = defaultdict[str, Report](Report)  # by text, which their code holds

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno != logging.WARNING or self._reports[record.msg].is_due()


class LoopErrors:
    """Exception handler for the event loop. The default one logs thousands of tracebacks a second if accept fails."""

    def __init__(self) -> None:
        self._report = Report()

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if "socket" not in context or not isinstance(error, OSError) or error.errno not in OUT_OF_RESOURCES:
            loop.default_exception_handler(context)
        elif self._report.is_due():
            logger.error("cannot accept connections: %s; raise `ulimit -n`", error.strerror)


class UnreadBodies:
    """ASGI middleware that reads on after a request has been refused, so that clients which send all before they read
    see why.

    A server that closes a connection with unread data in its buffers resets it, and the reset overtakes the answer
    (RFC 9112, section 9.6). So the answer to a request whose body is not read is sent at once and in full, and ends
    only when the rest of the body has come and been thrown away, or after MAX_UNREAD_BYTES or UNREAD_SECONDS; at once
    if the body is longer.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not has_body(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        more_body = True
        status = 0
        is_endless = int(headers.get("content-length", 0)) > MAX_UNREAD_BYTES

        async def receive_and_see() -> Message:
            nonlocal more_body
            message = await receive()
            more_body = message["type"] == "http.request" and message.get("more_body", False)
            return message

        async def discard() -> None:
            num_bytes = 0
            while more_body and num_bytes < MAX_UNREAD_BYTES:
                num_bytes += len((await receive_and_see()).get("body", b""))

        async def send_and_read_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if status >= 400 and more_body and (is_endless or "transfer-encoding" in headers):
                    MutableHeaders(scope=message)["Connection"] = "close"
            elif status >= 400 and more_body and not is_endless and not message.get("more_body", False):
                await send({**message, "more_body": True})
                with suppress(TimeoutError):
                    async with asyncio.timeout(UNREAD_SECONDS):
                        await discard()
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        await self._app(scope, receive_and_see, send_and_read_on)


def has_body(headers: Headers) -> bool:
    """Whether a body is on its way. One that waits for "100 Continue" does not come once the request is refused."""
    is_sent = headers.get("content-length", "0").strip("0") != "" or "transfer-encoding" in headers
    return is_sent and headers.get("expect", "").lower() != "100-continue"
