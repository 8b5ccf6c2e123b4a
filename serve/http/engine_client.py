"""The server's side of the pipe to the engine's process: starts it, dispatches its messages, notices its end.

Invariants: every submitted request ends exactly once, with an Output that has a finish reason or a call of `fail`; and
nothing here blocks the event loop, whatever the engine's process does.
"""

import asyncio
import logging
import multiprocessing
import pickle
import socket
import time
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from slipstream import runtime
from slipstream.serve import processes
from slipstream.serve.engine.counts import DraftState, EngineCounts
from slipstream.serve.engine.process import (
    Abort,
    EngineFactory,
    Failed,
    Ping,
    Rejected,
    Step,
    SwapDraft,
    Swapped,
    build_engine,
    run_engine,
)
from slipstream.serve.options import EngineConfig
from slipstream.serve.pipe import HEADER
from slipstream.serve.request import EngineInfo, Output, Request

STOP_SECONDS = 10.0  # for the current step to end before the process is killed
EXIT_SECONDS = 2.0  # to wait for the exit status after the process closed the pipe; delays errors of open requests
PING_SECONDS = 1.0
MESSAGES_AT_ONCE = 16  # handled before the event loop serves connections again
MAX_UNSENT = 4 << 20  # bytes; close to 0 as long as the engine's process reads

logger = logging.getLogger(__name__)


class EngineError(Exception):
    """The engine cannot answer: it failed to start, failed in a step or for one request, or was killed."""


class Busy(Exception):
    """The engine does something of which it does one at a time."""


class EngineStopped(EngineError):
    """The server has ended the engine."""


class Receiver(Protocol):
    """Gets one request's outputs. Both methods are called on the event loop."""

    def receive(self, output: Output) -> None: ...

    def fail(self, error: Exception) -> None:
        """Ends the request: ValueError if the engine refused it, EngineError if the engine ended."""


class Engine(Protocol):
    """An engine as the HTTP endpoints see it: a process, or the replicas of a deployment (serve/fleet/client.py)."""

    metrics: dict[str, float]
    counts: EngineCounts

    @property
    def failure(self) -> str | None: ...
    @property
    def num_open(self) -> int: ...
    @property
    def unresponsive_seconds(self) -> float: ...
    @property
    def is_congested(self) -> bool: ...
    def submit(self, request: Request, receiver: Receiver) -> None: ...
    def abort(self, request_id: str, *, is_whole: bool = False) -> None: ...
    async def swap_draft(self, name: str, trial_rounds: int) -> DraftState: ...


def problem_of(engine: Engine, timeout: float) -> str | None:
    """Says why an engine answers nothing: it has ended, or has been silent for `timeout` seconds; None: it answers."""
    if engine.failure is None and (seconds := engine.unresponsive_seconds) > timeout:
        return f"the engine has not answered for {seconds:.0f} s"
    return engine.failure


class EngineClient:
    """One engine process. All methods belong to the event loop that ran `start`."""

    def __init__(self, make_engine: EngineFactory = build_engine) -> None:
        self.failure: str | None = None  # why there is no engine any more
        self.ended = asyncio.Event()  # set with `failure`
        self.num_failed = 0  # requests that were open when the engine ended
        self.metrics: dict[str, float] = {}  # the engine's latest gauges
        self.counts = EngineCounts()  # the engine's latest; they outlive it
        self._make_engine = make_engine
        self._receivers: dict[str, Receiver] = {}
        self._swaps: dict[int, asyncio.Future[DraftState]] = {}  # by number
        self._num_swaps = 0
        self._outbox: list[Request | Abort | Ping | SwapDraft | None] = []
        self._asked_at: float | None = None  # when the oldest unanswered message was sent
        self._process: BaseProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._info: asyncio.Future[EngineInfo]  # done once the engine is ready or has failed
        self._is_ready = False
        self._tasks: list[asyncio.Task[None]] = []  # the event loop holds only weak references

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def num_open(self) -> int:
        return len(self._receivers)

    @property
    def unresponsive_seconds(self) -> float:
        """How long the oldest message has been unanswered: the age of the step, to within PING_SECONDS; 0 when idle."""
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    @property
    def is_congested(self) -> bool:
        """Whether more than MAX_UNSENT bytes wait because the engine's process does not read."""
        return self._writer is not None and self._writer.transport.get_write_buffer_size() > MAX_UNSENT

    def spawn(self) -> None:
        """Starts the process, which imports its modules while the caller reads its options. Needs no event loop."""
        self._end_of_pipe, engine_end = socket.socketpair()
        arguments = (self._make_engine, engine_end)
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=run_engine, args=arguments, name="slipstream-engine", daemon=True)
        resource_tracker.ensure_running()  # or process.start() would start it, and that unblocks the signals
        with (
            engine_end,
            runtime.blocked_signals(),
        ):  # the end closes here, so that it closes with the engine's process
            process.start()
            self._process = process  # before a Ctrl-C that waits is raised

    def kill(self) -> None:
        """Ends a process that was spawned and not stopped, without an event loop."""
        if self._process is not None:
            self._process.kill()

    async def start(self, config: EngineConfig) -> EngineInfo:
        """Has the process, spawned by now or not, build its engine. Raises EngineError with one sentence."""
        if self._process is None:
            self.spawn()
        self._info = asyncio.get_running_loop().create_future()
        reader, self._writer = await asyncio.open_unix_connection(sock=self._end_of_pipe)
        self._write(self._writer, config)
        self._tasks.append(asyncio.create_task(self._listen(reader)))
        info = await self._info
        self._tasks.append(asyncio.create_task(self._ping()))
        return info

    def submit(self, request: Request, receiver: Receiver) -> None:
        """Raises EngineError if the engine has ended. Check `is_congested` first: this sends in any case."""
        if self.failure is not None:
            raise EngineError(self.failure)
        self._receivers[request.id] = receiver
        self._send(request)

    async def swap_draft(self, name: str, trial_rounds: int) -> DraftState:
        """Has the engine draft with other weights (LLM.swap_draft). Raises ValueError if it refuses them, Busy while it
        reads others, and EngineError if it has ended."""
        if self.failure is not None:
            raise EngineError(self.failure)
        if self._swaps:
            raise Busy("the weights of another draft are being read; try again later")
        self._num_swaps += 1
        swap = asyncio.get_running_loop().create_future()
        self._swaps[self._num_swaps] = swap
        self._send(SwapDraft(self._num_swaps, name, trial_rounds))
        return await swap

    def abort(self, request_id: str, *, is_whole: bool = False) -> None:
        """Asks the engine to end a request; its last Output still comes."""
        if request_id in self._receivers:
            self._send(Abort(request_id, is_whole))

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Ends open requests, then the process, killing it after `seconds`. Safe to call again."""
        if self._process is None:
            return
        if self.failure is None:
            if self._is_ready:
                self._send(None)
            else:
                self._process.kill()  # still loading: there is nothing to close
            self._end(EngineStopped("the server is shutting down"))
        await self._reap(seconds)

    def _send(self, message: Request | Abort | Ping | SwapDraft | None) -> None:
        """Pickles the messages of one event loop iteration together, so that n choices of a prompt send it once."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(message)
        if self._asked_at is None:
            self._asked_at = time.monotonic()

    def _flush(self) -> None:
        messages = self._outbox
        self._outbox = []
        if messages and self._writer is not None and not self._writer.is_closing():
            self._write(self._writer, messages)

    def _write(self, writer: asyncio.StreamWriter, message: object) -> None:
        payload = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        writer.write(HEADER.pack(len(payload)) + payload)

    async def _ping(self) -> None:
        """Keeps sending messages to an idle engine, to see that it answers."""
        while self.failure is None:
            if self._asked_at is None:
                self._send(Ping())
            await asyncio.sleep(PING_SECONDS)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Handles messages until the engine's process closes the pipe, then reports how it ended."""
        try:
            while True:
                for _ in range(MESSAGES_AT_ONCE):
                    (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
                    self._handle(pickle.loads(await reader.readexactly(size)))
                await asyncio.sleep(0)
        except (EOFError, OSError):
            await self._wait_for_exit(EXIT_SECONDS)
        except Exception:
            self._end(EngineError("the server failed to handle a message of the engine"))
            raise
        if self.failure is None:
            self._end(EngineError(how_it_ended(self._process)))
        await self._reap(STOP_SECONDS)

    def _handle(self, message: Any) -> None:
        self._asked_at = None
        if self.failure is not None:
            return
        if isinstance(message, Step):
            if message.metrics is not None:
                self.metrics = message.metrics
            if message.counts is not None:
                self.counts = message.counts
            # Ends first: their clients' next requests may then come in time for the next step.
            for output in sorted(message.outputs, key=lambda output: output.finish_reason is None):
                self._deliver(output)
        elif isinstance(message, Swapped):
            swap = self._swaps.pop(message.number)
            if swap.cancelled():
                return
            if message.draft is None:
                swap.set_exception(ValueError(message.error))
            else:
                swap.set_result(message.draft)
        elif isinstance(message, Rejected):
            self._fail(self._receivers.pop(message.request_id), message.error)
        elif isinstance(message, Failed):
            self._end(EngineError(message.reason))  # closes the pipe, which ends the process
        elif not self._info.done():  # done if `start` was cancelled
            self._is_ready = True
            self._info.set_result(message)

    def _deliver(self, output: Output) -> None:
        """If a receiver raises, only its own request ends."""
        receiver = self._receivers.get(output.request_id)
        if receiver is None:
            return  # its receiver raised, and the engine has not seen the abort yet
        if output.finish_reason is not None:
            del self._receivers[output.request_id]
        if output.finish_reason == "error":
            self._fail(receiver, ValueError(output.error) if output.is_refusal else EngineError(output.error))
            return
        try:
            receiver.receive(output)
        except (KeyboardInterrupt, SystemExit, asyncio.CancelledError):
            raise
        except BaseException:  # a panic of the tokenizer, which is written in Rust, is no Exception
            logger.exception("request %s failed in the server", output.request_id)
            self.abort(output.request_id)
            self._receivers.pop(output.request_id, None)
            self._fail(receiver, EngineError(f"the server failed to handle the answer to {output.request_id}"))

    def _fail(self, receiver: Receiver, error: Exception) -> None:
        try:
            receiver.fail(error)
        except Exception:
            logger.exception("a request could not be ended (%s)", error)

    def _end(self, error: EngineError) -> None:
        """Marks the engine as ended and fails every open request."""
        self._flush()  # sends the message that ends the engine
        self.failure = str(error)
        self.metrics = {}
        if self._writer is not None:
            self._writer.close()
        if not self._info.done():
            self._info.set_exception(error)
        for swap in self._swaps.values():
            if not swap.done():
                swap.set_exception(error)
        receivers = self._receivers
        self._receivers = {}
        self.num_failed = len(receivers)
        for receiver in receivers.values():
            self._fail(receiver, error)
        self.ended.set()

    async def _wait_for_exit(self, seconds: float) -> None:
        assert self._process is not None
        deadline = time.monotonic() + seconds
        while self._process.is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    async def _reap(self, seconds: float) -> None:
        """Waits for the process to end, and kills it when it takes longer or when nobody waits any more."""
        assert self._process is not None
        try:
            await self._wait_for_exit(seconds)
        finally:
            if seconds and self._process.is_alive():
                message = (
                    "the engine's process did not end within %g s and is killed; what its drafter was saving is lost"
                )
                logger.warning(message, seconds)
            self._process.kill()
        await self._wait_for_exit(STOP_SECONDS)


def how_it_ended(process: BaseProcess | None) -> str:
    code = None if process is None else process.exitcode
    end = "closed its pipe" if code is None else processes.how_it_ended(code)
    return f"the engine's process {end}"
