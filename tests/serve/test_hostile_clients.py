"""Requests that no honest client sends: each is answered or cut off, none with a 5xx, and nothing is left of any."""

import json
import logging
import socket
from collections.abc import Iterator
from itertools import product

import httpx
import pytest

from slipstream.serve.http import connections
from slipstream.serve.http.launch import Server
from slipstream.serve.http.responses_body import ResponsesBody
from slipstream.serve.http.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from slipstream.serve.options import ServeConfig
from slipstream.tests.kernels.triton_runs import SLOW
from slipstream.tests.serve.fake_server import CHAT, COMPLETIONS, HELLO, RESPONSES, client_of, serving, wait_until

JSON = {"Content-Type": "application/json"}
BODY = b'{"prompt": "ab", "max_tokens": 4}'
POST = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n".encode()
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
KINDS = {CHAT: ChatBody, COMPLETIONS: CompletionBody, RESPONSES: ResponsesBody} | {
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
WHOLE = {CHAT: {"messages": HELLO}, COMPLETIONS: {"prompt": "ab"}, RESPONSES: {"input": "ab"}} | {
    "/tokenize": {"prompt": "ab"},
    "/detokenize": {"tokens": [5]},
}
LENGTHS = {CHAT: "max_tokens", COMPLETIONS: "max_tokens", RESPONSES: "max_output_tokens"}
# JSON's texts of numbers, and what only some parsers take for one.
NUMBERS = ["NaN", "-Infinity", "1e308", "-1e308", "1e400", "5e-324", "-0.0", str(2**63), f"-{2**64}", "1" + "0" * 4000]
SHAPES = ["[%s]", '{"5": %s}', '{"a": {"minimum": %s}}']
VALUES = NUMBERS + [shape % number for shape, number in product(SHAPES, NUMBERS)]


def raw(server: Server, request: bytes, *, half_closes: bool = False) -> bytes:
    """Returns all that comes back on a connection that sends `request` and, with `half_closes`, closes its sending
    side."""
    with socket.create_connection(server.listener.getsockname()[:2], timeout=120) as connection:
        try:
            connection.sendall(request)
            if half_closes:
                connection.shutdown(socket.SHUT_WR)
            with connection.makefile("rb") as file:
                return file.read()
        except (ConnectionResetError, BrokenPipeError):
            return b""


@pytest.fixture(scope="module")
def own_server(byte_target) -> Iterator[Server]:
    """Nothing of its clients is left at the end."""
    with serving(ServeConfig(target=byte_target, port=0, max_running=8, max_waiting=8)) as server:
        yield server
        wait_until(lambda: not server.server_state.connections, "no connection is open")
        assert server.api.engine.num_open == 0
        assert server.api.bodies.num_bytes == 0
        assert not server.api._watchers
        assert not server.connections._waiting
        assert not server.connections._stalled


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=SLOW)])
@pytest.mark.parametrize("path", KINDS)
def test_numbers_of_any_size_in_any_field(own_server, path, every):
    valid = json.dumps(WHOLE[path] | ({LENGTHS[path]: 2} if path in LENGTHS else {}))[:-1]
    with client_of(own_server) as client:
        fields = list(KINDS[path].model_fields)
        for field, value in list(product(fields, VALUES))[::every]:
            body = f"{valid}, {json.dumps(field)}: {value}}}"
            answer = client.post(path, content=body, headers=JSON)
            assert answer.status_code in (200, 400, 404), (body, answer.text)
            assert answer.status_code == 200 or answer.json()["error"]["message"], body
            assert answer.status_code == 400 or not ("NaN" in value or "Infinity" in value), "no JSON"


REQUESTS = {  # what is sent, and the status line that comes back
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"404"),
    "half a request": (POST + b"Content-Length: 40\r\n\r\n{", b""),
    "two lengths": (POST + b"Content-Length: 33\r\nContent-Length: 34\r\n\r\n" + BODY, b"400"),
    "no such length": (POST + b"Content-Length: -1\r\n\r\n" + BODY, b"400"),
    "a length of 20 digits": (POST + b"Content-Length: 99999999999999999999\r\n\r\n" + BODY, b"413"),
    "a length of 5,000 digits": (POST + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n" + BODY, b"400"),
    "a length beside chunks": (
        CHUNKED[:-2] + b"Content-Length: 5\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY),
        b"400",
    ),
    "another encoding": (POST + b"Transfer-Encoding: gzip\r\n\r\n" + BODY, b"400"),
    "no chunk": (CHUNKED + b"xyz\r\n", b"400"),
    "no chunk, sent to no endpoint": (CHUNKED.replace(b"/v1", b"/v0") + b"xyz\r\n", b"400"),
    "as many chunks as allowed": (
        CHUNKED + b"1\r\n \r\n" * (connections.MAX_CHUNKS - 1) + b"2\r\n{}\r\n0\r\n\r\n",
        b"400",
    ),
    "a chunk too many": (CHUNKED + b"1\r\n \r\n" * (connections.MAX_CHUNKS + 1), b"400"),
    "no chunk after a body that is too long": (CHUNKED + b"400001\r\n" + b" " * 2**22 + b" \r\nxyz\r\n", b""),
    "a chunk of any size": (CHUNKED + b"f" * 21 + b"\r\nabc", b"400"),
    "a body with a GET": (
        b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc",
        b"200",
    ),
    "no host": (b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n", b"400"),
    "a bad host": (b"GET /health/ HTTP/1.1\r\nHost: [\r\nConnection: close\r\n\r\n", b"307"),
    "a target with a host": (b"GET HTTP://a@y:1/health?b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"200"),
    "a target without a path": (b"GET http://y HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"200"),
    "a target of another form": (b"GET health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"404"),
    "a path of any bytes": (b"GET /v1/models/%ff%00%0d%0a HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"404"),
    "a long path": (b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", b""),
    "many headers": (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 50_000 + b"\r\n", b""),
    "a long header": (b"GET /health HTTP/1.1\r\nHost: x\r\na: " + b"b" * 300_000 + b"\r\n\r\n", b""),
    "metrics in any form": (
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        b"Accept: application/openmetrics-text; version=x; escaping=y;;=, \xff\r\n\r\n",
        b"200",
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_malformed_requests(own_server, name, caplog):
    """Where no status is given the connection may also be cut off before the answer, since more is sent than read."""
    request, status = REQUESTS[name]
    answer = raw(own_server, request, half_closes=name == "half a request")
    assert answer[9:12] in ((status,) if status else (b"", b"400", b"413")), answer[:200]
    assert status != b"400" or json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert (b"fewer and larger" in answer) == (name == "a chunk too many")
    assert not [record for record in caplog.records if record.exc_info]
    assert httpx.get(f"{own_server.url}/health", timeout=120).status_code == 200


@pytest.mark.parametrize("upgrade", ["websocket", "h2c"])
def test_a_server_that_speaks_one_protocol_goes_on_in_it(own_server, upgrade, caplog):
    """Whichever packages for others are installed; RFC 9110, section 7.8."""
    headers = {"Connection": "Upgrade", "Upgrade": upgrade, "Sec-WebSocket-Key": "x", "Sec-WebSocket-Version": "13"}
    with caplog.at_level(logging.INFO, "uvicorn"):
        answer = httpx.get(f"{own_server.url}/health", headers=headers, timeout=120)
    assert (answer.status_code, answer.json()["status"]) == (200, "ok")
    assert not caplog.records, "a line per request would fill the log"


@pytest.mark.parametrize("method", ["OPTIONS", "HEAD", "PUT", "DELETE", "PATCH", "TRACE", "XYZ"])
def test_methods(own_server, method):
    for path, allowed in (("/health", {"GET", "HEAD"}), (COMPLETIONS, {"POST"}), ("/", {"GET", "HEAD"})):
        answer = httpx.request(method, own_server.url + path)
        assert answer.status_code == (200 if method in allowed else 405)
        assert answer.status_code == 200 or set(answer.headers["allow"].split(", ")) == allowed
        assert method != "HEAD" or answer.content == b""


def test_json_in_strings_is_as_flat_as_a_body(own_server):
    deep = '{"a":' * 10_000 + "1" + "}" * 10_000
    call = {"type": "function", "function": {"name": "f", "arguments": deep}}
    for path, fields in (
        (COMPLETIONS, {"json_schema": deep}),
        (COMPLETIONS, {"structured_outputs": {"json": deep}}),
        (COMPLETIONS, {"structured_outputs": {"structural_tag": deep}}),
        (CHAT, {"messages": [*HELLO, {"role": "assistant", "tool_calls": [call]}]}),
    ):
        answer = httpx.post(own_server.url + path, json={**WHOLE[path], **fields}, timeout=120)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error"), fields.keys()


def test_the_event_loop_reads_little_at_a_time(own_server):
    """Chunks of one byte are work for h11: a read of all that is there would hold up every stream meanwhile."""
    transports = [connection.transport for connection in own_server.server_state.connections]
    assert all(transport.max_size <= connections.READ_BYTES for transport in transports)
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"
    assert b'"text":"abab"' in raw(own_server, CHUNKED + chunks)


def test_the_host_header_opens_no_door(byte_target):
    """Old releases of Starlette take a path from it."""
    with serving(ServeConfig(target=byte_target, port=0, api_key="sk-key")) as server:
        for host in ("x/health?", "x/health#", "/health", "["):
            answer = httpx.get(f"{server.url}/v1/models", headers={"Host": host}, timeout=120)
            assert answer.status_code == 401, host
