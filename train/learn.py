"""The trainer of `serve --learn`: goes on training a draft with what its server answers (serve/engine/learning.py).

python -m slipstream.train.learn FD JOB, which the engine's process starts. Texts with the target's states come in on a
socket and wait in memory (text_ring.py); nothing of them is written to disk, and all of it is gone when the process
ends. A round trains the draft by its family's objective on the texts that are there, walks held-out ones with the
weights that serve and with its own, and offers its own if they are accepted longer by GAIN. Then it waits: the engine
lets them serve on trial. If they are taken back, training goes on from those that serve.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import importlib
import json
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from slipstream.models.drafts.source import drafter_of
from slipstream.models.files.checkpoint import read_json, resolve
from slipstream.models.files.learning import LearnJob, Line, Offer, Outcome, ServedText, Verdict
from slipstream.models.layers.rope import RotaryEmbedding
from slipstream.models.targets.decoder import load_config
from slipstream.models.targets.frozen import load_frozen_target
from slipstream.train.batches import PackedRows
from slipstream.train.checkpoints import Progress
from slipstream.train.loop import Loop, dtype_of_weights
from slipstream.train.optim import build_optimizers
from slipstream.train.options import DataOptions, EvaluationOptions, OptimOptions
from slipstream.train.state_source import StateSource
from slipstream.train.text_ring import MemoryStates, ServedTexts, Splits, dataset_of
from slipstream.train.training import DraftTraining
from slipstream.train.warm_start import read_start

STEPS = 25  # of a round
LEAST_TEXTS = 16  # of the train split, from which on it trains
LEAST_HELD_OUT = 4
GAIN = 0.05  # of (accept length - 1), from which on weights are offered
LENGTH = 2048  # tokens of a packed row, at most
NICE = 10
WAIT_SECONDS = 0.5


class Channel:
    """The trainer's end of the socket: a thread puts texts into memory."""

    def __init__(self, line: Line, texts: ServedTexts, folder: Path) -> None:
        self.line = line
        self.texts = texts
        self.verdicts: SimpleQueue[Outcome] = SimpleQueue()
        self._folder = folder
        threading.Thread(target=self._listen, name="slipstream-learn", daemon=True).start()

    def _listen(self) -> None:
        try:
            while True:
                message = self.line.receive()
                if isinstance(message, Verdict):
                    self.verdicts.put(message.outcome)
                else:
                    self.texts.add(message)
        except (EOFError, OSError):
            shutil.rmtree(self._folder, ignore_errors=True)
            os._exit(0)  # the engine is gone, and with this process all texts


class Trainer:
    """Trains in rounds. `serving`: the weights that serve, on the host."""

    def __init__(self, job: LearnJob) -> None:
        self.job = job
        self.path = Path(job.target)
        self.config = load_config(self.path, job.trust_remote_code)
        folder = resolve(job.draft)
        self.drafter = drafter_of(read_json(folder / "config.json"), job.draft)
        module = importlib.import_module(f"slipstream.train.{self.drafter}")
        kind: type[DraftTraining] = module.program.keywords["kind"]
        options_class = module.main.args[1]
        draft: Any = read_start("draft", str(folder), kind.Network, self.drafter, self.config)
        device = torch.device(job.device)
        length = min(LENGTH, draft.config.max_position_embeddings)
        self.options = options_class(
            target=job.target,
            output="",
            data=DataOptions(path="served", max_length=length, long_documents="cut"),
            optim=OptimOptions(steps=1000, schedule="constant"),
            evaluation=EvaluationOptions(every=STEPS),
        )
        on_cpu = device.type == "cpu"
        self.accelerator = Accelerator(cpu=on_cpu, mixed_precision="no" if on_cpu else "bf16")
        target = load_frozen_target(self.path, draft.config.aux_layers, device, job.trust_remote_code, last_layers=0)
        options = self.options
        num_positions = length + max(options.draft.reach, options.evaluation.depth)
        rope = RotaryEmbedding(draft.config.rope, draft.config.head_dim, num_positions).to(device)
        draft.requires_grad_(True)
        training = kind(draft.to(device), target, rope, options.draft, options.evaluation.depth, options.seed)
        training.configure(options.evaluation)
        training.target.read_as = dtype_of_weights(self.accelerator)
        weights = {name: tensor.clone() for name, tensor in training.state_dict().items()}
        training.start(continues=True)  # says what is trained
        training.load_state_dict(weights)
        optimizers = build_optimizers(training, options.optim)
        self.training = training
        self.model, *self.optimizers = self.accelerator.prepare(training, *optimizers)
        self.progress = Progress(first_length=1000)
        self.serving = self.weights()

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().cpu().clone() for name, tensor in self.training.state_dict().items()}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        self.training.load_state_dict(weights)

    def loop(self, splits: Splits) -> Loop:
        """Returns the loop over some texts; optimizers and progress go on."""
        return Loop(
            self.accelerator,
            self.model,
            self.optimizers,
            self.options,
            self.rows(splits.train),
            self.rows(splits.heldout),
            self.progress,
            self.training,
        )

    def rows(self, texts: list[ServedText]) -> PackedRows:
        packed = PackedRows(dataset_of(texts), self.options.data.max_length)
        store: Any = MemoryStates(texts, tuple(self.job.layers), self.config.num_layers)
        layers = self.training.draft.config.aux_layers
        source = StateSource({0: store}, "served", layers, final_state=self.training.reads_final_state)
        packed.add_states = source.add
        return packed

    def accept_length(self, loop: Loop, weights: Mapping[str, Tensor]) -> float:
        """The simulated accept length of held-out texts with these weights; the trained ones stay."""
        trained = self.weights()
        self.load(weights)
        try:
            return loop.evaluate()["eval_accept_length"]
        finally:
            self.load(trained)

    def write(self, folder: Path, figures: Mapping[str, float]) -> None:
        """Writes a servable checkpoint. Its run.json says from which weights it goes on, and nothing of the texts."""
        folder.mkdir(parents=True)
        run = {"learned_from": self.job.draft, "step": self.progress.step, "metrics": dict(figures)}
        self.training.write(self.training.state_dict(), folder, run)


def learn(job: LearnJob, channel: Channel) -> None:
    """Learns until the engine is gone."""
    trainer = Trainer(job)
    while True:
        splits = channel.texts.now()
        if len(splits.train) < LEAST_TEXTS or len(splits.heldout) < LEAST_HELD_OUT:
            time.sleep(WAIT_SECONDS)
            continue
        loop = trainer.loop(splits)
        for _ in range(STEPS):
            loop.train_step(False)
        before = trainer.accept_length(loop, trainer.serving)
        after = trainer.accept_length(loop, trainer.weights())
        if after - before <= GAIN * max(before - 1, GAIN):
            continue
        folder = Path(job.folder) / f"step-{trainer.progress.step}"
        trainer.write(folder, {"accept_length": after})
        channel.line.send(Offer(str(folder), before, after))
        if channel.verdicts.get() == "passed":
            trainer.serving = trainer.weights()
        else:
            trainer.load(trainer.serving)
        shutil.rmtree(folder)


def main() -> None:
    number, text = sys.argv[1:]
    job = LearnJob(**json.loads(text))
    os.nice(NICE)
    texts = ServedTexts(job.memory)
    learn(job, Channel(Line(socket.socket(fileno=int(number))), texts, Path(job.folder)))


if __name__ == "__main__":
    main()
