"""A model of requests and of the drafts that they get, in simulated time, for tests of the acceptance alarm."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slipstream.serve.engine.acceptance_alarm import AcceptanceAlarm
from slipstream.serve.engine.scheduler import Sequence
from slipstream.serve.request import Request, SamplingParams


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests of one client. Each has an acceptance rate of its own, Beta distributed with mean `rate`; the larger
    `alike` is, the less they differ. Prompts and answers have geometric lengths with these means."""

    share: float
    rate: float
    alike: float = 12.0
    client: str = ""
    labels: tuple[str, ...] = ("chat",)
    temperature: float = 0.0
    prompt_len: int = 300
    answer_len: int = 150


CHAT = Kind(0.4, 0.68)
MIXED = (
    CHAT,
    Kind(0.2, 0.85, labels=("chat", "tools"), prompt_len=3000, answer_len=60),
    Kind(0.2, 0.52, temperature=0.8, labels=("chat", "reasoning"), answer_len=600),
    Kind(0.1, 0.45, labels=("completion",), alike=4.0, answer_len=40),
    Kind(0.1, 0.6, prompt_len=20000, answer_len=200),
)


@dataclass(slots=True)
class Running:
    sequence: Sequence
    rate: float
    left: int


@dataclass
class Traffic:
    """`num_slots` requests at once, a round each in a step of `step_s` seconds. `quality` multiplies the rates of all
    drafts; `shares` may drift. A draft of `depth` tokens is accepted token by token."""

    kinds: tuple[Kind, ...]
    seed: int
    num_slots: int = 16
    step_s: float = 0.1
    depth: int = 3
    quality: float = 1.0
    drift_s: float = 0.0  # period of the shares' drift; 0: they stay
    drafted: float = 1.0  # share of rounds that draft
    verified: float = 1.0  # share of proposals that passes verify
    now: float = 0.0
    tokens: int = 0
    raised: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    pick: Callable[[random.Random], Kind] | None = None

    def __post_init__(self):
        self.random = random.Random(self.seed)
        self.numpy = np.random.default_rng(self.seed)
        self.running: list[Running | None] = [None] * self.num_slots
        self.number = 0

    def run(self, alarm: AcceptanceAlarm, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Serves for so long, or until something holds; whether it does."""
        end = self.now + seconds
        while self.now < end:
            self.step(alarm)
            for record, charts in alarm.charts.items():
                for category, chart in charts.items():
                    if chart.alarm is not None:
                        self.raised[category, record, chart.alarm.clients] += 1
            if until():
                return True
        return False

    def step(self, alarm: AcceptanceAlarm):
        for slot, running in enumerate(self.running):
            if running is None:
                self.running[slot] = self.start(alarm, slot)
        entries = [running for running in self.running if running is not None]
        rates = np.array([running.rate for running in entries]) * self.quality
        accepted = self.numpy.random((len(rates), self.depth)) < rates[:, None]
        lengths = np.cumprod(accepted, axis=1).sum(axis=1)
        is_seen = self.numpy.random(len(rates)) < self.verified
        is_drafted = self.numpy.random(len(rates)) < self.drafted if self.drafted < 1 else np.ones(len(rates), bool)
        lengths *= is_drafted
        alarm.record(np.flatnonzero(is_drafted), np.where(is_seen, accepted[:, 0], rates)[is_drafted])
        for slot, (running, length) in enumerate(zip(entries, lengths.tolist(), strict=True)):
            num_tokens = min(length + 1, running.left)
            running.left -= num_tokens
            self.tokens += num_tokens
            running.sequence.tokens += [1] * num_tokens
            running.sequence.stats.completion_tokens += num_tokens
            running.sequence.count_round(self.depth, min(length, num_tokens))
            if running.left == 0:
                alarm.release(running.sequence)
                self.running[slot] = None
        self.now += self.step_s

    def start(self, alarm: AcceptanceAlarm, slot: int) -> Running:
        weights = [kind.share for kind in self.kinds]
        if self.drift_s:
            phases = [2 * np.pi * (self.now / self.drift_s + index / len(weights)) for index in range(len(weights))]
            weights = [weight * (1.02 + np.sin(phase)) for weight, phase in zip(weights, phases, strict=True)]
        kind = self.pick(self.random) if self.pick is not None else self.random.choices(self.kinds, weights)[0]
        rate = self.random.betavariate(kind.alike * kind.rate, kind.alike * (1 - kind.rate))
        length = 2 + int(self.random.expovariate(1 / kind.answer_len))
        self.number += 1
        sequence = sequence_of(f"{self.number}", kind, [1] * (1 + int(self.random.expovariate(1 / kind.prompt_len))))
        sequence.slot = slot
        sequence.stats.completion_tokens = sequence.stats.prefills = 1
        alarm.admit(sequence)
        return Running(sequence, rate, length)


def sequence_of(name: str, kind: Kind, prompt: list[int], **params: Any) -> Sequence:
    sampling = SamplingParams(max_tokens=1 << 20, temperature=kind.temperature, seed=0, **params)
    request = Request(id=name, prompt=prompt, params=sampling, client=kind.client, labels=kind.labels)
    return Sequence.of(request, frozenset(), 0)
