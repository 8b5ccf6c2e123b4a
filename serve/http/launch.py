"""Starts and stops the two processes of a server: this one (HTTP, tokenizer) and the engine's."""

import asyncio
import logging
import math
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, closing
from types import FrameType

import uvicorn

from slipstream import runtime
from slipstream.serve.grammar.trials import Trials
from slipstream.serve.http.app import Api, create_app
from slipstream.serve.http.connections import (
    KEEP_ALIVE_SECONDS,
    ConnectionTracker,
    LoopErrors,
    RareWarnings,
    connection_limit,
    raise_file_limit,
)
from slipstream.serve.http.engine_client import STOP_SECONDS, EngineClient
from slipstream.serve.http.frontend import Frontend, TargetText
from slipstream.serve.http.guard import Guard, warning
from slipstream.serve.listener import address
from slipstream.serve.logs import say
from slipstream.serve.options import ServeConfig

GRACE_SECONDS = 3  # for open connections to receive their last error at shutdown
WARNING_LOGGERS = ("uvicorn.error", "asyncio")
FAILURE_SECONDS = 5.0  # /health reports the engine's failure for so long before the server exits

logger = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """Prints its address, exits when its engine ends, and stops the engine before it waits for open connections.

    SIGTERM gives open requests up to `drain_timeout` to finish; Ctrl-C and a second signal do not.
    """

    def __init__(self, api: Api, engine: EngineClient, config: ServeConfig, listener: socket.socket) -> None:
        self.connections = ConnectionTracker(connection_limit(api.max_open))
        options = uvicorn.Config(
            create_app(api),
            http=self.connections.protocol(),
            log_config=None,  # `serve` has configured it (serve/logs.py)
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        super().__init__(options)
        self.api = api
        self._engine = engine
        self.listener = listener
        self.url = address(listener)
        self.banner = banner(config, api.frontend, self.url, needs_key=not api.guard.is_open)
        self.warning = warning(config, api.guard)
        self._logs_json = config.log_format == "json"
        self.status = 0  # exit status of `serve`
        self._drain_timeout = config.drain_timeout
        self._rare_warnings = RareWarnings()
        self._tasks: list[asyncio.Task[None]] = []  # the event loop holds only weak references

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        await super().startup(sockets)
        for name in WARNING_LOGGERS:
            logging.getLogger(name).addFilter(self._rare_warnings)
        if self.warning is not None:
            logger.warning(self.warning)
        asyncio.get_running_loop().set_exception_handler(LoopErrors())
        self._tasks = [asyncio.create_task(self.connections.close_late()), asyncio.create_task(self._end_with_engine())]
        if self._logs_json:
            logger.info("serving", extra={"url": self.url, "model": self.api.frontend.model_name})
        else:
            say(self.banner)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        elif sig == signal.SIGTERM:
            self.api.is_draining = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        engine = self._engine
        seconds = self._drain_timeout if self.api.is_draining else 0.0
        self.api.is_draining = True  # after Ctrl-C, too
        deadline = time.monotonic() + seconds
        if seconds and engine.num_open:
            logger.warning("shutting down: waiting up to %g s for %d open requests", seconds, engine.num_open)
        while engine.num_open and time.monotonic() < deadline and not self.force_exit:
            await asyncio.sleep(0.05)
        await engine.stop(seconds=0.0 if self.force_exit else STOP_SECONDS)
        self.connections.close_waiting()
        left = math.ceil(deadline - time.monotonic())  # for clients that are still reading their answers
        self.config.timeout_graceful_shutdown = max(GRACE_SECONDS, left)
        await super().shutdown(sockets)
        if not self.force_exit:
            await asyncio.to_thread(self.api.close)  # before the signal, which uvicorn raises again, ends the process
        for name in WARNING_LOGGERS:
            logging.getLogger(name).removeFilter(self._rare_warnings)

    async def _end_with_engine(self) -> None:
        engine = self._engine
        await engine.ended.wait()
        if self.should_exit:
            return  # `shutdown` has stopped the engine
        self.status = 1
        message = "%s; %d open requests failed; exiting with status 1 in %g s"
        logger.error(message, engine.failure, engine.num_failed, FAILURE_SECONDS)
        await asyncio.sleep(FAILURE_SECONDS)
        self.should_exit = True


def check_files(config: ServeConfig) -> None:
    """Reads what this process reads of files. Raises ValueError, in a sentence, for what cannot be used."""
    Guard.of(config)
    TargetText.read(config)


@asynccontextmanager
async def prepare(config: ServeConfig, listener: socket.socket, engine: EngineClient) -> AsyncIterator[Server]:
    """A server whose engine is ready. Raises ValueError or EngineError, with one sentence, where that fails."""
    with closing(listener):
        guard = Guard.of(config)  # before anything is loaded: its keys may be wrong
        try:
            info, text = await asyncio.gather(engine.start(config), asyncio.to_thread(TargetText.read, config))
            async with aclosing(Trials.of(config)) as trials:
                api = Api(config, Frontend(config, info, text), engine, guard, trials)
                yield Server(api, engine, config, listener)
        finally:
            await engine.stop()


async def serve(config: ServeConfig, listener: socket.socket, engine: EngineClient) -> int:
    """Runs until a signal or the engine's end. Returns the exit status: 1 if the engine ended by itself."""
    raise_file_limit()
    async with prepare(config, listener, engine) as server:
        with runtime.frozen_heap():
            server.api.trials.start()
            await server.serve([server.listener])
    return server.status


def banner(config: ServeConfig, frontend: Frontend, url: str, *, needs_key: bool) -> str:
    path = "completions"
    body = '{"prompt": "Once upon a time", "max_tokens": 64}'
    if frontend.tokenizer.chat_template:
        path = "chat/completions"
        body = '{"messages": [{"role": "user", "content": "What is 12 * 7?"}]}'
    dated = frontend.template is not None and frontend.template.inserts_date
    date = f"the chat template is told that today is {config.date}; change it with --date\n" if dated else ""
    key = "-H 'Authorization: Bearer KEY' " if needs_key else ""
    return (
        f"model {frontend.model_name}, draft {config.draft}, at {url} (Ctrl-C ends it)\n{date}"
        f"curl {url}/v1/{path} {key}-H 'Content-Type: application/json' -d '{body}'"
        f"\nplayground: {url}/"
    )
