"""How a server lives with its engine and how both end: hangs, deaths, draining."""

import asyncio
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from slipstream.serve.launch import Server
from slipstream.serve.options import ServeConfig
from slipstream.tests.serve.fake_server import COMPLETIONS, gauge, read_banner, serving, start, wait_until, write_target

SLOW = {"prompt": "abc", "cache_salt": "slow", "ignore_eos": True}


@contextmanager
def serving_with_client(target: str, **options: Any) -> Iterator[tuple[Server, httpx.Client]]:
    config = ServeConfig(target=target, port=0, max_model_len=100_000, **options)
    with serving(config) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        yield server, client


def test_a_hung_engine_is_unhealthy_until_it_goes_on(byte_target: str) -> None:
    with serving_with_client(byte_target, health_timeout=0.5) as (server, client), ThreadPoolExecutor() as pool:
        engine = psutil.Process(server.api.engine.pid)
        for has_work in (False, True):
            if has_work:
                answer = pool.submit(client.post, COMPLETIONS, json=SLOW | {"max_tokens": 60})
                wait_until(lambda: client.get("/health").json()["open_requests"] == 1, "the request is open")
            engine.suspend()
            wait_until(lambda: client.get("/health").status_code == 503, "the server is unhealthy")
            health = client.get("/health").json()
            assert health["status"] == "unhealthy"
            assert "has not answered for" in health["reason"]
            assert health["engine_unresponsive_seconds"] > 0.5
            assert gauge(client, "engine_up") == 0
            refused = client.post(COMPLETIONS, json=SLOW)
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
            engine.resume()
            wait_until(lambda: client.get("/health").json()["status"] == "ok", "the server is healthy again")
            assert gauge(client, "engine_up") == 1
        assert answer.result().json()["choices"][0]["text"] == "abc" * 20


def test_serve_ends_with_an_engine_that_was_killed(tmp_path: Path) -> None:
    async def ask(client: httpx.AsyncClient, index: int) -> httpx.Response:
        return await client.post(COMPLETIONS, json=SLOW | {"max_tokens": 250, "stream": index % 2 == 0})

    async def ask_and_kill(url: str, engine: psutil.Process) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            asked = [asyncio.create_task(ask(client, index)) for index in range(24)]
            while (await client.get("/health")).json()["open_requests"] < 24:
                assert not any(task.done() for task in asked)
            engine.kill()
            return await asyncio.gather(*asked)

    with start(str(write_target(tmp_path))) as server:
        _, _, url = read_banner(server)
        [engine] = [child for child in psutil.Process(server.pid).children() if "spawn_main" in str(child.cmdline())]
        answers = asyncio.run(ask_and_kill(url, engine))
        health = httpx.get(f"{url}/health")
        _, errors = server.communicate(timeout=30)
    assert [answer.status_code for answer in answers] == [200, 500] * 12  # streams had begun
    assert all("was killed by signal 9 (SIGKILL)" in answer.text.rstrip().splitlines()[-1] for answer in answers)
    assert health.status_code == 503
    assert "was killed by signal 9 (SIGKILL)" in health.json()["reason"]
    assert server.returncode == 1
    [line] = errors.splitlines()
    assert "was killed by signal 9 (SIGKILL); 24 open requests failed" in line


def test_sigterm_lets_open_requests_end_and_takes_no_others(byte_target: str) -> None:
    with serving_with_client(byte_target) as (server, client):
        with client.stream("POST", COMPLETIONS, json=SLOW | {"max_tokens": 300, "stream": True}) as stream:
            lines = stream.iter_lines()
            assert next(lines)
            server.handle_exit(signal.SIGTERM, None)
            health = client.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "draining")
            refused = client.post(COMPLETIONS, json=SLOW)
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
            assert "shutting down" in refused.json()["error"]["message"]
            assert list(lines)[-2] == "data: [DONE]"
        assert server.status == 0


@pytest.mark.parametrize(("drain_timeout", "num_signals"), [(0.2, 1), (600.0, 2)])
def test_what_does_not_end_in_time_is_told(byte_target: str, drain_timeout: float, num_signals: int) -> None:
    """In time: before the timeout and before a second signal."""
    with serving_with_client(byte_target, drain_timeout=drain_timeout) as (server, client):
        with ThreadPoolExecutor() as pool:
            whole, stream = (
                pool.submit(client.post, COMPLETIONS, json=SLOW | {"max_tokens": 90_000, "stream": stream})
                for stream in (False, True)
            )
            wait_until(lambda: client.get("/health").json()["open_requests"] == 2, "both requests are open")
            for _ in range(num_signals):
                server.handle_exit(signal.SIGTERM, None)
            assert whole.result().status_code == 503
            assert "shutting down" in whole.result().json()["error"]["message"]
            assert "shutting down" in stream.result().text.splitlines()[-2]
        wait_until(lambda: not psutil.pid_exists(server.api.engine.pid or 0), "the engine has ended")
