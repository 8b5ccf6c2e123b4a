"""A replica: one engine process, and the calls by which ingresses use it. Knows nothing of Ray.

Invariant: a request's replies end with an Output that has a finish reason, or with a Failure.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from slipstream.serve.engine.counts import EngineCounts
from slipstream.serve.http.engine_client import EngineClient, EngineError, problem_of
from slipstream.serve.options import EngineConfig
from slipstream.serve.request import EngineInfo, Output, Request


@dataclass(slots=True)
class Call:
    """A request on its way to a replica. The router notes in `replica` which of them gets it."""

    request: Request
    avoid: str = ""  # a replica that was lost with the request
    replica: str = ""


@dataclass(frozen=True, slots=True)
class Abort:
    """Ends a request early, at the replica that has it; its last Output still comes with its other replies."""

    request_id: str
    replica: str


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a request without an Output. `kind`: "refused", the request is to blame; "failed", it ended alone;
    "lost", the engine has ended, so that another replica may compute the request."""

    kind: str
    reason: str


Reply = list[Output] | Failure


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """The state of a replica, for ingresses."""

    name: str
    draft: str
    info: EngineInfo
    num_open: int
    problem: str | None  # why it answers nothing; None: it answers
    metrics: Mapping[str, float] = field(default_factory=dict)
    counts: EngineCounts = field(default_factory=EngineCounts)
    pid: int = 0
    engine_pid: int | None = None


class ReplyQueue:
    """Receives the outputs of one request until they are taken."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._outputs: list[Output] = []
        self._failure: Failure | None = None
        self._has_news = asyncio.Event()

    def receive(self, output: Output) -> None:
        self._outputs.append(output)
        self._has_news.set()

    def fail(self, error: Exception) -> None:
        kind = "refused" if isinstance(error, ValueError) else "failed"
        self._failure = Failure("lost" if self._engine.failure is not None else kind, str(error))
        self._has_news.set()

    async def take(self) -> Reply:
        """Waits for outputs and returns all that have come, so that a slow ingress gets fewer and larger replies."""
        await self._has_news.wait()
        self._has_news.clear()
        if self._outputs:
            outputs = self._outputs
            self._outputs = []
            if self._failure is not None:
                self._has_news.set()
            return outputs
        assert self._failure is not None
        return self._failure


class Replica:
    """One engine and its open requests. All methods belong to the event loop that ran `start`."""

    def __init__(self, name: str, engine: EngineClient, *, draft: str, health_timeout: float) -> None:
        self.name = name
        self.engine = engine
        self._draft = draft
        self._health_timeout = health_timeout
        self._info: EngineInfo | None = None
        self._counted = 0, 0.0  # steps, and their seconds, that `scaling_stats` has seen

    async def start(self, config: EngineConfig) -> None:
        """Raises EngineError, with one sentence, if the engine cannot be built."""
        self._info = await self.engine.start(config)

    async def generate(self, call: Call) -> AsyncIterator[Reply]:
        """Yields the replies to a request. If nobody takes them any more, the request is aborted."""
        replies = ReplyQueue(self.engine)
        is_open = True
        try:
            try:
                self.engine.submit(call.request, replies)
            except EngineError as error:
                is_open = False
                yield Failure("lost", str(error))
            while is_open:
                reply = await replies.take()
                is_open = not isinstance(reply, Failure) and all(output.finish_reason is None for output in reply)
                yield reply
        finally:
            if is_open:
                self.engine.abort(call.request.id)

    def abort(self, message: Abort) -> None:
        self.engine.abort(message.request_id)

    @property
    def problem(self) -> str | None:
        """Why the engine answers nothing: it has ended, or its heartbeat has stopped."""
        return problem_of(self.engine, self._health_timeout)

    def check_health(self) -> None:
        """Raises EngineError if the replica must be replaced."""
        if self.problem is not None:
            raise EngineError(self.problem)

    def state(self) -> ReplicaState:
        assert self._info is not None
        return ReplicaState(
            self.name,
            self._draft,
            self._info,
            self.engine.num_open,
            self.problem,
            self.engine.metrics,
            self.engine.counts,
            os.getpid(),
            self.engine.pid,
        )

    def scaling_stats(self) -> dict[str, float]:
        """Returns `step_ms`, the mean time of the steps since the last call, and `open`, its open requests."""
        now = self.engine.counts.steps, self.engine.counts.seconds.total
        num_steps, seconds = (after - before for after, before in zip(now, self._counted, strict=True))
        self._counted = now
        return {"step_ms": 1000 * seconds / num_steps if num_steps else 0.0, "open": float(self.engine.num_open)}

    async def stop(self) -> None:
        await self.engine.stop()
