"""Runs one concurrency level of a serving benchmark, in process or over HTTP, and records when tokens arrive."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tqdm import tqdm

from slipstream.bench.lines import milliseconds
from slipstream.bench.streams import Stream, Streams
from slipstream.bench.workload import Task
from slipstream.serve.engine.engine import Engine
from slipstream.serve.load import Answer, LoadResult, percentile, run_load
from slipstream.serve.request import Request, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(LoadResult):
    """Results of one level, over HTTP or in process."""

    cpu_s: float | None = None  # of this process, where the engine is in it

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
        rounds = self.rounds
        drafted = sum(answer.drafted_tokens for answer in self.answers)
        accept_length = self.accept_length
        streams = [answer.arrivals_s for answer in self.completed if answer.arrivals_s]
        first = [arrivals[0] for arrivals in streams]
        gaps = [later - earlier for arrivals in streams for earlier, later in pairwise(arrivals)]
        times = {f"ttft_ms_p{percent}": milliseconds(percentile(first, percent)) for percent in (50, 99)}
        times |= {f"itl_ms_p{percent}": milliseconds(percentile(gaps, percent)) for percent in (50, 95, 99)}
        return {
            "width": round(1 + drafted / rounds, 2) if rounds else None,
            "ms": times["itl_ms_p50"],
            "tok_s": self.tok_s,
            "accept_length": None if accept_length is None else round(accept_length, 4),
            **times,
            "completion_tokens": self.completion_tokens,
            "rounds": rounds,
            "wall_s": round(self.wall_s, 3),
        }


def pool(runs: Sequence[Run]) -> Run:
    """All of them as one, without `cpu_s`, which is compared turn by turn."""
    return Run(
        concurrency=runs[0].concurrency,
        wall_s=sum(run.wall_s for run in runs),
        answers=[answer for run in runs for answer in run.answers],
    )


@dataclass(slots=True, kw_only=True)
class EngineAnswer(Answer):
    """An answer of an engine in this process."""

    tokens: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, stream: Stream) -> "EngineAnswer":
        """The answer of a stream that has ended."""
        assert stream.stats is not None
        counts = stream.stats
        return cls(
            tokens=stream.tokens,
            arrivals_s=[arrival.time_s - stream.added_s for arrival in stream.arrivals],
            completion_tokens=counts.completion_tokens,
            rounds=counts.rounds,
            decoded_tokens=counts.completion_tokens - counts.prefills,
            drafted_tokens=counts.drafted_tokens,
        )


def run_offline(
    engine: Engine,
    tasks: Sequence[Task],
    concurrency: int,
    title: str,
    namespace: str = "",
    seed: int = 0,
    **params: Any,
) -> Run:
    """Keeps `concurrency` requests in flight until all tasks are done. `params` are passed to every SamplingParams.

    Task i samples with `seed` + i; with one seed for all, answers would be alike and a drafter could copy them. For the
    same reason a question that is asked again has a namespace of its own. Raises ValueError for a task that the engine
    cannot serve.
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
    streams = Streams(engine)
    start_s = time.perf_counter()
    cpu_start_s = time.process_time()
    for request in tqdm(requests, desc=title, unit="req"):
        streams.wait_for_room(concurrency)
        streams.add(request)
    streams.finish()
    wall_s = time.perf_counter() - start_s
    cpu_s = time.process_time() - cpu_start_s
    answers: list[Answer] = [EngineAnswer.of(streams.all[request.id]) for request in requests]
    return Run(concurrency=concurrency, wall_s=wall_s, answers=answers, cpu_s=cpu_s)


def task_namespace(namespace: str, task: Task) -> str:
    """Without a namespace for all, as a dynamic token map wants it, tasks have none of their own either."""
    return f"{namespace}, repeat {task.repeat}" if namespace and task.repeat else namespace


def run_http(
    base_url: str, tasks: Sequence[Task], concurrency: int, namespace: str = "", seed: int = 0, **params: Any
) -> Run:
    """Streams the answers of all tasks. Seeds and namespaces are those of run_offline; `params` are passed with every
    request.

    Raises ValueError if a request fails.
    """
    prompts = [task.prompt for task in tasks]
    prompt_fields = [
        {"max_tokens": task.max_tokens, "seed": seed + index, "cache_salt": task_namespace(namespace, task)}
        for index, task in enumerate(tasks)
    ]
    load = run_load(base_url, prompts, concurrency=concurrency, stream=True, prompt_fields=prompt_fields, **params)
    if load.errors:
        raise ValueError(f"{len(load.errors)} of {len(tasks)} requests failed, the first with: {load.errors[0]}")
    return Run(concurrency=concurrency, wall_s=load.wall_s, answers=load.answers)
