"""Request ids, the lines of the log in JSON, and readiness."""

import asyncio
import json
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.serve import logs
from slipstream.serve.http import request_log
from slipstream.tests.serve.fake_server import COMPLETIONS, RESPONSES, wait_until

HEADER = "X-Request-Id"


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    """All that is logged as JSON, in order."""
    root = logging.getLogger()
    level = logging.getLogger("slipstream").level
    warn = warnings.showwarning
    handler = logs.configure("json")
    entries = []
    handler.emit = lambda record: entries.append(json.loads(handler.format(record)))
    yield entries
    root.removeHandler(handler)
    logging.getLogger("slipstream").setLevel(level)
    logging.captureWarnings(False)
    warnings.showwarning = warn


def test_every_request_has_an_id_and_a_line(client, lines):
    body = {"prompt": "abc", "max_tokens": 7, "n": 2}
    answer = client.post(COMPLETIONS, json=body, headers={HEADER: "trace-1/a"})
    assert answer.headers[HEADER] == "trace-1/a"
    streamed = client.post(RESPONSES, json={"input": "abc", "max_output_tokens": 5, "stream": True})
    refused = client.post(COMPLETIONS, json={"prompt": 5}, headers={HEADER: 'bad "id"'})
    failed = client.post(COMPLETIONS, json={"prompt": "abc", "cache_salt": "fail"})
    unknown = client.get("/nothing")
    _ = client.get("/health")
    ids = [response.headers[HEADER] for response in (answer, streamed, refused, failed, unknown)]

    def own():  # others end whenever their streams do
        return {line["request_id"]: line for line in lines if line["message"] == "request"}

    wait_until(lambda: set(ids) <= own().keys(), "five lines")
    entries = [own()[name] for name in ids]
    assert [line["status"] for line in entries] == [200, 200, 400, 500, 404]
    assert len(set(ids)) == 5
    assert entries[0]["answer"] == answer.json()["id"]
    assert entries[0]["finish_reasons"] == ["length", "length"]
    assert entries[0]["completion_tokens"] == answer.json()["usage"]["completion_tokens"] == 14
    assert (entries[1]["path"], entries[1]["stream"], entries[1]["completion_tokens"]) == (RESPONSES, True, 5)
    assert entries[2]["error"] == refused.json()["error"]["message"]
    assert entries[3]["finish_reasons"] == ["error"]
    assert all(line["seconds"] >= 0 and line["time"].endswith("Z") for line in entries)


def test_a_text_log_has_a_line_for_each_refused_request(client, caplog, monkeypatch):
    monkeypatch.setattr(request_log, "TEXT_LINES", 10**6)  # others of this server may have been refused before
    assert client.post(COMPLETIONS, json={"prompt": "secret", "max_tokens": 2}).status_code == 200
    body = {"prompt": "secret", "stream_options": {"include_usage": True}}
    answer = client.post(COMPLETIONS, json=body, headers={HEADER: "find-me"})
    client.get("/v1/%0aforged", headers={HEADER: "newline"})
    wait_until(lambda: "newline" in caplog.text, "both lines")
    messages = [text for text in caplog.messages if "find-me" in text or "newline" in text]
    message = f"400 POST {COMPLETIONS}: {answer.json()['error']['message']} (client 127.0.0.1, request find-me)"
    assert messages[0] == message
    assert messages[1].startswith(r"404 GET /v1/\nforged: ")
    assert "\n" not in messages[1]
    assert "secret" not in caplog.text


def test_a_flood_of_refused_requests_is_counted(caplog):
    line = {"status": 400, "method": "GET", "path": "/", "error": "no", "client": None, "request_id": "r"}

    async def flood(refusals):
        for _ in range(request_log.TEXT_LINES + 1000):
            refusals.add(line)
        assert len(caplog.messages) == request_log.TEXT_LINES
        refusals._end_period()
        refusals.add(line)
        refusals._end_period()

    asyncio.run(flood(request_log.Refusals()))
    period, last = caplog.messages[-2:]
    assert len(caplog.messages) == request_log.TEXT_LINES + 2
    assert period.startswith("1000 more requests were refused in 60 s")
    assert last.startswith("400 GET /: no")


def test_an_internal_error_is_found_by_its_request_id(client, server, lines, monkeypatch):
    def break_down(*_, **__):
        raise RuntimeError("secret")

    monkeypatch.setattr(server.api.frontend, "encode", break_down)
    answer = client.post(COMPLETIONS, json={"prompt": "abc"}, headers={HEADER: "find-me"})
    assert answer.json()["error"]["message"].endswith(" find-me")
    [error] = [line for line in lines if line["level"] == "error"]
    assert error["request_id"] == "find-me"
    assert "RuntimeError: secret" in error["exception"]
