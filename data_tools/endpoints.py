"""Answers of OpenAI-compatible endpoints, streamed, with retries.

Invariant: an answer, and a refusal of the row itself, are final. A fault of the endpoint or of the way to it is a
failure: another run asks the row again. A refusal that concerns every row ends the run.
"""

import asyncio
import http.client
import json
import re
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import aiohttp
from tqdm import tqdm

from slipstream.data_tools.answers import Answers
from slipstream.data_tools.dialogue import Answer, Dialogue, Prompt, Result
from slipstream.data_tools.target_tokenizer import RowDropped
from slipstream.models.chat.messages import REASONING_FIELDS, Message, joined_pairs
from slipstream.models.files.checkpoint import Values
from slipstream.serve.request import SamplingParams

LONGEST_PAUSE_S = 60.0
MAX_EVENT = 2**20  # bytes of a streamed event; aiohttp limits a line to twice its buffer
FOR_EVERY_ROW = (401, 403, 404, 405)  # statuses: key, path or model are wrong
TRY_AGAIN = (408, 429)  # and all from 500
# How servers say that prompt and max_tokens exceed the context: ours, vLLM, SGLang, llama.cpp, OpenAI; TGI.
OVER_CONTEXT = re.compile(
    r"context.?(length|window|size|holds)|maximum (model|input|sequence) length|max_model_len|\+ `max_new_tokens`", re.I
)
USAGE = {"stream_options": {"include_usage": True}}
# So that nothing of an answer is lost; vLLM and this server return token ids, SGLang leaves special tokens in the text.
EXACT = {"return_token_ids": True, "skip_special_tokens": False}
ENDS = ("stop", "length", "tool_calls", "function_call")  # finish reasons of answers
BROKEN = ("abort", "error")  # of answers that the endpoint could not finish


class EndpointError(Exception):
    """An endpoint failed, retries included. The message names it and the cause."""


class RefusedError(Exception):
    """The endpoint refused this row."""


class OverContextError(RefusedError):
    """The prompt and max_tokens exceed the endpoint's context."""


class TryAgainError(Exception):
    """The same request may succeed, after `pause_s` at the earliest."""

    def __init__(self, fault: str, pause_s: float = 0.0) -> None:
        super().__init__(fault)
        self.pause_s = pause_s


def token_id(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**31:
        raise TypeError(f"{value!r} is not a token id")
    return value


@dataclass(slots=True)
class Reply:
    """The first choice of a response, put together from its events; a body that is not streamed is one event."""

    content: str = ""
    reasoning: str = ""
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)  # by index
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    num_tokens: int = 0
    model: str | None = None

    def add(self, event: Values) -> None:
        """Raises LookupError, TypeError or AttributeError for what is no completion."""
        self.model = event.get("model") or self.model
        self.num_tokens = (event.get("usage") or {}).get("completion_tokens") or self.num_tokens
        for choice in event["choices"][:1]:
            part = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
            self.content += part.get("content") or ""
            self.reasoning += next((part[name] for name in REASONING_FIELDS if part.get(name)), "")
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            if choice.get("token_ids") is not None:
                self.token_ids = (self.token_ids or []) + list(map(token_id, choice["token_ids"]))
            for place, piece in enumerate(part.get("tool_calls") or []):
                self._add_call(piece.get("index", place), piece)

    def _add_call(self, index: int, piece: Values) -> None:
        call = self.calls.setdefault(index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        call["id"] = piece.get("id") or call["id"]
        for name, text in (piece.get("function") or {}).items():
            call["function"][name] += text or ""

    @property
    def message(self) -> Message:
        reasoning = {"reasoning_content": self.reasoning} if self.reasoning else {}
        calls = {"tool_calls": [self.calls[index] for index in sorted(self.calls)]} if self.calls else {}
        return {"role": "assistant", "content": self.content, **reasoning, **calls}


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
    timeout: float  # seconds without a piece of the answer
    max_failures: int  # rows without an answer, one after the other, that end the run
    _unknown_fields: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # by endpoint
    _num_failed: int = 0  # since the last answer
    _has_answered: bool = False
    _has_told_refusal: bool = False
    _refused: list[tuple[str, RefusedError]] = field(default_factory=list)  # rows since the last answer

    def run(self, dialogues: Iterable[Dialogue]) -> None:
        """Raises ValueError after `max_failures` failures in a row, or for a refusal that concerns every row."""
        asyncio.run(self._run(iter(dialogues)))

    async def _run(self, waiting: Iterator[Dialogue]) -> None:
        """The workers share `waiting`: a free worker takes the next dialogue. The first is asked alone, since all may
        have its fault."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.timeout, sock_read=self.timeout)
        connector = aiohttp.TCPConnector(limit=self.concurrency)
        async with aiohttp.ClientSession(
            headers=bearer(self.api_key),
            timeout=timeout,
            connector=connector,
            read_bufsize=MAX_EVENT // 2,
            trust_env=True,
        ) as client:

            async def work(worker: int, dialogues: Iterable[Dialogue]) -> None:
                for dialogue in dialogues:
                    await self._answer(client, dialogue, worker)

            try:
                await work(0, islice(waiting, 1))
                await asyncio.gather(*(work(worker, waiting) for worker in range(self.concurrency)))
            finally:
                self._settle_refused(are_final=self._has_answered)

    async def _answer(self, client: aiohttp.ClientSession, dialogue: Dialogue, worker: int) -> None:
        conversing = self.converse(dialogue)
        try:
            prompt = next(conversing)
            while True:
                answer = await self._ask(client, prompt, dialogue.id, worker)
                self._has_answered = True
                self._num_failed = 0
                self._settle_refused(are_final=True)
                self.on_tokens(answer.num_tokens)
                prompt = conversing.send(answer)
        except StopIteration as stop:
            self.on_result(stop.value)
        except RowDropped as error:
            self.on_result(Result(id=dialogue.id, dropped=error.reason))
        except RefusedError as error:
            self._refused.append((dialogue.id, error))
            self._count_failure(error)
        except EndpointError as error:
            self.on_result(Result(id=dialogue.id, failed=str(error)))
            self._count_failure(error)

    def _count_failure(self, error: Exception) -> None:
        self._num_failed += 1
        if self._num_failed >= self.max_failures:
            self._settle_refused(are_final=False)
            raise ValueError(f"{self._num_failed} rows failed one after the other, the last: {error}") from error

    def _settle_refused(self, *, are_final: bool) -> None:
        """Drops the rows that were refused, or, if the fault may not be theirs, has them asked again in another run."""
        for identity, error in self._refused:
            if are_final:
                if not self._has_told_refusal:
                    tqdm.write(f"row {identity} is dropped, and so are others that the endpoint refuses: {error}")
                    self._has_told_refusal = True
                self.on_result(Result(id=identity, dropped="refused_by_endpoint"))
            else:
                self.on_result(Result(id=identity, failed=str(error)))
        self._refused.clear()

    async def _ask(self, client: aiohttp.ClientSession, prompt: Prompt, identity: str, worker: int) -> Answer:
        """One answer. Raises RowDropped for a prompt that fills the context."""
        room = None
        if self.chat is not None and self.context is not None:
            room = self.context - len(prompt.token_ids)
            if room < 1:
                raise RowDropped("prompt_too_long", f"{len(prompt.token_ids)} tokens of {self.context}")
        body = self._body(prompt, self.params_of(identity, room))
        while True:
            try:
                return self._read(prompt, await self._send(client, body, worker))
            except OverContextError as error:
                if self.chat is not None or "max_tokens" not in body:
                    raise RowDropped("prompt_too_long", str(error)) from error
            del body["max_tokens"]  # too many; without a limit the endpoint uses the room it has

    async def _send(self, client: aiohttp.ClientSession, body: Values, worker: int) -> Reply:
        """Retries go to the next endpoint."""
        fault = ""
        pause = 0.0
        for attempt in range(self.retries + 1):
            await asyncio.sleep(pause)
            base = self.urls[(worker + attempt) % len(self.urls)]
            pause = min(self.retry_pause * 2**attempt, LONGEST_PAUSE_S)
            try:
                return await self._post(client, base, body)
            except aiohttp.SocketTimeoutError as error:
                # Not asked at once again: the endpoint may still compute what was given up.
                remedy = "raise --timeout, or lower --concurrency"
                raise EndpointError(f"{base} sent nothing for {self.timeout:g} seconds; {remedy}") from error
            except TryAgainError as error:
                fault = str(error)
                pause = max(pause, error.pause_s)
            except (aiohttp.ClientError, TimeoutError) as error:
                fault = f"{base}: {type(error).__name__} {error}"
        raise EndpointError(f"{fault} (after {self.retries + 1} attempts)")

    async def _post(self, client: aiohttp.ClientSession, base: str, body: Values) -> Reply:
        """One request, repeated without the fields beyond OpenAI's that the endpoint does not know."""
        url = f"{base}/chat/completions" if self.chat is None else f"{base}/completions"
        extra = USAGE if self.chat is None else USAGE | EXACT
        while True:
            fields = {name: value for name, value in extra.items() if name not in self._unknown_fields[base]}
            async with client.post(url, json={**body, **fields}, allow_redirects=False) as response:
                if response.status == 200:
                    return await read_reply(url, response)
                status = response.status
                text = await read_text(response)
                pause_s = _retry_after(response)
            unknown = {name for name in fields if re.search(rf"\b{name}\b", text)} if status in (400, 422) else set()
            if not unknown:
                break
            self._unknown_fields[base] |= unknown
        fault = f"{url} answered {status}: {text[:200]}"
        if status in TRY_AGAIN or status >= 500:
            raise TryAgainError(fault, pause_s)
        if status in FOR_EVERY_ROW:
            raise ValueError(f"{fault}; check endpoint, --model and --api-key-file")
        raise OverContextError(fault) if OVER_CONTEXT.search(text) else RefusedError(fault)

    def _read(self, prompt: Prompt, reply: Reply) -> Answer:
        """Raises EndpointError and RowDropped for an end that is none."""
        reason = reply.finish_reason
        ids = reply.token_ids
        if reason in BROKEN:
            raise EndpointError(f"the endpoint ended an answer with {reason!r}")
        if reason not in ENDS:
            raise RowDropped("no_answer", f"the endpoint ended an answer with {reason!r}")
        fields: dict[str, Any] = {
            "finish_reason": reason,
            "num_tokens": reply.num_tokens,
            "model": reply.model or self.model,
        }
        if self.chat is None:
            return Answer(message=reply.message, **fields)
        if ids is not None and (reason == "length" or not self.end_ids or not self.end_ids.isdisjoint(ids[-1:])):
            return Answer(message=self.read(prompt, ids), token_ids=ids, **fields)
        message = self.read(prompt, self.chat.encode([reply.content])[0])
        return Answer(message=message, text=reply.content, **fields)

    def _body(self, prompt: Prompt, params: SamplingParams) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "max_tokens": params.max_tokens, "seed": params.seed}
        body |= {"temperature": params.temperature, "top_p": params.top_p, "stream": True}
        body |= {"top_k": params.top_k} if params.top_k else {}  # some endpoints reject it
        if self.chat is not None:
            return body | {"prompt": prompt.token_ids}
        return body | {"messages": prompt.messages} | ({"tools": prompt.tools} if prompt.tools else {})


async def read_reply(url: str, response: aiohttp.ClientResponse) -> Reply:
    """Raises TryAgainError if the stream breaks off, EndpointError if it is none of a completion."""
    reply = Reply()
    if response.content_type != "text/event-stream":
        add_event(url, reply, await read_text(response))
    else:
        async for line in response.content:  # up to a line feed: text may contain other line ends
            if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                add_event(url, reply, line[5:].decode(errors="replace"))
    if reply.finish_reason is None:
        raise TryAgainError(f"{url} broke off an answer")
    reply.content = joined_pairs(reply.content)
    reply.reasoning = joined_pairs(reply.reasoning)
    reply.calls = {index: joined_pairs(call) for index, call in reply.calls.items()}
    return reply


def add_event(url: str, reply: Reply, text: str) -> None:
    try:
        reply.add(json.loads(text))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise EndpointError(f"{url} did not answer with a completion: {text[:200]}") from error


async def read_text(response: aiohttp.ClientResponse) -> str:
    return (await response.read()).decode(errors="replace")


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


def shared_model(urls: Iterable[str], model: str | None, api_key: str | None) -> tuple[str, int | None]:
    """The model to ask, `model` or the first that the first endpoint lists, and its smallest context, where listed.

    Raises ValueError unless all endpoints list it. With `model`, one that lists nothing, as gateways do, is trusted.
    """
    contexts = list[int]()
    for url in urls:
        try:
            models = served_models(url, api_key)
        except ValueError:
            if model is None:
                raise
            continue
        model = model or next(iter(models))
        if model not in models:
            names = ", ".join(list(models)[:5])
            raise ValueError(f"model {model!r} is not at endpoint {url}, which lists {names}; name one that all list")
        contexts += [context for context in (models[model],) if context]
    assert model is not None
    return model, min(contexts, default=None)


def bearer(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _retry_after(response: aiohttp.ClientResponse) -> float:
    """Seconds that the endpoint asks to wait; 0 if it does not say, or names a date."""
    value = response.headers.get("Retry-After", "")
    return min(float(value), LONGEST_PAUSE_S) if value.isdecimal() else 0.0
