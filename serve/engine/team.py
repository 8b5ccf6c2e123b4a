"""The ranks above 0 of an engine over several devices: their processes, the messages to them, and how they are missed.

Rank 0 is the engine's process. It plans, measures and chooses, and sends every plan to the others before it runs it;
they execute the same passes in the same order (serve/engine/follower.py). A thread of rank 0 watches them: a rank that
raises, dies or stops answering ends all ranks, since no pass ends without it.
"""

import logging
import os
import pickle
import selectors
import struct
import subprocess
import threading
import time
import timeit
import zlib
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from slipstream.kernels.collectives.join import join_ranks
from slipstream.kernels.collectives.ranks import Norm, Ranks
from slipstream.models.files.cost_tables import CostTables
from slipstream.models.files.scratch import ScratchFolder
from slipstream.models.layers.linear import Head, Linear
from slipstream.models.targets.decoder import Target
from slipstream.serve import processes
from slipstream.serve.drafters.base import DraftWeights
from slipstream.serve.engine import members
from slipstream.serve.engine.members import Member
from slipstream.serve.engine.plan import StepOutput, StepPlan
from slipstream.serve.runner.cuda_graphs import REMEDY
from slipstream.serve.runner.model_runner import InFlight, ModelRunner

BEAT_SECONDS = 0.25  # between two signs of life of a rank
SILENCE_SECONDS = 4.0  # without a sign of life, after which a rank that serves counts as lost
BUILD_SILENCE_SECONDS = 60.0  # likewise while it builds: compilers hold Python's lock
BLAME_SECONDS = 1.0  # in which the watch finds out why a call failed
BEAT = struct.Struct("!QQI")  # bytes of memory; number of the last step that was read, and a digest of its tokens
MOST_DIGESTS = 1024  # of steps, that rank 0 keeps
MOST_BYTES = 1 << 16  # of a sign of life, or of a sentence

logger = logging.getLogger(__name__)


class RankError(ChildProcessError):
    """A rank was lost, and with it the engine."""


class Team:
    """The ranks of an engine. `is_kept`: they outlive an engine, and serve the next one.

    All methods but `watch` belong to the thread that steps the engine."""

    is_kept = False

    def __init__(self, world: int, device: torch.device) -> None:
        """The processes import their modules while the caller goes on; `meet` waits for them."""
        self.failure = ""  # why there are no ranks any more
        self.ranks: Ranks | None = None  # once they have met
        self.sum_seconds: list[float] = []  # by rank: of the sums in a pass of one row
        self._limit = BUILD_SILENCE_SECONDS
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self._report: Callable[[str], None] | None = None
        self._is_closed = False
        self._digests: dict[int, int] = {}  # of rank 0's tokens, by number of the step
        self._device = device
        self._folder = ScratchFolder("ranks")
        self._file = str(Path(self._folder.name) / "ranks")
        if device.type == "cuda":
            torch.cuda.set_device(0)
        self.members = members.take(world)
        for rank, member in enumerate(self.members, start=1):
            member.name = f"rank {rank} ({device_of(rank, device)})"
            member.heard = time.monotonic()
        threading.Thread(target=self._watch, name="slipstream-ranks", daemon=True).start()
        with self.guard():
            self.order("begin", device, self._file)

    def meet(self) -> Ranks:
        """Waits until all ranks have loaded their parts, and joins them."""
        if self.ranks is None:
            self.answers()
            self.ranks = self._join()
        return self.ranks

    def _join(self) -> Ranks:
        """Joins the ranks. Libraries wait for lost ones for minutes, so another thread does; it is left behind then."""
        result: Future[Ranks] = Future()

        def join() -> None:
            try:
                result.set_result(meet(self._device, 0, 1 + len(self.members), self._file))
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=join, daemon=True).start()
        while not wait([result], BEAT_SECONDS).done:
            self.check()
        return result.result()

    def watch(self, report: Callable[[str], None]) -> None:
        """Calls `report` with a sentence, from another thread, as soon as a rank is lost."""
        with self._lock:
            self._report = report
            failure = self.failure
        if failure:
            report(failure)

    def order(self, name: str, *args: Any) -> None:
        """Has all other ranks call a method of `Follower`."""
        payload = pickle.dumps((name, args), pickle.HIGHEST_PROTOCOL)
        try:
            for member in self.members:
                member.channel.send_bytes(payload)
        except OSError as error:
            raise RuntimeError("another rank has closed its channel") from error

    def answers(self) -> list[Any]:
        """Waits for an answer of each of them."""
        try:
            return [member.channel.receive() for member in self.members]
        except (EOFError, OSError) as error:
            raise RuntimeError("another rank has closed its channel") from error

    def serve(self) -> None:
        """Begins to miss ranks sooner: all that takes long is built."""
        self._limit = SILENCE_SECONDS

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Ends the ranks if what all do together fails here: they wait for one another. Raises RankError if one of them
        is the cause."""
        try:
            yield
        except BaseException as error:
            raise self.blame(error) from error

    def blame(self, error: BaseException) -> BaseException:
        """Returns the error to raise for `error`, which came within what all ranks do together."""
        is_consequence = isinstance(error, RuntimeError | OSError | EOFError)
        if is_consequence and self._failed.wait(BLAME_SECONDS):
            return RankError(self.failure)
        self._fail(f"rank 0 ({self._device}) failed with {type(error).__name__}", quiet=True)
        return error

    def check(self) -> None:
        """Raises RankError if a rank is lost."""
        if self.failure or (self.ranks is not None and self.ranks.is_lost()):
            raise self.blame(RuntimeError("a rank is lost"))

    def note(self, plan: StepPlan, output: StepOutput) -> None:
        """Keeps what the other ranks' tokens of a step must equal."""
        self._digests[plan.number] = digest_of(output)
        if len(self._digests) > MOST_DIGESTS:
            del self._digests[next(iter(self._digests))]

    def memory(self) -> list[int]:
        """Returns the bytes of memory that each rank has."""
        return [bytes_of_process(self._device), *(member.memory for member in self.members)]

    def end(self) -> None:
        """Ends the engine of the ranks and, unless they are kept, the ranks."""
        if self.is_kept and not self.failure:
            self._digests = {}
            self._limit = BUILD_SILENCE_SECONDS
            self.order("end")
        else:
            self.close()

    def close(self) -> None:
        """Ends the ranks. Safe to call again."""
        with self._lock:
            was_closed = self._is_closed
            self._is_closed = True
        if was_closed:
            return
        for member in self.members:
            member.channel.close()  # at which the rank exits
            member.life.close()
        self._folder.cleanup()
        for member in self.members:
            processes.end(member.process, SILENCE_SECONDS)
        if self.ranks is not None and not self.failure:
            self.ranks.close()

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            try:
                for member in self.members:
                    selector.register(member.life, selectors.EVENT_READ, member)
            except ValueError:  # `close` has closed the sockets
                return
            while not (self._is_closed or self.failure):
                began = time.monotonic()
                try:
                    for key, _ in selector.select(BEAT_SECONDS):
                        self._hear(key.data)
                except (OSError, ValueError):  # `close` has closed the sockets
                    return
                now = time.monotonic()
                stopped = now - began - BEAT_SECONDS
                if stopped > BEAT_SECONDS:  # the machine or this process slept, or something held Python's lock
                    for member in self.members:
                        member.heard = min(member.heard + stopped, now)
                oldest = min(self.members, key=lambda member: member.heard)
                if now - oldest.heard > self._limit:
                    self._fail(f"{oldest.name} has not answered for {self._limit:g} s")
                elif self.ranks is not None and self.ranks.is_lost():
                    self._fail(f"rank 0 ({self._device}) has waited in vain for another rank in a pass")

    def _hear(self, member: Member) -> None:
        try:
            message = member.life.recv(MOST_BYTES)
        except ConnectionError:
            message = b""
        if len(message) == BEAT.size:
            member.heard = time.monotonic()
            member.memory, number, digest = BEAT.unpack(message)
            if self._digests.get(number, digest) != digest:
                self._fail(f"{member.name} has drawn other tokens than rank 0 in step {number}")
        elif message:
            self._fail(self._cause() or f"{member.name} failed: {message.decode(errors='replace').rstrip()}")
        else:
            self._fail(f"{member.name} {how_it_ended(member.process)}")

    def _cause(self) -> str:
        """Names a rank that was killed, for which another one has failed; empty if there is none."""
        deadline = time.monotonic() + BEAT_SECONDS
        while time.monotonic() < deadline:
            killed = [member for member in self.members if (member.process.poll() or 0) < 0]
            if killed:
                return f"{killed[0].name} {how_it_ended(killed[0].process)}"
            time.sleep(BEAT_SECONDS / 10)
        return ""

    def _fail(self, sentence: str, *, quiet: bool = False) -> None:
        with self._lock:
            if self._is_closed or self.failure:
                return
            self.failure = sentence
            report = None if quiet else self._report
        for member in self.members:
            member.process.kill()
        self._folder.cleanup()
        self._failed.set()
        if self.ranks is not None:
            ending = threading.Thread(target=self.ranks.abort, daemon=True)
            ending.start()
            ending.join(BEAT_SECONDS)  # libraries may wait for kernels, and the report must not
        if report is not None:
            report(sentence)


class RankRunner(ModelRunner):
    """A runner whose passes need all ranks: if memory does not suffice for one of them, none can go on."""

    def _failed(self, plan: StepPlan, error: Exception) -> InFlight:
        raise error

    @torch.inference_mode()
    def sum_seconds(self) -> float:
        """Returns the seconds that a pass of one row takes for its sums over ranks, captured if passes are."""
        target = self.target
        modules = [module for module in target.modules() if getattr(module, "ranks", None) is not None]
        count = sum(not isinstance(module, Head | Target) for module in modules)
        ranks = target.ranks
        assert ranks is not None
        has_leaves = any(isinstance(module, Linear) and module.leaves for module in modules)
        dtype = torch.float32 if has_leaves else target.dtype
        partial_sums = torch.zeros(1, target.config.hidden_size, dtype=dtype, device=self.state.device)
        norm = Norm(partial_sums.to(target.dtype), *target.norm.gain)

        def add(_: object = None) -> None:
            for _ in range(count):
                ranks.add_and_norm(partial_sums, norm)

        run: Callable[[], object] = add
        if self.steps is not None:
            captured = self.steps.capturer.capture(add, None, "sums over ranks", REMEDY)
            assert captured is not None  # memory that lacks ends ranks
            run = captured[0].replay
        return min(timeit.repeat(lambda: (run(), partial_sums.tolist()), number=1))  # sync


class LeadingRunner(RankRunner):
    """Has the other ranks do what it does, before it does so."""

    def __init__(self, team: Team, *parts: Any) -> None:
        super().__init__(*parts)
        self.team = team

    def time_passes(self) -> CostTables:
        self.team.order("time_passes")
        return super().time_passes()

    def time_sums(self) -> None:
        self.team.order("time_sums")
        self.team.sum_seconds = [self.sum_seconds(), *self.team.answers()]

    def drop(self, sizes: Collection[int]) -> None:
        self.team.order("drop", set(sizes))
        super().drop(sizes)

    def forget(self) -> None:
        self.team.order("forget")
        super().forget()

    def load_draft(self, weights: DraftWeights) -> None:
        self.team.order("load_draft", weights)
        super().load_draft(weights)

    def launch(self, plan: StepPlan, *, up_to_sampling: bool = False) -> InFlight:
        with self.team.guard():
            self.team.order("launch", plan, up_to_sampling)
            return super().launch(plan, up_to_sampling=up_to_sampling)

    def finish(self, flight: InFlight, plan: StepPlan) -> InFlight:
        with self.team.guard():
            self.team.order("finish", plan)
            return super().finish(flight, plan)

    def check(self) -> None:
        self.team.check()

    def note(self, plan: StepPlan, output: StepOutput) -> None:
        self.team.check()
        self.team.note(plan, output)


def device_of(rank: int, device: torch.device) -> torch.device:
    """The device of a rank, where rank 0 has this one."""
    return device if device.type == "cpu" else torch.device(device.type, rank)


def meet(device: torch.device, rank: int, world: int, file: str) -> Ranks:
    """Joins the ranks, and returns once all have exchanged something. Until then they read `file`; NCCL's threads, if
    it is needed, read it later, too."""
    ranks = join_ranks(device, rank, world, file)
    ranks.collect(torch.zeros(1, device=device)).tolist()  # sync
    return ranks


def digest_of(output: StepOutput) -> int:
    """A digest of a step's tokens."""
    return zlib.crc32(output.tokens.tobytes(), zlib.crc32(output.num_emitted.tobytes()))


def how_it_ended(process: subprocess.Popen[bytes]) -> str:
    try:
        return processes.how_it_ended(process.wait(BLAME_SECONDS))
    except subprocess.TimeoutExpired:
        return "closed its end"


def bytes_of_process(device: torch.device) -> int:
    """Returns the bytes that this process has on the device, or on a CPU in main memory."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)  # another thread has another current device
    return psutil.Process(os.getpid()).memory_info().rss
