"""The ingress's side of the replicas. To the HTTP endpoints it looks like one engine (`Engine` in engine_client.py).

Invariant: every submitted request ends exactly once. A request whose replica is lost is computed again by another one,
once; the tokens that its client already has must come again, or the request ends with an error. So an answer is always
the answer of one replica, from its first token to its last.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextvars import Context
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from xxhash import xxh3_64_intdigest

from slipstream.serve.engine.counts import DraftState, EngineCounts, Histogram
from slipstream.serve.fleet.replica import Abort, Call, Failure, ReplicaState, Reply
from slipstream.serve.http.engine_client import EngineError, Receiver
from slipstream.serve.http.metrics import ACCEPT_BOUNDS
from slipstream.serve.request import Output, Request

ATTEMPTS = 2
STALE_SECONDS = 10.0  # after which a replica that does not tell its state counts no more

logger = logging.getLogger(__name__)


class ReplicaLost(EngineError):
    """A replica has ended, or cannot be reached."""


class Fleet(Protocol):
    """The replicas of one draft, and the way to them."""

    def generate(self, call: Call) -> AsyncIterator[Reply]:
        """Chooses a replica, notes it in `call`, and yields its replies. Raises ReplicaLost."""

    async def abort(self, message: Abort) -> None:
        """Passes on that a request should end."""

    async def states(self) -> list[ReplicaState]:
        """Asks all replicas, and leaves out those that do not answer in time."""


@dataclass(slots=True)
class ReplicaCounts:
    """Requests that this ingress sent to one replica."""

    draft: str = ""  # not known yet
    finished: Counter[str] = field(default_factory=Counter)  # by finish reason
    lost: int = 0  # ended with it
    resumed: int = 0  # taken over from another one
    accept_length: Histogram = field(default_factory=lambda: Histogram(ACCEPT_BOUNDS))


class Ticket:
    """An open request: who waits for it, what it has received, and which replica computes it."""

    def __init__(self, request: Request, receiver: Receiver, fleet: Fleet) -> None:
        self.request = request
        self.receiver = receiver
        self.fleet = fleet
        self.call = Call(request)
        self.is_aborted = False
        self._tokens: list[int] = []  # that the receiver has
        self._place = 0  # of the next token of the present replica
        self.has_begun = False  # the receiver has had an output

    def restart(self) -> None:
        """Prepares the request for another replica."""
        self.call = Call(self.request, avoid=self.call.replica)
        self._place = 0

    @property
    def is_behind(self) -> bool:
        """Whether the present replica still repeats tokens that the receiver has."""
        return self._place < len(self._tokens)

    def unseen(self, output: Output) -> Output | None:
        """Returns the part of an output that the receiver has not had; None if there is none. Raises EngineError if
        the replica computed other tokens than the one before it."""
        end = self._place + len(output.tokens)
        repeated = self._tokens[self._place : end]
        count = len(repeated)
        is_last = output.finish_reason is not None
        is_cut = is_last and end < len(self._tokens) and output.finish_reason != "abort"
        if output.tokens[:count] != repeated or is_cut:
            raise EngineError(
                f"the replica {self.call.avoid} was lost after {len(self._tokens)} tokens of this answer, and "
                "another one answers otherwise; send the request again"
            )
        self._place = end
        self._tokens += output.tokens[count:]
        is_first = not self.has_begun
        self.has_begun = True
        if is_first or (count == 0 and output.prompt_logprobs is None):
            return output
        if count == len(output.tokens) > 0 and not is_last:
            return None
        return replace(
            output,
            tokens=output.tokens[count:],
            logprobs=None if output.logprobs is None else output.logprobs[count:],
            trace=None if output.trace is None else output.trace[count:],
            prompt_logprobs=None,
        )


class FleetClient:
    """All methods belong to one event loop."""

    def __init__(self, fleets: Sequence[Fleet], share: float = 0.0) -> None:
        """`fleets`: the replicas of one draft, or of two, of which the second get `share` of the calls."""
        self.fleets = fleets
        self.replicas: dict[str, ReplicaState] = {}
        self.counts_of = defaultdict[str, ReplicaCounts](ReplicaCounts)
        self.metrics: dict[str, float] = {}
        self.counts = EngineCounts()
        self._share = share
        self._tickets: dict[str, Ticket] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop holds only weak references
        self._heard_at: dict[str, float] = {}

    @property
    def failure(self) -> str | None:
        if any(state.problem is None for state in self.replicas.values()):
            return None
        return "no replica is ready"

    @property
    def num_open(self) -> int:
        return len(self._tickets)

    @property
    def unresponsive_seconds(self) -> float:
        """Each replica watches the heartbeat of its engine."""
        return 0.0

    @property
    def is_congested(self) -> bool:
        return False

    def submit(self, request: Request, receiver: Receiver) -> None:
        ticket = Ticket(request, receiver, self.fleets[self._variant(request)])
        self._tickets[request.id] = ticket
        self._start(self._carry(ticket))

    def abort(self, request_id: str, *, is_whole: bool = False) -> None:  # noqa: ARG002
        """Asks the replica to end a request; its last Output still comes."""
        ticket = self._tickets.get(request_id)
        if ticket is not None and not ticket.is_aborted:
            ticket.is_aborted = True
            self._forward_abort(ticket)

    async def swap_draft(self, name: str, trial_rounds: int) -> DraftState:  # noqa: ARG002
        """Raises ValueError: an update of the deployment changes drafts."""
        raise ValueError(f"draft {name} cannot be loaded here; run `slipstream deploy` with it, which updates replicas")

    async def refresh(self) -> None:
        """Asks all replicas for their states."""
        now = asyncio.get_running_loop().time()
        answers = await asyncio.gather(*(fleet.states() for fleet in self.fleets))
        for state in (state for states in answers for state in states):
            self.replicas[state.name] = state
            self.counts_of[state.name].draft = state.draft
            self._heard_at[state.name] = now
        for name in [name for name, heard_at in self._heard_at.items() if now - heard_at > STALE_SECONDS]:
            del self._heard_at[name]
            self.replicas.pop(name, None)

    def drop(self, replica: str) -> None:
        """Forgets the state of a replica that was lost."""
        self.replicas.pop(replica, None)
        self._heard_at.pop(replica, None)

    def _variant(self, request: Request) -> int:
        """Chooses the draft by the call's id, so that all choices of a call have the same one."""
        if len(self.fleets) == 1:
            return 0
        call_id = request.id.rpartition("-")[0]
        return int(xxh3_64_intdigest(call_id.encode()) < self._share * 2**64)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        # Without the context of the HTTP request: Ray would give all its calls one id, and end them with it.
        task = asyncio.create_task(work, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _forward_abort(self, ticket: Ticket) -> None:
        if ticket.call.replica:
            self._start(ticket.fleet.abort(Abort(ticket.request.id, ticket.call.replica)))

    async def _carry(self, ticket: Ticket) -> None:
        """Has a request computed, and ends its ticket whatever happens."""
        try:
            for attempt in range(ATTEMPTS):
                try:
                    await self._follow(ticket)
                    return
                except ReplicaLost as error:
                    self.counts_of[ticket.call.replica].lost += 1
                    self.drop(ticket.call.replica)
                    is_left = ticket.is_aborted and not ticket.has_begun  # nobody waits for it
                    if attempt == ATTEMPTS - 1 or is_left:
                        self._end(ticket, EngineError(f"{error}; the request was lost with it"))
                        return
                    logger.warning("%s; request %s goes to another replica", error, ticket.request.id)
                    ticket.restart()
        except (KeyboardInterrupt, SystemExit, asyncio.CancelledError):
            raise
        except (EngineError, ValueError) as error:
            self._end(ticket, error)
        except BaseException:  # a panic of the tokenizer, which is written in Rust, is no Exception
            logger.exception("request %s failed in the ingress", ticket.request.id)
            self._end(ticket, EngineError(f"the server failed to handle the answer to {ticket.request.id}"))

    async def _follow(self, ticket: Ticket) -> None:
        """Takes the replies of one replica until the request ends. Raises ReplicaLost; ValueError and EngineError for a
        request that failed alone."""
        is_open = True
        is_first = True
        async for reply in ticket.fleet.generate(ticket.call):
            if isinstance(reply, Failure):
                raise {"refused": ValueError, "failed": EngineError, "lost": ReplicaLost}[reply.kind](reply.reason)
            if is_first and ticket.call.avoid:
                self.counts_of[ticket.call.replica].resumed += 1
            if is_first and ticket.is_aborted and not ticket.is_behind:
                self._forward_abort(ticket)  # it was aborted before it had a replica
            is_first = False
            try:
                for output in reply:
                    is_open = is_open and self._deliver(ticket, output)
            except BaseException:  # of its receiver, or since it answers otherwise; the replica knows nothing of it
                self._forward_abort(ticket)
                raise
        if is_open:
            raise ReplicaLost(f"the replica {ticket.call.replica or 'of this request'} ended")

    def _deliver(self, ticket: Ticket, output: Output) -> bool:
        """Hands an output on. Returns whether the request is still open."""
        was_behind = ticket.is_behind
        unseen = ticket.unseen(output)
        is_last = output.finish_reason is not None
        if was_behind and not ticket.is_behind and ticket.is_aborted and not is_last:
            self._forward_abort(ticket)  # the text had ended before the first replica was lost
        if unseen is not None:
            ticket.receiver.receive(unseen)
        if is_last:
            counts = self.counts_of[ticket.call.replica]
            counts.finished[str(output.finish_reason)] += 1
            if output.stats is not None and output.stats.rounds:
                counts.accept_length.observe(output.stats.decoded_tokens / output.stats.rounds)
            del self._tickets[ticket.request.id]
        return not is_last

    def _end(self, ticket: Ticket, error: Exception) -> None:
        if self._tickets.pop(ticket.request.id, None) is not None:
            ticket.receiver.fail(error)


def first_state(states: Iterable[ReplicaState]) -> ReplicaState | None:
    return next((state for state in states if state.problem is None), None)
