"""The trainer of `serve --learn`: goes on training a draft with what its server answers (serve/engine/learning.py).

python -m slipstream.train.learn FD JOB, which the engine's process starts. Texts with the target's states come in on a
socket and wait in memory (text_ring.py); nothing of them is written to disk, and all of it is gone when the process
ends. A round trains the draft by its family's objective on the texts that are there, old ones among them, and walks
held-out ones with the weights that serve and with new ones, which lie between the trained and the first. It offers them
if recent texts are accepted longer by GAIN and past ones as long as ever but for LOSS. Then it waits: the engine lets
them serve on trial. If they are taken back, training goes on from those that serve.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import importlib
import json
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from slipstream.models.drafts.source import drafter_of
from slipstream.models.files.atomic import atomic_folder
from slipstream.models.files.checkpoint import read_json, resolve, tokenizer_hash
from slipstream.models.files.learning import LearnJob, Line, Offer, Outcome, ServedText, Verdict
from slipstream.models.files.outputs import CHECKPOINT
from slipstream.models.layers.rope import RotaryEmbedding
from slipstream.models.targets.decoder import load_config
from slipstream.models.targets.frozen import FrozenTarget, load_frozen_target
from slipstream.models.targets.pretrained import load_tokenizer
from slipstream.train.batches import PackedRows, Share, load_prepared
from slipstream.train.checkpoints import Progress
from slipstream.train.loop import Loop, dtype_of_weights
from slipstream.train.optim import build_optimizers
from slipstream.train.options import DataOptions, EvaluationOptions, OptimOptions
from slipstream.train.state_source import StateSource
from slipstream.train.text_ring import MemoryStates, ServedTexts, Split, Splits, dataset_of
from slipstream.train.training import DraftTraining
from slipstream.train.warm_start import read_start

STEPS = 25  # of a round
LEAST_TEXTS = 16  # of the train split, from which on it trains
LEAST_HELD_OUT = 4
GAIN = 0.05  # of (accept length - 1) of recent texts, from which on weights are offered
LOSS = 0.03  # of the accept length of past texts, up to which they are
RATE = 0.3  # of the learning rate of a run from scratch
WAY = 0.5  # from the first weights to the trained ones, which weights on offer have gone (Wortsman et al., 2109.01903)
PAST = 0.5  # share of past texts in an epoch, if there are enough of them
MOST_PASSES = 8  # through a text in an epoch
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


class Lengths(NamedTuple):
    """Simulated accept lengths of held-out texts, means over clients; 0 without texts."""

    recent: float
    past: float


class Trainer:
    """Trains in rounds. Weights on the host: `serving`, those that serve; `best`, those that have served and are
    accepted longest on past texts, at first the draft's."""

    def __init__(self, job: LearnJob) -> None:
        self.job = job
        self.path = Path(job.target)
        self.config = load_config(self.path, job.trust_remote_code)
        folder = resolve(job.draft)
        self.origin = origin_of(folder, job.draft)
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
        rate = RATE * training.peak_lr(options.optim, length)
        self.options = replace(options, optim=replace(options.optim, lr=rate))
        optimizers = build_optimizers(training, self.options.optim)
        self.training = training
        self.model, *self.optimizers = self.accelerator.prepare(training, *optimizers)
        self.progress = Progress(first_length=1000)
        self.serving = self.best = self.weights()

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().cpu().clone() for name, tensor in self.training.state_dict().items()}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        self.training.load_state_dict(weights)

    def new_weights(self) -> dict[str, Tensor]:
        """Weights to offer."""
        weights = self.weights()
        return {
            name: tensor.lerp(weights[name], WAY) if tensor.is_floating_point() else tensor
            for name, tensor in self.best.items()
        }

    def loop(self, splits: Splits) -> Loop:
        """Returns the loop over some texts; optimizers and progress go on."""
        return Loop(
            self.accelerator,
            self.model,
            self.optimizers,
            self.options,
            self.rows(splits.train, shares_of(splits.train)),
            self.rows(splits.heldout),
            self.progress,
            self.training,
        )

    def rows(self, split: Split, shares: Sequence[Share] = ()) -> PackedRows:
        """`shares` of an epoch; evaluations, which walk each row once, have none."""
        groups = groups_of(split)
        texts = [text for part in groups.values() for text in part]
        packed = PackedRows(dataset_of(texts), self.options.data.max_length, shares)
        packed.categories = [" ".join(group) for group, part in groups.items() for _ in part]
        store: Any = MemoryStates(texts, tuple(self.job.layers), self.config.num_layers)
        layers = self.training.draft.config.aux_layers
        source = StateSource({0: store}, "served", layers, final_state=self.training.reads_final_state)
        packed.add_states = source.add
        return packed

    def accept_lengths(self, loop: Loop, weights: Mapping[str, Tensor]) -> Lengths:
        """With these weights; the trained ones stay."""
        self.training.categories = sorted({*map(str, loop.heldout.categories)})
        trained = self.weights()
        self.load(weights)
        try:
            metrics = loop.evaluate()
        finally:
            self.load(trained)
        lengths = {name: metrics[f"eval_accept_length_by_category/{name}"] for name in self.training.categories}
        return Lengths(*(mean_of(lengths, part) for part in Lengths._fields))

    def write(self, weights: Mapping[str, Tensor], folder: Path, figures: Mapping[str, float]) -> None:
        """Writes a servable checkpoint. Its run.json says from which weights it goes on, and nothing of the texts."""
        folder.mkdir(parents=True, exist_ok=True)
        run = {"learned_from": self.origin, "step": self.progress.step, "metrics": dict(figures)}
        self.training.write(weights, folder, run)


def groups_of(split: Split) -> dict[tuple[str, str], list[ServedText]]:
    """Texts by part, recent or past, and client."""
    return {(name, client): texts for name, part in split._asdict().items() for client, texts in part.items()}


def shares_of(split: Split) -> list[Share]:
    """An epoch has as many tokens of each client, and PAST of them are past."""
    groups = groups_of(split)
    sizes = {group: sum(len(text.tokens) for text in texts) for group, texts in groups.items()}
    recent = sum(sizes[group] for group in sizes if group[0] == "recent")
    tokens = {"recent": recent, "past": recent * PAST / (1 - PAST)}  # of an epoch
    return [
        Share("", len(texts), min(MOST_PASSES, tokens[name] / len(getattr(split, name)) / sizes[name, client]))
        for (name, client), texts in groups.items()
    ]


def origin_of(folder: Path, name: str) -> str:
    """The draft that learning began with: the draft `name`, unless it has been learnt itself."""
    run = folder / "run.json"
    return read_json(run).get("learned_from", name) if run.is_file() else name


def add_data(texts: ServedTexts, job: LearnJob, trainer: Trainer) -> None:
    """Lets the past begin with texts that the draft was trained on, whose states the target computes."""
    tokenizer = load_tokenizer(trainer.path, job.trust_remote_code)
    splits, _ = load_prepared(Path(job.data or ""), tokenizer_hash(tokenizer))
    device = torch.device(job.device)
    target = load_frozen_target(trainer.path, tuple(job.layers), device, job.trust_remote_code)
    for name, memory in (("train", texts.train), ("heldout", texts.heldout)):
        for row in splits[name].shuffle(seed=trainer.options.seed):
            text = text_of(row, target, device, trainer.options.data.max_length)
            if text is not None and texts.add_past(memory, text):
                break


def text_of(row: Mapping[str, Any], target: FrozenTarget, device: torch.device, max_length: int) -> ServedText | None:
    """A document of a prepared dataset up to the end of its first answer; None where that is too short or too far."""
    mask = [bool(value) for value in row["loss_mask"][:max_length]]
    start = mask.index(True) if True in mask else max_length
    end = start + sum(takewhile(bool, mask[start:]))
    if end < start + 2:
        return None
    tokens = row["input_ids"][:end]
    batch = torch.tensor([tokens], device=device)
    states, _ = target.aux_states(batch, torch.arange(end, device=device)[None])
    states = states[0, :-1].unflatten(1, (len(target.aux_layers), -1)).cpu()
    return ServedText("learn.data", tokens, start, states)


def mean_of(lengths: Mapping[str, float], part: str) -> float:
    values = [length for name, length in lengths.items() if name.partition(" ")[0] == part]
    return sum(values) / max(1, len(values))


def is_better(before: Lengths, after: Lengths, best: Lengths) -> bool:
    """Whether weights are worth a trial. `before`: of those that serve; `best`: of those with the longest past."""
    gain = after.recent - before.recent
    return gain > GAIN * max(before.recent - 1, GAIN) and after.past >= (1 - LOSS) * best.past


def learn(job: LearnJob, trainer: Trainer, channel: Channel) -> None:
    """Learns until the engine is gone."""
    if job.data is not None:
        add_data(channel.texts, job, trainer)
    while True:
        splits = channel.texts.now()
        if splits.train.num_recent < LEAST_TEXTS or splits.heldout.num_recent < LEAST_HELD_OUT:
            time.sleep(WAIT_SECONDS)
            continue
        loop = trainer.loop(splits)
        for _ in range(STEPS):
            loop.train_step(False)
        weights = trainer.new_weights()
        before, after, best = (trainer.accept_lengths(loop, x) for x in (trainer.serving, weights, trainer.best))
        if not is_better(before, after, best):
            continue
        folder = Path(tempfile.mkdtemp(prefix="step-", dir=job.folder))  # one that died may have left its own there
        trainer.write(weights, folder, after._asdict())
        channel.line.send(Offer(str(folder), before.recent, after.recent))
        if channel.verdicts.get() == "passed":
            with atomic_folder(Path(job.output), CHECKPOINT.check) as new:
                shutil.copytree(folder, new, dirs_exist_ok=True)
            trainer.serving = weights
            trainer.best = weights if after.past > best.past else trainer.best
        else:
            trainer.load(trainer.serving)
        shutil.rmtree(folder)


def main() -> None:
    number, text = sys.argv[1:]
    job = LearnJob(**json.loads(text))
    os.nice(NICE)
    trainer = Trainer(job)
    texts = ServedTexts(job.memory, trainer.options.data.max_length)
    learn(job, trainer, Channel(Line(socket.socket(fileno=int(number))), texts, Path(job.folder)))


if __name__ == "__main__":
    main()
