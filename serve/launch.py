"""Starts and ends the two processes of a server: this one (HTTP, tokenizer) and the engine's."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn

from slipstream.serve.client import EngineClient
from slipstream.serve.frontend import Frontend
from slipstream.serve.options import ServeConfig
from slipstream.serve.server import Api, create_app
from slipstream.serve.worker import EngineFactory, build_engine

GRACE_SECONDS = 3  # for open connections to take their last error when the server ends


class Server(uvicorn.Server):
    """Says where it listens, and ends the engine before it waits for open connections."""

    def __init__(self, api: Api, config: ServeConfig, listener: socket.socket) -> None:
        options = uvicorn.Config(
            create_app(api),
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        super().__init__(options)
        self.api, self.listener, self.url = api, listener, address(listener)
        self.banner = banner(config, api.frontend, self.url)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self.banner, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.api.engine.stop()
        await super().shutdown(sockets)


@asynccontextmanager
async def prepare(config: ServeConfig, make_engine: EngineFactory = build_engine) -> AsyncIterator[Server]:
    """A server whose engine is ready. Raises ValueError or EngineError, with one sentence, where that fails."""
    listener = bind(config.host, config.port)
    engine = EngineClient(config, make_engine)
    try:
        frontend = Frontend(config, await engine.start())
        yield Server(Api(config, frontend, engine), config, listener)
    finally:
        engine.stop()
        listener.close()


async def serve(config: ServeConfig, make_engine: EngineFactory = build_engine) -> None:
    """Runs until a signal."""
    async with prepare(config, make_engine) as server:
        await server.serve([server.listener])


def bind(host: str, port: int) -> socket.socket:
    """Takes the port before anything is loaded; nobody can connect until the server listens."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
    except OSError as error:
        raise ValueError(f"can not listen on {host} port {port} ({error.strerror}); choose another --port") from error
    return listener


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def banner(config: ServeConfig, frontend: Frontend, url: str) -> str:
    path, body = "completions", '{"prompt": "Once upon a time", "max_tokens": 64}'
    if frontend.tokenizer.chat_template:
        path, body = "chat/completions", '{"messages": [{"role": "user", "content": "What is 12 * 7?"}]}'
    dated = frontend.template is not None and frontend.template.inserts_date
    date = f"the chat template is told that today is {config.date}; change it with --date\n" if dated else ""
    return (
        f"model {frontend.model_name}, draft {config.draft}, at {url} (Ctrl-C ends it)\n{date}"
        f"curl {url}/v1/{path} -H 'Content-Type: application/json' -d '{body}'"
    )
