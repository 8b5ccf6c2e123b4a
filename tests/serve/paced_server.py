"""A small OpenAI-compatible server that drafts by a known rule and reports it as others document it.

Answer i to a prompt has `length(prompt)` tokens; round r emits 1, 2 or 3 of them in turn, so that whoever knows the
lengths knows the rounds. `Counts` is the plain sum over all its answers.
"""

import asyncio
import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

WORDS = ["one", "two", "three", "four", "five", "six", "seven"]


def rounds_of(length: int) -> list[int]:
    """Tokens that each round after the first token emits."""
    left = length - 1
    emitted = []
    while left:
        emitted.append(min(left, 1 + len(emitted) % 3))
        left -= emitted[-1]
    return emitted


def length_of(text: str) -> int:
    return 8 + len(text) % 17


@dataclass
class PacedServer:
    """`dialect`: vllm, vllm-detailed (rounds in answers), sglang or plain. `pace`: seconds of a round, drawn within
    `jitter` of it."""

    dialect: str = "plain"
    pace: float = 0.0
    jitter: float = 0.0
    has_usage: bool = True
    prompt_lens: dict[str, int] = field(default_factory=dict)  # tokens by last message; of others 5
    process_start: float | None = None  # as /metrics tells it
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    rounds: int = 0
    decoded: int = 0
    positions: list[int] = field(default_factory=lambda: [0, 0])
    generated: int = 0
    finished: int = 0

    def __post_init__(self):
        self._random = random.Random(7)

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "paced"}]})

    async def metrics(self, _: web.Request) -> web.Response:
        if self.dialect == "plain":
            raise web.HTTPNotFound
        start = "" if self.process_start is None else f"process_start_time_seconds {self.process_start}\n"
        return web.Response(text=start + (self.vllm() if self.dialect.startswith("vllm") else self.sglang()))

    def vllm(self) -> str:
        labels = 'engine="0",model_name="paced"'
        lines = [
            "# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.",
            "# TYPE vllm:spec_decode_num_drafts_total counter",
            f"vllm:spec_decode_num_drafts_total{{{labels}}} {float(self.rounds)}",
            f"vllm:spec_decode_num_drafts_created{{{labels}}} 1.7636e+09",
            f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {float(sum(self.positions))}",
        ]
        for index, count in enumerate(self.positions):
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines.append(f'{name}{{{labels},position="{index}"}} {float(count)}')
        return "\n".join(lines) + "\n"

    def sglang(self) -> str:
        labels = '{model_name="paced"}'
        return (
            f"sglang:spec_accept_length{labels} 2.5\n"
            f"sglang:spec_verify_calls_total{labels} {float(self.rounds)}\n"
            f"sglang:generation_tokens_total{labels} {float(self.generated)}\n"
            f"sglang:num_requests_total{labels} {float(self.finished)}\n"
        )

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        text = body["messages"][-1]["content"]
        emitted = rounds_of(min(length_of(text), body["max_tokens"]))
        await self.sleep()
        pieces = [self.words(text, 0, 1)]
        place = 1
        response = None
        if body.get("stream"):
            response = web.StreamResponse()
            await response.prepare(request)
            await self.send(response, choice(pieces[0]))
        for count in emitted:
            await self.sleep()
            pieces.append(self.words(text, place, count))
            place += count
            if response is not None:
                await self.send(response, choice(pieces[-1]))
        self.count(emitted)
        counts = {"completion_tokens": place, "prompt_tokens": self.prompt_lens.get(text, 5)}
        usage = {"usage": counts} if self.has_usage else {}
        closing = {**usage, **self.metrics_of(emitted)}
        if response is None:
            stopped = {"message": {"role": "assistant", "content": "".join(pieces)}, "finish_reason": "stop"}
            return web.json_response({"choices": [{**stopped, **self.meta_of(emitted, body)}], **closing})
        await self.send(response, {"choices": [{"delta": {}, "finish_reason": "stop"}]})
        await self.send(response, {"choices": [], **closing})
        await response.write(b"data: [DONE]\n\n")
        return response

    def count(self, emitted: list[int]):
        self.rounds += len(emitted)
        self.decoded += sum(emitted)
        for count in emitted:
            for position in range(count - 1):
                self.positions[position] += 1
        self.generated += 1 + sum(emitted)
        self.finished += 1

    def metrics_of(self, emitted: list[int]) -> dict[str, Any]:
        if self.dialect != "vllm-detailed":
            return {}
        histogram = [emitted.count(1 + accepted) for accepted in range(3)]
        figures = {"num_spec_steps": len(emitted), "num_accepted_draft_tokens": sum(emitted) - len(emitted)}
        return {"metrics": {"speculative_decoding": {**figures, "acceptance_histogram": histogram}}}

    def meta_of(self, emitted: list[int], body: dict[str, Any]) -> dict[str, Any]:
        if self.dialect != "sglang" or not body.get("return_meta_info"):
            return {}
        histogram = [emitted.count(1 + accepted) for accepted in range(3)]
        return {"meta_info": {"spec_verify_ct": len(emitted), "spec_accept_histogram": histogram}}

    def words(self, text: str, place: int, count: int) -> str:
        return "".join(WORDS[(len(text) + at) % len(WORDS)] + " " for at in range(place, place + count))

    async def sleep(self):
        if self.pace:
            await asyncio.sleep(self.pace * self._random.uniform(1 - self.jitter, 1 + self.jitter))

    async def send(self, response: web.StreamResponse, event: dict[str, Any]):
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def choice(text: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}}]}


@contextmanager
def paced(dialect: str = "plain", **options: Any) -> Iterator[PacedServer]:
    """The server on a thread of this process."""
    server = PacedServer(dialect, **options)
    loop = asyncio.new_event_loop()
    app = web.Application()
    app.add_routes([web.get("/v1/models", server.models), web.get("/metrics", server.metrics)])
    app.add_routes([web.post("/v1/chat/completions", server.chat)])
    runner = web.AppRunner(app)

    async def start():
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = site.name

    loop.run_until_complete(start())
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
