"""Answers from OpenAI-compatible endpoints, several at once, each request retried where that can help."""

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import httpx

from slipstream.data_tools.chat_template import ChatTemplate, RowDropped
from slipstream.data_tools.dialogue import Answer, Dialogue, Prompt, Result, converse, row_seed
from slipstream.serve.request import SamplingParams

LONGEST_PAUSE_S = 60.0
# How servers say that prompt and max_tokens do not fit: ours, vLLM, SGLang, llama.cpp, OpenAI; TGI.
OVER_CONTEXT = re.compile(
    r"context.?(length|window|size|holds)|maximum (model|input|sequence) length|max_model_len|\+ `max_new_tokens`", re.I
)


class EndpointError(Exception):
    """One request that got no answer, retries included. The message names the endpoint and the cause."""


class OverContextError(EndpointError):
    """The endpoint's context has no room for the prompt and max_tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointOptions:
    """How endpoints are asked. `concurrency` requests are open at once, over all endpoints."""

    urls: tuple[str, ...]  # up to and including /v1
    model: str
    context: int | None = None  # tokens of a prompt and its answer, where known
    api_key: str | None = None
    concurrency: int = 64
    retries: int = 6
    first_pause_s: float = 1.0  # doubles with every retry
    timeout_s: float = 600.0
    max_failures: int = 100  # rows that may fail before the run ends


class EndpointAnswers:
    """Drives dialogues through the endpoints. With `chat` prompts are rendered here and sent as token ids to
    /completions; without it messages go to /chat/completions and the template is the endpoint's.

    An answer gets `params.max_tokens` or what the context has room for; a prompt that leaves none drops its row.
    """

    def __init__(
        self, options: EndpointOptions, chat: ChatTemplate | None, params: SamplingParams, *, keep_cut: bool
    ) -> None:
        self._options = options
        self._chat = chat
        self._params = params
        self._keep_cut = keep_cut
        self._num_failed = 0

    def run(
        self, dialogues: Iterable[Dialogue], on_result: Callable[[Result], None], on_tokens: Callable[[int], None]
    ) -> None:
        """Calls `on_result` for every dialogue as it ends. Raises ValueError after `max_failures` failures."""
        asyncio.run(self._run(dialogues, on_result, on_tokens))

    async def _run(
        self, dialogues: Iterable[Dialogue], on_result: Callable[[Result], None], on_tokens: Callable[[int], None]
    ) -> None:
        waiting = iter(dialogues)  # shared by the workers: each takes the next one when it is free
        options = self._options
        headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        limits = httpx.Limits(max_connections=options.concurrency)
        async with httpx.AsyncClient(headers=headers, timeout=options.timeout_s, limits=limits) as client:

            async def work(worker: int) -> None:
                for dialogue in waiting:
                    on_result(await self._converse(client, dialogue, worker, on_tokens))

            await asyncio.gather(*(work(worker) for worker in range(options.concurrency)))

    async def _converse(
        self, client: httpx.AsyncClient, dialogue: Dialogue, worker: int, on_tokens: Callable[[int], None]
    ) -> Result:
        conversing = converse(dialogue, self._chat, keep_cut=self._keep_cut)
        params = replace(self._params, seed=row_seed(self._params.seed, dialogue.id))
        try:
            prompt = next(conversing)
            while True:
                answer = await self._ask(client, prompt, params, worker)
                on_tokens(answer.num_tokens)
                prompt = conversing.send(answer)
        except StopIteration as stop:
            return stop.value
        except RowDropped as error:
            return Result(id=dialogue.id, dropped=error.reason)
        except EndpointError as error:
            self._num_failed += 1
            if self._num_failed >= self._options.max_failures:
                raise ValueError(f"{self._num_failed} rows failed, the last: {error}") from error
            return Result(id=dialogue.id, failed=str(error))

    async def _ask(self, client: httpx.AsyncClient, prompt: Prompt, params: SamplingParams, worker: int) -> Answer:
        """One answer. Raises RowDropped for a prompt that leaves it no room."""
        if self._chat is not None:
            return await self._send(client, self._body(prompt, self._fitted(prompt, params)), worker)
        body = self._body(prompt, params)
        try:
            return await self._send(client, body, worker)
        except OverContextError:
            del body["max_tokens"]  # there is less room than that, and without it the answer gets what there is
        try:
            return await self._send(client, body, worker)
        except OverContextError as error:
            raise RowDropped("prompt_too_long", str(error)) from error

    def _fitted(self, prompt: Prompt, params: SamplingParams) -> SamplingParams:
        if self._options.context is None:
            return params
        room = self._options.context - len(prompt.token_ids)
        if room < 1:
            raise RowDropped("prompt_too_long", f"{len(prompt.token_ids)} tokens of {self._options.context}")
        return replace(params, max_tokens=min(room, params.max_tokens))

    async def _send(self, client: httpx.AsyncClient, body: Mapping[str, Any], worker: int) -> Answer:
        """A retry goes to the next endpoint."""
        options, fault, pause = self._options, "", 0.0
        for attempt in range(options.retries + 1):
            await asyncio.sleep(pause)
            base = options.urls[(worker + attempt) % len(options.urls)]
            url = f"{base}/chat/completions" if self._chat is None else f"{base}/completions"
            pause = min(options.first_pause_s * 2**attempt, LONGEST_PAUSE_S)
            try:
                response = await client.post(url, json=body)
            except httpx.TransportError as error:
                fault = f"{url}: {type(error).__name__} {error}"
                continue
            if response.status_code == 200:
                return _read_answer(url, response)
            fault = f"{url} answered {response.status_code}: {response.text[:200]}"
            if response.status_code in (400, 422) and OVER_CONTEXT.search(response.text):
                raise OverContextError(fault)
            if response.status_code != 429 and response.status_code < 500:
                raise EndpointError(fault)
            pause = max(pause, _retry_after(response))
        raise EndpointError(f"{fault} (after {options.retries + 1} attempts)")

    def _body(self, prompt: Prompt, params: SamplingParams) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self._options.model, "max_tokens": params.max_tokens, "seed": params.seed}
        body |= {"temperature": params.temperature, "top_p": params.top_p}
        body |= {"top_k": params.top_k} if params.top_k else {}  # not every endpoint knows it
        if self._chat is not None:
            return body | {"prompt": prompt.token_ids}
        return body | {"messages": prompt.messages} | ({"tools": prompt.tools} if prompt.tools else {})


def served_models(url: str, api_key: str | None) -> dict[str, int | None]:
    """The models that the endpoint lists, and how many tokens the context of each holds, if it says so.

    Raises ValueError when it cannot be asked.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = httpx.get(f"{url}/models", headers=headers, timeout=30.0)
        response.raise_for_status()
        models = {str(entry["id"]): entry.get("max_model_len") for entry in response.json()["data"]}
        if not models:
            raise ValueError("its list is empty")
        return models
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"endpoint {url} does not say which model it serves ({error}); check it or add --model"
        ) from error


def _read_answer(url: str, response: httpx.Response) -> Answer:
    try:
        body: Mapping[str, Any] = response.json()
        choice = body["choices"][0]
        message = choice["message"] if "message" in choice else {"content": choice["text"]}
        content, reason = message["content"], choice["finish_reason"]
    except (ValueError, LookupError, TypeError) as error:
        raise EndpointError(f"{url} answered what is no completion: {response.text[:200]}") from error
    if reason not in ("stop", "length") or not isinstance(content, str):
        raise EndpointError(f"{url} ended an answer with {reason!r} and content of type {type(content).__name__}")
    num_tokens = (body.get("usage") or {}).get("completion_tokens", 0)
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return Answer(text=content, finish_reason=reason, num_tokens=num_tokens, reasoning=reasoning)


def _retry_after(response: httpx.Response) -> float:
    """Seconds that the endpoint asks to wait; 0 where it does not say or names a date."""
    value = response.headers.get("Retry-After", "")
    return min(float(value), LONGEST_PAUSE_S) if value.isdigit() else 0.0
