"""`serve --learn`: a process beside the engine trains the draft on what it serves (train/learn.py).

The engine sends the tokens of each answer that has ended, with the states that the target computed. It keeps none of
them: a text for which the trainer has no time is dropped. Texts of requests with a `cache_salt` are never sent. At the
start the trainer asks for states of texts that the draft was trained on, which the engine computes between two steps.
What the trainer offers is a checkpoint, which comes in as any other weights do, on trial (draft_swaps.py).
The trainer ends with the engine. If it ends by itself, the engine goes on, and another trainer goes on from the last
weights that passed their trial, unless it lived shorter than LEAST_SECONDS. The engine saves weights that pass after
the end of their trainer.
On a GPU of the engine it starts first, so that the cache is sized by the memory that it leaves.
"""

import json
import logging
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.models.files.atomic import atomic_folder
from slipstream.models.files.learning import (
    TEXT_LEN,
    LearnJob,
    Line,
    Load,
    Offer,
    Outcome,
    Ready,
    ServedText,
    StateAnswer,
    StateQuestion,
    Verdict,
)
from slipstream.models.files.outputs import CHECKPOINT
from slipstream.models.files.scratch import ScratchFolder
from slipstream.serve import processes
from slipstream.serve.engine.engine import Engine
from slipstream.serve.engine.engine_plan import EnginePlan, read_plan
from slipstream.serve.engine.scheduler import Sequence
from slipstream.serve.engine.state_passes import PackedText
from slipstream.serve.options import EngineConfig, LearnOptions, find_target
from slipstream.serve.runner.model_runner import is_out_of_memory, to_host

MODULE = "slipstream.train.learn"
MOST_UNSENT = 64  # messages, above which texts are dropped
EXIT_SECONDS = 2.0
LEAST_SECONDS = 60.0
SHARE = 0.1  # of a GPU that the engine uses

Post = Callable[[Callable[[], None]], None]

logger = logging.getLogger(__name__)


class Unsent(NamedTuple):
    message: ServedText | StateAnswer | Verdict
    line: Line  # to the process that it is for
    landed: torch.cuda.Event | None = None  # after which the host has the states


def with_states(config: EngineConfig) -> EngineConfig:
    """Has the engine keep the states that the draft reads, and the one that its loss reads. Raises ValueError for a
    draft without a checkpoint to go on from."""
    source = config.source
    if not source.has_network or source.is_in_target:
        raise ValueError(f"learn.device is set, but draft {config.draft} has no checkpoint to go on from; name one")
    plan = read_plan(config)
    if plan.draft.adapters:
        raise ValueError("learn.device is set, and a draft with drafter.adapters takes no other weights; leave one out")
    layers: tuple[int, ...] = plan.draft.network.aux_layers  # type: ignore[union-attr]
    last = plan.spec.num_layers
    return replace(config, keep_states=layers if last in layers else (*layers, last))


def text_of(sequence: Sequence, read: Callable[[int], Tensor]) -> ServedText | None:
    """Returns the text of a request that has ended, up to TEXT_LEN tokens, with its states on their way to the host,
    which `read` copies; None for one that opted out by a `cache_salt`, and where states or an answer of two tokens are
    lacking."""
    request = sequence.request
    tokens = sequence.tokens[:TEXT_LEN]
    if request.namespace or len(tokens) < len(request.prompt) + 2:
        return None
    states = read(len(tokens) - 1)
    if len(states) < len(tokens) - 1:
        return None
    return ServedText(request.client, [*tokens], len(request.prompt), on_host(states))


def on_host(states: Tensor) -> Tensor:
    """Starts a copy to the host, of 16 bits where the states are not of 32."""
    return to_host(states if states.dtype == torch.float32 else states.bfloat16())


def end_of_copy(copy: Tensor) -> torch.cuda.Event | None:
    """Returns an event after the copies to pinned memory so far."""
    if not copy.is_pinned():
        return None
    landed = torch.cuda.Event()
    landed.record()
    return landed


def is_shared(device: str, plan: EnginePlan) -> bool:
    """Whether the engine uses the trainer's GPU."""
    place = torch.device(device)
    return place.type == plan.device.type == "cuda" and (place.index or 0) < plan.config.tp


class Learner:
    """The engine's end. The trainer starts with it, `attach` follows."""

    def __init__(self, config: EngineConfig, options: LearnOptions) -> None:
        """`config`: the engine's. Raises ValueError where the engine's GPU has no place for the trainer."""
        shared = is_shared(options.device, read_plan(config))
        self.config = config
        self._folder = ScratchFolder("learn")
        _, target = find_target(config)
        folder = self._folder.name
        self._job = LearnJob(
            target=str(target),
            draft=config.draft,
            trust_remote_code=config.trust_remote_code,
            layers=list(config.keep_states),
            device=options.device,
            share=options.share or (SHARE if shared else 1.0),
            memory=int(options.memory_gb * 1e9),
            folder=folder,
            output=options.output or f"{folder}/passed",
            data=options.data,
        )
        self.num_dropped = 0  # texts
        self._offered = ""  # folder of this process's weights that have no verdict
        self._orphan = ""  # likewise, of a process that has ended
        self._saving = threading.Thread()
        self._unsent: SimpleQueue[Unsent] = SimpleQueue()  # texts, and one thing that the trainer waits for
        self._is_closed = False
        self._start()
        if shared:
            self._await_memory()

    def _await_memory(self) -> None:
        with suppress(EOFError, OSError):
            self._line.receive()
            return
        status = self.process.wait()
        self._folder.cleanup()
        raise ValueError(
            f"learn.device is {self._job.device}, where training does not start (status {status}, see the log above); "
            "free memory of that GPU, or give another device"
        )

    def attach(self, engine: Engine, offer: Callable[[Offer], None], post: Post) -> None:
        """Begins to learn. `offer` is called with each Offer, from another thread; `post` calls in that of `step`."""
        self._offer = offer
        self._post = post
        self._passes = engine.state_passes()
        engine.on_load = Load(self._job.folder).set
        engine.on_states = self.note
        engine.draft.on_verdict = self.judge
        for work in (self._send, self._receive):
            threading.Thread(target=work, name=f"slipstream-learn{work.__name__}", daemon=True).start()

    def _start(self) -> None:
        """Starts the process, with the last draft that passed its trial, or else the engine's."""
        job = self._job
        if (Path(job.output) / "config.json").is_file():
            job = replace(job, draft=job.output)
        end, other = socket.socketpair()
        with other:
            argv = [sys.executable, "-P", "-m", MODULE, str(other.fileno()), json.dumps(asdict(job))]
            # A session of its own: Ctrl-C is for the server, at whose end the socket closes.
            self.process = subprocess.Popen(
                argv,
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                env=processes.child_environment(),
                start_new_session=True,
            )
        self._line = Line(end)

    def note(self, sequence: Sequence, read: Callable[[int], Tensor]) -> None:
        """Takes the text of a request that ends, whose states `read` copies."""
        text = text_of(sequence, read)
        if text is None:
            return
        if self._unsent.qsize() < MOST_UNSENT:
            self._unsent.put(Unsent(text, self._line, end_of_copy(text.states)))
        else:
            self.num_dropped += 1

    def answer(self, question: StateQuestion, line: Line) -> None:
        """Computes states that the trainer at the end of `line` wants, between two steps."""
        tokens = torch.tensor([[*chain(*question.texts)]])
        positions = torch.tensor([[*chain(*(range(len(text)) for text in question.texts))]], dtype=torch.int32)
        copy = torch.empty(0, len(self._job.layers), 1)
        vocab_size = self._passes.target.config.vocab_size
        if 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
            try:
                states, _ = self._passes.compute(PackedText(tokens.int(), positions, tuple(self._job.layers)))
                copy = on_host(states)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
        else:  # it would end the engine
            logger.warning(
                "learn.data has token ids outside of the target's vocabulary of %d; prepare it again", vocab_size
            )
        self._unsent.put(Unsent(StateAnswer(copy), line, end_of_copy(copy)))

    def judge(self, outcome: Outcome) -> None:
        """Tells the trainer what became of its offer. A trial that ends is that of a trainer which has ended, if there
        is one, since a later offer is refused meanwhile."""
        if self._orphan and (outcome != "refused" or not self._offered):
            if outcome == "passed":
                self._saving = threading.Thread(target=self._save, args=(self._orphan,), name="slipstream-learn-save")
                self._saving.start()
            self._orphan = ""
        elif self._offered:
            self._offered = ""
            self._unsent.put(Unsent(Verdict(outcome), self._line))

    def _save(self, folder: str) -> None:
        try:
            with atomic_folder(Path(self._job.output), CHECKPOINT.check) as new:
                shutil.copytree(folder, new, dirs_exist_ok=True)
        except (OSError, ValueError) as error:
            logger.error("learn: weights that passed their trial could not be saved: %s", error)

    def close(self) -> None:
        """Ends the trainer, whose texts are gone then."""
        self._is_closed = True
        self._line.close()
        processes.end(self.process, EXIT_SECONDS)
        if self._saving.ident is not None:
            self._saving.join()
        self._folder.cleanup()

    def _send(self) -> None:
        while not self._is_closed:
            message, line, landed = self._unsent.get()
            if landed is not None:
                landed.synchronize()  # sync, on this thread
            try:
                line.send(message)
            except OSError:
                self.num_dropped += 1

    def _receive(self) -> None:
        while True:
            began = time.monotonic()
            with suppress(EOFError, OSError):
                while True:
                    message = self._line.receive()
                    if isinstance(message, StateQuestion):
                        self._post(partial(self.answer, message, self._line))
                    elif not isinstance(message, Ready):
                        self._offered = message.folder
                        self._offer(message)
            if self._is_closed:
                return
            status = self.process.wait()
            self._orphan = self._offered or self._orphan
            self._offered = ""
            goes_on = time.monotonic() - began >= LEAST_SECONDS
            effect = "another one starts" if goes_on else "serving goes on without"
            logger.warning("the process that trains the draft ended (status %d); %s", status, effect)
            if not goes_on:
                return
            self._start()
