"""The HTTP server: OpenAI's endpoints over one engine process."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from slipstream.serve.client import EngineClient, EngineError, EngineStopped
from slipstream.serve.completion import Completion, RequestFailed
from slipstream.serve.frontend import Frontend
from slipstream.serve.metrics import CONTENT_TYPE, Metrics
from slipstream.serve.options import ServeConfig
from slipstream.serve.protocol import ApiError, Body, ChatBody, CompletionBody
from slipstream.serve.responses import DONE, Shape, sse
from slipstream.serve.scheduler import QueueFull


class Api:
    """The endpoints."""

    def __init__(self, config: ServeConfig, frontend: Frontend, engine: EngineClient) -> None:
        self.frontend, self.engine, self.metrics = frontend, engine, Metrics()
        self.max_open = config.max_running + config.max_waiting
        self.is_draining = False  # open requests are answered, new ones are not
        self._health_timeout = config.health_timeout
        self._watchers: set[asyncio.Task[None]] = set()  # a loop alone would not keep its tasks alive

    async def chat(self, body: ChatBody, request: Request) -> Response:
        return await self._answer(body, request)

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        return await self._answer(body, request)

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._model()]}

    async def model(self, name: str) -> dict[str, Any]:
        self.frontend.check_model(name)
        return self._model()

    @property
    def engine_problem(self) -> str | None:
        """Why no request can be answered now."""
        if self.engine.failure is not None:
            return self.engine.failure
        if (seconds := self.engine.unresponsive_seconds) > self._health_timeout:
            return f"the engine has not answered for {seconds:.0f} s (health_timeout is {self._health_timeout:g} s)"
        return None

    async def health(self) -> Response:
        seconds = round(self.engine.unresponsive_seconds, 3)
        state = {"open_requests": self.engine.num_open, "engine_unresponsive_seconds": seconds}
        if self.is_draining:
            return JSONResponse({"status": "draining", "reason": "the server is shutting down", **state}, 503)
        if (problem := self.engine_problem) is not None:
            return JSONResponse({"status": "unhealthy", "reason": problem, **state}, 503)
        return JSONResponse({"status": "ok", **state})

    async def prometheus(self) -> Response:
        engine = self.engine
        text = self.metrics.render(engine.metrics, engine.num_open, is_healthy=self.engine_problem is None)
        return PlainTextResponse(text, media_type=CONTENT_TYPE)

    def error_response(self, error: ApiError, headers: dict[str, str] | None = None) -> Response:
        self.metrics.responses[error.status] += 1
        # ASCII: a message may quote text that has no UTF-8 form.
        headers = {**error.headers, **(headers or {})}
        return Response(json.dumps(error.body), error.status, headers, media_type="application/json")

    async def _answer(self, body: ChatBody | CompletionBody, request: Request) -> Response:
        self.frontend.check_model(body.model)
        self._check_room(body)  # before the work of tokenising
        shape = Shape.of(body, self.frontend.model_name)
        completion = Completion(self.engine, self.frontend.decoder, self.metrics, watched=body.stream)
        # A long prompt takes seconds, in which streams and /health must go on.
        requests = await asyncio.to_thread(self.frontend.requests, body, shape.id)
        self._check_room(body)  # others may have come meanwhile
        shape = shape._replace(seed=requests[0].seed)
        completion.submit(requests, body.stop)
        self._watch(request, completion)
        if body.stream:
            return StreamingResponse(self._events(body, shape, completion), media_type="text/event-stream")
        return JSONResponse(await self._whole(body, shape, completion))

    async def _whole(self, body: Body, shape: Shape, completion: Completion) -> dict[str, Any]:
        texts, reasons = [""] * len(completion.choices), [""] * len(completion.choices)
        try:
            async for delta in completion.deltas():
                texts[delta.index] += delta.text
                reasons[delta.index] = delta.finish_reason or ""
        except RequestFailed as error:
            raise api_error(error.cause) from error
        finally:
            completion.abort()
        return shape.whole(texts, reasons, completion.usage(body.n))

    async def _events(self, body: Body, shape: Shape, completion: Completion) -> AsyncIterator[str]:
        try:
            for opening in shape.opening(len(completion.choices)):
                yield sse(opening)
            async for delta in completion.deltas():
                yield sse(shape.piece(delta))
            if body.include_usage:
                yield sse(shape.closing(completion.usage(body.n)))
            yield DONE
        except RequestFailed as error:
            failed = api_error(error.cause)
            self.metrics.responses[failed.status] += 1
            yield sse(failed.body)
        finally:
            completion.abort()

    def _check_room(self, body: Body) -> None:
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", code="server_shutting_down")
        if (problem := self.engine_problem) is not None:
            raise ApiError(503, problem)
        if self.engine.is_congested:
            raise ApiError(503, "the engine does not take requests; try again later", code="server_overloaded")
        num_asked = body.num_prompts * body.n
        if num_asked > self.max_open:
            message = f"{num_asked} choices in one call; this server takes {self.max_open} (max_running + max_waiting)"
            raise ApiError(400, message, "n")
        if self.engine.num_open + num_asked > self.max_open:
            message = f"{self.engine.num_open} requests are open of at most {self.max_open}; try again later"
            raise ApiError(429, message, code="server_overloaded")

    def _watch(self, request: Request, completion: Completion) -> None:
        """Aborts what a client that hangs up has asked for, also while nothing is being written to it."""

        async def wait_for_end() -> None:
            while (await request.receive())["type"] != "http.disconnect":  # also comes after a complete response
                pass
            completion.abort()

        task = asyncio.create_task(wait_for_end())
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.frontend.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "slipstream",
            "max_model_len": self.frontend.max_model_len,
        }


def api_error(cause: Exception) -> ApiError:
    """What a client is told of a failed request: overload, a dead engine, or a request that can not be served."""
    if isinstance(cause, QueueFull):
        return ApiError(429, str(cause), code="server_overloaded")
    if isinstance(cause, EngineStopped):
        return ApiError(503, str(cause), code="server_shutting_down")
    if isinstance(cause, EngineError):
        return ApiError(500, str(cause), code="engine_failed")
    return ApiError(400, str(cause))


def validation_error(error: RequestValidationError) -> ApiError:
    """The first fault, named by its field."""
    fault = error.errors()[0]
    if fault["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {fault['ctx']['error']} at character {fault['loc'][-1]}")
    param = ".".join(str(part) for part in fault["loc"][1:])
    if not param:
        return ApiError(400, "the body must be a JSON object, with the header Content-Type: application/json")
    return ApiError(400, f"{param}: {fault['msg']}", param)


def create_app(api: Api) -> FastAPI:
    app = FastAPI(title="Slipstream")
    for method, path, endpoint in (
        ("POST", "/v1/chat/completions", api.chat),
        ("POST", "/v1/completions", api.completions),
        ("GET", "/v1/models", api.models),
        ("GET", "/v1/models/{name:path}", api.model),
        ("GET", "/health", api.health),
        ("GET", "/metrics", api.prometheus),
    ):
        app.add_api_route(path, endpoint, methods=[method], response_model=None)

    @app.exception_handler(ApiError)
    async def on_api_error(_: Request, error: ApiError) -> Response:
        return api.error_response(error)

    @app.exception_handler(EngineError)
    async def on_engine_error(_: Request, error: EngineError) -> Response:
        return api.error_response(ApiError(503, f"no engine: {error}"))

    @app.exception_handler(RequestValidationError)
    async def on_validation_error(_: Request, error: RequestValidationError) -> Response:
        return api.error_response(validation_error(error))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return api.error_response(ApiError(error.status_code, message), dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def on_fault(_: Request, error: Exception) -> Response:
        return api.error_response(ApiError(500, f"{type(error).__name__}: {error}"))

    return app
