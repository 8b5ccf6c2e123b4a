"""The engine's process and the server's side of its pipe."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import psutil
import pytest

from slipstream.serve.engine.process import EngineFactory
from slipstream.serve.http.engine_client import EngineClient, EngineError
from slipstream.serve.options import EngineConfig
from slipstream.serve.request import Output, Request, SamplingParams
from slipstream.tests.serve.fake_engine import VOCABULARY, FakeEngine, break_at_start, never_start, refuse_to_start
from slipstream.tests.serve.fake_server import wait_until

PROMPT = [5, 6, 7]
CONFIG = EngineConfig(target="ckpt")


def request(name: str, max_tokens: int = 7, namespace: str = "", prompt: list[int] = PROMPT) -> Request:
    return Request(id=name, prompt=prompt, params=SamplingParams(max_tokens=max_tokens), namespace=namespace)


class Collector:
    """A receiver that remembers."""

    def __init__(self):
        self.tokens: list[int] = []
        self.end: asyncio.Future[str | Exception] = asyncio.get_running_loop().create_future()

    def receive(self, output: Output):
        self.tokens += output.tokens
        if output.finish_reason is not None:
            self.end.set_result(output.finish_reason)

    def fail(self, error: Exception):
        self.end.set_result(error)


def with_client(test: Callable, make_engine: EngineFactory = FakeEngine):
    async def run():
        client = EngineClient(make_engine)
        try:
            await test(client)
        finally:
            await client.stop()
            assert not psutil.pid_exists(client.pid or 0)

    asyncio.run(run())


def test_refused_and_aborted_requests_end():
    async def run(client):
        await client.start(CONFIG)
        refused = Collector()
        confusing = Collector()
        aborted = Collector()
        client.submit(request("refused", namespace="refuse"), refused)
        assert isinstance(await refused.end, ValueError)
        client.submit(request("confusing", namespace="confuse"), confusing)
        assert "could not queue this request (TypeError)" in str(await confusing.end)
        client.submit(request("aborted", max_tokens=10**6, namespace="slow"), aborted)
        client.abort("aborted")
        client.abort("aborted")
        client.abort("unknown")
        assert await aborted.end == "abort"

    with_client(run)


@pytest.mark.parametrize(
    ("make_engine", "sentence"),
    [
        (refuse_to_start, "checkpoint ckpt is cut short; fetch it again"),
        (break_at_start, "RuntimeError: no driver"),
    ],
)
def test_a_failed_start_says_why(make_engine, sentence):
    async def run(client):
        with pytest.raises(EngineError) as caught:
            await client.start(CONFIG)
        assert str(caught.value) == sentence

    with_client(run, make_engine)


def test_a_receiver_that_raises_fails_alone(caplog):
    class Raising(Collector):
        def receive(self, output):
            raise TypeError("no text for this")

    async def run(client):
        await client.start(CONFIG)
        raising = Raising()
        other = Collector()
        client.submit(request("raising", max_tokens=10**6, namespace="slow"), raising)
        client.submit(request("other", max_tokens=30, namespace="slow"), other)
        assert isinstance(await raising.end, EngineError)
        assert await other.end == "length"
        assert len(other.tokens) == 30
        assert client.num_open == 0
        while client.metrics.get("aborted") != 1:  # the engine has been told
            await asyncio.sleep(0.01)

    with_client(run)
    [record] = caplog.records
    assert "raising" in record.message
    assert "no text for this" in (record.exc_text or "")


def test_an_engine_that_does_not_read_blocks_nobody_and_misses_nothing():
    async def run(client):
        assert (await client.start(CONFIG)).vocab_size == VOCABULARY
        engine = psutil.Process(client.pid)
        was_late = threading.Event()
        rescue = threading.Timer(120, lambda: (was_late.set(), engine.resume()))  # a blocked loop would never do it
        engine.suspend()
        rescue.start()
        prompt = list(range(4, VOCABULARY)) * 400
        same = []
        collectors = []
        for index in range(30):  # 6 MB, if each were sent
            same.append(Collector())
            client.submit(request(f"same {index}", prompt=prompt), same[-1])
        await asyncio.sleep(0)
        assert not client.is_congested, "what one prompt's choices share is sent once"
        while not client.is_congested and len(collectors) < 100:
            collectors.append(Collector())
            client.submit(request(f"own {len(collectors)}", prompt=[*prompt, 4 + len(collectors) % 9]), collectors[-1])
            await asyncio.sleep(0)
        assert client.is_congested
        client.submit(request("aborted", max_tokens=10**6, namespace="slow"), aborted := Collector())
        client.abort("aborted")
        while client.unresponsive_seconds < 0.1:
            await asyncio.sleep(0.01)
        rescue.cancel()
        assert not was_late.is_set()
        engine.resume()
        assert await aborted.end == "abort"
        assert {await collector.end for collector in same + collectors} == {"length"}
        assert all(collector.tokens == prompt[:7] for collector in same + collectors)
        assert client.num_open == 0
        while client.unresponsive_seconds or client.metrics["running"]:  # comes with the last outputs or after them
            await asyncio.sleep(0.01)

    with_client(run)


def test_stopping_while_the_engine_loads():
    async def run(client):
        starting = asyncio.create_task(client.start(CONFIG))
        await asyncio.sleep(0.2)
        await client.stop()
        with pytest.raises(EngineError, match="shutting down"):
            await starting

    with_client(run, never_start)


def test_an_engine_that_does_not_end_is_killed_with_a_warning(caplog):
    async def run(client):
        await client.start(CONFIG)
        psutil.Process(client.pid).suspend()
        await client.stop(0.2)
        assert "the engine's process did not end within 0.2 s and is killed" in caplog.text

    with_client(run)


SERVER = """
import asyncio
from slipstream.serve.http.engine_client import EngineClient
from slipstream.serve.options import EngineConfig
from slipstream.tests.serve.fake_engine import FakeEngine, never_start

async def main():
    client = EngineClient({engine})
    starting = asyncio.create_task(client.start(EngineConfig()))
    await asyncio.sleep(0)
    {ready}
    print(client.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("engine", "ready"), [("FakeEngine", "await starting"), ("never_start", "await asyncio.sleep(0.5)")]
)
def test_the_engine_does_not_outlive_the_server(engine, ready):
    script = SERVER.format(engine=engine, ready=ready)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as server:
        process = psutil.Process(int(server.stdout.readline()))
        assert process.is_running()
        os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, "the engine has ended")
