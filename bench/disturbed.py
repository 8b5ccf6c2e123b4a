"""Measures how busy processes and hostile clients slow down a server, its streams and its /health.

    python bench/disturbed.py --kinds busy --concurrency 8 --repeats 3       # processes that compute all the time
    python bench/disturbed.py --kinds hostile                                # all hostile requests
    python bench/disturbed.py --kinds "stop string" "4,000 messages" --serve.max-running 8

Starts one server and sends it the same streamed requests each time, first undisturbed. A hostile client, in its own
process, repeats one request until the streams end. ATTACKS names the requests; --kinds selects those whose name
contains one of the given words. Prints a table, then JSON lines: tokens/s and their share of the undisturbed speed in
the same turn, times of /health and gaps within streams in milliseconds, and the peak memory of the HTTP process.
"""

import asyncio
import json
import multiprocessing
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from statistics import median
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import aiohttp
import psutil

from slipstream.bench.lines import Lines, milliseconds, origin
from slipstream.bench.server import Server, flags, running_server
from slipstream.data_tools.options import check_at_least, run
from slipstream.serve.bench import read_prompts
from slipstream.serve.load import run_load

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPTS, NUM_PROMPTS, MAX_TOKENS = "assets/gsm8k.jsonl.gz", 24, 96
MB = 2**20
SETTLE_SECONDS = 1.0  # between two kinds, for the server to finish its work
PERCENTS = (50, 99, 100)
PROBE_SECONDS = 0.02  # between two requests of /health
HELLO = [{"role": "user", "content": "x"}]
COLUMNS = "| disturbance | answers to it | tok/s | of idle | /health p50 / p99 / max, ms | gaps, ms | RSS, MB |"


@dataclass(frozen=True, slots=True, kw_only=True)
class DisturbedConfig:
    """A server under disturbance."""

    kinds: list[str] = field(default_factory=lambda: ["busy", "hostile"])
    """busy, hostile, or words from the names of hostile requests."""
    target: str = "assets/tiny-target"
    """Target to serve."""
    draft: str = "none"
    """Draft to serve it with."""
    serve: dict[str, Any] = field(default_factory=dict)
    """Further options of `serve` by name."""
    concurrency: int = 1
    """Requests open at once."""
    repeats: int = 1
    """Turns of one idle measurement and one of each kind; prints medians."""
    output: str | None = None
    """File to append the JSON lines to."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "concurrency", "repeats")
        for kind in self.kinds:
            if kind not in ("busy", "hostile") and not any(kind in name for name in ATTACKS):
                raise ValueError(f"kinds holds {kind!r}; give busy, hostile, or words of {', '.join(ATTACKS)}")

    @property
    def names(self) -> list[str]:
        """The measurements of a turn."""
        attacks = [name for name in ATTACKS if any(kind == "hostile" or kind in name for kind in self.kinds)]
        return ["idle", *(["busy"] if "busy" in self.kinds else []), *attacks]


@dataclass(frozen=True)
class Attack:
    """A request that `clients` repeat, each time over a new connection."""

    path: str
    body: Callable[[], bytes]
    clients: int = 1
    timeout: float = 30.0  # seconds until the client hangs up


def fill(head: str, unit: str, tail: str, size: int) -> Callable[[], bytes]:
    """A body of about `size` bytes, `unit` repeated."""
    return lambda: (head + unit * (size // len(unit)) + tail).encode()


def nested(depth: int) -> Callable[[], bytes]:
    messages = json.dumps(HELLO)
    return lambda: (
        f'{{"max_tokens":1,"messages":{messages},"chat_template_kwargs":{{"a":{"[" * depth}{"]" * depth}}}}}'.encode()
    )


def stops(count: int, length: int) -> Callable[[], bytes]:
    strings = [f"{index:06}".rjust(length, "~") for index in range(count)]
    return as_json({"prompt": "Tom has", "max_tokens": 100, "ignore_eos": True, "stop": strings})


def as_json(body: dict[str, Any]) -> Callable[[], bytes]:
    return lambda: json.dumps(body).encode()


PROMPT, METADATA = '{"max_tokens":1,"prompt":', '{"prompt":"x","max_tokens":1,"metadata":['
MESSAGE = '{"role":"user","content":"x"},'
MANY_CHOICES = {"messages": HELLO, "n": 128, "max_tokens": 256, "ignore_eos": True, "temperature": 1}
SALTED = {"prompt": "x" * 64, "max_tokens": 1, "cache_salt": "s" * MB}
ATTACKS = {  # one body above the limit of its size, the others just below a limit
    "text of 50 MB": Attack(COMPLETIONS, fill(PROMPT + '"', "hello world ", '"}', 50 * MB)),
    "text of 4 MB": Attack(COMPLETIONS, fill(PROMPT + '"', "hello world ", '"}', 4 * MB - 99)),
    "text of 4 MB, leaves at once": Attack(
        COMPLETIONS, fill(PROMPT + '"', "hello world ", '"}', 4 * MB - 99), timeout=0.1
    ),
    "texts of 4 MB, 8 clients": Attack(COMPLETIONS, fill(PROMPT + '"', "hello world ", '"}', 4 * MB - 99), clients=8),
    "texts of 30 kB, 8 clients": Attack(COMPLETIONS, fill(PROMPT + '"', "hello world ", '"}', 30_000), clients=8),
    "2M token ids": Attack(COMPLETIONS, fill(PROMPT + "[", "1,", "1]}", 4 * MB - 99)),
    "260k token ids": Attack(COMPLETIONS, fill(PROMPT + "[", "4095,", "1]}", 260_000 * 5)),
    "140k messages": Attack(CHAT, fill('{"messages":[', MESSAGE, "{}]}", 4 * MB - 99)),
    "4,000 messages": Attack(CHAT, fill('{"messages":[', MESSAGE, "{}]}", 4_000 * len(MESSAGE))),
    "500k objects in metadata": Attack(COMPLETIONS, fill(METADATA, '{"a":1},', "{}]}", 4 * MB - 99)),
    "1.3M lists in metadata": Attack(COMPLETIONS, fill(METADATA, "[],", "[]]}", 4 * MB - 99)),
    "65k lists in metadata": Attack(COMPLETIONS, fill(METADATA, "[],", "[]]}", 65_000 * 3)),
    "unknown field of 4 MB": Attack(COMPLETIONS, fill('{"prompt":"x","abc":"', "y", '"}', 4 * MB - 99)),
    "stop string of 1 MB": Attack(COMPLETIONS, stops(1, MB)),
    "300k stop strings": Attack(COMPLETIONS, stops(300_000, 6)),
    "16 stop strings": Attack(COMPLETIONS, stops(16, 256)),
    "template options 60 deep": Attack(CHAT, nested(60)),
    "template options 500 deep": Attack(CHAT, nested(500)),
    "salt of 1 MB": Attack(COMPLETIONS, as_json(SALTED)),
    "n = 128, 3 clients": Attack(CHAT, as_json(MANY_CHOICES), clients=3),
}


@contextmanager
def beside(kind: str, url: str) -> Iterator[dict[str, Any]]:
    """Disturbs the server inside the context; on exit the dict holds the hostile client's answers."""
    found: dict[str, Any] = {}
    if kind in ("idle", "busy"):
        command = [sys.executable, "-c", "while True: pass" if kind == "busy" else "pass"]
        with subprocess.Popen(command) as process:
            try:
                yield found
            finally:
                process.kill()
        return
    context = multiprocessing.get_context("spawn")
    pipe, far_end = context.Pipe()
    client = context.Process(target=attack, args=(url, kind, far_end), daemon=True)
    client.start()
    far_end.close()
    pipe.recv()  # its bodies are ready
    yield found
    pipe.send("stop")
    answers = pipe.recv()
    client.join()
    found["statuses"] = dict(Counter(status for status, _ in answers))
    found["longest_s"] = round(max(seconds for _, seconds in answers), 2)


def attack(url: str, name: str, pipe: Connection) -> None:
    """Runs a hostile client. Its own process keeps megabytes of body from delaying the probes."""
    chosen, answers = ATTACKS[name], list[tuple[str, float]]()

    async def send(session: aiohttp.ClientSession, body: bytes) -> None:
        while not answers or not pipe.poll():
            start = time.perf_counter()
            try:
                async with session.post(
                    chosen.path, data=body, headers={"Content-Type": "application/json"}
                ) as response:
                    await response.read()
                status = str(response.status)
            except (aiohttp.ClientError, OSError) as error:
                status = type(error).__name__
            answers.append((status, time.perf_counter() - start))

    async def send_all() -> None:
        timeout, connector = aiohttp.ClientTimeout(total=chosen.timeout), aiohttp.TCPConnector(force_close=True)
        bodies = [chosen.body() for _ in range(chosen.clients)]
        pipe.send("ready")
        async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
            await asyncio.gather(*(send(session, body) for body in bodies))

    asyncio.run(send_all())
    pipe.send(answers)


@dataclass
class Probe:
    """Polls /health and the server's memory."""

    server: Server
    times_s: list[float] = field(default_factory=list)
    rss: int = 0
    done: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.done.wait(PROBE_SECONDS):
            start = time.perf_counter()
            try:
                with urlopen(f"{self.server.url}/health", timeout=120) as response:
                    response.read()
            except HTTPError:
                pass  # counts as an answer
            self.times_s.append(time.perf_counter() - start)
            self.rss = max(self.rss, psutil.Process(self.server.pid).memory_info().rss)


def measure(config: DisturbedConfig, kind: str, server: Server) -> dict[str, Any]:
    """Runs the load during one disturbance. Raises ValueError if every request fails."""
    probe = Probe(server)
    thread = threading.Thread(target=probe.run)
    with beside(kind, server.url) as found:
        thread.start()
        try:
            load = run_load(
                server.url,
                read_prompts(PROMPTS, NUM_PROMPTS),
                concurrency=config.concurrency,
                stream=True,
                max_tokens=MAX_TOKENS,
                ignore_eos=True,
                temperature=0.0,
            )
        finally:
            probe.done.set()
            thread.join()
    if not load.completed:
        raise ValueError(f"all requests failed during {kind}, the first with: {load.errors[0]}")
    gaps = [later - earlier for answer in load.completed for earlier, later in pairwise(answer.arrivals_s)]
    return {
        "kind": kind,
        **found,
        "tok_s": round(load.tokens_per_second, 1),
        "failed": len(load.errors),
        "health_ms": [milliseconds(probe.times_s, percent) for percent in PERCENTS],
        "gap_ms": [milliseconds(gaps, percent) for percent in PERCENTS],
        "rss_mb": round(probe.rss / MB),
    }


def row(line: dict[str, Any]) -> str:
    times = [
        " / ".join("-" if value is None else f"{value:.0f}" for value in line[key]) for key in ("health_ms", "gap_ms")
    ]
    statuses = ", ".join(f"{count} x {status}" for status, count in line.get("statuses", {}).items())
    speed = f"{line['tok_s']:.0f} | {line['share']:.2f}"
    return f"| {line['kind']} | {statuses} | {speed} | {times[0]} | {times[1]} | {line['rss_mb']} |"


def disturb(config: DisturbedConfig) -> None:
    lines = Lines(config.output, {**origin("disturbed", "cpu"), "concurrency": config.concurrency})
    options = {"target": config.target, "draft": config.draft, **config.serve}
    print(f"{COLUMNS}\n{'|---' * (COLUMNS.count('|') - 1)}|")
    with running_server([sys.executable, "-m", "slipstream.serve.cli", *flags(options)]) as server:
        measure(config, "idle", server)  # fills the prefix cache
        for _ in range(config.repeats):
            idle = 0.0
            for kind in config.names:
                result = measure(config, kind, server)
                idle = idle or result["tok_s"]
                print(row(lines.add({**result, "share": round(result["tok_s"] / idle, 3)})), flush=True)
                time.sleep(SETTLE_SECONDS)
    for kind in config.names if config.repeats > 1 else ():
        speeds, shares = ([line[key] for line in lines.all if line["kind"] == kind] for key in ("tok_s", "share"))
        print(f"{kind}: median {median(speeds):.0f} tok/s, {median(shares):.2f} of idle")
    lines.print()


if __name__ == "__main__":
    run(disturb, DisturbedConfig, None, "bench/disturbed.py")
