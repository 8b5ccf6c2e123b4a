"""Gives states of the target to trainers, over a socket (models/states/wire.py).

A client's thread reads its requests and checks them; the engine's thread computes one between two steps; another thread
of the client sends the answers, in the order of the requests. Clients take turns. A client has few requests here: what
else it sends waits in the socket.
"""

import logging
import os
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from slipstream.models.files.checkpoint import weights_fingerprint
from slipstream.models.files.state_store import encode
from slipstream.models.states.address import Address
from slipstream.models.states.client import StateFacts
from slipstream.models.states.shared import Slot, memory_name
from slipstream.models.states.wire import NAMES_OF, BrokenError, Connection, Frame, RefusedError, greet_client
from slipstream.models.targets.config import check_aux_layers
from slipstream.serve.engine.state_passes import PackedText, StatePasses
from slipstream.serve.keys import check_states, read_keys
from slipstream.serve.listener import take
from slipstream.serve.options import ServeConfig
from slipstream.serve.runner.model_runner import is_out_of_memory, to_host

MOST_TOKENS = 1 << 18  # of a request
MOST_CONNECTIONS = 256  # a thread or two for each
RETRY_SECONDS = 1.0  # after a fault of the system
MOST_OPEN = 4  # requests of a client that are read and not answered
MOST_REFUSAL = 1000  # characters
MOST_SHARING = 16  # clients that get states through shared memory; others through their socket
SLOTS = 2  # of a client there: the engine fills one while the client copies the other
IN_ENGINE = 2  # requests that the engine has at once: it never waits for the next one

Post = Callable[[Callable[[], None]], None]

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class StateJob:
    """A request, and then its answer. Rows are indices into the flattened batch."""

    client: "Client"
    text: PackedText
    rows: Tensor  # (R,) int64
    final_rows: Tensor  # (M,) int64
    is_fp8: bool
    answer: dict[str, Tensor] = field(default_factory=dict)  # on the host, filled once `landed` has passed
    landed: torch.cuda.Event | None = None
    refusal: str = ""
    slot: Slot | None = None  # that the answer goes into, instead
    layout: dict[str, Any] = field(default_factory=dict)  # of the slot

    def run(self, passes: StatePasses) -> None:
        """Computes the answer; on a GPU the host does not wait for it."""
        aux_states, final = passes.compute(self.text)
        answer = {}
        for name, states, rows in (("aux", aux_states, self.rows), ("final", final, self.final_rows)):
            values = states[rows.to(states.device)]
            scales = None
            if self.is_fp8:
                values, scales = encode(values, "fp8")
            answer["aux_states" if name == "aux" else name] = values
            if scales is not None:
                answer[f"{name}_scales"] = scales
        if self.slot is not None:
            answer = self.share(self.slot, answer)
        self.answer = {name: to_host(values.contiguous()) for name, values in answer.items()}
        if aux_states.is_cuda:
            self.landed = torch.cuda.Event()
            self.landed.record()

    def share(self, slot: Slot, answer: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns what is still to be sent: the sum of what lies in the slot, or all if there is no memory."""
        try:
            self.layout, total = slot.fill(answer)
        except (OSError, RuntimeError) as error:
            logger.warning("states go to a client through its socket: %s", error)
            self.slot = None
            self.client.shares = False
            return answer
        return {"sum": total}


class StateService:
    """Listens with a socket that is bound. `post` has the engine's thread call something between two steps."""

    def __init__(
        self,
        listener: socket.socket,
        keys: Sequence[str],
        facts: StateFacts,
        passes: StatePasses,
        post: Post,
    ) -> None:
        self.keys = keys
        self.facts = facts
        self.passes = passes
        self.post = post
        self.clients: list[Client] = []  # those that have waited longest first
        self.in_engine = 0
        self.num_connections = 0
        self.is_closed = False
        self.lock = threading.Lock()
        self.listener = listener
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.listen()
        threading.Thread(target=self.accept, name="states", daemon=True).start()

    def accept(self) -> None:
        while True:
            try:
                end, _ = self.listener.accept()
            except OSError as error:
                if self.is_closed:
                    return
                logger.warning("no client of states can come in: %s", error)
                time.sleep(RETRY_SECONDS)
                continue
            with self.lock:
                is_full = self.num_connections >= MOST_CONNECTIONS
                self.num_connections += not is_full
            if is_full:
                logger.warning("a client of states is turned away: there are %d connections", MOST_CONNECTIONS)
                end.close()
                continue
            threading.Thread(target=self.serve, args=(end,), name="states of a client", daemon=True).start()

    def serve(self, end: socket.socket) -> None:
        """Serves a connection until it ends."""
        try:
            self.follow(Client(self, Connection(end)))
        except (OSError, RefusedError) as error:
            logger.info("a client of states has left: %s", error)
        finally:
            with self.lock:
                self.num_connections -= 1

    def follow(self, client: "Client") -> None:
        """Greets a client and takes its requests. Raises OSError when it leaves; RefusedError for one without a key."""
        try:
            memory = memory_name(self.passes.target.device)
            may_share = greet_client(client.connection, self.keys, asdict(self.facts), memory)
            with self.lock:
                if self.is_closed:
                    raise ConnectionAbortedError("the engine ends")
                if may_share and sum(other.shares for other in self.clients) < MOST_SHARING:
                    client.share()
                self.clients.append(client)
            if not client.shares:
                reason = "others have all shared memory" if may_share else "it can map none of this engine's memory"
                logger.info("states go to a client through its socket: %s", reason)
            threading.Thread(target=client.answer, name="answers to a client", daemon=True).start()
            client.listen()
        finally:
            client.leave()

    def schedule(self) -> None:
        """Gives the engine the next requests, if it has room."""
        with self.lock:
            jobs: list[StateJob] = []
            while self.in_engine + len(jobs) < IN_ENGINE:
                client = next((client for client in self.clients if client.is_ready), None)
                if client is None:
                    break
                self.clients.remove(client)
                self.clients.append(client)
                jobs.append(client.waiting.popleft())
                jobs[-1].slot = client.free.pop() if client.shares else None
            self.in_engine += len(jobs)
        for job in jobs:
            self.post(lambda job=job: self.run(job))  # type: ignore[misc]

    def run(self, job: StateJob) -> None:
        """Computes a request, in the engine's thread. A fault ends the request, but for that of a rank."""
        try:
            if not (job.refusal or job.client.has_left):
                job.run(self.passes)
        except ChildProcessError:
            raise
        except Exception as error:
            job.answer = {}
            if is_out_of_memory(error):
                job.refusal = f"its device has no memory for {job.text.tokens.numel()} tokens; lower data.batch_size"
            else:
                logger.exception("states could not be computed")
                job.refusal = f"it failed with {type(error).__name__}; its log has the traceback"
        with self.lock:
            self.in_engine -= 1
            if job.slot is not None:
                (job.client.free if job.refusal else job.client.lent).append(job.slot)
        job.client.done.put(job)
        self.schedule()

    def close(self) -> None:
        with self.lock:
            self.is_closed = True
            clients = list(self.clients)
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`, which `close` does not
        self.listener.close()
        for client in clients:
            client.connection.close()


class Client:
    """A trainer's connection."""

    def __init__(self, service: StateService, connection: Connection) -> None:
        self.service = service
        self.connection = connection
        self.waiting: deque[StateJob] = deque()  # for the engine
        self.done: SimpleQueue[StateJob | None] = SimpleQueue()
        self.room = threading.Semaphore(MOST_OPEN)
        self.has_left = False
        self.shares = False  # memory
        self.slots: list[Slot] = []
        self.free: list[Slot] = []
        self.lent: list[Slot] = []

    def share(self) -> None:
        self.shares = True
        self.slots = [Slot(number) for number in range(SLOTS)]
        self.free = list(self.slots)

    @property
    def is_ready(self) -> bool:
        """Whether the engine may compute its next request."""
        return bool(self.waiting and (self.free or not self.shares))

    def listen(self) -> None:
        """Reads requests. Raises OSError at the end of the connection."""
        while True:
            frame = self.connection.receive(limit=4 * 8 * MOST_TOKENS)
            if frame.kind == "taken":
                self.take_back(frame.fields.get("slot"))
                continue
            with self.service.lock:
                if len(self.waiting) == MOST_OPEN and len(self.lent) == SLOTS:  # no answer would end the wait for room
                    raise BrokenError("a client asks for more, and returns nothing")
            self.room.acquire()
            try:
                job = self.read(frame)
            except (ValueError, KeyError, TypeError, OverflowError, RuntimeError) as error:
                none = torch.zeros(0, dtype=torch.int64)
                refusal = f"no request: {error}"[:MOST_REFUSAL]
                job = StateJob(self, PackedText(none, none, ()), none, none, False, refusal=refusal)
            with self.service.lock:
                self.waiting.append(job)
            self.service.schedule()

    def read(self, frame: Frame) -> StateJob:
        """Raises ValueError, KeyError, TypeError, OverflowError or RuntimeError for what is no request."""
        tokens, positions, rows, final_rows = (
            frame.tensors[name] for name in ("tokens", "positions", "rows", "final_rows")
        )
        facts = self.service.facts
        layers = tuple(frame.fields["layers"])
        if not all(type(layer) is int for layer in layers):
            raise ValueError("layers must be whole numbers")
        check_aux_layers(layers, facts.num_layers)
        if tokens.dim() != 2 or not 0 < tokens.numel() <= facts.max_tokens or positions.shape != tokens.shape:
            raise ValueError(f"tokens {tuple(tokens.shape)} and positions {tuple(positions.shape)}")
        following = (positions[:, 1:] == positions[:, :-1] + 1) | (positions[:, 1:] == 0)
        if not (following.all() and (positions[:, 0] == 0).all()):
            raise ValueError("positions do not count documents from 0")
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < facts.vocab_size:
            raise ValueError("token ids outside the vocabulary")
        for places in (rows, final_rows):
            if places.dim() != 1 or (len(places) and not 0 <= int(places.min()) <= int(places.max()) < tokens.numel()):
                raise ValueError("rows outside the text")
        text = PackedText(tokens, positions, layers)
        return StateJob(self, text, rows.long(), final_rows.long(), bool(frame.fields["is_fp8"]))

    def take_back(self, number: object) -> None:
        """The client has read a slot. Raises BrokenError if it has none of this number."""
        with self.service.lock:
            slot = next((slot for slot in self.lent if slot.number == number), None)
            if slot is None:
                raise BrokenError("a client returns what it does not have")
            self.lent.remove(slot)
            self.free.append(slot)
        self.service.schedule()

    def answer(self) -> None:
        """Sends answers until the client leaves."""
        while (job := self.done.get()) is not None:
            if job.landed is not None:
                job.landed.synchronize()  # sync
            with suppress(OSError):  # the other thread notices
                if job.refusal:
                    self.connection.send("refusal", {"error": job.refusal})
                elif job.slot is not None:
                    self.connection.send("shared", job.layout | {"sum": int(job.answer["sum"])})
                else:
                    self.connection.send("states", {}, job.answer)
            self.room.release()

    def leave(self) -> None:
        self.has_left = True
        with self.service.lock:
            if self in self.service.clients:
                self.service.clients.remove(self)
            self.waiting.clear()
        self.connection.close()
        self.done.put(None)
        if self.slots:
            self.service.post(self.close_slots)  # in the engine's thread, which may be about to fill one

    def close_slots(self) -> None:
        for slot in self.slots:
            with suppress(OSError, RuntimeError):  # of a device that has failed
                slot.close()


def bind(address: Address) -> socket.socket:
    """Takes an address before the target is loaded; that of a path only its owner may use. Raises ValueError if others
    have it."""
    listener = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        if address.path:
            bind_path(listener, address)
        else:
            take(listener, address.place)
    except OSError as error:
        listener.close()
        raise ValueError(f"cannot listen at states {address} ({error.strerror}); choose another --states") from error
    return listener


def bind_path(listener: socket.socket, address: Address) -> None:
    """Raises OSError if the path cannot be used."""
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(Path(address.path).stat().st_mode) and not is_used(address):
            Path(address.path).unlink()
    mask = os.umask(0o177)
    try:
        listener.bind(address.path)
    finally:
        os.umask(mask)
    listener.listen()  # at once: else another engine would take the path for that of one that has ended


def is_used(address: Address) -> bool:
    """Whether a process listens at the path."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
        try:
            end.connect(address.path)
        except ConnectionRefusedError:
            return False
    return True


def open_service(
    config: ServeConfig, engine_path: Path, passes: StatePasses, post: Post, listener: socket.socket
) -> StateService:
    """Listens at an address that is bound. Raises ValueError for one that others can reach, without a key."""
    keys = read_keys(config)
    check_states(config, keys)
    facts = facts_of(passes, weights_fingerprint(engine_path))
    logger.info("gives states at %s", config.states)
    return StateService(listener, keys, facts, passes, post)


def facts_of(passes: StatePasses, fingerprint: str) -> StateFacts:
    """`fingerprint` of the target's weights."""
    config = passes.target.config
    return StateFacts(
        target_fingerprint=fingerprint,
        num_layers=len(config.layers),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        dtype=NAMES_OF[passes.target.dtype],
        max_tokens=MOST_TOKENS,
    )
