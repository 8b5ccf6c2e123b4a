"""A rank above 0: python -m slipstream.serve.engine.follower (serve/engine/team.py starts it).

It builds the runner of the plan that rank 0 sends, and executes its plans. It measures and chooses nothing. It sends
signs of life, and exits when rank 0 is gone.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Collection
from dataclasses import replace
from typing import cast

import torch

from slipstream.kernels.collectives.ranks import Ranks
from slipstream.serve import logs
from slipstream.serve.drafters.base import DraftWeights
from slipstream.serve.engine.build import Capture, Networks, load_networks, make_runner, measure
from slipstream.serve.engine.engine_plan import EnginePlan, Space
from slipstream.serve.engine.plan import StepPlan
from slipstream.serve.engine.state_passes import PackedText, StatePasses
from slipstream.serve.engine.team import (
    BEAT,
    BEAT_SECONDS,
    MOST_BYTES,
    RankRunner,
    bytes_of_process,
    device_of,
    digest_of,
    meet,
)
from slipstream.serve.pipe import Pipe
from slipstream.serve.runner.model_runner import InFlight

logger = logging.getLogger(__name__)


class Follower:
    """Does what rank 0 orders: each method is an order. Those that rank 0 waits for send an answer."""

    plan: EnginePlan
    networks: Networks
    runner: RankRunner
    _states: StatePasses
    _file: str

    def __init__(self, rank: int, world: int, channel: Pipe) -> None:
        self.rank = rank
        self.world = world
        self.channel = channel
        self.device: torch.device | None = None
        self.last = (0, 0)  # number and digest of the last step that was read
        self._ranks: Ranks | None = None
        self._begun: InFlight | None = None  # a step that is launched up to where it samples
        self._launched: InFlight | None = None  # the last step

    def begin(self, device: torch.device, file: str) -> None:
        """Takes its device, where rank 0 has this one. `file`: where ranks meet."""
        device = device_of(self.rank, device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.device = device
        self._file = file

    def load(self, plan: EnginePlan) -> None:
        """Loads this rank's part, and answers how much room its device has."""
        self.load_target(plan)
        self.channel.send(measure(plan, self.networks))

    def load_target(self, plan: EnginePlan) -> None:
        """Loads this rank's part, for passes that need no KV cache."""
        logs.configure(getattr(plan.config, "log_format", "text"))
        self.plan = plan
        self.networks = load_networks(plan, self.rank, self.meet)
        self._states = StatePasses(self.networks.target)

    def compute_states(self, text: PackedText) -> None:
        self._states.compute(text)

    def meet(self) -> Ranks:
        """See Team."""
        if self._ranks is None:
            self.channel.send(None)
            assert self.device is not None
            self._ranks = meet(self.device, self.rank, self.world, self._file)
        return self._ranks

    def make_runner(self, space: Space, capture: Capture) -> None:
        runner = make_runner(replace(self.plan, space=space), self.networks, capture, RankRunner)
        self.runner = cast(RankRunner, runner)

    def time_passes(self) -> None:
        """Runs the passes that rank 0 times."""
        self.runner.time_passes()

    def time_sums(self) -> None:
        self.channel.send(self.runner.sum_seconds())

    def drop(self, sizes: Collection[int]) -> None:
        self.runner.drop(sizes)

    def forget(self) -> None:
        self.runner.forget()

    def load_draft(self, weights: DraftWeights) -> None:
        self.runner.load_draft(weights)

    def launch(self, plan: StepPlan, up_to_sampling: bool) -> None:
        flight = self.runner.launch(plan, up_to_sampling=up_to_sampling)
        if up_to_sampling:
            self._begun = flight
        else:
            self._read_before(flight)

    def finish(self, plan: StepPlan) -> None:
        assert self._begun is not None
        self._read_before(self.runner.finish(self._begun, plan))
        self._begun = None

    def _read_before(self, flight: InFlight) -> None:
        """Reads the step before `flight`, while that runs: rank 0 compares the tokens with its own."""
        if self._launched is not None:
            self.last = self._launched.plan.number, digest_of(self._launched.read())
        self._launched = flight

    def end(self) -> None:
        """Frees the engine's memory."""
        del self.runner, self.networks, self._states
        self._begun = self._launched = None
        self.last = (0, 0)


def beat(life: socket.socket, follower: Follower) -> None:
    """Sends signs of life. Exits at once when rank 0 is gone, even during a step or while loading."""
    while True:
        memory = 0 if follower.device is None else bytes_of_process(follower.device)
        try:
            life.send(BEAT.pack(memory, *follower.last))
        except OSError:
            os._exit(1)
        time.sleep(BEAT_SECONDS)


def report(life: socket.socket, error: Exception) -> None:
    """Sends a sentence to rank 0, unless that is gone, which has caused the error."""
    text = " ".join(str(error).split())
    sentence = text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
    message = sentence.encode()[: MOST_BYTES // 2]
    try:
        life.send(message.ljust(BEAT.size + 1))  # longer than a sign of life
    except OSError:
        return
    if not isinstance(error, ValueError):
        logger.exception("the rank failed")


def main() -> None:
    channel_end, life_end, rank, world = map(int, sys.argv[1:])
    life = socket.socket(fileno=life_end)
    channel = Pipe(socket.socket(fileno=channel_end))
    follower = Follower(rank, world, channel)
    threading.Thread(target=beat, args=(life, follower), daemon=True).start()
    logs.configure("text")
    try:
        while True:
            order, arguments = channel.receive()
            getattr(follower, order)(*arguments)
    except (EOFError, ConnectionError):
        os._exit(0)  # rank 0 has closed the channel
    except Exception as error:
        report(life, error)
        os._exit(1)


if __name__ == "__main__":
    main()
