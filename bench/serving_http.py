"""One level of concurrency of a serving benchmark, over HTTP: our server and the one load client."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import httpx

from slipstream.bench.serving_run import Run
from slipstream.bench.workload import Task
from slipstream.serve.load import run_load

DRAFTED = "slipstream_drafted_tokens_total"


def run_http(base_url: str, tasks: Sequence[Task], concurrency: int, seed: int = 0, **params: Any) -> Run:
    """Streams every task's answer, sampled with `seed` + its index as run_offline does. `params` go into each request.

    Raises ValueError if one fails.
    """
    before = read_counters(base_url)
    prompts = [task.prompt for task in tasks]
    own = [{"max_tokens": task.max_tokens, "seed": seed + index} for index, task in enumerate(tasks)]
    load = run_load(base_url, prompts, concurrency=concurrency, stream=True, each=own, **params)
    if load.errors:
        raise ValueError(f"{len(load.errors)} of {len(tasks)} requests failed, the first with: {load.errors[0]}")
    streams = [answer.arrivals_s for answer in load.answers if answer.arrivals_s]
    return Run(
        wall_s=load.wall_s,
        answers=[answer.text for answer in load.answers],
        completion_tokens=load.completion_tokens,
        rounds=sum(answer.rounds for answer in load.answers),
        decoded_tokens=sum(answer.decoded_tokens for answer in load.answers),
        drafted_tokens=int(read_counters(base_url)[DRAFTED] - before[DRAFTED]),
        ttft_s=[times[0] for times in streams],
        itl_s=[later - earlier for times in streams for earlier, later in pairwise(times)],
    )


def read_counters(base_url: str) -> dict[str, float]:
    """Our server's metrics without labels."""
    lines = httpx.get(f"{base_url}/metrics").raise_for_status().text.splitlines()
    pairs = [line.split(" ") for line in lines if not line.startswith("#") and "{" not in line]
    return {name: float(value) for name, value in pairs}
