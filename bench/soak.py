"""Many clients that come and go, or random requests, against a server that must stay whole: a measured soak.

python bench/soak.py clients --draft runs/demo/draft/best --clients 1000 --minutes 3
python bench/soak.py fuzz --draft ngram --requests 100000

Starts `serve` on a free port and ends it by SIGTERM. `clients`: streaming clients, of which some hang up at a random
token; each request must end with a finish reason, a 429, or its own hanging up, and none may be lost or answered twice.
`fuzz`: bodies of bench/fuzzed.py; none may get a 5xx or no answer. Each tenth request is one of BYSTANDERS, which must
get the answer that it gets alone: 99 % of them, since a CPU's sums depend a little on the requests beside. Both then
ask the server what is left: no open request and no KV page in use. Prints one line of JSON, and exits with status 1
where anything of that does not hold.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import numpy as np
import psutil

from slipstream.bench.fuzzed import CHAT, COMPLETIONS, MODEL, RESPONSES, body
from slipstream.bench.lines import Lines, origin
from slipstream.bench.server import Server, running_server

PROBE_SECONDS = 0.1  # between two requests of /health
SETTLE_SECONDS = 30.0  # within which what clients have left must be gone
QUESTION = "Tom has {} boxes of {} eggs and gives {} of them away. How many eggs does he have?"
SLOWEST = 60.0  # seconds for an answer to a random request, beyond which the server counts as hung
JSON = {"content-type": "application/json"}
BYSTANDERS: list[dict[str, Any]] = [  # requests whose answers are known
    {"prompt": "Tom has 12 boxes.", "max_tokens": 24, "temperature": 0},
    {"prompt": "Tom has 12 boxes.", "max_tokens": 24, "temperature": 1, "seed": 1, "top_p": 0.9, "min_tokens": 20},
    {"prompt": "A word: ", "max_tokens": 24, "temperature": 1, "seed": 2, "regex": "[a-c ]{5,20}"},
]
HANG_UP = 0.3  # share of streaming clients that leave before the end


@dataclass(slots=True)
class Tally:
    """Observations of clients."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    same_answers: Counter[bool] = field(default_factory=Counter)  # of bystanders: whether each is the one it gets alone
    ids: set[str] = field(default_factory=set)
    health_s: list[float] = field(default_factory=list)
    memory_mb: list[tuple[float, float]] = field(default_factory=list)  # seconds, of both processes
    starved: float = 0.0  # share of the time in which the server could have run, and had no core

    def end(self, outcome: str, *, wrong: str = "") -> None:
        self.outcomes[outcome] += 1
        if wrong:
            self.wrong.append(wrong[:500])


@contextmanager
def watched(server: Server, tally: Tally) -> Iterator[None]:
    """Meanwhile another process, whose times are not those of busy clients, asks for /health and reads memory."""
    pipe, probe_pipe = multiprocessing.Pipe()
    arguments = (server.url, server.process.pid, probe_pipe)
    probe = multiprocessing.get_context("spawn").Process(target=watch, args=arguments)
    probe.start()
    try:
        yield
    finally:
        pipe.send(None)
        tally.health_s, tally.memory_mb, tally.starved, wrong = pipe.recv()
        tally.wrong += wrong
        probe.join()


def watch(url: str, pid: int, pipe: Connection) -> None:
    """Sends seconds of /health, (time, MB) pairs, the share of time without a core and what went wrong, once it gets a
    message."""
    waited = waited_s(pid)
    began = time.monotonic()
    health = list[float]()
    memory = list[tuple[float, float]]()
    wrong = list[str]()
    with httpx.Client(base_url=url, timeout=60) as client:
        while not pipe.poll(PROBE_SECONDS):
            start_s = time.perf_counter()
            try:
                answer = client.get("/health")
            except httpx.TransportError as error:
                wrong.append(f"/health: {error!r}")
                break
            health.append(time.perf_counter() - start_s)
            if answer.status_code != 200:
                wrong.append(f"/health: {answer.status_code} {answer.text}")
            if len(health) % 10 == 0:
                memory.append((time.monotonic() - began, memory_mb(pid)))
    pipe.send((health, memory, (waited_s(pid) - waited) / (time.monotonic() - began), wrong))


def waited_s(pid: int) -> float:
    """How long a process's main thread, the event loop, was ready to run and had no core."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def memory_mb(pid: int) -> float:
    """Memory of a server and its engine without shared pages, which would count twice."""
    server = psutil.Process(pid)
    total = 0
    for process in (server, *server.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # those that compile grammars come and go
            total += process.memory_full_info().uss
    return total / 2**20


def busy_cores() -> float:
    """Measures for a second how many cores other programs use."""
    return round(psutil.cpu_percent(1.0) / 100 * (os.cpu_count() or 1), 1)


def session_to(server: Server) -> aiohttp.ClientSession:
    """Without limits."""
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(server.url, connector=connector, timeout=aiohttp.ClientTimeout(total=None))


async def stream_once(session: aiohttp.ClientSession, rng: random.Random, tally: Tally) -> None:
    """One request of a client: to its end, or to where it hangs up."""
    prompt = QUESTION.format(*(rng.randrange(2, 99) for _ in range(3)))
    request = {"prompt": prompt, "max_tokens": rng.randrange(8, 96), "temperature": rng.choice((0, 1)), "stream": True}
    request["ignore_eos"] = rng.random() < 0.7
    leaves_at = rng.randrange(1, 40) if rng.random() < HANG_UP else None
    async with session.post(COMPLETIONS, json=request) as answer:
        if answer.status == 429:
            await answer.read()
            tally.end("429")
            await asyncio.sleep(float(answer.headers["Retry-After"]) * (0.5 + rng.random()))
            return
        if answer.status != 200:
            tally.end(str(answer.status), wrong=await answer.text())
            return
        reasons = []
        events = 0
        async for line in answer.content:
            if not line.startswith(b"data: ") or line == b"data: [DONE]\n":
                continue
            event = json.loads(line[6:])
            if events == 0:
                if event["id"] in tally.ids:
                    tally.wrong.append(f"{event['id']} came twice")
                tally.ids.add(event["id"])
            events += 1
            if "error" in event:
                tally.end("error", wrong=str(event))
                return
            reasons += [choice["finish_reason"] for choice in event["choices"] if choice["finish_reason"]]
            if events == leaves_at and not reasons:
                tally.end("hung up")
                answer.close()
                return
    tally.end(reasons[0] if reasons else "lost", wrong="" if len(reasons) == 1 else f"finish reasons {reasons}")


async def run_clients(server: Server, tally: Tally, clients: int, minutes: float) -> None:
    end = time.monotonic() + 60 * minutes

    async def client(number: int) -> None:
        rng = random.Random(number)
        await asyncio.sleep(rng.random() * 5)
        while time.monotonic() < end:
            try:
                await stream_once(session, rng, tally)
            except aiohttp.ClientError as error:
                tally.end("connection", wrong=repr(error))

    async with session_to(server) as session:
        await asyncio.gather(*map(client, range(clients)))


async def run_fuzz(server: Server, tally: Tally, requests: int, clients: int) -> None:
    numbers = iter(range(requests))

    async def client() -> None:
        for number in numbers:
            rng = random.Random(number)
            path = rng.choice((CHAT, COMPLETIONS, RESPONSES))
            expected = None
            if number % 10:
                data = json.dumps(body(rng, path))
            else:
                path = COMPLETIONS
                index = rng.randrange(len(BYSTANDERS))
                data = json.dumps(BYSTANDERS[index])
                expected = alone[index]
            try:
                status, text = await post(session, path, data)
                is_wrong = status >= 500 or '"server_error"' in text
                tally.end(str(status), wrong=f"{number} {path} {data}: {text}" if is_wrong else "")
                if expected is not None and status == 200:
                    tally.same_answers[answer_of(text) == expected] += 1
            except (aiohttp.ClientError, TimeoutError) as error:
                tally.end("no answer", wrong=f"{number} {path} {data}: {error!r}")
                if isinstance(error, aiohttp.ClientConnectorError):
                    return  # there is no server any more
            if number % 10_000 == 0:
                print(f"{number} requests: {dict(tally.outcomes)}", file=sys.stderr, flush=True)

    async with session_to(server) as session:
        alone = [answer_of((await post(session, COMPLETIONS, json.dumps(request)))[1]) for request in BYSTANDERS]
        await asyncio.gather(*(client() for _ in range(clients)))


async def post(session: aiohttp.ClientSession, path: str, data: str) -> tuple[int, str]:
    async with asyncio.timeout(SLOWEST), session.post(path, data=data, headers=JSON) as answer:
        return answer.status, await answer.text()


def answer_of(text: str) -> str:
    return json.loads(text)["choices"][0]["text"]


async def leftovers(server: Server) -> dict[str, float]:
    """Open requests and KV pages in use, once both are 0 or the time is up."""
    deadline = time.monotonic() + SETTLE_SECONDS
    left = dict[str, float]()
    async with aiohttp.ClientSession(server.url) as session:
        while time.monotonic() < deadline:
            async with session.get("/metrics") as page:
                lines = [line for line in (await page.text()).splitlines() if line[:1] != "#"]
            numbers = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
            pools = [name for name in numbers if name.startswith("slipstream_kv_pages{") and '"used"' in name]
            left = {"open": numbers["slipstream_open_requests"], "pages_used": sum(numbers[name] for name in pools)}
            if not any(left.values()):
                break
            await asyncio.sleep(0.5)
    return left


def summary(tally: Tally, seconds: float) -> dict[str, Any]:
    health = 1000 * np.quantile(tally.health_s, (0.5, 0.99, 1.0))
    settled = [mb for at, mb in tally.memory_mb if at > 30] or [mb for _, mb in tally.memory_mb]
    return {
        "seconds": round(seconds),
        "requests": sum(tally.outcomes.values()),
        "outcomes": dict(tally.outcomes.most_common()),
        **{f"health_{name}_ms": round(ms, 1) for name, ms in zip(("p50", "p99", "max"), health, strict=True)},
        "starved": round(tally.starved, 2),
        "memory_mb_after_30_s": [round(settled[0]), round(max(settled)), round(settled[-1])],  # first, most, last
        "other_answers": tally.same_answers[False],
        "wrong": len(tally.wrong),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("clients", "fuzz"))
    parser.add_argument("--target", default="assets/tiny-target")
    parser.add_argument("--draft", default="ngram")
    parser.add_argument("--tp", type=int, default=1, help="devices that share the target")
    parser.add_argument("--clients", type=int, help="default: 1,000 that stream, or 16 that send random requests")
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--output", help="JSON lines file to append to")
    args = parser.parse_args()
    tally = Tally()
    load = busy_cores()
    options = {
        "target": args.target,
        "draft": args.draft,
        "tp": args.tp,
        "served-model-name": MODEL,
        "kv-cache-tokens": "8192",
    }
    if args.kind == "fuzz":
        options["max-model-len"] = "512"  # where a body sets no max_tokens, the answer fills the context
    command = [sys.executable, "-m", "slipstream.serve.cli", *(f"--{name}={value}" for name, value in options.items())]
    start_s = time.monotonic()
    with running_server(command) as server:
        with watched(server, tally):
            if args.kind == "clients":
                asyncio.run(run_clients(server, tally, args.clients or 1000, args.minutes))
            else:
                asyncio.run(run_fuzz(server, tally, args.requests, args.clients or 16))
        figures = summary(tally, time.monotonic() - start_s) | {"left": asyncio.run(leftovers(server))}
    figures["exit"] = server.process.returncode
    shared = origin("soak", "cpu") | {name: getattr(args, name) for name in ("kind", "clients", "draft", "tp")}
    lines = Lines(args.output, shared | {"cores_busy_before": load})
    lines.add(figures)
    lines.print()
    for wrong in tally.wrong[:20]:
        print(wrong, file=sys.stderr)
    is_misled = tally.same_answers[False] > 0.01 * tally.same_answers.total()
    return int(bool(tally.wrong) or is_misled or any(figures["left"].values()) or figures["exit"] != -signal.SIGTERM)


if __name__ == "__main__":
    raise SystemExit(main())
