"""Reads on after a request has been refused, so that clients which send all before they read see why.

A server that closes a connection with unread data in its buffers resets it, and the reset overtakes the answer
(RFC 9112, section 9.6). So the answer to a request whose body is not read is sent at once and in full, and ends only
when the rest of the body has come and been thrown away, or after MAX_BYTES or SECONDS; at once if the body is longer.
"""

import asyncio
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BYTES = 64 * 2**20
SECONDS = 10.0


class UnreadBodies:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not has_body(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        more_body = True
        status = 0
        is_endless = int(headers.get("content-length", 0)) > MAX_BYTES

        async def receive_and_see() -> Message:
            nonlocal more_body
            message = await receive()
            more_body = message["type"] == "http.request" and message.get("more_body", False)
            return message

        async def discard() -> None:
            num_bytes = 0
            while more_body and num_bytes < MAX_BYTES:
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
                    async with asyncio.timeout(SECONDS):
                        await discard()
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        await self._app(scope, receive_and_see, send_and_read_on)


def has_body(headers: Headers) -> bool:
    """Whether a body is on its way. One that waits for "100 Continue" does not come once the request is refused."""
    is_sent = headers.get("content-length", "0").strip("0") != "" or "transfer-encoding" in headers
    return is_sent and headers.get("expect", "").lower() != "100-continue"
