"""Request bodies: read, parsed and checked within serve/limits.py before anything else looks at them."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request

from slipstream.serve.limits import MAX_BODIES_BYTES, MAX_NESTING, MAX_NODES, SHORT_BODY_BYTES
from slipstream.serve.protocol import ApiError

# A string (its end may be missing), a bracket, or what stands between those: numbers, commas, colons.
JSON_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]|[\]}]|[^"\[\]{}]{1,65536}+', re.DOTALL)


class BodyReader:
    """Reads bodies. Invariant: `num_bytes` is what all of them together hold."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: of one body."""
        self.max_bytes = max_bytes
        self.num_bytes = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The body, which counts as held until the block ends. Raises ApiError: 413, 415, or 429 for too many."""
        check_content_type(request)
        if int(request.headers.get("content-length", 0)) > self.max_bytes:
            raise self._too_long()
        chunks: list[bytes] = []
        size = 0
        try:
            async for chunk in request.stream():
                size += len(chunk)
                self.num_bytes += len(chunk)
                if size > self.max_bytes:  # a chunked body does not say its length
                    raise self._too_long()
                if size > SHORT_BODY_BYTES and self.num_bytes > MAX_BODIES_BYTES:
                    raise ApiError(429, "too many long bodies at once; try again later", code="server_overloaded")
                chunks.append(chunk)
            chunks = [b"".join(chunks)]  # not held twice
            yield chunks[0]
        finally:
            self.num_bytes -= size

    def _too_long(self) -> ApiError:
        return ApiError(413, f"the body is longer than {self.max_bytes} bytes, the most that this server takes")


def check_content_type(request: Request) -> None:
    """JSON only: a browser can not send it to another site without that site's consent."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(415, "send the body as JSON, with the header Content-Type: application/json")


def parse_json(raw: bytes, max_values: int) -> dict[str, Any]:
    """Raises ApiError for what is not a JSON object within the limits."""
    try:
        text = raw.decode()
        check_structure(text, max_values)
        body = from_json(text, allow_inf_nan=False, cache_strings="keys") if text else None
    except ValueError as error:  # of UnicodeDecodeError and of the parser: what is wrong, and where
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    return body


def check_structure(text: str, max_values: int) -> None:
    """Refuses JSON that is cheap to send and dear to parse, piece by piece: other threads run in between."""
    depth = num_nodes = num_values = 0
    field = None  # of the body's, the last one read
    for match in JSON_TOKEN.finditer(text):
        start, end = match.span()
        if text[start] == '"':
            num_nodes += 1
            field = text[start + 1 : min(end - 1, start + 64)] if depth == 1 else field
        elif text[start] in "[{":
            num_nodes += 1
            depth += 1
        elif text[start] in "]}":
            depth -= 1
        else:
            num_values += text.count(",", start, end)
        place = field or "the body"
        if depth > MAX_NESTING:
            raise ApiError(400, f"{place} nests deeper than {MAX_NESTING} levels", field)
        if num_nodes > MAX_NODES:
            message = f"{place} is too much: a body may hold {MAX_NODES} strings, lists and objects"
            raise ApiError(400, message, field)
        if num_values > max_values:
            raise ApiError(400, f"{place} is too much: a body may hold {max_values} values", field)
