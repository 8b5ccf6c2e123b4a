"""Where regenerated answers come from: our engine in this process, or OpenAI-compatible endpoints.

Both run many dialogues at once and call `on_result` as each ends. A row always gets the same seed.
"""

import asyncio
import http.client
import json
import re
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from slipstream.data_tools.dialogue import Answer, Conversing, Dialogue, Prompt, Result, converse, row_seed
from slipstream.data_tools.target_tokenizer import ChatTemplate, RowDropped
from slipstream.serve.llm import LLM
from slipstream.serve.request import Output, Request, SamplingParams

LONGEST_PAUSE_S = 60.0
TIMEOUT_S = 600.0
# How servers say that prompt and max_tokens exceed the context: ours, vLLM, SGLang, llama.cpp, OpenAI; TGI.
OVER_CONTEXT = re.compile(
    r"context.?(length|window|size|holds)|maximum (model|input|sequence) length|max_model_len|\+ `max_new_tokens`", re.I
)


@dataclass(slots=True, kw_only=True)
class Answers:
    """What both sources share. `on_tokens` gets the number of new tokens."""

    chat: ChatTemplate | None  # None: the endpoints render the messages with their own template
    params: SamplingParams
    keep_cut: bool
    on_result: Callable[[Result], None]
    on_tokens: Callable[[int], None]

    def converse(self, dialogue: Dialogue) -> Conversing:
        return converse(dialogue, self.chat, keep_cut=self.keep_cut)

    def params_of(self, identity: str, room: int | None) -> SamplingParams:
        """The row's own seed, and at most `room` tokens."""
        assert self.params.seed is not None
        most = self.params.max_tokens if room is None else min(room, self.params.max_tokens)
        return replace(self.params, max_tokens=most, seed=row_seed(self.params.seed, identity))


@dataclass(slots=True, kw_only=True)
class EngineAnswers(Answers):
    """Drives dialogues through `llm.stream`."""

    llm: LLM
    _running: dict[str, Conversing] = field(default_factory=dict)  # by dialogue id
    _tokens: dict[str, list[int]] = field(default_factory=dict)  # of the current answer, by dialogue id
    _requests: deque[Request] = field(default_factory=deque)  # later turns; they go before new dialogues

    def run(self, dialogues: Iterable[Dialogue]) -> None:
        waiting = iter(dialogues)
        more = True
        while more:
            for output in self.llm.stream(self._draw(waiting)):
                self.on_tokens(len(output.tokens))
                self._take(output)
            # The engine stops drawing at the end of `waiting`; later turns that became ready since need another round.
            more = bool(self._requests)

    def _draw(self, waiting: Iterator[Dialogue]) -> Iterator[Request]:
        while True:
            while not self._requests:
                dialogue = next(waiting, None)
                if dialogue is None:
                    return
                self._running[dialogue.id] = self.converse(dialogue)
                self._step(dialogue.id, None)
            yield self._requests.popleft()

    def _take(self, output: Output) -> None:
        identity, reason = output.request_id, output.finish_reason
        tokens = self._tokens[identity]
        tokens += output.tokens
        if reason in ("abort", "error"):
            self._end(Result(id=identity, failed=output.error or "the engine ended the request"))
        elif reason is not None:
            text_ids = tokens[:-1] if reason == "stop" else tokens
            text = str(self.llm.tokenizer.decode(text_ids, skip_special_tokens=True))
            self._step(identity, Answer(text=text, finish_reason=reason, num_tokens=len(tokens), token_ids=tokens))

    def _step(self, identity: str, answer: Answer | None) -> None:
        """Sends `answer` to its dialogue; queues the next prompt or ends the dialogue."""
        try:
            # A generator's first send must be None, which its type cannot say.
            prompt = next(self._running[identity]) if answer is None else self._running[identity].send(answer)
        except StopIteration as stop:
            self._end(stop.value)
            return
        self._tokens[identity] = []
        room = self.llm.engine.info.max_model_len - len(prompt.token_ids)
        if room < 1:
            self._end(Result(id=identity, dropped="prompt_too_long"))
            return
        self._requests.append(Request(id=identity, prompt=prompt.token_ids, params=self.params_of(identity, room)))

    def _end(self, result: Result) -> None:
        del self._running[result.id]
        self._tokens.pop(result.id, None)
        self.on_result(result)


class EndpointError(Exception):
    """A request failed, retries included. The message names the endpoint and the cause."""


class OverContextError(EndpointError):
    """The prompt and max_tokens exceed the endpoint's context."""


@dataclass(slots=True, kw_only=True)
class EndpointAnswers(Answers):
    """Drives dialogues through endpoints, `concurrency` requests at once over all of them, with retries. With `chat`
    prompts are rendered here and sent as token ids to /completions; without it messages go to /chat/completions."""

    urls: tuple[str, ...]  # up to and including /v1
    model: str
    context: int | None  # tokens of a prompt and its answer, where known
    api_key: str | None
    concurrency: int
    retries: int
    retry_pause: float  # seconds; doubles with every retry
    max_failures: int  # failed rows that end the run
    _num_failed: int = 0

    def run(self, dialogues: Iterable[Dialogue]) -> None:
        """Raises ValueError after `max_failures` failures."""
        asyncio.run(self._run(iter(dialogues)))

    async def _run(self, waiting: Iterator[Dialogue]) -> None:
        """The workers share `waiting`: a free worker takes the next dialogue."""
        timeout = aiohttp.ClientTimeout(sock_connect=TIMEOUT_S, sock_read=TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=self.concurrency)
        async with aiohttp.ClientSession(
            headers=bearer(self.api_key), timeout=timeout, connector=connector, trust_env=True
        ) as client:

            async def work(worker: int) -> None:
                for dialogue in waiting:
                    self.on_result(await self._answer(client, dialogue, worker))

            await asyncio.gather(*(work(worker) for worker in range(self.concurrency)))

    async def _answer(self, client: aiohttp.ClientSession, dialogue: Dialogue, worker: int) -> Result:
        conversing = self.converse(dialogue)
        try:
            prompt = next(conversing)
            while True:
                answer = await self._ask(client, prompt, dialogue.id, worker)
                self.on_tokens(answer.num_tokens)
                prompt = conversing.send(answer)
        except StopIteration as stop:
            return stop.value
        except RowDropped as error:
            return Result(id=dialogue.id, dropped=error.reason)
        except EndpointError as error:
            self._num_failed += 1
            if self._num_failed >= self.max_failures:
                raise ValueError(f"{self._num_failed} rows failed, the last: {error}") from error
            return Result(id=dialogue.id, failed=str(error))

    async def _ask(self, client: aiohttp.ClientSession, prompt: Prompt, identity: str, worker: int) -> Answer:
        """One answer. Raises RowDropped for a prompt that fills the context."""
        room = None
        if self.chat is not None and self.context is not None:
            room = self.context - len(prompt.token_ids)
            if room < 1:
                raise RowDropped("prompt_too_long", f"{len(prompt.token_ids)} tokens of {self.context}")
        body = self._body(prompt, self.params_of(identity, room))
        if self.chat is not None:
            return await self._send(client, body, worker)
        try:
            return await self._send(client, body, worker)
        except OverContextError:
            del body["max_tokens"]  # too many; without a limit the endpoint uses the room it has
        try:
            return await self._send(client, body, worker)
        except OverContextError as error:
            raise RowDropped("prompt_too_long", str(error)) from error

    async def _send(self, client: aiohttp.ClientSession, body: Mapping[str, Any], worker: int) -> Answer:
        """Retries go to the next endpoint."""
        fault, pause = "", 0.0
        for attempt in range(self.retries + 1):
            await asyncio.sleep(pause)
            base = self.urls[(worker + attempt) % len(self.urls)]
            url = f"{base}/chat/completions" if self.chat is None else f"{base}/completions"
            pause = min(self.retry_pause * 2**attempt, LONGEST_PAUSE_S)
            try:
                async with client.post(url, json=body, allow_redirects=False) as response:
                    status, text = response.status, (await response.read()).decode(errors="replace")
            except (aiohttp.ClientError, TimeoutError) as error:
                fault = f"{url}: {type(error).__name__} {error}"
                continue
            if status == 200:
                return _read_answer(url, text)
            fault = f"{url} answered {status}: {text[:200]}"
            if status in (400, 422) and OVER_CONTEXT.search(text):
                raise OverContextError(fault)
            if status != 429 and status < 500:
                raise EndpointError(fault)
            pause = max(pause, _retry_after(response))
        raise EndpointError(f"{fault} (after {self.retries + 1} attempts)")

    def _body(self, prompt: Prompt, params: SamplingParams) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "max_tokens": params.max_tokens, "seed": params.seed}
        body |= {"temperature": params.temperature, "top_p": params.top_p}
        body |= {"top_k": params.top_k} if params.top_k else {}  # some endpoints reject it
        if self.chat is not None:
            return body | {"prompt": prompt.token_ids}
        return body | {"messages": prompt.messages} | ({"tools": prompt.tools} if prompt.tools else {})


def served_models(url: str, api_key: str | None) -> dict[str, int | None]:
    """The models that the endpoint lists, each with the size of its context, where listed. Raises ValueError."""
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/models", headers=bearer(api_key)), timeout=30
        ) as got:
            models = {str(entry["id"]): entry.get("max_model_len") for entry in json.load(got)["data"]}
        if not models:
            raise ValueError("its list is empty")
        return models
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"endpoint {url} does not list its models ({error}); check it or add --model") from error


def bearer(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _read_answer(url: str, text: str) -> Answer:
    try:
        body: Mapping[str, Any] = json.loads(text)
        choice = body["choices"][0]
        message = choice["message"] if "message" in choice else {"content": choice["text"]}
        content, reason = message["content"], choice["finish_reason"]
    except (ValueError, LookupError, TypeError) as error:
        raise EndpointError(f"{url} did not answer with a completion: {text[:200]}") from error
    if reason not in ("stop", "length") or not isinstance(content, str):
        raise EndpointError(f"{url} ended an answer with {reason!r} and content of type {type(content).__name__}")
    num_tokens = (body.get("usage") or {}).get("completion_tokens", 0)
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return Answer(text=content, finish_reason=reason, num_tokens=num_tokens, reasoning=reasoning)


def _retry_after(response: aiohttp.ClientResponse) -> float:
    """Seconds that the endpoint asks to wait; 0 if it does not say, or names a date."""
    value = response.headers.get("Retry-After", "")
    return min(float(value), LONGEST_PAUSE_S) if value.isdigit() else 0.0
