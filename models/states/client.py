"""Asks engines for target states: any number of engines, each as many requests as it can take.

A request is a function of its tokens alone, so one that a lost engine has not answered goes to another, or to the same
one once it is back. Requests wait in one queue; the first engine with room takes the next.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.models.states.address import Address
from slipstream.models.states.shared import Views, memory_name
from slipstream.models.states.wire import NAMES, BrokenError, Connection, RefusedError, connect

IN_FLIGHT = 2  # requests of a connection: the engine computes one while the other's states travel
FIRST_PAUSE = 0.2  # seconds before an engine is called again; doubles each time
LONGEST_PAUSE = 5.0
MOST_TRIES = 5  # of a request

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StateFacts:
    """Facts about an engine and its target."""

    target_fingerprint: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: str  # of the states, as frames name it
    max_tokens: int  # of a request


@dataclass(slots=True)
class StateRequest:
    """Packed rows (B, S) and the states to take of them.

    tokens and positions: (B, S) int32 as in FrozenTarget.aux_states; rows (R,) and final_rows (M,): int64 indices into
    the flattened batch. `places`: tensors of the host that get `aux_states` (R, K, Ht) and `final` (M, Ht), and in fp8
    `aux_scales` (R, K) and `final_scales` (M,); those on the meta device say shapes alone. What came through shared
    memory replaces them. `pinned`: pins the host's memory.
    """

    layers: tuple[int, ...]
    tokens: Tensor
    positions: Tensor
    rows: Tensor
    final_rows: Tensor
    places: dict[str, Tensor]
    pinned: bool = False
    done: Future[None] = field(default_factory=Future)
    tries: int = 0  # that have failed

    @property
    def fields(self) -> dict[str, Any]:
        return {"layers": self.layers, "is_fp8": "aux_scales" in self.places}

    @property
    def tensors(self) -> dict[str, Tensor]:
        rows = {"rows": self.rows, "final_rows": self.final_rows}
        return {"tokens": self.tokens, "positions": self.positions, **rows}

    def allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The place of a tensor of the answer. Raises BrokenError if the answer is not what was asked for."""
        place = self.place(name, shape, dtype)
        if place.is_meta:
            place = self.places[name] = torch.empty(shape, dtype=dtype, pin_memory=self.pinned)
        return place

    def place(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        place = self.places.get(name)
        if place is None or (tuple(place.shape), place.dtype) != (shape, dtype):
            raise BrokenError(f"the engine sends {name} {shape} in {dtype}, which was not asked for")
        return place

    def replace(self, answer: Mapping[str, Tensor]) -> None:
        """Takes an answer's own tensors. Raises BrokenError for others than were asked for."""
        for name, tensor in answer.items():
            self.place(name, tuple(tensor.shape), tensor.dtype)
        self.places.update(answer)


def empty_places(
    num_rows: int, num_final: int, shape: tuple[int, int], dtype: torch.dtype, **options: Any
) -> dict[str, Tensor]:
    """Makes `StateRequest.places` for states of `shape` (K, Ht). `options`: of torch.empty."""
    layers, size = shape
    empty = partial(torch.empty, **options)
    places = {"aux_states": empty(num_rows, *shape, dtype=dtype), "final": empty(num_final, size, dtype=dtype)}
    if dtype == NAMES["fp8"]:
        places |= {"aux_scales": empty(num_rows, layers), "final_scales": empty(num_final)}
    return places


class StateClient:
    """Connections to engines at `addresses`. Raises ValueError unless all of them answer with equal facts within
    `timeout` seconds. Its threads end with the process."""

    def __init__(
        self,
        option: str,
        addresses: Sequence[Address],
        key: str | None,
        timeout: float,
        *,
        waits: bool = False,
        ended: Callable[[], str] = str,
        device: torch.device | None = None,
    ) -> None:
        """`option` names the addresses in messages. `timeout`: seconds without any engine after which requests fail.
        `waits`: for an engine that is still loading, however long. `ended`: says why none will come any more, or is
        empty. `device`: where states are to arrive from an engine whose memory can be mapped; None: through the socket
        from all."""
        self.option = option
        self.device = device
        self.ended = ended
        self.timeout = timeout
        self.key = key
        self.waiting: deque[StateRequest] = deque()
        self.changed = threading.Condition()
        self.failure: Exception | None = None
        self.links = [Link(self, address) for address in addresses]
        deadline = time.monotonic() + (math.inf if waits else timeout)
        try:
            self.facts = self.meet(deadline)
        except ValueError as error:
            for link in self.links:
                link.drop(ConnectionError(str(error)))
            raise
        for link in self.links:
            threading.Thread(target=link.run, name=f"states of {link.address}", daemon=True).start()

    def meet(self, deadline: float) -> StateFacts:
        """Returns the facts that all engines have. Raises ValueError if they differ, or one does not answer."""
        facts = [link.meet(deadline) for link in self.links]
        for link, other in zip(self.links, facts, strict=True):
            if other != facts[0]:
                raise ValueError(
                    f"{self.option} names engines that differ: {self.links[0].address} has {facts[0]}, {link.address} "
                    f"has {other}; start them alike"
                )
        return facts[0]

    def check_target(self, fingerprint: str) -> None:
        """Raises ValueError for engines of another target than that with this fingerprint of its weights; the
        connections have ended then."""
        if self.facts.target_fingerprint != fingerprint:
            self.close()
            raise ValueError(
                f"{self.option} {self.links[0].address} has another target (fingerprint "
                f"{self.facts.target_fingerprint[:12]}, ours is {fingerprint[:12]}); start it with the same target"
            )

    def ask(self, request: StateRequest) -> Future[None]:
        """Queues a request. The future ends when its places are filled; raises ValueError for one that the engine
        refuses, and if all engines are lost."""
        with self.changed:
            if self.failure is None:
                self.waiting.append(request)
                self.changed.notify()
            else:
                request.done.set_exception(self.failure)
        return request.done

    def fail(self, error: Exception) -> None:
        """Ends all requests, now and later, with `error`."""
        with self.changed:
            self.failure = self.failure or error
            requests = list(self.waiting)
            self.waiting.clear()
            self.changed.notify_all()
        for request in requests:
            request.done.set_exception(self.failure)

    @property
    def silence(self) -> float:
        """Seconds since the last engine was lost; 0 while there is one."""
        lost = [link.lost_at for link in self.links]
        return 0.0 if None in lost else time.monotonic() - max(at for at in lost if at is not None)

    def lost(self, cause: str) -> ValueError:
        engines = ", ".join(str(link.address) for link in self.links)
        return ValueError(
            f"{self.option} {engines}: {cause}; start the engine again, and then the same command, which continues "
            "from the newest checkpoint"
        )

    def close(self) -> None:
        """Ends the connections; requests that are open fail."""
        self.fail(ValueError(f"the connection to {self.option} was closed"))
        for link in self.links:
            link.close()


class Link:
    """The connection to one engine, which a thread keeps."""

    def __init__(self, client: StateClient, address: Address) -> None:
        self.client = client
        self.address = address
        self.connection: Connection | None = None
        self.facts: StateFacts | None = None
        self.open: deque[StateRequest] = deque()  # sent, in order
        self.lost_at: float | None = None  # when the connection broke; None: it stands
        self.views = None if client.device is None else Views(client.device)  # None: of an engine without any, too

    def meet(self, deadline: float) -> StateFacts:
        """Connects for the first time. Raises ValueError if the engine refuses, or does not answer in time."""
        pause = FIRST_PAUSE
        while self.connection is None:
            try:
                self.reconnect()
            except OSError as error:
                if ended := self.client.ended():
                    raise ValueError(ended) from error
                if time.monotonic() > deadline:
                    raise ValueError(
                        f"{self.client.option} {self.address} does not answer ({error}); start an engine there with "
                        "`slipstream serve --states`"
                    ) from error
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        assert self.facts is not None
        return self.facts

    def reconnect(self) -> None:
        """Raises OSError, and RefusedError also for an engine that is another one now."""
        memory = "" if self.views is None else memory_name(self.views.device)
        connection, values = connect(self.address, self.client.key, self.client.timeout, memory)
        facts = StateFacts(**values)
        if self.facts not in (None, facts):
            connection.close()
            raise RefusedError(
                f"the engine at {self.address} has changed from {self.facts} to {facts}; start it as it was"
            )
        self.connection = connection
        self.facts = facts
        self.lost_at = None

    def run(self) -> None:
        """Sends requests and receives states; connects again after a fault."""
        pause = FIRST_PAUSE
        while self.client.failure is None:
            try:
                if self.connection is None:
                    self.reconnect()
                    pause = FIRST_PAUSE
                self.exchange()
            except OSError as error:
                if self.client.failure is not None:  # `close`, in the middle of an answer
                    break
                if self.lost_at is None:
                    self.lost_at = time.monotonic()
                    logger.warning("the engine at %s is lost (%s); it is called again", self.address, error)
                self.drop(error)
                if ended := self.client.ended():
                    self.client.fail(ValueError(ended))
                if self.client.silence > self.client.timeout:
                    self.client.fail(self.client.lost(f"no engine for {self.client.timeout:g} s ({error})"))
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            except Exception as error:  # it is another engine now, or this is our fault: requests may not wait for ever
                self.client.fail(error)
        self.drop(ConnectionError("closed"))

    def exchange(self) -> None:
        """Serves until the client has failed. Raises OSError at a fault."""
        connection = self.connection
        assert connection is not None
        while True:
            requests = []
            with self.client.changed:
                while not (self.open or self.client.waiting or self.client.failure):
                    self.client.changed.wait()
                if self.client.failure is not None:
                    return
                while self.client.waiting and len(self.open) < IN_FLIGHT:
                    requests.append(self.client.waiting.popleft())
                    self.open.append(requests[-1])
            for request in requests:
                connection.send("ask", request.fields, request.tensors)
            self.receive(connection)

    def receive(self, connection: Connection) -> None:
        """Receives the answer to the oldest request."""
        request = self.open[0]
        answer = connection.receive(request.allocate)
        if answer.kind == "refusal":
            error = RefusedError(f"the engine at {self.address} refuses a request: {answer.fields['error']}")
            request.done.set_exception(error)
        else:
            tensors = answer.tensors
            if answer.kind == "shared":
                tensors = self.take(answer.fields)
                connection.send("taken", {"slot": answer.fields["slot"]})
            if tensors.keys() != request.places.keys():
                raise BrokenError("the engine leaves out states")
            request.replace(tensors)  # last: a request that is asked again needs places of the host
            request.done.set_result(None)
        self.open.popleft()

    def take(self, fields: Mapping[str, Any]) -> dict[str, Tensor]:
        """Takes an answer out of the engine's memory. Raises BrokenError if that fails; then the next connection does
        without."""
        try:
            if self.views is None:
                raise ValueError("nothing was to be shared")
            return self.views.take(fields)
        except (OSError, KeyError, ValueError, TypeError, RuntimeError) as error:
            self.close_views()
            self.views = None
            raise BrokenError(
                f"its memory cannot be read: {error}; states come through the socket from now on"
            ) from error

    def drop(self, error: Exception) -> None:
        """Closes the connection, and gives its open requests back, unless they have failed often."""
        self.close_views()  # first: the engine frees its memory when the connection ends
        if self.connection is not None:
            self.connection.close()
        self.connection = None
        with self.client.changed:
            failure = self.client.failure
            for request in self.open:
                request.tries += 1
                if failure is None and request.tries >= MOST_TRIES:
                    failure = self.client.lost(f"a request has failed {MOST_TRIES} times ({error})")
            self.client.waiting.extendleft(reversed(self.open))
            self.open.clear()
            self.client.changed.notify_all()
        if failure is not None:
            self.client.fail(failure)

    def close_views(self) -> None:
        if self.views is not None:
            self.views.close()

    def close(self) -> None:
        """Wakes the thread, which then drops the connection."""
        connection = self.connection
        if connection is not None:
            connection.wake()
