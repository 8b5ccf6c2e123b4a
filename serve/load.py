"""Sends load to an OpenAI-compatible server and collects answers, times and acceptance. Imports no torch.

One process sends everything. A streamed piece costs it about 45 us, a third of what httpx needs, so that measuring does
not slow down fast servers with many streams.
"""

import asyncio
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Self

import aiohttp
from tqdm import tqdm

from slipstream.models.chat.messages import joined_pairs

Prompt = str | list[int] | list[dict[str, str]]  # text, token ids, or messages
# Connection errors, malformed streams, bodies that are not JSON.
FAILURES = (aiohttp.ClientError, aiohttp.http.HttpProcessingError, TimeoutError, ValueError)
MAX_LEVEL = 65_536  # requests open at once; a computer has no more ports for one server
MAX_EVENT = 2**20  # bytes of a streamed event; aiohttp limits a line to twice its buffer
SILENCE_S = 30.0  # after which a server is not there, unless it writes an answer
ANSWER_SILENCE_S = 600.0  # after which an answer is given up that comes in pieces
WHOLE_ANSWER_S = 3600.0  # likewise in one piece
WHOLE = ("application/json", "text/html")  # types of answers that come in one piece, also where a stream was asked for


@dataclass(slots=True, kw_only=True)
class Answer:
    """The answer to one prompt."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0  # 0: the server does not tell
    completion_tokens: int = 0
    latency_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)  # arrival of each streamed piece, after the request
    rounds: int = 0  # these four are 0 or empty where the server does not report them for each answer
    decoded_tokens: int = 0  # emitted by rounds
    drafted_tokens: int = 0  # drafted tokens that rounds verified
    accepted_by_position: list[int] = field(default_factory=list)
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens as the server counts them, or streamed pieces where it does not."""
        return self.completion_tokens or len(self.arrivals_s)

    def add(self, text: str) -> None:
        """Adds a response body or one streamed event, of either endpoint. One that is no completion is an error."""
        try:
            event = json.loads(text)
            error = event.get("error")
            if error is None:
                self._add_choices(event)
            else:
                self.error = str(error.get("message") if isinstance(error, dict) else error)
        except (ValueError, AttributeError, LookupError, TypeError):
            self.error = f"the answer is no completion in JSON: {text[:200]}"

    def _add_choices(self, event: Any) -> None:
        usage = event.get("usage") or {}
        self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
        self.completion_tokens = usage.get("completion_tokens", self.completion_tokens)
        for choice in event["choices"]:
            content = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
            self.text += content.get("content") or ""
            self.reasoning += content.get("reasoning_content") or content.get("reasoning") or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self._add_sglang(choice.get("meta_info") or {})
        speculation = (event.get("metrics") or {}).get("speculative_decoding") or {}
        if speculation.get("num_spec_steps"):
            accepted = speculation.get("num_accepted_draft_tokens")
            histogram = speculation.get("acceptance_histogram")
            self._add_rounds(speculation["num_spec_steps"], accepted, histogram or [])
            self.drafted_tokens = speculation.get("num_draft_tokens", 0)

    def _add_sglang(self, meta: dict[str, Any]) -> None:
        """Adds the counts that SGLang sends for a request with `return_meta_info`."""
        if meta.get("spec_verify_ct"):
            histogram = meta.get("spec_correct_drafts_histogram") or meta.get("spec_accept_histogram") or []
            accepted = sum(count * rounds for count, rounds in enumerate(histogram)) if histogram else None
            self._add_rounds(meta["spec_verify_ct"], accepted, histogram)
            self.drafted_tokens = meta.get("spec_num_proposed_drafts") or meta.get("spec_draft_token_num") or 0

    def _add_rounds(self, rounds: int, accepted: int | None, histogram: Sequence[int]) -> None:
        """Adds counts of rounds. `histogram`: rounds by how many drafted tokens they accepted. The prompt's pass gives
        the first token. The smaller number is right, since a round that ends the answer may emit only drafted tokens,
        and vLLM does not count rounds that verified nothing."""
        after_first = self.completion_tokens - 1 if self.completion_tokens else rounds + (accepted or 0)
        self.rounds = rounds
        self.decoded_tokens = after_first if accepted is None else min(after_first, rounds + accepted)
        at_least = [sum(histogram[count:]) for count in range(1, len(histogram))]
        self.accepted_by_position = [count for count in at_least if count]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """One level of concurrency; answers in the order of the prompts."""

    concurrency: int
    wall_s: float
    answers: list[Answer]

    @property
    def completed(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.error is None]

    @property
    def errors(self) -> list[str]:
        return [answer.error for answer in self.answers if answer.error is not None]

    @property
    def completion_tokens(self) -> int:
        return sum(answer.completion_tokens for answer in self.completed)

    @property
    def tokens_per_second(self) -> float:
        return self.completion_tokens / self.wall_s

    @property
    def rounds(self) -> int:
        return sum(answer.rounds for answer in self.completed)

    @property
    def decoded_tokens(self) -> int:
        return sum(answer.decoded_tokens for answer in self.completed)

    @property
    def accept_length(self) -> float | None:
        """Tokens per round, over all rounds; None if the server does not report rounds."""
        return self.decoded_tokens / self.rounds if self.rounds else None

    @property
    def accept_rate_by_position(self) -> list[float]:
        """Share of all rounds in which the draft token at each position was accepted."""
        counts = zip_longest(*(answer.accepted_by_position for answer in self.completed), fillvalue=0)
        return [sum(column) / self.rounds for column in counts]


def percentile(values: Sequence[float], percent: int) -> float | None:
    """Returns the smallest value that is at least as large as so many percent of the values; None without values."""
    return sorted(values)[max(0, -(-len(values) * percent // 100) - 1)] if values else None


class Client:
    """A server, as an asynchronous context manager. `base_url` may end with /v1.

    `connections`: requests open at once. `model`: default is the first that the server lists. Entering raises
    ValueError if no server answers.
    """

    def __init__(
        self, base_url: str, *, connections: int, model: str | None = None, api_key: str | None = None
    ) -> None:
        self.root = base_url.rstrip("/").removesuffix("/v1")
        self.model = model
        self._connections = connections
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._connections),
            read_bufsize=MAX_EVENT // 2,
            trust_env=True,  # proxies
            headers=self._headers,
        )
        try:
            self.model = self.model or await self._first_model()
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def _first_model(self) -> str:
        try:
            return str(json.loads(await self._get("/v1/models"))["data"][0]["id"])
        except (*FAILURES, LookupError, TypeError) as error:
            if isinstance(error, aiohttp.ClientResponseError) and error.status in (401, 403):
                raise ValueError(
                    f"{self.root} asks for a key (status {error.status}); name a file with it by --api-key-file"
                ) from error
            raise ValueError(
                f"{self.root} is not an OpenAI-compatible server ({type(error).__name__}: {error}); "
                "give one like http://127.0.0.1:8000"
            ) from error

    async def _get(self, path: str) -> str:
        timeout = aiohttp.ClientTimeout(sock_connect=SILENCE_S, sock_read=SILENCE_S)
        async with self._session.get(self.root + path, raise_for_status=True, timeout=timeout) as response:
            return await response.text()

    async def read(self, path: str) -> str | None:
        """Returns the text at `path`; None if the server has none there."""
        try:
            return await self._get(path)
        except FAILURES:
            return None

    async def ask(self, prompt: Prompt, fields: Mapping[str, Any]) -> Answer:
        """Sends one prompt and returns its answer. `fields`: further fields of the request; with `stream`, the answer
        has `arrivals_s`. A failed request gives an Answer with `error`. Raises ValueError for a server that sends
        nothing for long."""
        is_chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        body = {"model": self.model, **fields, "messages" if is_chat else "prompt": prompt}
        if body.get("stream"):
            body["stream_options"] = {"include_usage": True}
        answer = Answer()
        silence = ANSWER_SILENCE_S if body.get("stream") else WHOLE_ANSWER_S
        timeout = aiohttp.ClientTimeout(sock_connect=SILENCE_S, sock_read=silence)
        start = time.perf_counter()
        try:
            async with self._session.post(
                self.root + path, json=body, allow_redirects=False, timeout=timeout
            ) as response:
                if response.status == 200 and body.get("stream") and response.content_type not in WHOLE:
                    await read_stream(response, answer)
                else:
                    answer.add((await response.read()).decode(errors="replace"))
                if response.status != 200 and answer.error is not None:
                    answer.error = f"status {response.status}: {answer.error}"
        except aiohttp.SocketTimeoutError as error:
            raise ValueError(
                f"{self.root} accepted a request and sent nothing for {silence:g} seconds; look at its log, and run "
                "the same command again"
            ) from error
        except FAILURES as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.latency_s = time.perf_counter() - start
        answer.arrivals_s = [arrival - start for arrival in answer.arrivals_s]
        if answer.error is None and answer.finish_reason is None:
            answer.error = "the answer broke off"
        answer.text = joined_pairs(answer.text)
        answer.reasoning = joined_pairs(answer.reasoning)
        return answer


def run_load(
    base_url: str,
    prompts: Sequence[Prompt],
    *,
    model: str | None = None,
    concurrency: int = 1,
    num_warmup: int = 0,
    stream: bool = False,
    prompt_fields: Sequence[Mapping[str, Any]] = (),
    **fields: Any,
) -> LoadResult:
    """Sends every prompt once, `concurrency` at a time. `base_url` may end with /v1.

    `fields` are sent in every request: max_tokens, temperature, ... `prompt_fields` has further ones, a mapping per
    prompt. A failed request gives an Answer with `error`. Raises ValueError if no server answers.
    """
    if stream:
        fields["stream"] = True
    task_fields = [{**fields, **extra} for extra in prompt_fields or [{}] * len(prompts)]
    tasks = list(zip(prompts, task_fields, strict=True))

    async def run() -> LoadResult:
        async with Client(base_url, connections=concurrency, model=model) as client:
            await send_all(client, [tasks[index % len(tasks)] for index in range(num_warmup)], concurrency)
            return await send_all(client, tasks, concurrency, progress=f"concurrency {concurrency}")

    return asyncio.run(run())


def read_levels(concurrency: str) -> list[int]:
    """Reads the option "1,8,32" of load programs. Raises ValueError for anything but numbers from 1 to `MAX_LEVEL`."""
    levels = concurrency.split(",")
    if not all(re.fullmatch(r"\s*[0-9]{1,5}\s*", level) and 0 < int(level) <= MAX_LEVEL for level in levels):
        raise ValueError(f"concurrency is {concurrency!r}; give numbers from 1 to {MAX_LEVEL:,} separated by commas")
    return [int(level) for level in levels]


async def send_all(
    client: Client, tasks: Sequence[tuple[Prompt, Mapping[str, Any]]], concurrency: int, progress: str | None = None
) -> LoadResult:
    """Sends prompts, each with the other fields of its request, `concurrency` at a time."""
    answers = [Answer() for _ in tasks]
    waiting = iter(enumerate(tasks))
    with tqdm(total=len(tasks), desc=progress, unit="req", disable=progress is None) as bar:

        async def work() -> None:
            for index, (prompt, fields) in waiting:  # shared by the workers
                answers[index] = await client.ask(prompt, fields)
                bar.update()

        start = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(concurrency)))
        wall_s = time.perf_counter() - start
    return LoadResult(concurrency=concurrency, wall_s=wall_s, answers=answers)


async def read_stream(response: aiohttp.ClientResponse, answer: Answer) -> None:
    async for line in response.content:  # up to a line feed: text may contain other line ends
        if not line.startswith(b"data:") or line.rstrip().endswith(b"[DONE]"):
            continue
        length = len(answer.text) + len(answer.reasoning)
        answer.add(line[5:].decode(errors="replace"))
        if len(answer.text) + len(answer.reasoning) > length:
            answer.arrivals_s.append(time.perf_counter())
