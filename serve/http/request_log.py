"""Gives every HTTP request an id, sends it back, and logs how the request ended: in JSON each, in text the refused and
failed ones.

The id is the client's `X-Request-Id`, if it is a short printable one, or a new one. Lines that are logged while the
request is answered carry it (serve/logs.py).
"""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.serve.logs import REQUEST_ID
from slipstream.serve.request import RequestStats

HEADER = "X-Request-Id"
VALID_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
QUIET = frozenset(("/health", "/ready", "/metrics"))  # probes, logged only where they fail
COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens", "rounds", "drafted_tokens", "accepted_tokens")
TEXT_LINES = 30  # about refused requests that a text log takes in TEXT_SECONDS; it counts the others
TEXT_SECONDS = 60.0
NOTES: ContextVar[dict[str, Any] | None] = ContextVar("notes", default=None)  # what the line of a request will say

logger = logging.getLogger(__name__)


def note(**values: Any) -> None:
    """Adds to the line that will be logged of the present request."""
    notes = NOTES.get()
    if notes is not None:
        notes.update(values)


def note_choice(reason: str, stats: RequestStats | None, notes: dict[str, Any] | None) -> None:
    """A choice has ended. `notes`: those of its request, since the engine's messages are handled outside it."""
    if notes is None:
        return
    notes.setdefault("finish_reasons", []).append(reason)
    if stats is not None:
        for name in COUNTS:
            notes[name] = notes.get(name, 0) + getattr(stats, name)


class Refusals:
    """The lines of a text log about requests that were refused or failed: TEXT_LINES in TEXT_SECONDS, so that a flood
    fills no disk, and then how many more there were."""

    def __init__(self) -> None:
        self._num_lines = self._num_omitted = 0

    def add(self, line: Mapping[str, Any]) -> None:
        """Call on the event loop."""
        if self._num_lines == 0:
            asyncio.get_running_loop().call_later(TEXT_SECONDS, self._end_period)
        if self._num_lines == TEXT_LINES:
            self._num_omitted += 1
            return
        self._num_lines += 1
        form = "%(status)s %(method)s %(path)s: %(error)s (client %(client)s, request %(request_id)s)"
        logger.warning(single_line(form % line))

    def _end_period(self) -> None:
        if self._num_omitted:
            logger.warning("%d more requests were refused in %g s", self._num_omitted, TEXT_SECONDS)
        self._num_lines = self._num_omitted = 0


def single_line(text: str) -> str:
    """Escapes characters of a client's text that are not printable, such as line ends, for a log."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


class RequestLog:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._refusals = Refusals()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        header = Headers(scope=scope).get(HEADER, "")
        name = header if VALID_ID.fullmatch(header) else f"req-{uuid.uuid4().hex}"
        notes: dict[str, Any] = {}
        REQUEST_ID.set(name)
        NOTES.set(notes)
        began = time.perf_counter()
        status = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = name
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._log(scope, status, time.perf_counter() - began, notes)

    def _log(self, scope: Scope, status: int | None, seconds: float, notes: dict[str, Any]) -> None:
        if scope["path"] in QUIET and status is not None and status < 400:
            return
        line = {"method": scope["method"], "path": scope["path"], "status": status, "seconds": round(seconds, 4)}
        client = scope.get("client")
        line |= {"client": client[0] if client else None, **notes}
        if logger.isEnabledFor(logging.INFO):  # a log in JSON (serve/logs.py)
            logger.info("request", extra=line)
        elif "error" in notes:
            self._refusals.add({**line, "request_id": REQUEST_ID.get()})
