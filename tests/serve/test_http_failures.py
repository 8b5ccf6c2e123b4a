"""Clients that leave, more clients than there is room for, engines that hang or die, servers that end."""

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import aiohttp
import httpx
import psutil
import pytest

from slipstream.serve.http import engine_client, launch
from slipstream.serve.http.connections import raise_file_limit
from slipstream.serve.http.launch import Server
from slipstream.serve.http.limits import MAX_BODIES_BYTES, SHORT_BODY_BYTES, BodyReader, BoundedPool
from slipstream.serve.http.writers import CompletionWriter
from slipstream.serve.options import ServeConfig
from slipstream.tests.serve.fake_server import (
    COMPLETIONS,
    client_of,
    engine_held,
    gauge,
    send_post,
    serving,
    wait_until,
)

LONG = "x" * SHORT_BODY_BYTES
SLOW = {"prompt": "x", "max_tokens": 250, "cache_salt": "slow", "ignore_eos": True}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_request(client, server, stream):
    aborted = gauge(client, "engine_aborted")
    body = {**SLOW, "stream": stream, "n": 2}
    if stream:
        with (
            client_of(server) as leaving,
            leaving.stream("POST", COMPLETIONS, json=body) as response,
        ):
            assert next(response.iter_lines())
    else:
        with engine_held(server), send_post(server, COMPLETIONS, body):
            wait_until(lambda: server.api.engine.num_open == 2, "both choices are open")
    wait_until(lambda: gauge(client, "engine_aborted") == aborted + 2, "both choices were aborted")
    wait_until(lambda: gauge(client, "open_requests") == 0, "nothing is open")


@pytest.mark.parametrize("num_clients", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_clients_each_get_an_answer_or_429(byte_target, num_clients):
    raise_file_limit()  # both ends of all connections are in this process
    config = ServeConfig(target=byte_target, port=0, max_running=4, max_waiting=8)
    with serving(config) as server, client_of(server) as client:

        async def ask(session, stream):
            body = {"prompt": "abc", "max_tokens": 40, "cache_salt": "slow", "stream": stream}
            async with session.post(server.url + COMPLETIONS, json=body) as response:
                assert response.status != 200 or '"finish_reason":"length"' in await response.text()
                return response.status

        async def flood():
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            async with aiohttp.ClientSession(connector=connector) as session:
                return await asyncio.gather(*(ask(session, stream=index % 2 == 0) for index in range(num_clients)))

        statuses = asyncio.run(flood())
        assert set(statuses) == {200, 429}
        assert statuses.count(200) >= 12
        assert gauge(client, "engine_largest_batch") <= 12, "never more open than max_running + max_waiting"
        assert gauge(client, "open_requests") == 0
        assert client.post(COMPLETIONS, json={"prompt": "x"}).status_code == 200


@pytest.mark.parametrize("cause", ["SIGKILL", "crash"])
def test_the_end_of_the_engine_ends_every_request_and_then_the_server(byte_target, cause, monkeypatch, caplog):
    monkeypatch.setattr(launch, "FAILURE_SECONDS", 1.0)
    reason = "was killed by signal 9 (SIGKILL)" if cause == "SIGKILL" else "failed in a step with RuntimeError"

    async def ask_and_break():
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as many:
            tasks = [
                asyncio.create_task(many.post(COMPLETIONS, json={**SLOW, "stream": index % 2 == 0}))
                for index in range(24)
            ]
            while (await many.get("/health")).json()["open_requests"] < 24:
                assert not any(task.done() for task in tasks)
            if cause == "SIGKILL":
                os.kill(server.api.engine.pid or 0, signal.SIGKILL)
            else:
                assert (await many.post(COMPLETIONS, json={"prompt": "x", "cache_salt": "crash"})).status_code == 500
            return await asyncio.gather(*tasks)

    with (
        serving(ServeConfig(target=byte_target, port=0)) as server,
        client_of(server) as client,
    ):
        answers = asyncio.run(ask_and_break())
        assert [answer.status_code for answer in answers] == [200, 500] * 12, "streams had begun"
        assert all(reason in answer.text.rstrip().splitlines()[-1] for answer in answers)
        for late in (client.get("/health"), client.post(COMPLETIONS, json={"prompt": "x"})):
            assert late.status_code == 503
            assert reason in late.text
        assert late.json()["error"]["code"] == "engine_failed"
        assert gauge(client, "engine_up") == 0
        wait_until(lambda: not psutil.pid_exists(server.api.engine.pid or 0), "the dead process was reaped")
        wait_until(lambda: server.should_exit, "the server ends")
    assert server.status == 1
    [line] = [record.message for record in caplog.records if record.name.endswith("launch")]
    assert reason in line
    assert f"{24 + (cause == 'crash')} open requests failed" in line


@pytest.mark.parametrize("stream", [False, True])
def test_one_request_fails_and_the_engine_goes_on(client, stream):
    before = gauge(client, 'requests_total{finish_reason="error"}')
    failed = client.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 9, "cache_salt": "fail", "stream": stream})
    assert failed.status_code == (200 if stream else 500), "a stream has begun"
    assert '"no memory"' in failed.text.rstrip().splitlines()[-1]
    assert '"engine_failed"' in failed.text
    assert gauge(client, 'requests_total{finish_reason="error"}') == before + 1
    assert gauge(client, "open_requests") == 0
    assert client.post(COMPLETIONS, json={"prompt": "abc"}).status_code == 200


def test_long_prompts_hold_up_nobody_and_cost_nothing_once_their_client_has_left(client, server, monkeypatch):
    api = server.api
    encode = server.api.frontend.encode
    prompts = []
    started = threading.Event()
    go_on = threading.Event()

    def held_back(text, *arguments, **options):
        prompts.append(text)
        if text == "first":
            started.set()
            assert go_on.wait(120)
        return encode(text, *arguments, **options)

    def ask(prompt, timeout=120):
        body = {"prompt": prompt, "max_tokens": 4, "user": LONG}
        return httpx.post(server.url + COMPLETIONS, json=body, timeout=timeout)

    monkeypatch.setattr(api.frontend, "encode", held_back)
    monkeypatch.setattr(api, "long_pool", BoundedPool(1, max_waiting=2))
    with ThreadPoolExecutor() as pool:
        try:
            running = pool.submit(ask, "first")
            assert started.wait(120)
            waiting = pool.submit(ask, "second")
            wait_until(lambda: api.long_pool.num_waiting == 1, "the second waits for the thread")
            with pytest.raises(httpx.ReadTimeout):
                ask("left", timeout=0.5)
            wait_until(lambda: api.long_pool.num_waiting == 1, "the one that left waits no longer")
            assert client.get("/health", timeout=120).status_code == 200
            assert client.post(COMPLETIONS, json={"prompt": "x", "stream": True}, timeout=120).status_code == 200
            assert not running.done()
        finally:
            go_on.set()
        assert [call.result().json()["choices"][0]["text"] for call in (running, waiting)] == ["firs", "seco"]
    assert prompts == ["first", "x", "second"]
    assert api.bodies.num_bytes == 0


def test_too_many_long_prompts_are_refused(client, server, monkeypatch):
    body = {"prompt": "x", "max_tokens": 1, "user": LONG}
    for attribute, value in (("long_pool", BoundedPool(1, max_waiting=0)), ("bodies", BodyReader(2**22))):
        with monkeypatch.context() as patch:
            patch.setattr(server.api, attribute, value)
            server.api.bodies.num_bytes = MAX_BODIES_BYTES if attribute == "bodies" else 0
            response = client.post(COMPLETIONS, json=body)
            assert (response.status_code, response.headers["Retry-After"]) == (429, "1")
            assert client.post(COMPLETIONS, json={"prompt": "x"}).status_code == 200, "short ones are served"


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_is_told_by_an_id_and_logged_once(client, monkeypatch, caplog, stream):
    def break_down(*_):
        raise RuntimeError("secret of /home/someone")

    monkeypatch.setattr(CompletionWriter, "pieces" if stream else "whole", break_down)
    response = client.post(COMPLETIONS, json={"prompt": "x", "stream": stream})
    error = (json.loads(response.text.removeprefix("data: ")) if stream else response.json())["error"]
    assert response.status_code == (200 if stream else 500)
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "secret" not in response.text
    assert "RuntimeError" not in response.text
    [record] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert error["message"].split()[-1] in record.getMessage()
    assert "secret of /home/someone" in caplog.text
    assert client.get("/health").status_code == 200
    assert client.get("/health").status_code == 200, "the connection was kept"


def test_room_is_looked_for_again_after_tokenising(byte_target, monkeypatch):
    config = ServeConfig(target=byte_target, port=0, max_running=1, max_waiting=0)
    with serving(config) as server, ThreadPoolExecutor() as pool:
        encode = server.api.frontend.encode
        both_are_here = threading.Barrier(2, timeout=120)

        def encode_together(text, field, add_special_tokens):
            both_are_here.wait()
            return encode(text, field, add_special_tokens)

        monkeypatch.setattr(server.api.frontend, "encode", encode_together)
        bodies = [SLOW, {**SLOW, "user": LONG}]  # a thread each
        calls = [pool.submit(httpx.post, server.url + COMPLETIONS, json=body, timeout=120) for body in bodies]
        assert sorted(call.result().status_code for call in calls) == [200, 429]


@contextmanager
def serving_with_client(target: str, **options: Any) -> Iterator[tuple[Server, httpx.Client]]:
    config = ServeConfig(target=target, port=0, max_model_len=100_000, **options)
    with serving(config) as server, client_of(server) as client:
        yield server, client


def test_a_hung_engine_is_unhealthy_until_it_goes_on(byte_target, monkeypatch):
    monkeypatch.setattr(engine_client, "PING_SECONDS", 0.1)
    with serving_with_client(byte_target, health_timeout=1.0) as (server, client), ThreadPoolExecutor() as pool:
        engine = psutil.Process(server.api.engine.pid)
        for has_work in (False, True):
            if has_work:
                answer = pool.submit(client.post, COMPLETIONS, json=SLOW | {"prompt": "abc", "max_tokens": 300})
                wait_until(lambda: client.get("/health").json()["open_requests"] == 1, "the request is open")
            engine.suspend()
            wait_until(lambda: client.get("/health").status_code == 503, "the server is unhealthy")
            health = client.get("/health").json()
            ready = client.get("/ready")
            assert (ready.status_code, ready.json()["reason"]) == (503, health["reason"])
            assert health["status"] == "unhealthy"
            assert "has not answered for" in health["reason"]
            assert health["engine_unresponsive_seconds"] > 1.0
            assert gauge(client, "engine_up") == 0
            refused = client.post(COMPLETIONS, json=SLOW)
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
            assert refused.json()["error"]["code"] == "engine_unresponsive"
            engine.resume()
            wait_until(lambda: client.get("/health").json()["status"] == "ok", "the server is healthy again")
            assert client.get("/ready").status_code == 200
            assert gauge(client, "engine_up") == 1
        assert answer.result().json()["choices"][0]["text"] == "abc" * 100


def test_sigterm_lets_open_requests_end_and_takes_no_others(byte_target):
    with serving_with_client(byte_target) as (server, client):
        with client.stream("POST", COMPLETIONS, json=SLOW | {"max_tokens": 300, "stream": True}) as stream:
            lines = stream.iter_lines()
            assert next(lines)
            with engine_held(server):
                server.handle_exit(signal.SIGTERM, None)
                health = client.get("/health")
                assert (health.status_code, health.json()["status"]) == (503, "draining")
                assert client.get("/ready").json()["reason"] == "the server is shutting down"
                refused = client.post(COMPLETIONS, json=SLOW)
                assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
                assert "shutting down" in refused.json()["error"]["message"]
            assert list(lines)[-2] == "data: [DONE]"
        assert server.status == 0


@pytest.mark.parametrize(("drain_timeout", "num_signals"), [(0.2, 1), (600.0, 2)])
def test_what_does_not_end_in_time_is_told(byte_target, drain_timeout, num_signals):
    """In time: before the timeout and before a second signal."""
    with serving_with_client(byte_target, drain_timeout=drain_timeout) as (server, client):
        with ThreadPoolExecutor() as pool:
            answer, stream = (
                pool.submit(client.post, COMPLETIONS, json=SLOW | {"max_tokens": 90_000, "stream": stream})
                for stream in (False, True)
            )
            wait_until(lambda: client.get("/health").json()["open_requests"] == 2, "both requests are open")
            for _ in range(num_signals):
                server.handle_exit(signal.SIGTERM, None)
            assert answer.result().status_code == 503
            assert "shutting down" in answer.result().json()["error"]["message"]
            assert "shutting down" in stream.result().text.splitlines()[-2]
        wait_until(lambda: not psutil.pid_exists(server.api.engine.pid or 0), "the engine has ended")


@pytest.mark.parametrize("is_tried", [False, True])
def test_a_request_whose_grammar_is_tried_is_told_of_the_end(is_tried, byte_target, monkeypatch):
    monkeypatch.setattr(launch, "GRACE_SECONDS", 5 if is_tried else 0.1)
    waits = threading.Event()

    with serving_with_client(byte_target) as (server, client), ThreadPoolExecutor() as pool:

        async def admit(grammar):
            waits.set()
            while server.api.engine.failure is None or not is_tried:
                await asyncio.sleep(0.01)
            return grammar

        monkeypatch.setattr(server.api.trials, "admit", admit)
        answer = pool.submit(client.post, COMPLETIONS, json={"prompt": "x", "regex": "a"})
        assert waits.wait(120)
        server.handle_exit(signal.SIGINT, None)
        assert (answer.result().status_code, answer.result().json()["error"]["code"]) == (503, "server_shutting_down")
