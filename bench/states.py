"""Measures states from an engine in another process: GB/s by the way they take, and EAGLE3's training by tokens/s,
against a trainer that runs the target itself, and against what each side does alone.

    python bench/states.py --shape llama31-8b    # the engine on the last GPU, the trainer on the first
    python bench/states.py --shape tiny          # a trial, on a CPU

States whose speed is measured lie in the engine's memory already. Prints a JSON line.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import islice, repeat
from queue import SimpleQueue
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from slipstream.bench.lines import Lines, origin
from slipstream.bench.random_targets import published_target
from slipstream.bench.training import OPTIM, WARM_UP, StepConfig, build, clock, make_batch
from slipstream.config import parse
from slipstream.models.states.address import Address
from slipstream.models.states.client import StateClient
from slipstream.models.targets.decoder import Target
from slipstream.serve.engine.state_passes import PackedText, StatePasses
from slipstream.serve.engine.state_service import StateService, facts_of
from slipstream.train.batches import Batch
from slipstream.train.engine_states import EngineStates
from slipstream.train.loop import start
from slipstream.train.optim import CLIP, build_optimizers
from slipstream.train.options import DataOptions, RunOptions
from slipstream.train.training import DraftTraining

SECONDS = 120.0  # in which an engine answers
PREFETCH = 3  # batches
WARM_ANSWERS = 10  # after which all memory that answers pass through has been written once
KINDS = ("computed", "stored")  # states of the engine


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesConfig:
    """Options of this benchmark."""

    shape: str = "llama31-8b"
    """Sizes of target and draft: one of bench/random_targets.py."""
    sequence: int = 4096
    """Tokens in a packed row."""
    rows: int = 4
    """Packed rows in a step."""
    steps: int = 12
    """Training steps measured, after three that warm up."""
    answers: int = 24
    """Answers of the engine measured, after ten."""
    in_process: bool = True
    """Train with the target in process first."""
    output: str | None = None
    """File to append the JSON line to."""
    folder: str = ""
    """The engine's own process: where its sockets are."""
    ports: list[int] | None = None
    """Likewise: of TCP, for computed and for stored states."""

    @property
    def step(self) -> StepConfig:
        sizes = {"sequence": self.sequence, "rows": self.rows, "document": min(1024, self.sequence)}
        return StepConfig(shape=self.shape, drafter="eagle3", **sizes)


class StoredStates(StatePasses):
    """Answers with random states."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._states: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def compute(self, text: PackedText) -> tuple[Tensor, Tensor]:
        count = text.tokens.numel()
        layers = len(text.layers)
        if (count, layers) not in self._states:
            options: dict[str, Any] = {"dtype": self.target.dtype, "device": self.target.device}
            size = self.target.config.hidden_size
            states = torch.randn(count, layers, size, **options)
            self._states[count, layers] = states, torch.randn(count, size, **options)
        return self._states[count, layers]


def run_engine(config: StatesConfig) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = published_target(config.shape, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    work: SimpleQueue[Any] = SimpleQueue()
    for kind, port, passes in zip(KINDS, config.ports or (), (StatePasses(target), StoredStates(target)), strict=True):
        for address in addresses(config.folder, kind, port):
            StateService(address, (), facts_of(passes, "random"), passes, work.put)
    while True:
        work.get()()


def addresses(folder: str, kind: str, port: int) -> tuple[Address, Address]:
    return Address("", path=f"{folder}/{kind}"), Address("127.0.0.1", port)


def start_engine(config: StatesConfig, folder: str) -> "subprocess.Popen[bytes]":
    environment = dict(os.environ)
    if torch.cuda.is_available():
        environment["CUDA_VISIBLE_DEVICES"] = str(torch.cuda.device_count() - 1)
    words = [sys.executable, __file__, "--shape", config.shape, "--folder", folder, "--ports", str(config.ports)]
    return subprocess.Popen(words, env=environment)


def batches(config: StatesConfig, training: DraftTraining, address: Address, *, is_mapped: bool) -> Iterator[Batch]:
    """Yields the same batch with states from the engine at `address`, through its memory if `is_mapped`."""
    device = training.device
    client = StateClient("states", [address], None, SECONDS, waits=True, device=device if is_mapped else None)
    layers = tuple(training.draft.config.aux_layers)
    source = EngineStates(client, layers, final_state=True, is_fp8=False, pinned=device.type == "cuda")
    batch = make_batch(config.step)
    ahead = deque(source.add(batch, []) for _ in range(PREFETCH))
    with closing(client):
        while True:
            ahead.append(source.add(batch, []))
            yield ahead.popleft()


def ask(config: StatesConfig, training: DraftTraining, address: Address, *, is_mapped: bool) -> tuple[float, float]:
    """GB of states and tokens a second that reach the trainer's device."""
    device = training.device
    with closing(batches(config, training, address, is_mapped=is_mapped)) as answers:
        for batch in islice(answers, WARM_ANSWERS):
            read(batch, device)
        began = clock(device)
        num_bytes = sum(read(batch, device) for batch in islice(answers, config.answers))
        seconds = clock(device) - began
        return num_bytes / seconds / 1e9, config.answers * config.sequence * config.rows / seconds


def read(batch: Batch, device: torch.device) -> int:
    """Waits for a batch's states; returns their bytes."""
    assert batch.cached is not None
    states = batch.cached.to(device).states
    return states["aux_states"].nbytes + states["final"].nbytes


def train(config: StatesConfig, training: DraftTraining, accelerator: Accelerator, rows: Iterator[Batch]) -> float:
    """Tokens a second."""
    model, *optimizers = accelerator.prepare(training.train(), *build_optimizers(training, OPTIM))

    def step(batch: Batch) -> None:
        accelerator.backward(model(batch)[0] / batch.num_supervised)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    for batch in islice(rows, WARM_UP):
        step(batch)
    began = clock(training.device)
    for batch in islice(rows, config.steps):
        step(batch)
    return config.steps * config.sequence * config.rows / (clock(training.device) - began)


def measure(config: StatesConfig, folder: str) -> dict[str, Any]:
    accelerator = start(RunOptions(output="", data=DataOptions(path="")))
    training = build(config.step, accelerator.device)
    in_process = train(config, training, accelerator, repeat(make_batch(config.step))) if config.in_process else None
    training.target.layers.to("meta")
    (unix, tcp), (stored_unix, stored_tcp) = (
        addresses(folder, kind, port) for kind, port in zip(KINDS, config.ports or (), strict=True)
    )
    ways = {"TCP": (stored_tcp, False), "Unix socket": (stored_unix, False), "memory": (stored_unix, True)}
    speeds = {name: ask(config, training, address, is_mapped=mapped)[0] for name, (address, mapped) in ways.items()}
    rates = {"in process": in_process} if in_process else {}
    for name, address in (("memory", unix), ("TCP", tcp), ("trainer alone", stored_unix)):
        with closing(batches(config, training, address, is_mapped=name != "TCP")) as rows:
            rates[name] = train(config, training, accelerator, rows)
    rates["engine alone"] = ask(config, training, unix, is_mapped=True)[1]
    return {
        "gb_per_second": {name: round(speed, 2) for name, speed in speeds.items()},
        "tokens_per_second": {name: round(rate) for name, rate in rates.items()},
    }


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def main() -> None:
    config = parse(StatesConfig, None, prog="bench/states.py", description="States from an engine.")
    if config.folder:
        run_engine(config)
    config = replace(config, ports=[free_port() for _ in KINDS])
    with tempfile.TemporaryDirectory() as folder:
        engine = start_engine(config, folder)
        began = time.monotonic()
        try:
            figures = measure(config, folder)
        finally:
            engine.kill()
            engine.wait()
    lines = Lines(config.output)
    options = {name: value for name, value in asdict(config).items() if name not in ("output", "folder", "ports")}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lines.add({**origin("states", device), **options, **figures, "seconds": round(time.monotonic() - began)})
    lines.print()


if __name__ == "__main__":
    main()
