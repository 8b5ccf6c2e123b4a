"""Runs one concurrency level of a serving benchmark, in process or over HTTP, and records when tokens arrive."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from itertools import pairwise
from operator import add
from typing import Any
from urllib.request import urlopen

from tqdm import tqdm

from slipstream.bench.host_clock import HostClock, HostTimes, host_figures
from slipstream.bench.lines import milliseconds
from slipstream.bench.workload import Task
from slipstream.serve.engine import Engine
from slipstream.serve.load import Answer, run_load
from slipstream.serve.request import Output, Request, SamplingParams

SUMMED = ("completion_tokens", "rounds", "decoded_tokens")
DRAFTED = "slipstream_drafted_tokens_total"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Results of one level. Times in seconds."""

    wall_s: float
    answers: list[Any]  # token ids or text, in the order of the tasks
    completion_tokens: int
    rounds: int
    decoded_tokens: int  # emitted by rounds
    drafted_tokens: int
    ttft_s: list[float]  # of each request
    itl_s: list[float]  # between two outputs of one request, each of which may hold several tokens
    cpu_s: float | None = None  # of this process, where the engine is in it
    host: list[HostTimes] = field(default_factory=list)  # of each full round, with a drafter on the host

    @property
    def tok_s(self) -> float:
        return round(self.completion_tokens / self.wall_s, 2)

    @property
    def accept_length(self) -> float | None:
        return self.decoded_tokens / self.rounds if self.rounds else None

    @property
    def width(self) -> float | None:
        """Mean nodes per round, root included."""
        return round(1 + self.drafted_tokens / self.rounds, 2) if self.rounds else None

    def figures(self) -> dict[str, float | int | None]:
        """The figures of a result line. `ms`, the time of a round, is the median time between two outputs."""
        return {
            "width": self.width,
            "ms": milliseconds(self.itl_s, 50),
            "tok_s": self.tok_s,
            "accept_length": None if self.accept_length is None else round(self.accept_length, 4),
            "ttft_ms_p50": milliseconds(self.ttft_s, 50),
            "ttft_ms_p99": milliseconds(self.ttft_s, 99),
            "itl_ms_p50": milliseconds(self.itl_s, 50),
            "itl_ms_p99": milliseconds(self.itl_s, 99),
            "completion_tokens": self.completion_tokens,
            "rounds": self.rounds,
            "wall_s": round(self.wall_s, 3),
            **host_figures(self.host),
        }


def pool(runs: Sequence[Run]) -> Run:
    """All of them as one."""
    names = (one.name for one in fields(Run) if one.name != "cpu_s")
    return Run(**{name: reduce(add, (getattr(run, name) for run in runs)) for name in names})


@dataclass(slots=True, kw_only=True)
class EngineAnswer(Answer):
    """An answer of an engine in this process."""

    start_s: float
    tokens: list[int] = field(default_factory=list)
    drafted_tokens: int = 0

    def take(self, output: Output) -> None:
        if output.tokens:
            self.arrivals_s.append(time.perf_counter() - self.start_s)
        self.tokens += output.tokens
        if output.stats is not None:
            counts = output.stats
            self.completion_tokens, self.rounds = counts.completion_tokens, counts.rounds
            self.decoded_tokens, self.drafted_tokens = counts.completion_tokens - counts.prefills, counts.drafted_tokens


def run_offline(
    engine: Engine,
    tasks: Sequence[Task],
    concurrency: int,
    title: str,
    namespace: str = "",
    seed: int = 0,
    clock: HostClock | None = None,
    **params: Any,
) -> Run:
    """Keeps `concurrency` requests in flight until all tasks are done. `params` are passed to every SamplingParams.

    Task i samples with `seed` + i; with one seed for all, answers would be alike and a drafter could copy them.
    `clock`: the engine's, if its drafter runs on the host. Raises ValueError for a task that the engine cannot serve.
    """
    requests = [
        Request(
            id=str(index),
            prompt=task.prompt,
            params=SamplingParams(max_tokens=task.max_tokens, seed=seed + index, **params),
            namespace=namespace,
        )
        for index, task in enumerate(tasks)
    ]
    for request in requests:
        engine.check(request)
    if clock is not None:
        clock.begin(min(concurrency, len(tasks)))
    answers: dict[str, EngineAnswer] = {}
    start, cpu_start = time.perf_counter(), time.process_time()
    with tqdm(total=len(tasks), desc=title, unit="req") as bar:
        for output in outputs(engine, requests, concurrency, answers):
            answers[output.request_id].take(output)
            bar.update(output.finish_reason is not None)
    wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    done = [answers[request.id] for request in requests]
    return summarise(
        done,
        answers=[answer.tokens for answer in done],
        drafted_tokens=sum(answer.drafted_tokens for answer in done),
        wall_s=wall_s,
        cpu_s=cpu_s,
        host=[] if clock is None else clock.rounds,
    )


def outputs(
    engine: Engine, requests: Sequence[Request], concurrency: int, answers: dict[str, EngineAnswer]
) -> Iterator[Output]:
    waiting = iter(requests)
    more = True
    while more or engine.has_work:
        while more and engine.num_open < concurrency:
            request = next(waiting, None)
            more = request is not None
            if request is not None:
                answers[request.id] = EngineAnswer(start_s=time.perf_counter())
                engine.add(request)
        yield from engine.step()


def summarise(received: Sequence[Answer], **others: Any) -> Run:
    """`others`: what the answers do not say."""
    arrivals = [answer.arrivals_s for answer in received if answer.arrivals_s]
    return Run(
        **{name: sum(getattr(one, name) for one in received) for name in SUMMED},
        ttft_s=[times[0] for times in arrivals],
        itl_s=[later - earlier for times in arrivals for earlier, later in pairwise(times)],
        **others,
    )


def run_http(base_url: str, tasks: Sequence[Task], concurrency: int, seed: int = 0, **params: Any) -> Run:
    """Streams the answers of all tasks. Seeds are those of run_offline; `params` are passed with every request.

    Raises ValueError if a request fails.
    """
    before = read_counters(base_url)
    prompts = [task.prompt for task in tasks]
    own = [{"max_tokens": task.max_tokens, "seed": seed + index} for index, task in enumerate(tasks)]
    load = run_load(base_url, prompts, concurrency=concurrency, stream=True, each=own, **params)
    if load.errors:
        raise ValueError(f"{len(load.errors)} of {len(tasks)} requests failed, the first with: {load.errors[0]}")
    drafted = int(read_counters(base_url)[DRAFTED] - before[DRAFTED])
    texts = [answer.text for answer in load.answers]
    return summarise(load.answers, answers=texts, drafted_tokens=drafted, wall_s=load.wall_s)


def read_counters(base_url: str) -> dict[str, float]:
    """The server's metrics that have no labels."""
    with urlopen(f"{base_url}/metrics") as response:
        lines = response.read().decode().splitlines()
    pairs = [line.split(" ") for line in lines if not line.startswith("#") and "{" not in line]
    return {name: float(value) for name, value in pairs}
