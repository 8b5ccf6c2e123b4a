"""The engine's process: builds the engine, then takes requests from a pipe and sends back what each step yields.

Messages in: Request, Abort, and None to end. Messages out: `engine.info` once it is ready, then Step and Rejected;
Failed before an end that nobody asked for. A step and its Outputs are one message, so that a round costs one write.
"""

import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from slipstream.serve.options import EngineConfig
from slipstream.serve.request import Output, Request
from slipstream.serve.scheduler import QueueFull

METRICS_SECONDS = 0.1  # gauges travel at most this often while the engine is busy


class EngineLike(Protocol):
    """What the process needs of an engine; serve/engine.py is the one."""

    info: Any  # EngineInfo

    @property
    def has_work(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> Output | None: ...
    def step(self) -> list[Output]: ...
    def metrics(self) -> dict[str, int]: ...
    def close(self) -> None: ...


EngineFactory = Callable[[EngineConfig], EngineLike]  # a function that can be imported, since it is named to a process
Inbox = SimpleQueue  # of Request | Abort | None


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class Step:
    outputs: list[Output]
    metrics: dict[str, int] | None  # the engine's gauges, where they are due


@dataclass(frozen=True, slots=True)
class Rejected:
    request_id: str
    error: ValueError | QueueFull


@dataclass(frozen=True, slots=True)
class Failed:
    reason: str


def build_engine(config: EngineConfig) -> EngineLike:
    from slipstream.serve.engine import Engine  # here: only the engine's process shall load it

    logging.basicConfig(format="%(message)s")
    logging.getLogger("slipstream").setLevel(logging.INFO)  # which backends were taken, which rounds captured
    return Engine(config)


def run_engine(make_engine: EngineFactory, config: EngineConfig, connection: Connection) -> None:
    """Target of the process. Ends with status 1 after a Failed message."""
    inbox: Inbox = SimpleQueue()
    threading.Thread(target=listen, args=(connection, inbox), daemon=True).start()
    try:
        engine = start_engine(make_engine, config, connection)
        serve_requests(engine, inbox, connection)
        engine.close()
    except ConnectionError:  # the server ends and has hung up; what this step yields nobody waits for
        raise SystemExit(1) from None
    except Exception as error:
        traceback.print_exc()  # before the message: the server hangs up when it has read it
        connection.send(Failed(f"{type(error).__name__}: {one_line(error)}"))
        raise SystemExit(1) from error


def start_engine(make_engine: EngineFactory, config: EngineConfig, connection: Connection) -> EngineLike:
    try:
        engine = make_engine(config)
    except (ValueError, OSError) as error:  # what a user can mend: the sentence says it all
        connection.send(Failed(one_line(error)))
        raise SystemExit(1) from error
    connection.send(engine.info)
    connection.send(Step([], engine.metrics()))
    return engine


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def listen(connection: Connection, inbox: Inbox) -> None:
    """Empties the pipe at all times: the other side never waits for a step to end before it can write."""
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            os._exit(1)  # the server is gone; leave at once, even amid a step or while weights load
        inbox.put(message)
        if message is None:
            return


def serve_requests(engine: EngineLike, inbox: Inbox, connection: Connection) -> None:
    """Steps while there is work, sleeps on the inbox while there is none; returns on None."""
    metrics_due = 0.0
    while True:
        outputs: list[Output] = []
        for message in take(inbox, wait=not engine.has_work):
            if message is None:
                return
            outputs += handle(message, engine, connection)
        if engine.has_work:
            outputs += engine.step()
        now = time.monotonic()
        is_due = now >= metrics_due or not engine.has_work
        if is_due:
            metrics_due = now + METRICS_SECONDS
        if outputs or is_due:
            connection.send(Step(outputs, engine.metrics() if is_due else None))


def take(inbox: Inbox, wait: bool) -> Iterator[Request | Abort | None]:
    """Everything in the inbox; with `wait` at least one message."""
    if wait:
        yield inbox.get()
    try:
        while True:
            yield inbox.get_nowait()
    except Empty:
        return


def handle(message: Request | Abort, engine: EngineLike, connection: Connection) -> list[Output]:
    if isinstance(message, Abort):
        output = engine.abort(message.request_id)
        return [] if output is None else [output]
    try:
        engine.add(message)
    except (ValueError, QueueFull) as error:
        connection.send(Rejected(message.id, error))
    return []
