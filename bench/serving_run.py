"""Runs one concurrency level of a serving benchmark, in process or over HTTP, and records when tokens arrive."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from slipstream.bench.host_clock import HostClock, HostTimes, host_figures
from slipstream.bench.lines import milliseconds
from slipstream.bench.workload import Task
from slipstream.serve.engine.engine import Engine
from slipstream.serve.load import Answer, LoadResult, run_load
from slipstream.serve.request import Output, Request, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(LoadResult):
    """Results of one level, over HTTP or in process."""

    drafted_tokens: int
    cpu_s: float | None = None  # of this process, where the engine is in it
    host: list[HostTimes] = field(default_factory=list)  # of each full round, with a drafter on the host

    @property
    def replies(self) -> list[Any]:
        """Token ids, or text over HTTP, in the order of the tasks."""
        return [answer.tokens if isinstance(answer, EngineAnswer) else answer.text for answer in self.answers]

    @property
    def tok_s(self) -> float:
        return round(self.tokens_per_second, 2)

    def figures(self) -> dict[str, float | int | None]:
        """The figures of a result line. `ms`, the time of a round, is the median time between two outputs of a request,
        each of which may hold several tokens; `width` is the mean nodes per round, root included."""
        rounds, accept_length, summary = self.rounds, self.accept_length, self.summary()
        names = ("ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p95", "itl_ms_p99")
        times = {name: milliseconds(summary[f"{name.replace('_ms', '')}_s"]) for name in names}
        return {
            "width": round(1 + self.drafted_tokens / rounds, 2) if rounds else None,
            "ms": times["itl_ms_p50"],
            "tok_s": self.tok_s,
            "accept_length": None if accept_length is None else round(accept_length, 4),
            **times,
            "completion_tokens": self.completion_tokens,
            "rounds": rounds,
            "wall_s": round(self.wall_s, 3),
            **host_figures(self.host),
        }


def pool(runs: Sequence[Run]) -> Run:
    """All of them as one, without `cpu_s`, which is compared turn by turn."""
    return Run(
        concurrency=runs[0].concurrency,
        wall_s=sum(run.wall_s for run in runs),
        answers=[answer for run in runs for answer in run.answers],
        drafted_tokens=sum(run.drafted_tokens for run in runs),
        host=[times for run in runs for times in run.host],
    )


@dataclass(slots=True, kw_only=True)
class EngineAnswer(Answer):
    """An answer of an engine in this process."""

    start_s: float
    tokens: list[int] = field(default_factory=list)

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

    Task i samples with `seed` + i; with one seed for all, answers would be alike and a drafter could copy them. For the
    same reason a question that is asked again has a namespace of its own. `clock`: the engine's, if its drafter runs on
    the host. Raises ValueError for a task that the engine cannot serve.
    """
    requests = [
        Request(
            id=str(index),
            prompt=task.prompt,
            params=SamplingParams(max_tokens=task.max_tokens, seed=seed + index, **params),
            namespace=task_namespace(namespace, task),
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
    done: list[Answer] = [answers[request.id] for request in requests]
    return Run(
        concurrency=concurrency,
        wall_s=wall_s,
        answers=done,
        drafted_tokens=sum(answer.drafted_tokens for answer in answers.values()),
        cpu_s=cpu_s,
        host=[] if clock is None else clock.rounds,
    )


def task_namespace(namespace: str, task: Task) -> str:
    """Without a namespace for all, as a dynamic token map wants it, tasks have none of their own either."""
    return f"{namespace}, repeat {task.repeat}" if namespace and task.repeat else namespace


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


def run_http(
    base_url: str, tasks: Sequence[Task], concurrency: int, namespace: str = "", seed: int = 0, **params: Any
) -> Run:
    """Streams the answers of all tasks. Seeds and namespaces are those of run_offline; `params` are passed with every
    request.

    Raises ValueError if a request fails.
    """
    prompts = [task.prompt for task in tasks]
    own = [
        {"max_tokens": task.max_tokens, "seed": seed + index, "cache_salt": task_namespace(namespace, task)}
        for index, task in enumerate(tasks)
    ]
    load = run_load(base_url, prompts, concurrency=concurrency, stream=True, each=own, **params)
    if load.errors:
        raise ValueError(f"{len(load.errors)} of {len(tasks)} requests failed, the first with: {load.errors[0]}")
    drafted = sum(answer.drafted_tokens for answer in load.answers)
    return Run(concurrency=concurrency, wall_s=load.wall_s, answers=load.answers, drafted_tokens=drafted)
