"""Admission of grammars: a server tries each (serve/grammar/trial.py), in a fair order, as long as a request wants it.

Every grammar gets a short try, one after the other. One that needs longer gets a second try, of all the time that
compiling may take, in a queue of its own: so slow grammars never hold up others for longer than their short tries.
A grammar is tried once for all requests that want it at a time, and given up with the last of them. Only the library's
verdicts are remembered: a trial that took too long, or crashed, or met a slow token, may have met a busy machine.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from functools import partial

from slipstream.models.targets.pretrained import load_tokenizer
from slipstream.serve.grammar.grammars import check_length
from slipstream.serve.grammar.trial import Crashed, TooLong, TrialProcess, Unavailable
from slipstream.serve.grammar.trial_process import TooSlow
from slipstream.serve.options import ServeConfig, find_target
from slipstream.serve.request import Grammar

GRAMMAR_SECONDS = 20.0  # CPU time that compiling a grammar may take
SHORT_SECONDS = 0.5  # CPU time of a short try
MOST_SHORT = 64  # grammars that wait for their short try
MOST_LONG = 8  # for their second one, which may take 40 times as long
MOST_REMEMBERED = 64 * 2**20  # bytes of verdicts
LEAST_SIZE = 256  # bytes of a verdict, beside its characters
CRASHED = "the grammar needs too much memory to compile, or makes the compiler fail; simplify it"

logger = logging.getLogger(__name__)


class Busy(Exception):
    """Too many grammars wait."""


Verdict = Grammar | str  # a translation, or the sentence that refuses it


@dataclass(slots=True, eq=False)
class Job:
    """A grammar that requests wait for."""

    grammar: Grammar
    name: bytes
    verdict: asyncio.Future[Verdict]
    abandoned: asyncio.Event = field(default_factory=asyncio.Event)
    num_waiting: int = 0  # requests


class Lane:
    """Jobs that wait for a try of `seconds`. One task works on them."""

    def __init__(self, seconds: float, capacity: int) -> None:
        self.seconds = seconds
        self.capacity = capacity
        self._jobs = deque[Job]()
        self._has_jobs = asyncio.Event()

    def add(self, job: Job) -> None:
        """Adds a job. Raises Busy if the lane is full."""
        if len(self._jobs) >= self.capacity:
            message = f"{len(self._jobs)} grammars wait for {self.seconds:g} s of CPU time each to be compiled"
            raise Busy(f"{message}; try again later")
        self._jobs.append(job)
        self._has_jobs.set()

    def discard(self, job: Job) -> None:
        if job in self._jobs:
            self._jobs.remove(job)

    async def next(self) -> Job:
        while not self._jobs:
            self._has_jobs.clear()
            await self._has_jobs.wait()
        return self._jobs.popleft()


class Verdicts:
    """The verdicts that were used last, by the digests of their grammars."""

    def __init__(self) -> None:
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._num_chars = 0

    def find(self, name: bytes) -> Verdict | None:
        if name in self._verdicts:
            self._verdicts.move_to_end(name)
        return self._verdicts.get(name)

    def add(self, name: bytes, verdict: Verdict) -> None:
        if name in self._verdicts:  # a trial that was given up may have ended all the same
            return
        self._verdicts[name] = verdict
        self._num_chars += size_of(verdict)
        while self._num_chars > MOST_REMEMBERED:
            self._num_chars -= size_of(self._verdicts.popitem(last=False)[1])


def size_of(verdict: Verdict) -> int:
    return LEAST_SIZE + len(verdict if isinstance(verdict, str) else verdict.text)


class Trials:
    """Tries grammars. `seconds`: CPU time that compiling one may take. All methods belong to one event loop."""

    def __init__(self, compiler: TrialProcess, seconds: float) -> None:
        self._compiler = compiler
        self._seconds = seconds
        self._short = Lane(min(SHORT_SECONDS, seconds), MOST_SHORT)
        self._long = Lane(seconds, MOST_LONG)
        self._jobs: dict[bytes, Job] = {}  # those not yet decided
        self._verdicts = Verdicts()
        self._workers: list[asyncio.Task[None]] = []

    @classmethod
    def of(cls, config: ServeConfig) -> "Trials":
        """Returns the trials of a server."""
        _, path = find_target(config, weights=False)
        load = partial(load_tokenizer, path, config.trust_remote_code)
        return cls(TrialProcess(load, config.json_whitespace), GRAMMAR_SECONDS)

    def start(self) -> None:
        """Starts the process in the background, so that the first grammar waits less."""
        self._compiler.start()

    async def admit(self, grammar: Grammar) -> Grammar:
        """Returns the translation of a grammar. Raises ValueError, in a sentence, if it does not compile within the
        limits; Busy; Unavailable."""
        check_length(grammar)
        name = grammar.digest()
        verdict = self._verdicts.find(name)
        if verdict is None:
            verdict = await self._decide(self._jobs.get(name) or self._add(grammar, name))
        if isinstance(verdict, str):
            raise ValueError(verdict)
        return verdict

    async def aclose(self) -> None:
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        self._compiler.close()

    def _add(self, grammar: Grammar, name: bytes) -> Job:
        if not self._workers:
            self._workers = [asyncio.create_task(self._work(lane)) for lane in (self._short, self._long)]
        job = Job(grammar, name, asyncio.get_running_loop().create_future())
        self._short.add(job)
        self._jobs[name] = job
        return job

    async def _decide(self, job: Job) -> Verdict:
        job.num_waiting += 1
        try:
            return await asyncio.shield(job.verdict)
        finally:
            job.num_waiting -= 1
            if not job.num_waiting and not job.verdict.done():
                del self._jobs[job.name]
                self._short.discard(job)
                self._long.discard(job)
                job.abandoned.set()

    async def _work(self, lane: Lane) -> None:
        while True:
            job = await lane.next()
            try:
                await self._try(job, lane)
            except Exception as error:  # ends this job alone
                logger.exception("a grammar could not be tried")
                self._fail(job, Unavailable(f"the grammar could not be tried ({type(error).__name__})"))

    async def _try(self, job: Job, lane: Lane) -> None:
        try:
            translated = await self._compiler.attempt(job.grammar, lane.seconds, job.abandoned)
        except TooSlow as refusal:
            self._fail(job, refusal)
        except ValueError as refusal:
            self._remember(job, str(refusal))
        except TooLong:
            self._lengthen(job, lane)
        except Crashed:
            self._fail(job, ValueError(CRASHED))
        except Unavailable as error:
            self._fail(job, error)
        else:
            if not job.abandoned.is_set():
                self._remember(job, translated)

    def _lengthen(self, job: Job, lane: Lane) -> None:
        """Queues a job whose time is up for a longer try, if there is one."""
        if job.abandoned.is_set():
            return
        if lane.seconds >= self._seconds:
            limit = f"{self._seconds:g} s of CPU time to compile"
            self._fail(job, ValueError(f"the grammar takes longer than {limit}; simplify it"))
            return
        try:
            self._long.add(job)
        except Busy as busy:
            self._fail(job, busy)

    def _remember(self, job: Job, verdict: Verdict) -> None:
        self._verdicts.add(job.name, verdict)
        if not job.abandoned.is_set():
            del self._jobs[job.name]
            job.verdict.set_result(verdict)

    def _fail(self, job: Job, error: Exception) -> None:
        """Fails a job. No verdict is remembered, since the grammar may compile another time."""
        if not job.abandoned.is_set():
            del self._jobs[job.name]
            job.verdict.set_exception(error)
