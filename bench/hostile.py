"""What one hostile client costs everybody else: /health and another client's stream beside each kind of bad request.

serve --target assets/tiny-target --port 8000 &
python bench/hostile.py --url http://127.0.0.1:8000 --pid $!

The first line is the idle server in the same run; on a busy machine compare with it. Starts and ends nothing.
"""

import argparse
import asyncio
import json
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import aiohttp
import httpx
import numpy as np
import psutil

from slipstream.bench.lines import Lines

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MB = 2**20
SETTLE_SECONDS = 1.0  # between two kinds, for the server to end what it was doing
PROBE_SECONDS = 0.02  # between two requests of /health
STREAM = {"prompt": "Tom has", "max_tokens": 512, "stream": True, "ignore_eos": True, "temperature": 0.0}
HELLO = [{"role": "user", "content": "x"}]


@dataclass(frozen=True)
class Attack:
    """Bodies that `clients` threads send again and again, each over connections of its own."""

    path: str
    body: Callable[[], bytes]
    clients: int = 1
    timeout: float = 30.0  # after which the client hangs up


def fill(head: str, unit: str, tail: str, size: int) -> Callable[[], bytes]:
    """A body of about `size` bytes, `unit` repeated."""
    return lambda: (head + unit * (size // len(unit)) + tail).encode()


def nested(depth: int) -> Callable[[], bytes]:
    messages = json.dumps(HELLO)
    return lambda: (
        f'{{"max_tokens":1,"messages":{messages},"chat_template_kwargs":{{"a":{"[" * depth}{"]" * depth}}}}}'.encode()
    )


def salted(salt: Callable[[], str]) -> Callable[[], bytes]:
    return lambda: json.dumps({"prompt": "x" * 64, "max_tokens": 1, "cache_salt": salt()}).encode()


def choices(n: int) -> Callable[[], bytes]:
    body = {"messages": HELLO, "n": n, "max_tokens": 256, "ignore_eos": True, "temperature": 1}
    return lambda: json.dumps(body).encode()


def stops(count: int, length: int) -> Callable[[], bytes]:
    strings = [f"{index:06}".rjust(length, "~") for index in range(count)]
    return lambda: json.dumps({"prompt": "Tom has", "max_tokens": 100, "ignore_eos": True, "stop": strings}).encode()


PROMPT, METADATA = '{"max_tokens":1,"prompt":', '{"prompt":"x","max_tokens":1,"metadata":['
MESSAGE = '{"role":"user","content":"x"},'
NUMBER = iter(range(10**9))
ATTACKS = {
    "text of 50 MB": Attack(COMPLETIONS, fill(PROMPT + '"', "hello world ", '"}', 50 * MB)),
    "text of 4 MB": Attack(COMPLETIONS, fill(PROMPT + '"', "hello world ", '"}', 4 * MB - 99)),
    "text of 30 kB, 8 clients": Attack(COMPLETIONS, fill(PROMPT + '"', "hello world ", '"}', 30_000), clients=8),
    "text of 12 MB, leaves after 1 s": Attack(
        COMPLETIONS, fill(PROMPT + '"', "hello world ", '"}', 12 * MB), timeout=1.0
    ),
    "texts of 15 MB, 8 clients": Attack(COMPLETIONS, fill(PROMPT + '"', "hello world ", '"}', 15 * MB), clients=8),
    "texts of 4 MB, 8 clients": Attack(COMPLETIONS, fill(PROMPT + '"', "hello world ", '"}', 4 * MB - 99), clients=8),
    "10M token ids": Attack(COMPLETIONS, fill(PROMPT + "[", "1,", "1]}", 20 * MB)),
    "2M token ids": Attack(COMPLETIONS, fill(PROMPT + "[", "1,", "1]}", 4 * MB - 99)),
    "260k token ids": Attack(COMPLETIONS, fill(PROMPT + "[", "4095,", "1]}", 260_000 * 5)),
    "1M messages": Attack(CHAT, fill('{"messages":[', MESSAGE, "{}]}", 30 * MB)),
    "140k messages": Attack(CHAT, fill('{"messages":[', MESSAGE, "{}]}", 4 * MB - 99)),
    "4,000 messages": Attack(CHAT, fill('{"messages":[', MESSAGE, "{}]}", 4_000 * len(MESSAGE))),
    "4M objects in metadata": Attack(COMPLETIONS, fill(METADATA, '{"a":1},', "{}]}", 36 * MB)),
    "500k objects in metadata": Attack(COMPLETIONS, fill(METADATA, '{"a":1},', "{}]}", 4 * MB - 99)),
    "1.3M lists in metadata": Attack(COMPLETIONS, fill(METADATA, "[],", "[]]}", 4 * MB - 99)),
    "65k lists in metadata": Attack(COMPLETIONS, fill(METADATA, "[],", "[]]}", 65_000 * 3)),
    "unknown field of 50 MB": Attack(COMPLETIONS, fill('{"prompt":"x","abc":"', "y", '"}', 50 * MB)),
    "unknown field of 4 MB": Attack(COMPLETIONS, fill('{"prompt":"x","abc":"', "y", '"}', 4 * MB - 99)),
    "stop string of 1 MB": Attack(COMPLETIONS, stops(1, MB)),
    "300k stop strings": Attack(COMPLETIONS, stops(300_000, 6)),
    "16 stop strings": Attack(COMPLETIONS, stops(16, 256)),
    "template options 60 deep": Attack(CHAT, nested(60)),
    "template options 500 deep": Attack(CHAT, nested(500)),
    "salts of 1 MB": Attack(COMPLETIONS, salted(lambda: f"{next(NUMBER)}" + "s" * MB)),
    "n = 128, 3 clients": Attack(CHAT, choices(128), clients=3),
}


@dataclass
class Probe:
    """Times of /health, gaps between the pieces of one stream, and the largest memory of the server."""

    url: str
    pid: int | None
    health_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    refused: int = 0  # streams that could not begin
    rss: int = 0
    done: bool = False

    async def run(self, is_over: Callable[[], bool]) -> None:
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(self.url, timeout=timeout, read_bufsize=2**20) as session:
            tasks = [asyncio.create_task(task(session)) for task in (self.ask_health, self.read_streams)]
            while not is_over():
                self.rss = max(self.rss, psutil.Process(self.pid).memory_info().rss if self.pid else 0)
                await asyncio.sleep(0.05)
            self.done = True
            await asyncio.gather(*tasks)

    async def ask_health(self, session: aiohttp.ClientSession) -> None:
        while not self.done:
            start = time.perf_counter()
            async with session.get("/health") as response:
                await response.read()
            self.health_s.append(time.perf_counter() - start)
            await asyncio.sleep(PROBE_SECONDS)

    async def read_streams(self, session: aiohttp.ClientSession) -> None:
        while not self.done:
            async with session.post(COMPLETIONS, json=STREAM) as response:
                if response.status != 200:
                    self.refused += 1
                    await asyncio.sleep(0.1)
                    continue
                arrivals = [time.perf_counter() async for line in response.content if line.strip() and not self.done]
            self.gaps_s += [later - earlier for earlier, later in pairwise(arrivals)]

    def summary(self) -> dict[str, Any]:
        figures: dict[str, Any] = {"refused_streams": self.refused, "rss_mb": round(self.rss / MB)}
        for name, values in (("health", self.health_s), ("gap", self.gaps_s)):
            for label, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
                figures[f"{name}_{label}_ms"] = round(1e3 * float(np.quantile(values, share)), 1) if values else None
        return figures


def attack(url: str, name: str, seconds: float, pipe: Connection) -> None:
    """In a process of its own, so that bodies of megabytes do not hold up the probes."""
    chosen = ATTACKS[name]
    bodies = [chosen.body() for _ in range(chosen.clients)]
    pipe.send("ready")
    end = time.monotonic() + seconds

    def send(body: bytes) -> Iterator[tuple[str, float]]:
        while time.monotonic() < end:
            start = time.perf_counter()
            try:
                headers = {"Content-Type": "application/json"}
                response = httpx.post(url + chosen.path, content=body, headers=headers, timeout=chosen.timeout)
                yield str(response.status_code), time.perf_counter() - start
            except httpx.TransportError as error:
                yield type(error).__name__, time.perf_counter() - start

    with ThreadPoolExecutor(chosen.clients) as pool:
        pipe.send([answer for answers in pool.map(lambda body: list(send(body)), bodies) for answer in answers])


def measure(url: str, pid: int | None, name: str | None, seconds: float) -> dict[str, Any]:
    """One kind of request, or, without a name, none."""
    probe = Probe(url, pid)
    if name is None:
        end = time.monotonic() + seconds
        asyncio.run(probe.run(lambda: time.monotonic() > end))
        return {"kind": "idle", **probe.summary()}
    context = multiprocessing.get_context("spawn")
    pipe, far_end = context.Pipe()
    process = context.Process(target=attack, args=(url, name, seconds, far_end))
    process.start()
    far_end.close()
    pipe.recv()
    asyncio.run(probe.run(pipe.poll))
    answers = pipe.recv()
    process.join()
    statuses = dict(Counter(status for status, _ in answers))
    return {"kind": name, "statuses": statuses, "longest_s": round(max(s for _, s in answers), 2), **probe.summary()}


def row(line: dict[str, Any]) -> str:
    health, gap = ([line[f"{name}_{label}_ms"] for label in ("p50", "p99", "max")] for name in ("health", "gap"))
    cells = [" / ".join("-" if value is None else f"{value:.0f}" for value in values) for values in (health, gap)]
    statuses = ", ".join(f"{count} x {status}" for status, count in line.get("statuses", {}).items())
    return f"| {line['kind']} | {statuses} | {cells[0]} | {cells[1]} | {line['rss_mb']} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="base URL of a running server, without /v1")
    parser.add_argument("--pid", type=int, help="its HTTP process, whose memory is shown")
    parser.add_argument("--seconds", type=float, default=4.0, help="time per kind of request")
    parser.add_argument("--only", nargs="*", help="kinds whose names contain one of these words")
    parser.add_argument("--output", help="file to which JSON lines are appended")
    options = parser.parse_args()
    names = [name for name in ATTACKS if not options.only or any(word in name for word in options.only)]
    lines = Lines(options.output)
    print("| request | answers | /health p50 / p99 / max, ms | gaps of a stream, ms | largest RSS, MB |")
    print("|---|---|---|---|---|")
    for name in [None, *names, None]:
        print(row(lines.add(measure(options.url, options.pid, name, options.seconds))), flush=True)
        time.sleep(SETTLE_SECONDS)
    lines.print()


if __name__ == "__main__":
    main()
