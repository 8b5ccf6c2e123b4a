"""The server's side of the pipe to the engine's process: starts it, hands out what it sends, notices its end.

Invariant: every submitted request gets exactly one end, an Output with a finish reason or a call of `fail`.
"""

import asyncio
import multiprocessing
import signal
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from slipstream.serve.options import EngineConfig
from slipstream.serve.request import Output, Request
from slipstream.serve.worker import Abort, EngineFactory, Failed, Rejected, Step, build_engine, run_engine

STOP_SECONDS = 10.0  # a step that is under way may end before the process is killed
MESSAGES_AT_ONCE = 16  # of the engine, before open connections are served again


class EngineError(Exception):
    """The engine can not answer: it failed to start, failed in a step, or was killed."""


class Receiver(Protocol):
    """Where one request's outputs go; both are called on the event loop."""

    def receive(self, output: Output) -> None: ...

    def fail(self, error: Exception) -> None:
        """The request ends: ValueError and QueueFull for one that was refused, EngineError for an engine's end."""


class EngineClient:
    """One engine process. All methods belong to the event loop that ran `start`."""

    def __init__(self, config: EngineConfig, make_engine: EngineFactory = build_engine) -> None:
        self.failure: str | None = None  # why there is no engine any more
        self.metrics: dict[str, int] = {}  # the engine's latest gauges
        self._config, self._make_engine = config, make_engine
        self._receivers: dict[str, Receiver] = {}
        self._process: BaseProcess
        self._connection: Connection
        self._info: asyncio.Future[Any]  # done once the engine is ready or has failed
        self._is_ready = False

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def num_open(self) -> int:
        return len(self._receivers)

    async def start(self) -> Any:
        """Waits for the engine and returns its EngineInfo. Raises EngineError with one sentence."""
        loop = asyncio.get_running_loop()
        context = multiprocessing.get_context("spawn")
        self._connection, engine_end = context.Pipe()
        arguments = (self._make_engine, self._config, engine_end)
        self._process = context.Process(target=run_engine, args=arguments, name="slipstream-engine", daemon=True)
        # Ctrl-C reaches every process of the terminal; the engine inherits this mask and leaves the matter to us.
        resource_tracker.ensure_running()  # else its own start, within the process's, would unblock the signal
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        engine_end.close()  # so that the engine's end of the pipe closes with its process
        self._info = loop.create_future()
        loop.add_reader(self._connection.fileno(), self._read)
        return await self._info

    def submit(self, request: Request, receiver: Receiver) -> None:
        """Raises EngineError if there is no engine."""
        if self.failure is not None:
            raise EngineError(self.failure)
        self._receivers[request.id] = receiver
        self._send(request)

    def abort(self, request_id: str) -> None:
        """Asks for an early end; the request's last Output still comes."""
        if request_id in self._receivers:
            self._send(Abort(request_id))

    def stop(self, reason: str = "the server is shutting down") -> None:
        """Ends open requests and the process, and waits for it; safe to call again."""
        if self.failure is None:
            if self._is_ready:
                self._send(None)
            else:
                self._process.kill()  # amid loading: nothing is there to be ended in order
            self._end(reason)
        self._reap(STOP_SECONDS)

    def _send(self, message: Request | Abort | None) -> None:
        try:
            self._connection.send(message)
        except OSError:  # the engine's process died and `_read` has yet to see it
            self._died()

    def _read(self) -> None:
        """Takes what the pipe holds, so that this process can catch up with the engine in larger pieces."""
        for _ in range(MESSAGES_AT_ONCE):
            self._read_one()
            if self.failure is not None or not self._connection.poll():
                return

    def _read_one(self) -> None:
        try:
            message = self._connection.recv()
        except (EOFError, OSError):
            self._died()
            return
        if isinstance(message, Step):
            self._deliver(message)
        elif isinstance(message, Rejected):
            self._receivers.pop(message.request_id).fail(message.error)
        elif isinstance(message, Failed):
            self._end(message.reason)  # which hangs up, and that ends the process
            asyncio.get_running_loop().call_later(1.0, self._reap, STOP_SECONDS)
        else:
            self._is_ready = True
            self._info.set_result(message)

    def _deliver(self, step: Step) -> None:
        if step.metrics is not None:
            self.metrics = step.metrics
        for output in step.outputs:
            if output.finish_reason is None:
                self._receivers[output.request_id].receive(output)
            else:
                self._receivers.pop(output.request_id).receive(output)

    def _died(self) -> None:
        if self.failure is None:
            self._reap(1.0)
            code = self._process.exitcode
            how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with status {code}"
            self._end(f"the engine's process {how}")

    def _end(self, reason: str) -> None:
        """No engine from here on: every open request fails."""
        self.failure = reason
        self.metrics = {}
        asyncio.get_running_loop().remove_reader(self._connection.fileno())
        self._connection.close()
        if not self._info.done():
            self._info.set_exception(EngineError(reason))
        receivers, self._receivers = self._receivers, {}
        for receiver in receivers.values():
            receiver.fail(EngineError(reason))

    def _reap(self, seconds: float) -> None:
        self._process.join(seconds)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
