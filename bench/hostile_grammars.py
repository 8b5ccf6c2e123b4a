"""Measures what one client's hostile schemas, patterns and tools cost other clients: /health, a stream, grammars.

python bench/hostile_grammars.py
python bench/hostile_grammars.py --only pattern,tools

Starts `serve` on a free port. While a client streams, and another asks for grammars that compile at once, each case
sends several bodies of up to 64 KiB together, hangs up after some seconds, and looks after two more at what still runs.
Prints a line for each case and one of JSON: milliseconds of /health (median, 99th percentile, most) and of the stream's
longest gap (before, meanwhile), seconds that the innocent grammars took, trials that go on and cores that are busy once
everybody has left. The bundled target has no tools, so the server gets it with a template that has.
"""

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil

from slipstream.bench.fuzzed import CHAT, COMPLETIONS
from slipstream.bench.lines import Lines, origin
from slipstream.bench.server import Server, running_server
from slipstream.bench.soak import JSON, busy_cores, session_to

PROBE_S = 0.02
QUIET_S = 3.0
AFTER_S = 2.0
WINDOW_S = 0.5
MOST_CHARS = 64 * 2**10 - 200
TEMPLATE = (
    "{%- for tool in tools or [] -%}{{ tool | tojson }}{%- endfor -%}{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endfor -%}"
    "{{ '<|im_start|>assistant\n' }}"
)
Body = dict[str, Any]


def schema(value: Any) -> Body:
    entry = {"name": "n", "schema": value}
    return {"response_format": {"type": "json_schema", "json_schema": entry}}


def tool(parameters: Any) -> Body:
    function = {"name": "f", "strict": True, "parameters": parameters}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


def texts(number: int, length: int) -> list[str]:
    return [f"{index:0{length}d}" for index in range(number)]


def alternatives(width: int, number: int) -> Body:
    """Definitions, each of which offers the next one several times."""
    definitions: Body = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * width} for i in range(6)}
    definitions["d6"] = {"type": "integer", "minimum": number}
    return {**properties(["x"], {"$ref": "#/$defs/d0"}), "required": ["x"], "$defs": definitions}


def joined(number: int) -> Body:
    """Two enums, referred to in turn."""
    values = list(range(number, number + 1000))
    parts = [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}] * 900
    return {"$defs": {"a": {"enum": values}, "b": {"enum": values[::-1]}}, "allOf": parts}


def properties(names: list[str], body: Body) -> Body:
    return {"type": "object", "properties": dict.fromkeys(names, body), "additionalProperties": False}


def doubling(number: int) -> str:
    rules = [f"r{index} ::= r{index + 1} r{index + 1}" for index in range(2500)]
    return "\n".join(["root ::= r0", *rules, f'r2500 ::= "{number}"'])


AMBIGUOUS = "(a|b|ab|ba|aab|bba)*"
NEGATED = "".join(f"[^{chr(97 + index % 26)}]+." for index in range(8000))
NESTED = "((((a{1,900}b){1,900}c){1,900}d){1,900}e){1,900}"
# Bodies by case, each for a number, so that no two are the same.
CASES: dict[str, Callable[[int], Body]] = {
    "pattern of brackets": lambda n: schema({"type": "string", "pattern": f"^{n}" + "(" * 60_000}),
    "pattern that backtracks": lambda n: schema({"type": "string", "pattern": f"{n}" + AMBIGUOUS * 3000}),
    "oneOf of constants": lambda n: schema({"oneOf": [{"const": n + index} for index in range(3500)]}),
    "allOf of enums": lambda n: schema({"allOf": [{"enum": list(range(n, n + 4500))}, {"enum": list(range(4500))}]}),
    "enums by reference": lambda n: schema(joined(n)),
    "anyOf of itself": lambda n: schema({"anyOf": [{"$ref": "#"}] * 3000 + [{"const": n}]}),
    "many properties": lambda n: schema(properties(texts(1500, 8 + n), {"type": "string"})),
    "long strings": lambda n: schema(properties(texts(800, 4), {"type": "string", "maxLength": 9000 + n})),
    "large numbers": lambda n: schema({"type": "integer", "minimum": 10**400 + n}),
    "slow pattern": lambda n: {"regex": f"{NEGATED}{n}"},
    "slower pattern": lambda n: {"regex": AMBIGUOUS * 3200 + f"{n}"},
    "nested repetition": lambda n: {"regex": f"{NESTED}{n}"},
    "rules that double": lambda n: {"ebnf": doubling(n)},
    "long choices": lambda n: {"structured_outputs": {"choice": [f"{text} {n}" for text in texts(1000, 50)]}},
    "tools with alternatives": lambda n: tool(alternatives(9, n)),
    "tools of themselves": lambda n: tool(properties(["x", f"y{n}"], {"anyOf": [{"$ref": "#/properties/x"}] * 18})),
    "tools of enums": lambda n: tool(properties(["x"], {"allOf": [{"enum": list(range(n, n + 4000))}] * 2})),
}


@dataclass(slots=True)
class Times:
    """Seconds that were measured since the last `take`."""

    health: list[float] = field(default_factory=list)
    events: list[float] = field(default_factory=list)  # of the stream: when they came
    grammars: list[float] = field(default_factory=list)  # how long innocent ones took

    def take(self) -> "Times":
        times = Times(self.health, self.events, self.grammars)
        self.health = []
        self.events = self.events[-1:]
        self.grammars = []
        return times

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.events)]


async def probe(session: aiohttp.ClientSession, times: Times) -> None:
    while True:
        began = time.perf_counter()
        async with session.get("/health") as answer:
            await answer.read()
        times.health.append(time.perf_counter() - began)
        await asyncio.sleep(PROBE_S)


async def stream(session: aiohttp.ClientSession, times: Times) -> None:
    body = {"prompt": "Tom has 12 boxes.", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    while True:
        times.events.clear()  # between two answers there is no gap
        async with session.post(COMPLETIONS, json=body) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    times.events.append(time.perf_counter())


async def ask_for_grammars(session: aiohttp.ClientSession, times: Times) -> None:
    """New ones, which compile in milliseconds."""
    for number in count():
        body = {"prompt": "Tom", "max_tokens": 2, "regex": f"[ab]{{1,3}}{number}"}
        began = time.perf_counter()
        async with session.post(COMPLETIONS, json=body) as answer:
            await answer.read()
        times.grammars.append(time.perf_counter() - began)
        await asyncio.sleep(0.1)


async def attack(session: aiohttp.ClientSession, body: Body) -> str:
    data = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **body})
    async with session.post(CHAT, data=data, headers=JSON) as answer:
        await answer.read()
        return str(answer.status)


async def warm_up(server: Server) -> None:
    """Waits until the server has loaded what compiles grammars."""
    async with session_to(server) as session:
        await attack(session, {"regex": "a"})


async def run_case(server: Server, make: Callable[[int], Body], copies: int, seconds: float) -> dict[str, Any]:
    async with session_to(server) as session:
        times = Times()
        users = [asyncio.create_task(use(session, times)) for use in (probe, stream, ask_for_grammars)]
        try:
            await asyncio.sleep(QUIET_S)
            quiet = times.take()
            attacks = [asyncio.create_task(attack(session, make(number))) for number in range(copies)]
            began = time.perf_counter()
            await asyncio.wait(attacks, timeout=seconds)
            took = time.perf_counter() - began
            await asyncio.sleep(0.3)
            outcomes = [task.result() if task.done() else "left" for task in attacks]
            for task in attacks:
                task.cancel()
            during = times.take()
            during.health += [] if during.health else [time.perf_counter() - began]  # not answered at all
        finally:
            for user in users:
                user.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*users, *attacks, return_exceptions=True)
    await asyncio.sleep(AFTER_S)
    left = leftovers(server)
    health, gaps, gaps_before = (1000 * np.array(waits) for waits in (during.health, during.gaps, quiet.gaps))
    return {
        "outcomes": " ".join(sorted(set(outcomes))),
        "seconds": round(took, 2),
        "health_ms": [round(float(np.quantile(health, share)), 1) for share in (0.5, 0.99, 1.0)],
        "gap_ms": [round(float(waits.max(initial=0)), 1) for waits in (gaps_before, gaps)],
        "grammar_s": round(max(during.grammars, default=float("nan")), 2),
        **left,
        "all_health": during.health,
    }


def leftovers(server: Server) -> dict[str, float]:
    """Trials that go on, and cores that the server keeps busy."""
    server_process = psutil.Process(server.process.pid)
    family = [server_process, *server_process.children(recursive=True)]
    forking = [process for process in family if "trial_process" in " ".join(process.cmdline())]
    before = cpu_s(family)
    time.sleep(WINDOW_S)
    return {"trials_left": max(len(forking) - 1, 0), "busy_cores": round((cpu_s(family) - before) / WINDOW_S, 2)}


def cpu_s(processes: list[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="assets/tiny-target", help="a folder")
    parser.add_argument("--only", default="", help="cases that have one of these texts in their names, with commas")
    parser.add_argument("--copies", type=int, default=3, help="bodies that a case sends together")
    parser.add_argument("--seconds", type=float, default=3.0, help="after which the client hangs up")
    parser.add_argument("--output", help="JSON lines file to append to")
    args = parser.parse_args()
    names = [name for name in CASES if any(part in name for part in args.only.split(","))]
    load = busy_cores()
    cases = dict[str, dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        target = shutil.copytree(args.target, Path(folder) / "target")
        (target / "chat_template.jinja").write_text(TEMPLATE)  # it takes tools
        command = [sys.executable, "-m", "slipstream.serve.cli", f"--target={target}", "--draft=none", "--device=cpu"]
        with running_server([*command, "--tool-parser=qwen3_coder"]) as server:
            asyncio.run(warm_up(server))
            for name in names:
                cases[name] = asyncio.run(run_case(server, CASES[name], args.copies, args.seconds))
                figures = {key: value for key, value in cases[name].items() if key != "all_health"}
                print(f"{name}: {figures}", flush=True)
    health = 1000 * np.array([seconds for case in cases.values() for seconds in case.pop("all_health")])
    line = {"cores_busy_before": load, "cases": cases}
    line |= {
        "health_p99_ms": round(float(np.quantile(health, 0.99)), 1),
        "health_max_ms": round(float(health.max()), 1),
    }
    lines = Lines(args.output, origin("hostile_grammars", "cpu"))
    lines.add(line)
    lines.print()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
