"""The load client: sends prompts to any OpenAI-compatible server and measures speed and acceptance.

    python -m slipstream.serve.bench --base_url http://127.0.0.1:8000 --prompts questions.jsonl --concurrency 1,8

Prompts: JSON lines (also .gz) with `prompt` (text or token ids), `messages` (a last assistant turn is left out) or
`turns` (the first one is asked). Every level of concurrency sends the same prompts, so a server with a prefix cache has
seen them from the second level on. Ends in one line of JSON; status 1 if any request failed.
"""

import asyncio
import gzip
import json
import math
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from slipstream.config import parse

Prompt = str | list[int] | list[dict[str, str]]  # text, token ids, or messages


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """Options of the load client."""

    prompts: Path
    """File of prompts."""
    base_url: str = "http://127.0.0.1:8000"
    """The server, without /v1."""
    model: str | None = None
    """Model to ask for. Default: the first that the server lists."""
    concurrency: str = "1,8"
    """Requests open at once; several levels, parted by commas, are measured one after another."""
    num_prompts: int = 64
    """Prompts of the file to send per level."""
    num_warmup: int = 2
    """Requests sent before each level and not counted."""
    max_tokens: int = 128
    """Longest answer."""
    temperature: float = 0.0
    """0: greedy."""
    seed: int = 0
    """Seed of every request."""
    stream: bool = False
    """Stream the answers, which gives time to first token and between pieces, at some cost for the client."""
    ignore_eos: bool = False
    """Ask for answers of max_tokens in any case (not every server knows this)."""

    def __post_init__(self) -> None:
        if not all(level.strip().isdigit() and int(level) > 0 for level in self.concurrency.split(",")):
            raise ValueError(f"concurrency is {self.concurrency!r}; give positive numbers parted by commas")

    @property
    def levels(self) -> list[int]:
        return [int(level) for level in self.concurrency.split(",")]


@dataclass(slots=True, kw_only=True)
class Answer:
    """What came back for one prompt."""

    text: str = ""
    finish_reason: str | None = None
    completion_tokens: int = 0
    latency_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)  # of each streamed piece, since the request
    speculation: dict[str, Any] | None = None  # usage.speculation, from our server
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """One level of concurrency; answers in the order of the prompts."""

    concurrency: int
    wall_s: float
    answers: list[Answer]

    @property
    def good(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.error is None]

    @property
    def completion_tokens(self) -> int:
        return sum(answer.completion_tokens for answer in self.good)

    @property
    def tokens_per_second(self) -> float:
        return self.completion_tokens / self.wall_s

    @property
    def num_rounds(self) -> int:
        return sum(answer.speculation["rounds"] for answer in self.good if answer.speculation)

    @property
    def accept_length(self) -> float | None:
        """Tokens per round, over all rounds; None where the server does not say."""
        said = [answer.speculation for answer in self.good if answer.speculation and answer.speculation["rounds"]]
        tokens = sum(speculation["accept_length"] * speculation["rounds"] for speculation in said)
        return tokens / self.num_rounds if self.num_rounds else None

    @property
    def accept_rate_by_position(self) -> list[float]:
        """Share of rounds in which the draft token at each position was accepted."""
        counts: list[int] = []
        for answer in self.good:
            accepted = answer.speculation["accepted_by_position"] if answer.speculation else []
            counts += [0] * (len(accepted) - len(counts))
            for position, count in enumerate(accepted):
                counts[position] += count
        return [count / self.num_rounds for count in counts]

    def summary(self) -> dict[str, Any]:
        """Figures for tables and files; times in seconds."""
        streamed = [answer.arrivals_s for answer in self.good if answer.arrivals_s]
        gaps = [later - earlier for times in streamed for earlier, later in zip(times, times[1:], strict=False)]
        return {
            "concurrency": self.concurrency,
            "requests": len(self.answers),
            "errors": len(self.answers) - len(self.good),
            "wall_s": self.wall_s,
            "completion_tokens": self.completion_tokens,
            "tok_s": self.tokens_per_second,
            **percentiles("latency", [answer.latency_s for answer in self.good]),
            **percentiles("ttft", [times[0] for times in streamed]),
            **percentiles("itl", gaps),
            "accept_length": self.accept_length,
            "accept_rate_by_position": self.accept_rate_by_position,
        }


def run_load(
    base_url: str,
    prompts: Sequence[Prompt],
    *,
    model: str | None = None,
    concurrency: int = 1,
    num_warmup: int = 0,
    stream: bool = False,
    **fields: Any,
) -> LoadResult:
    """Sends every prompt once, `concurrency` at a time. `fields` go into each request: max_tokens, temperature, seed …

    A request that fails is an Answer with `error`. Raises ValueError if the server can not be reached at all.
    """

    async def run() -> LoadResult:
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        async with httpx.AsyncClient(base_url=base_url, limits=limits, timeout=httpx.Timeout(None, connect=10)) as client:
            load = Load(client, {"model": model or await first_model(client), **fields}, stream)
            await load.send_all([prompts[index % len(prompts)] for index in range(num_warmup)], concurrency)
            start = time.perf_counter()
            answers = await load.send_all(prompts, concurrency, progress=f"concurrency {concurrency}")
            return LoadResult(concurrency=concurrency, wall_s=time.perf_counter() - start, answers=answers)

    return asyncio.run(run())


async def first_model(client: httpx.AsyncClient) -> str:
    try:
        response = await client.get("/v1/models")
        return response.raise_for_status().json()["data"][0]["id"]
    except (httpx.HTTPError, KeyError, IndexError, json.JSONDecodeError) as error:
        raise ValueError(f"base_url {client.base_url} does not answer as an OpenAI-compatible server: {error}") from error


class Load:
    """Requests that differ in the prompt only."""

    def __init__(self, client: httpx.AsyncClient, fields: dict[str, Any], stream: bool) -> None:
        self.client, self.fields = client, fields
        if stream:
            self.fields |= {"stream": True, "stream_options": {"include_usage": True}}
        self.ask = self.ask_stream if stream else self.ask_whole

    async def send_all(self, prompts: Sequence[Prompt], concurrency: int, progress: str | None = None) -> list[Answer]:
        answers = [Answer() for _ in prompts]
        waiting = iter(range(len(prompts)))
        with tqdm(total=len(prompts), desc=progress, unit="req", disable=progress is None) as bar:

            async def work() -> None:
                for index in waiting:  # shared: each worker takes the next one
                    await self.send(prompts[index], answers[index])
                    bar.update()

            await asyncio.gather(*(work() for _ in range(concurrency)))
        return answers

    async def send(self, prompt: Prompt, answer: Answer) -> None:
        is_chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        body = {**self.fields, "messages" if is_chat else "prompt": prompt}
        start = time.perf_counter()
        try:
            await self.ask(path, body, answer, start)
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.latency_s = time.perf_counter() - start

    async def ask_whole(self, path: str, body: dict[str, Any], answer: Answer, _: float) -> None:
        response = await self.client.post(path, json=body)
        take(answer, read_event(response.content, response.status_code))

    async def ask_stream(self, path: str, body: dict[str, Any], answer: Answer, start: float) -> None:
        async with self.client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                take(answer, read_event(await response.aread(), response.status_code))
                return
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                if take(answer, read_event(line[6:].encode(), 200)):
                    answer.arrivals_s.append(time.perf_counter() - start)
