"""The HTTP server: OpenAI's endpoints for one engine process."""

import asyncio
import json
import logging
import os
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from slipstream.models.chat.quotes import shorten
from slipstream.models.files.checkpoint import tokenizer_hash
from slipstream.serve.chat.tools import ToolError
from slipstream.serve.grammar.trial import Unavailable
from slipstream.serve.grammar.trials import Busy, Trials
from slipstream.serve.http import playground
from slipstream.serve.http.answer_log import AnswerLog
from slipstream.serve.http.completions import Completion, Delta, RequestFailed
from slipstream.serve.http.connections import UnreadBodies
from slipstream.serve.http.engine_client import Busy as EngineBusy
from slipstream.serve.http.engine_client import Engine, EngineError, EngineStopped, problem_of
from slipstream.serve.http.frontend import CallBody, Frontend
from slipstream.serve.http.guard import Guard
from slipstream.serve.http.limits import (
    MAX_LONG_WAITING,
    SHORT_BODY_BYTES,
    ApiError,
    BodyReader,
    BoundedPool,
    parse_json,
)
from slipstream.serve.http.metrics import EngineView, Metrics
from slipstream.serve.http.request_log import HEADER, RequestLog, note
from slipstream.serve.http.responses import ResponseWriter
from slipstream.serve.http.responses_body import InputTokensBody, ResponsesBody
from slipstream.serve.http.schemas import (
    AnyBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    DraftBody,
    TokenizeBody,
    read_body,
)
from slipstream.serve.http.writers import ChatWriter, CompletionWriter, sse
from slipstream.serve.logs import REQUEST_ID
from slipstream.serve.options import ServeConfig
from slipstream.serve.request import Request as RequestOfEngine

CLIENT_LEFT = 499  # nginx's status for "client closed request"
LONG_SCORED = 256  # tokens above which a thread writes log-probabilities and traces, not the event loop

Fields = dict[str, Any]  # of a body
Endpoint = Callable[[Request], Awaitable[Response]]
Kind = type[ChatBody] | type[CompletionBody] | type[ResponsesBody]
Writer = ChatWriter | CompletionWriter | ResponseWriter
Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class Api:
    """The endpoints."""

    def __init__(self, config: ServeConfig, frontend: Frontend, engine: Engine, guard: Guard, trials: Trials) -> None:
        self.frontend = frontend
        self.engine = engine
        self.metrics = Metrics()
        self.max_open = config.max_running + config.max_waiting
        self._num_open = Counter[str]()  # of each client
        self.is_draining = False  # True: open requests finish, new ones are refused
        self.guard = guard
        self.cors_origins = config.cors_origins
        self.started = int(time.time())
        self.trials = trials
        self.answer_log: AnswerLog | None = None
        if config.answer_log is not None:
            self.answer_log = AnswerLog(Path(config.answer_log), tokenizer_hash(frontend.tokenizer))
        self._health_timeout = config.health_timeout
        self._ignore_unknown = config.ignore_unknown_fields
        self.bodies = BodyReader(frontend.limits.body_bytes)
        num_cores = os.cpu_count() or 1
        self.short_pool = BoundedPool(min(max(num_cores // 2, 1), 8), self.max_open)
        self.long_pool = BoundedPool(min(max(num_cores // 4, 1), 4), MAX_LONG_WAITING)
        self.tools_pool = BoundedPool(min(max(num_cores // 4, 1), 4), self.max_open)
        self._watchers: set[asyncio.Task[None]] = set()  # the event loop holds only weak references to tasks

    def close(self) -> None:
        if self.answer_log is not None:
            self.answer_log.close()

    async def answer(self, kind: Kind, request: Request) -> Response:
        client = request.state.client
        self._check_room(client, 1)  # before the body is read
        call, disconnect = await self._take(partial(self._read_call, kind), request)
        requests = await self._with_grammar(call, disconnect)
        num_choices = len(call.requests)
        self._check_room(client, num_choices)
        note(answer=call.requests[0].id.rpartition("-")[0], stream=call.stream)
        completion = Completion(self.engine, self.metrics, watched=call.stream, answer_log=self.answer_log)
        tenant = client or (request.client.host if request.client else "")
        requests = [replace(choice, client=client, tenant=tenant) for choice in requests]
        completion.submit(requests, call.stop, call.answers, call.echoes)
        self._num_open[client] += num_choices

        def end(_: asyncio.Task[None]) -> None:
            self._num_open[client] -= num_choices
            completion.abort()

        disconnect.add_done_callback(end)
        if call.stream:
            return StreamingResponse(self._events(call, completion), media_type="text/event-stream")
        return await self._whole(call, completion)

    async def tokenizer_info(self, _: Request) -> Response:
        return JSONResponse(self.frontend.tokenizer_info())

    async def convert(
        self, kind: type[AnyBody], use: Callable[[AnyBody], dict[str, Any]], request: Request
    ) -> Response:
        """Answers with what `use` makes of the body."""
        answer, disconnect = await self._take(partial(self._read, kind, use), request)
        disconnect.cancel()
        return JSONResponse(answer)

    async def change_draft(self, request: Request) -> Response:
        def read(fields: Fields) -> tuple[str, DraftBody]:
            return self._read(DraftBody, lambda body: (self.frontend.draft_path(body), body), fields)

        (path, body), disconnect = await self._take(read, request)
        disconnect.cancel()
        try:
            draft = await self.engine.swap_draft(path, body.trial_rounds)
        except ValueError as error:
            raise ApiError(400, str(error), "draft") from error
        except EngineBusy as error:
            raise ApiError(409, str(error), code="draft_busy") from error
        fields = {"draft": body.draft, "weight_version": draft.version, "trial": draft.trial or None}
        return JSONResponse({"object": "draft", **fields})

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self.frontend.check_model(request.path_params["name"])
        return JSONResponse(self._model())

    @property
    def engine_problem(self) -> str | None:
        """Why no request can be answered now, or None."""
        return problem_of(self.engine, self._health_timeout)

    async def health(self, _: Request) -> Response:
        seconds = round(self.engine.unresponsive_seconds, 3)
        state = {"open_requests": self.engine.num_open, "engine_unresponsive_seconds": seconds}
        if self.is_draining:
            return JSONResponse({"status": "draining", "reason": "the server is shutting down", **state}, 503)
        if (problem := self.engine_problem) is not None:
            return JSONResponse({"status": "unhealthy", "reason": problem, **state}, 503)
        return JSONResponse({"status": "ok", **state})

    @property
    def not_ready(self) -> str | None:
        """Why a load balancer should send requests elsewhere, or None."""
        if self.is_draining:
            return "the server is shutting down"
        if self.engine.is_congested:
            return "the engine is not taking requests"
        return self.engine_problem

    async def ready(self, _: Request) -> Response:
        if (reason := self.not_ready) is not None:
            return JSONResponse({"status": "not ready", "reason": reason}, 503)
        return JSONResponse({"status": "ready"})

    async def prometheus(self, request: Request) -> Response:
        engine = self.engine
        view = EngineView(
            engine.metrics,
            engine.counts,
            num_open=engine.num_open,
            is_up=self.engine_problem is None,
            is_ready=self.not_ready is None,
        )
        text, content_type = self.metrics.render(view, request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": content_type})

    def error_response(self, error: ApiError, headers: dict[str, str] | None = None) -> Response:
        self.metrics.count_error(error.status)
        note(error=str(error))
        # json.dumps escapes: a message may quote text that has no UTF-8 form.
        headers = {**error.headers, **(headers or {})}
        return Response(json.dumps(error.body), error.status, headers, media_type="application/json")

    async def _take(self, read: Callable[[Fields], Result], request: Request) -> tuple[Result, asyncio.Task[None]]:
        """Reads the body and returns the result and a task that ends when the client leaves. Raises ClientDisconnect.

        Parsing and tokenising can take seconds, so a thread does them while the event loop serves others.
        """
        async with self.bodies.read(request) as raw:
            disconnect = self._watch(request)
            return await self._while_connected(disconnect, self._read_in_pool(read, raw)), disconnect

    async def _read_in_pool(self, read: Callable[[Fields], Result], raw: bytes) -> Result:
        """Reads the body on a thread. Bodies with tools have separate threads, as long bodies do, since their schemas
        may cost far more than their size suggests."""

        def parsed() -> Fields:
            return parse_json(raw, self.frontend.limits.values)

        def read_cheap() -> tuple[Fields, Result | None]:
            fields = parsed()
            return fields, None if fields.get("tools") else read(fields)

        if len(raw) > SHORT_BODY_BYTES:
            return await self.long_pool.run(lambda: read(parsed()))
        fields, result = await self.short_pool.run(read_cheap)
        return await self.tools_pool.run(read, fields) if result is None else result

    async def _with_grammar(self, call: Writer, disconnect: asyncio.Task[None]) -> Sequence[RequestOfEngine]:
        """Returns the requests of a call with their grammar translated. Raises ApiError if it does not compile within
        the limits; ClientDisconnect."""
        if call.answers.grammar is None:
            return call.requests
        try:
            grammar = await self._while_connected(disconnect, self.trials.admit(call.answers.grammar))
        except ValueError as error:
            field = call.answers.grammar_field
            raise ApiError(400, f"{field}: {error}", field) from error
        except Busy as error:
            raise ApiError(429, str(error), code="server_overloaded") from error
        except Unavailable as error:
            raise ApiError(503, f"{error}; try again later", code="server_overloaded") from error
        return [replace(request, params=replace(request.params, grammar=grammar)) for request in call.requests]

    async def _while_connected(self, disconnect: asyncio.Task[None], work: Coroutine[Any, Any, Result]) -> Result:
        """Awaits `work` and cancels it when the client leaves. Raises ClientDisconnect; ApiError where uvicorn cancels
        the request as the server ends."""
        task = asyncio.create_task(work)
        disconnect.add_done_callback(lambda _: task.cancel())
        try:
            return await task
        except asyncio.CancelledError:
            if disconnect.done():
                raise ClientDisconnect from None
            raise shutting_down() from None

    def _read(self, kind: type[AnyBody], use: Callable[[AnyBody], Result], fields: Fields) -> Result:
        """Checks the body and uses it. Runs on a thread of a pool."""
        body = read_body(kind, fields, ignore_unknown=self._ignore_unknown)
        self.frontend.check_model(body.model)
        return use(body)

    def _read_call(self, kind: Kind, fields: Fields) -> Writer:
        def opened(body: CallBody) -> Writer:
            if isinstance(body, ResponsesBody):
                return ResponseWriter.of(body, self.frontend)
            return (ChatWriter if isinstance(body, ChatBody) else CompletionWriter).of(body, self.frontend)

        return self._read(kind, opened, fields)

    async def _whole(self, call: Writer, completion: Completion) -> Response:
        pieces: list[list[Delta]] = [[] for _ in completion.choices]
        try:
            async for delta in completion.deltas():
                pieces[delta.index].append(delta)
        finally:
            completion.abort()
        answers = [Delta.join(deltas) for deltas in pieces]

        def respond() -> Response:
            return PiecewiseResponse(call.whole(answers, completion))

        if sum(map(num_described, answers)) > LONG_SCORED or call.prompt_logprobs is not None:
            return await asyncio.to_thread(respond)
        return respond()

    async def _events(self, call: Writer, completion: Completion) -> AsyncIterator[str]:
        try:
            for event in call.opening():
                yield sse(event)
            async for delta in completion.deltas():
                if num_described(delta) > LONG_SCORED:
                    texts = await asyncio.to_thread(lambda delta: [*map(sse, call.pieces(delta))], delta)
                else:
                    texts = [*map(sse, call.pieces(delta))]
                for text in texts:
                    yield text
            for event in call.closing(completion):
                yield sse(event)
            if call.ending:
                yield call.ending
        except Exception as error:  # the status line is sent; report the error as an event
            failed = api_error(error)
            self.metrics.count_error(failed.status)
            note(error=str(failed))
            for event in call.failed(failed):
                yield sse(event)
        finally:
            completion.abort()

    def _check_room(self, client: str, num_choices: int) -> None:
        if self.is_draining:
            raise shutting_down()
        if (problem := self.engine_problem) is not None:
            raise ApiError(503, problem, code="engine_failed" if self.engine.failure else "engine_unresponsive")
        if self.engine.is_congested:
            raise ApiError(503, "the engine is not taking requests; try again later", code="server_overloaded")
        if self.engine.num_open + num_choices > self.max_open:
            message = f"{self.engine.num_open} of at most {self.max_open} requests are open; try again later"
            raise ApiError(429, message, code="server_overloaded")
        limit = self.max_open - self.max_open // 4
        if client and self._num_open[client] + num_choices > limit:
            message = f"{self._num_open[client]} of at most {limit} requests of your key are open; try again later"
            raise ApiError(429, message, code="server_overloaded")

    def _watch(self, request: Request) -> asyncio.Task[None]:
        """Starts a task that ends when the client hangs up or has the whole answer."""

        async def wait_for_end() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        task = asyncio.create_task(wait_for_end())
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)
        return task

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.frontend.model_name,
            "object": "model",
            "created": self.started,
            "owned_by": "slipstream",
            "max_model_len": self.frontend.max_model_len,
            "num_spec_tokens": self.frontend.num_spec_tokens,
            "exact": not self.frontend.inexact,
            "inexact_reason": self.frontend.inexact or None,
            "system_fingerprint": self.frontend.fingerprint,
            "draft_fingerprint": self.engine.counts.draft.fingerprint or self.frontend.draft_fingerprint,
        }


class PiecewiseResponse(JSONResponse):
    """JSON that is encoded piece by piece: all streams wait while the library encodes one, since it holds Python's
    lock."""

    def render(self, content: Any) -> bytes:
        return b"".join(self._pieces(content, 3))  # a piece is a token's log-probabilities

    def _pieces(self, value: Any, depth: int) -> Iterator[bytes]:
        """Yields the JSON of a value, the entries of lists and `depth` levels of objects for themselves."""
        if not value or not isinstance(value, dict | list if depth else list):
            yield super().render(value)
        elif isinstance(value, dict):
            for index, (name, part) in enumerate(value.items()):
                yield (b"," if index else b"{") + super().render(name) + b":"
                yield from self._pieces(part, depth - 1)
            yield b"}"
        else:
            for index, part in enumerate(value):
                yield b"," if index else b"["
                yield from self._pieces(part, depth)
            yield b"]"


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", code="server_shutting_down")


def num_described(delta: Delta) -> int:
    return len(delta.scored) + len(delta.traced)


def api_error(error: Exception) -> ApiError:
    """Returns the answer to an error: the text of errors meant for clients, and for others the id of a log entry."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ToolError):
        return ApiError(400, str(error), error.field)
    if isinstance(error, EngineError):
        return ApiError(503, f"no engine: {error}", code="engine_failed")
    cause = error.cause if isinstance(error, RequestFailed) else None
    if isinstance(cause, EngineStopped):
        return shutting_down()
    if isinstance(cause, EngineError):
        return ApiError(500, str(cause), code="engine_failed")
    if isinstance(cause, ValueError):
        return ApiError(400, str(cause))
    name = REQUEST_ID.get() or uuid.uuid4().hex
    logger.error("request failed, id %s", name, exc_info=error)
    return ApiError(500, f"internal error; see the server's log under the id {name}", code="internal_error")


def create_app(api: Api) -> Starlette:
    def guarded(endpoint: Endpoint) -> Endpoint:
        """Unlike Starlette's handler of Exception it does not re-raise, which would break the connection."""

        async def answer(request: Request) -> Response:
            try:
                request.state.client = ""
                if not api.guard.is_open:
                    header = request.headers.get("authorization")
                    request.state.client = api.guard.check(request.scope["path"], header)
                return await endpoint(request)
            except ClientDisconnect:
                return Response(status_code=CLIENT_LEFT)
            except Exception as error:
                return api.error_response(api_error(error))

        return answer

    routes = [
        Route("/v1/chat/completions", guarded(partial(api.answer, ChatBody)), methods=["POST"]),
        Route("/v1/completions", guarded(partial(api.answer, CompletionBody)), methods=["POST"]),
        Route("/v1/responses", guarded(partial(api.answer, ResponsesBody)), methods=["POST"]),
        Route(
            "/v1/responses/input_tokens",
            guarded(partial(api.convert, InputTokensBody, api.frontend.count_input)),
            methods=["POST"],
        ),
        *([Route("/v1/drafts", guarded(api.change_draft), methods=["POST"])] if api.frontend.draft_folder else ()),
        Route("/tokenize", guarded(partial(api.convert, TokenizeBody, api.frontend.tokenize)), methods=["POST"]),
        Route("/detokenize", guarded(partial(api.convert, DetokenizeBody, api.frontend.detokenize)), methods=["POST"]),
        Route("/tokenizer_info", guarded(api.tokenizer_info)),
        Route("/v1/models", guarded(api.models)),
        Route("/v1/models/{name:path}", guarded(api.model)),
        Route("/health", guarded(api.health)),
        Route("/ready", guarded(api.ready)),
        Route("/metrics", guarded(api.prometheus)),
    ]
    paths = ", ".join(route.path for route in routes if "{" not in route.path)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        try:
            api.guard.check(request.scope["path"], request.headers.get("authorization"))
        except ApiError as refused:
            return api.error_response(refused)
        request_line = shorten(f"{request.method} {request.scope['path']}")
        message = f"{request_line}: {error.detail}"
        if error.status_code == 404:
            message = f"{request_line} is not supported; this server has {paths}"
        return api.error_response(ApiError(error.status_code, message), dict(error.headers or {}))

    middleware = [Middleware(UnreadBodies), Middleware(RequestLog)]
    if origins := api.cors_origins:
        every = ["*"]
        middleware.append(
            Middleware(
                CORSMiddleware, allow_origins=origins, allow_methods=every, allow_headers=every, expose_headers=[HEADER]
            )
        )
    return Starlette(
        routes=[*routes, *playground.routes()], middleware=middleware, exception_handlers={HTTPException: on_http_error}
    )
